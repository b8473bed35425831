"""What one call of a language model uses: tokens, for a caller whose tokens are limited, and for the call's trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.access.caller import Caller
from headrace.observability.trace import GenerationNote, Trace
from headrace_protocol.generation import GenerationEvent, Timing

if TYPE_CHECKING:
    from headrace.gateway.http.openai.exchange import Exchange


class Account:
    """Counts what one call uses: for a caller whose tokens are limited, and for its trace."""

    __slots__ = ("_asked", "_cached", "_caller", "_exchange", "_finished", "_prompt", "_timing", "_told", "_trace")

    def __init__(self, caller: Caller | None, trace: Trace | None, exchange: Exchange, asked: str) -> None:
        self._caller = caller
        self._trace = trace
        self._exchange = exchange
        self._asked = asked
        self._prompt = self._cached = 0
        self._told: dict[int, int] = {}
        self._finished: dict[int, str] = {}
        self._timing = Timing()

    def take(self, event: GenerationEvent) -> None:
        """Take note of what an event tells."""
        for prompt in event.prompts:
            self._prompt += prompt.num_tokens
            self._cached += prompt.num_cached_tokens
        for choice in event.choices:
            if choice.num_tokens:
                self._told[choice.index] = choice.num_tokens
            if choice.finish_reason is not None:
                self._finished[choice.index] = choice.finish_reason
        self._timing = event.timing or self._timing

    def settle(self) -> None:
        """Charge what was used, also of a call that its client has left. Does nothing the second time."""
        output = sum(self._told.values())
        if self._caller is not None and self._prompt + output:
            self._caller.charge(self._prompt + output, self._exchange.now_ns())
        if self._trace is not None:
            chat = self._exchange.http.url.partition(b"?")[0].endswith(b"/chat/completions")
            timing = self._timing
            note = GenerationNote(
                "chat" if chat else "text_completion",
                self._asked,
                self._prompt,
                self._cached,
                output,
                tuple(self._finished.values()),
                timing.queue_ns,
                timing.prefill_ns,
                timing.decode_ns,
                timing.preemptions,
            )
            self._trace.generated(note)
        self._caller = self._trace = None


def account_of(exchange: Exchange, asked: str) -> Account | None:
    """Return the account of a call that has begun; None where nobody wants one."""
    http = exchange.http
    caller = http.caller if http.caller is not None and http.caller.counts_tokens else None
    return None if caller is None and http.trace is None else Account(caller, http.trace, exchange, asked)
