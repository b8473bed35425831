"""What is new of an assistant's message: reasoning, content, a call of a tool, or more of a call's arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    """More of what the model thinks."""

    text: str


class ContentDelta(msgspec.Struct, frozen=True, gc=False):
    """More of what it says."""

    text: str


class CallBegun(msgspec.Struct, frozen=True, gc=False):
    """It calls a tool. Told once of each call, before any of its arguments."""

    index: int
    """Calls of one message count from 0."""
    id: str
    name: str


class ArgumentsDelta(msgspec.Struct, frozen=True, gc=False):
    """More of the JSON text of a call's arguments, as the model wrote it."""

    index: int
    text: str


Delta = ReasoningDelta | ContentDelta | CallBegun | ArgumentsDelta


class ToolParser(Protocol):
    """Reads the text of one choice, in pieces of any size. How the text is cut changes nothing but where deltas are."""

    def feed(self, text: str) -> list[Delta]:
        """Return what the next piece tells; [] while it may still become either content or a call."""
        ...

    def finish(self) -> list[Delta]:
        """Return what was held back: the text has ended."""
        ...


class DeltaSink:
    """Collects what a parser finds: joins neighbours, numbers the calls, and drops all but the first where only one may be."""

    __slots__ = ("_deltas", "_make_id", "_parallel", "begun")

    def __init__(self, make_id: Callable[[], str], *, parallel: bool) -> None:
        self._make_id = make_id
        self._parallel = parallel
        self._deltas: list[Delta] = []
        self.begun = 0
        """Calls found, dropped ones included."""

    def content(self, text: str) -> None:
        """Note more content."""
        if text:
            last = self._deltas[-1] if self._deltas else None
            if isinstance(last, ContentDelta):
                self._deltas[-1] = ContentDelta(last.text + text)
            else:
                self._deltas.append(ContentDelta(text))

    def begin(self, name: str) -> None:
        """Note that a call begins; arguments are of this one from now on."""
        if self._kept(self.begun):
            self._deltas.append(CallBegun(self.begun, self._make_id(), name))
        self.begun += 1

    def arguments(self, text: str) -> None:
        """Note more arguments of the call that was begun last."""
        index = self.begun - 1
        if text and self._kept(index):
            last = self._deltas[-1] if self._deltas else None
            if isinstance(last, ArgumentsDelta) and last.index == index:
                self._deltas[-1] = ArgumentsDelta(index, last.text + text)
            else:
                self._deltas.append(ArgumentsDelta(index, text))

    def take(self) -> list[Delta]:
        """Return what was noted since the last time."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def _kept(self, index: int) -> bool:
        return self._parallel or not index
