"""What parsers of calls find in a text, put in order: content, and calls with their ids and arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from headrace.gateway.http.openai.message import CallArguments, CallBegun, Content, Part


class ToolParser(Protocol):
    """Reads the text of one choice, in pieces of any size. How the text is cut changes nothing but where parts are."""

    def feed(self, text: str) -> list[Part]:
        """Return what the next piece tells; [] while it may still become either content or a call."""
        ...

    def finish(self) -> list[Part]:
        """Return what was held back: the text has ended."""
        ...


class PartSink:
    """Collects parts: joins neighbours, numbers the calls, and drops all but the first where only one may be."""

    __slots__ = ("_make_id", "_parallel", "_parts", "begun")

    def __init__(self, make_id: Callable[[], str], *, parallel: bool) -> None:
        self._make_id = make_id
        self._parallel = parallel
        self._parts: list[Part] = []
        self.begun = 0
        """Calls found, dropped ones included."""

    def content(self, text: str) -> None:
        """Note more content."""
        if text:
            last = self._parts[-1] if self._parts else None
            if isinstance(last, Content):
                self._parts[-1] = Content(last.text + text)
            else:
                self._parts.append(Content(text))

    def begin(self, name: str) -> None:
        """Note that a call begins; arguments are of this one from now on."""
        if self._kept(self.begun):
            self._parts.append(CallBegun(self.begun, self._make_id(), name))
        self.begun += 1

    def arguments(self, text: str) -> None:
        """Note more arguments of the call that was begun last."""
        index = self.begun - 1
        if text and self._kept(index):
            last = self._parts[-1] if self._parts else None
            if isinstance(last, CallArguments) and last.number == index:
                self._parts[-1] = CallArguments(index, last.text + text)
            else:
                self._parts.append(CallArguments(index, text))

    def take(self) -> list[Part]:
        """Return what was noted since the last time."""
        parts, self._parts = self._parts, []
        return parts

    def _kept(self, index: int) -> bool:
        return self._parallel or not index
