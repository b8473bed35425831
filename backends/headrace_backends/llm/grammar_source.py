"""A model's grammars: its tokens, how it sets reasoning apart, and the threads that compile. Puts parts together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from threading import Lock, Thread
from typing import Any, Final

from headrace_backends.llm.engine import TextCodec
from headrace_backends.llm.grammar import ReasoningMarks
from headrace_backends.llm.grammar_compiler import GrammarCompiler
from headrace_backends.llm.grammar_llguidance import LlgBuilder, LlgGrammar
from headrace_protocol.errors import InferError, internal
from headrace_protocol.generation import StructuredOutput

_LOG: Final = logging.getLogger(__name__)
_LOG.setLevel(logging.INFO)  # a part of the time of loading is not left out of the log


class ModelTokens:
    """A model's tokens as its grammars need them, whatever they are of. Read once, in a thread of its own.

    That takes up to a second of a processor, and some MB for ten thousand tokens.
    """

    def __init__(self, read: Callable[[], LlgBuilder]) -> None:
        self._read: Final = read
        self._lock: Final = Lock()
        self._thread: Thread | None = None
        self._builder: Final[Future[LlgBuilder]] = Future()
        self._seconds = 0.0

    def begin(self) -> None:
        """Begin to read, unless that was begun. Does not wait."""
        with self._lock:
            if self._thread is None:
                self._thread = Thread(target=self._run, name="grammar-tokens", daemon=True)
                self._thread.start()

    def builder(self) -> LlgBuilder:
        """Return what builds grammars over them; waits until they are read. Raises as reading them did."""
        self.begin()
        error = self._builder.exception()
        if isinstance(error, InferError):
            raise InferError(error.code, error.message)  # one for each who asks
        return self._builder.result()

    def wait(self) -> None:
        """Wait until they are read, if that was begun, and tell how long it took. What went wrong, requests are told."""
        if self._thread is None:
            return
        began = time.monotonic()
        failure = self._builder.exception()
        if failure is None:
            waited = time.monotonic() - began
            _LOG.info("tokens for structured output: read in %.2f s, %.2f s after the rest", self._seconds, waited)
        else:
            _LOG.info("structured output is not to be had of this model: %s", failure)

    def end(self) -> None:
        """Wait until the thread has ended, if there is one: what it reads from may be freed then."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        began = time.monotonic()
        try:
            builder = self._read()
        except Exception as error:
            known = isinstance(error, InferError)
            self._builder.set_exception(error if known else internal(f"{type(error).__name__}: {error}"))
        else:
            self._seconds = time.monotonic() - began
            self._builder.set_result(builder)


class ModelGrammars(GrammarCompiler):
    """What compiles for one model."""

    def __init__(self, tokens: ModelTokens, reasoning: ReasoningMarks | None) -> None:
        self.tokens: Final = tokens
        super().__init__(self._build_over_tokens, reasoning=reasoning)

    def close(self) -> None:
        super().close()
        self.tokens.end()

    def _build_over_tokens(self, structured: StructuredOutput) -> LlgGrammar:
        return self.tokens.builder()(structured)


def grammars_of(
    tokenizer: Any,
    eos_token_ids: Iterable[int],
    vocab_size: int,
    *,
    reasoning: ReasoningMarks | None = None,
    ahead: bool = False,
) -> ModelGrammars:
    """Return what compiles for a model; `tokenizer` is as `LlgBuilder` takes it.

    It is read from now on, `ahead` of all requests, or else when it is first needed.
    """
    tokens = ModelTokens(lambda: LlgBuilder(tokenizer, eos_token_ids, vocab_size))
    if ahead:
        tokens.begin()
    return ModelGrammars(tokens, reasoning)


def marks_of(reasoning_format: str | None, text: TextCodec) -> ReasoningMarks | None:
    """Return the tokens around the reasoning of a model with that format; None where it does not set it apart."""
    if reasoning_format != "think_tags":
        return None
    start, end = (tuple(text.encode(mark, add_special_tokens=False)) for mark in ("<think>", "</think>"))
    return ReasoningMarks(start, end)
