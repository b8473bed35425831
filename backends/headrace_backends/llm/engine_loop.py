"""The thread that owns an engine's core and runner: calls in, steps, news out.

Others hand it calls and aborts, which it takes between two steps; it tells what each step brought in one piece, and sleeps
while there is nothing to do. Knows no model and no tokenizer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Condition, Thread
from types import MappingProxyType
from typing import Final

from headrace_backends.llm.admission import Refusal, RefusalReason
from headrace_backends.llm.core import EngineCore
from headrace_backends.llm.engine import EngineCall, EngineStats, Listener, Told
from headrace_backends.llm.engine_calls import CallBook, call_of, refused
from headrace_backends.llm.output import GenerationOutput
from headrace_backends.llm.request import GenerationRequest
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_backends.llm.step import ModelRunner, ScheduledRequest, SchedulerOutput
from headrace_protocol.errors import InferError, internal, unavailable

_FAILURES: Final = 4
"""Steps that fail one after another before it is tried whether the model can compute anything at all."""
_MOST_UNTAKEN: Final = 4096
"""Calls that may come while one step is computed."""

MakeRequests = Callable[[EngineCall], Sequence[GenerationRequest]]
"""One request of each prompt, by its order; raises InferError for what the model cannot do."""


@dataclass(slots=True)
class _Inbox:
    """What others have asked for since the last step."""

    calls: dict[int, EngineCall | None] = field(default_factory=dict)
    """None: there were too many."""
    aborts: list[int] = field(default_factory=list)
    compiled: bool = False
    """Whether the grammar of a call that waits may be compiled."""

    def __bool__(self) -> bool:
        return bool(self.calls or self.aborts or self.compiled)


class EngineLoop:
    """Runs a core until it is closed. `submit`, `abort` and `stats` may be called by any thread."""

    def __init__(
        self,
        core: EngineCore,
        runner: ModelRunner,
        listener: Listener,
        make_requests: MakeRequests,
        *,
        prepare: Callable[[], None] = lambda: None,
        clock: Callable[[], int] = time.monotonic_ns,
        cache_config: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`prepare` is called first, by the loop's own thread."""
        self._core = core
        self._runner = runner
        self._listener = listener
        self._make_requests = make_requests
        self._prepare = prepare
        self._clock = clock
        self._cache_config = cache_config
        self._book = CallBook()
        self._changed = Condition()
        self._inbox = _Inbox()
        self._closing = False
        self._ended: InferError | None = None
        """What calls are told that come too late."""
        self._idle = True
        self._failures = 0
        self._last_error = ""
        self._steps = 0
        self._step_tokens = 0
        self._thread = Thread(target=self._run, name="llm-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, call: EngineCall) -> None:
        """Take a call; what becomes of it, a refusal too, is told by the loop's thread, or at once where that has ended."""
        with self._changed:
            if self._ended is None:
                full = len(self._inbox.calls) >= _MOST_UNTAKEN
                self._inbox.calls[call.number] = None if full else call
                self._changed.notify()
                return
        self._listener.told([Told(call.number, error=self._ended)])

    def abort(self, number: int) -> None:
        """End a call before the next step; unknown ones are none of its business."""
        with self._changed:
            if self._inbox.calls.pop(number, None) is None:
                self._inbox.aborts.append(number)
                self._changed.notify()

    def healthy(self) -> bool:
        return self._ended is None and self._thread.is_alive()

    def close(self) -> None:
        """End after the step that is under way; calls that are left are told so."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def stats(self) -> EngineStats:
        """Return how it stands: numbers that the loop changes meanwhile, each true by itself."""
        scheduler = self._core.scheduler
        counts = scheduler.stats
        return EngineStats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting + len(self._inbox.calls),
            kv_usage=scheduler.blocks.usage,
            waiting_tokens=scheduler.num_waiting_tokens,
            totals={
                "prefix_cache_queries": counts.prefix_cache_queries,
                "prefix_cache_hits": counts.prefix_cache_hits,
                "preemptions": counts.num_preemptions,
                "prompt_tokens": counts.prompt_tokens,
                "generation_tokens": counts.generation_tokens,
                "steps": self._steps,
                "step_tokens": self._step_tokens,
                "drafts": counts.num_drafts,
                "draft_tokens": counts.num_draft_tokens,
                "accepted_tokens": counts.num_accepted_tokens,
            },
            accepted_per_position=tuple(counts.accepted_at),
            cache_config=self._cache_config,
        )

    def _run(self) -> None:
        try:
            self._prepare()
            while self._turn():
                pass
            self._end(unavailable("the model is being unloaded"))
        except BaseException as error:  # a fault of our own: calls must not wait for ever
            self._break(internal(f"the engine broke: {type(error).__name__}: {error}"))

    def _turn(self) -> bool:
        """Take what was asked for and run one step; return whether to go on."""
        inbox = self._taken()
        if inbox is None:
            return False
        for number in inbox.aborts:
            self._abort(number)
        news = [told for number, call in inbox.calls.items() if (told := self._admit(number, call)) is not None]
        news.extend(self._settle())
        news.extend(self._step())
        if news:
            self._listener.told(news)
        if self._failures >= _FAILURES and not self._can_compute():
            self._break(internal(f"the model cannot compute any more: {self._last_error}"))
            return False
        return True

    def _taken(self) -> _Inbox | None:
        with self._changed:
            while self._idle and not (self._closing or self._inbox):
                self._changed.wait()
            if self._closing:
                return None
            inbox, self._inbox = self._inbox, _Inbox()
            return inbox

    def _settle(self) -> list[Told]:
        """Take that grammars are compiled; return the refusals of calls whose grammar is wrong."""
        failed: dict[int, InferError] = {}
        for request_id, error in self._core.settle(self._clock()):
            failed.setdefault(call_of(request_id), error)
        for number in failed:
            self._abort(number)
        return [Told(number, error=error) for number, error in failed.items()]

    def _admit(self, number: int, call: EngineCall | None) -> Told | None:
        """Let a call enter; return its refusal."""
        if call is None:
            return Told(number, error=refused(Refusal(RefusalReason.BUSY, f"{_MOST_UNTAKEN} calls came within a step")))
        if number in self._book:
            return Told(number, error=internal(f"call {number} is under way"))
        try:
            requests = self._make_requests(call)
            refusal = self._core.add(*requests)
            if refusal is not None:
                return Told(number, error=refused(refusal))
        except InferError as error:
            return Told(number, error=error)
        except Exception as error:  # a tokenizer that cannot take a stop string
            return Told(number, error=internal(f"{type(error).__name__}: {error}"))
        self._book.open(call, requests, self._core)
        for request in requests:
            if request.compilation is not None:
                request.compilation.add_done_callback(self._wake)
        return None

    def _wake(self, _: object = None) -> None:
        with self._changed:
            self._inbox.compiled = True
            self._changed.notify()

    def _abort(self, number: int) -> None:
        now = self._clock()
        for request_id in self._book.close(number):
            self._core.abort(request_id, now)

    def _step(self) -> list[Told]:
        step = self._core.schedule(self._clock())
        self._idle = not step  # nothing is left, or all that is left waits for a grammar
        if not step:
            return []
        try:
            results = self._runner.execute(step)
        except Exception as error:  # whatever the model does: the core finds out whose fault it was
            self._failures += 1
            self._last_error = f"{type(error).__name__}: {error}"
            outputs: Sequence[GenerationOutput] = self._core.fail(step, self._last_error, self._clock())
        else:
            self._failures = 0
            self._steps += 1
            self._step_tokens += step.num_tokens
            outputs = self._core.update(step, results, self._clock())
        news = self._book.told(outputs)
        for told in news:
            if told.error is not None:
                self._abort(told.number)
        return news

    def _can_compute(self) -> bool:
        """Try one token that is nobody's, in the block that is nobody's."""
        self._failures = 0
        probe = GenerationRequest("probe", (0,), SamplingParams(temperature=0), 0)
        entry = ScheduledRequest(probe, 0, (0,), 0, 1, (0,))
        try:
            self._runner.execute(SchedulerOutput((entry,), 1))
        except Exception as error:
            self._last_error = f"{type(error).__name__}: {error}"
            return False
        return True

    def _break(self, error: InferError) -> None:
        self._end(error)
        self._listener.broke(error)

    def _end(self, error: InferError) -> None:
        """Tell every call that there will be nothing more."""
        with self._changed:
            self._ended = error
            inbox, self._inbox = self._inbox, _Inbox()
        gone = set(inbox.aborts)
        open_calls = self._book.numbers
        if news := [Told(number, error=error) for number in [*open_calls, *inbox.calls] if number not in gone]:
            self._listener.told(news)
        for number in open_calls:
            self._abort(number)
