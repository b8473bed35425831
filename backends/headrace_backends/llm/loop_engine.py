"""What engines that run under our own scheduler have in common: a loop in a thread of its own, and what is asked of it.

What an engine is made of, and in which order that is freed, is its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, Generic, TypeVar

from headrace_backends.llm.engine import EngineCall, EngineStats, Listener, TextCodec
from headrace_backends.llm.engine_loop import EngineLoop
from headrace_backends.llm.engine_setup import requests_of
from headrace_backends.llm.grammar import ReasoningMarks
from headrace_backends.llm.grammar_source import ModelGrammars
from headrace_backends.llm.request import GenerationRequest
from headrace_backends.llm.settings import Settings
from headrace_protocol.generation import ModelCard

_Text = TypeVar("_Text", bound=TextCodec)


class LoopEngine(ABC, Generic[_Text]):
    """An `engine.Engine` over an EngineLoop, which `_open` makes and starts."""

    def __init__(self, settings: Settings) -> None:
        self._settings: Final = settings
        self._loop: EngineLoop | None = None
        self._card: ModelCard | None = None
        self._text: _Text | None = None
        self._eos: frozenset[int] = frozenset()
        self._grammars: ModelGrammars | None = None
        self._reasoning: ReasoningMarks | None = None

    def open(self, listener: Listener) -> None:
        try:
            self._open(listener)
            if self._grammars is not None:
                self._grammars.tokens.wait()
        except BaseException:
            self.close()
            raise

    @property
    def card(self) -> ModelCard:
        assert self._card is not None, "not open"
        return self._card

    @property
    def text(self) -> _Text:
        assert self._text is not None, "not open"
        return self._text

    def submit(self, call: EngineCall) -> None:
        assert self._loop is not None, "not open"
        self._loop.submit(call)

    def abort(self, number: int) -> None:
        if self._loop is not None:
            self._loop.abort(number)

    def stats(self) -> EngineStats:
        return EngineStats() if self._loop is None else self._loop.stats()

    def healthy(self) -> bool:
        return self._loop is not None and self._loop.healthy()

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _open(self, listener: Listener) -> None: ...

    def _requests(self, call: EngineCall) -> Sequence[GenerationRequest]:
        return requests_of(call, self._settings, self._eos, self._reasoning)
