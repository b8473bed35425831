"""Writes what is told of a call as GenerationEvents: JSON in the output `generation_event`. Knows no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from headrace_backends.llm.asked_call import AskedCall, News, PromptNote
from headrace_backends.llm.engine import TextCodec
from headrace_backends.llm.logprobs import TokenLogprob as EngineLogprob
from headrace_backends.llm.logprobs import TokenLogprobs
from headrace_backends.llm.output import GenerationOutput
from headrace_protocol.datatype import Array
from headrace_protocol.generation import (
    EMBEDDING_OUTPUT,
    ENCODER,
    EVENT_OUTPUT,
    ChoiceDelta,
    GenerationEvent,
    PromptTold,
    TokenChance,
    TokenLogprob,
)

_MOST_TOKENS: Final = 1 << 16
"""Tokens whose spelling is remembered."""


class Spelling:
    """How tokens are shown: their text, and their exact bytes."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec: Final = codec
        self._known: Final[dict[int, tuple[str, tuple[int, ...] | None]]] = {}

    def of(self, token_id: int) -> tuple[str, tuple[int, ...] | None]:
        """Return a token's text, half characters as U+FFFD, and its bytes, None of a special token."""
        found = self._known.get(token_id)
        if found is None:
            exact = self._codec.token_bytes(token_id)
            if exact is None:
                found = self._codec.decode([token_id], skip_special_tokens=False), None
            else:
                found = exact.decode(errors="replace"), tuple(exact)
            if len(self._known) < _MOST_TOKENS:
                self._known[token_id] = found
        return found

    def chance(self, entry: EngineLogprob) -> TokenChance:
        """Return a token and how likely it was, as the boundary has it."""
        text, exact = self.of(entry.token_id)
        return TokenChance(entry.token_id, text, exact, float(entry.logprob), entry.rank)

    def logprob(self, entry: TokenLogprobs) -> TokenLogprob:
        """Return a chosen token with the likeliest ones, as the boundary has it."""
        return TokenLogprob(self.chance(entry.chosen), tuple(map(self.chance, entry.top)))


class EventForm:
    """One GenerationEvent a response."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling: Final = spelling

    def write(self, call: AskedCall, news: News) -> Mapping[str, Array]:
        """Return the event, and the vectors of a call for them."""
        prompts = () if news.prompts is None else self._prompts(call, news.prompts)
        choices = tuple([self._choice(call, output) for output in news.outputs])
        outputs = written(GenerationEvent(prompts, choices, news.timing))
        return outputs if news.vectors is None else {**outputs, EMBEDDING_OUTPUT: news.vectors}

    def _prompts(self, call: AskedCall, notes: Sequence[PromptNote]) -> tuple[PromptTold, ...]:
        return tuple(
            PromptTold(
                num_tokens=len(prompt.token_ids),
                num_cached_tokens=note.num_cached_tokens,
                text=prompt.text if call.echo else None,
                token_ids=tuple(prompt.token_ids) if call.return_token_ids else None,
                logprobs=None
                if note.logprobs is None
                else tuple(None if entry is None else self._spelling.logprob(entry) for entry in note.logprobs),
                in_reasoning=prompt.in_reasoning,
            )
            for prompt, note in zip(call.prompts, notes, strict=True)
        )

    def _choice(self, call: AskedCall, output: GenerationOutput) -> ChoiceDelta:
        tells = call.tells_logprobs and output.logprobs is not None
        return ChoiceDelta(
            output.index,
            output.text,
            output.token_ids if call.return_token_ids else (),
            output.num_output_tokens,
            tuple(map(self._spelling.logprob, output.logprobs or ())) if tells else (),
            None if output.finish_reason is None else output.finish_reason.value,
            output.stop_reason,
            output.cumulative_logprob if call.tells_logprobs else None,
            output.error,
        )


def written(event: GenerationEvent) -> dict[str, Array]:
    """Return an event as an output."""
    array = np.empty(1, np.object_)
    array[0] = ENCODER.encode(event)
    return {EVENT_OUTPUT: array}
