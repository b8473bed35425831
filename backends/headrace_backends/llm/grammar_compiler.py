"""Compiles grammars away from the engine: threads, a limit of time, and the grammars that were compiled before.

What is compiled, and by what library, is its builder's business. A description that cannot be compiled is remembered
as well, so that asking for it again costs nothing.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from queue import SimpleQueue
from typing import Final

from headrace_backends.llm.grammar import Grammar, ReasoningMarks
from headrace_protocol.errors import ErrorCode, InferError, internal, invalid, unavailable
from headrace_protocol.generation import StructuredOutput

_NICE: Final = 10
"""Added to the niceness of the threads that compile: the engine's own goes first."""

_Key = tuple[str, str]


class GrammarCompiler:
    """A `GrammarSource`. `close` ends its threads; what waits to be compiled then fails."""

    def __init__(
        self,
        build: Callable[[StructuredOutput], Grammar],
        *,
        reasoning: ReasoningMarks | None = None,
        threads: int = 2,
        limit_s: float = 10.0,
        most_kept: int = 128,
        most_kept_bytes: int = 8 << 20,
        most_waiting: int = 1024,
        wait: Callable[[threading.Event, float], bool] = threading.Event.wait,
    ) -> None:
        """Take what compiles, by any thread: it raises InferError for what cannot be compiled.

        `most_kept_bytes` is of descriptions, to which the size of what is compiled of them is in proportion.
        """
        self._build: Final = build
        self._reasoning: Final = reasoning
        self._limit_s: Final = limit_s
        self._most_kept: Final = most_kept
        self._most_kept_bytes: Final = most_kept_bytes
        self._most_waiting: Final = most_waiting
        self._wait: Final = wait
        self._lock: Final = threading.Lock()
        self._kept: Final[OrderedDict[_Key, Future[Grammar]]] = OrderedDict()
        self._kept_bytes = 0
        self._waiting = 0
        self._overdue = 0
        self._closed = False
        self._jobs: Final[SimpleQueue[tuple[StructuredOutput, Future[Grammar]] | None]] = SimpleQueue()
        self._threads: Final = [
            threading.Thread(target=self._work, name=f"grammar-{at}", daemon=True) for at in range(threads)
        ]
        self._started = False

    @property
    def reasoning(self) -> ReasoningMarks | None:
        return self._reasoning

    def __len__(self) -> int:
        """Return how many are kept."""
        return len(self._kept)

    def compile(self, structured: StructuredOutput) -> Future[Grammar]:
        key = (structured.kind, structured.spec)
        with self._lock:
            known = self._kept.get(key)
            if known is not None and not _worn(known):
                self._kept.move_to_end(key)
                return known
            future: Future[Grammar] = Future()
            problem = self._refusal()
            if problem is not None:
                future.set_exception(problem)
                return future
            if not self._started:
                self._started = True
                for thread in self._threads:
                    thread.start()
            self._waiting += 1
            self._keep(key, future)
            self._jobs.put((structured, future))
            return future

    def close(self) -> None:
        """End the threads; one that compiles ends with what it is at."""
        with self._lock:
            self._closed = True
            started = self._started
        if started:
            for _ in self._threads:
                self._jobs.put(None)
            for thread in self._threads:
                thread.join()

    def _refusal(self) -> InferError | None:
        if self._closed:
            return unavailable("the model is being unloaded")
        if self._waiting >= self._most_waiting:
            return unavailable(f"{self._waiting} grammars wait to be compiled")
        if self._overdue >= len(self._threads):
            return unavailable(f"{self._overdue} grammars take longer than {self._limit_s:g} s to be compiled")
        return None

    def _keep(self, key: _Key, future: Future[Grammar]) -> None:
        """Remember one, and forget those that have not been asked for the longest. The lock is held."""
        self._drop(key)
        self._kept[key] = future
        self._kept_bytes += _size(key)
        while len(self._kept) > self._most_kept or (self._kept_bytes > self._most_kept_bytes and len(self._kept) > 1):
            self._drop(next(iter(self._kept)))

    def _drop(self, key: _Key) -> None:
        if self._kept.pop(key, None) is not None:
            self._kept_bytes -= _size(key)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            structured, future = job
            if self._closed:
                self._settle(structured, future, unavailable("the model is being unloaded"))
            else:
                self._compile(structured, future)
            with self._lock:
                self._waiting -= 1

    def _compile(self, structured: StructuredOutput, future: Future[Grammar]) -> None:
        """Compile in a thread that can be left behind, as nothing can end it."""
        done = threading.Event()

        def build() -> None:
            with contextlib.suppress(OSError, AttributeError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # on Linux of this thread alone
            outcome: Grammar | InferError
            try:
                outcome = self._build(structured)
            except InferError as error:
                outcome = error
            except Exception as error:
                outcome = internal(f"{structured.kind}: {type(error).__name__}: {error}")
            self._settle(structured, future, outcome)
            with self._lock:
                if done.is_set():
                    self._overdue -= 1
                done.set()

        try:
            threading.Thread(target=build, name="grammar-build", daemon=True).start()
        except RuntimeError as error:  # the system has no thread to give: what waits must not wait for ever
            self._settle(structured, future, unavailable(f"no grammar can be compiled now: {error}"))
            return
        if self._wait(done, self._limit_s):
            return
        with self._lock:
            if done.is_set():
                return
            done.set()
            self._overdue += 1
        self._settle(
            structured, future, invalid(f"{structured.kind}: takes longer than {self._limit_s:g} s to be compiled")
        )

    def _settle(self, structured: StructuredOutput, future: Future[Grammar], outcome: Grammar | InferError) -> None:
        with contextlib.suppress(InvalidStateError):  # it was overdue, and has been told so
            if isinstance(outcome, InferError):
                outcome.param = outcome.param or "structured"
                if outcome.code is not ErrorCode.INVALID_ARG:
                    with self._lock:
                        self._drop((structured.kind, structured.spec))
                future.set_exception(outcome)
            else:
                future.set_result(outcome)


def _worn(future: Future[Grammar]) -> bool:
    return future.done() and future.exception() is None and future.result().spoiled


def _size(key: _Key) -> int:
    return len(key[1]) + 1024
