"""Calls that are all that a model writes, as those of Llama and of a choice that a grammar keeps. Pure.

What begins otherwise is content from its first character on, and is not looked at again.
"""

from __future__ import annotations

import enum

from headrace.gateway.http.openai.message import Part
from headrace.gateway.http.openai.tools.body import CallsBody, NewBody, left_over
from headrace.gateway.http.openai.tools.parts import PartSink
from headrace.gateway.http.openai.tools.watch import MAX_SPACE, MarkerWatch


class _Place(enum.Enum):
    START = 1
    CALLS = 2
    BEHIND = 3
    """The calls have ended."""
    SPOILED = 4
    """In arguments that are no JSON: to the end of the text."""
    CONTENT = 5


class WholeCalls:
    """Implements ToolParser. The calls may stand between the markers `begin` and `end`, and need neither."""

    def __init__(
        self, sink: PartSink, opening: str, new_body: NewBody, *, begin: str | None = None, end: str | None = None
    ) -> None:
        self._sink = sink
        self._opening = opening
        """Characters of which the calls begin with one."""
        self._begin = begin
        self._new_body = new_body
        self._place = _Place.START
        self._held = ""
        """What came so far, as long as it is not known what it is."""
        self._lead = ""
        """What stands before the calls."""
        self._body: CallsBody | None = None
        self._rest = MarkerWatch() if end is None else MarkerWatch(end)
        """Reads what comes behind the calls."""

    def feed(self, text: str) -> list[Part]:
        if self._place is _Place.START:
            text = self._decide(self._held + text)
        if self._place is _Place.CALLS:
            text = self._read_calls(text)
        while text:
            text = self._read_rest(text)
        return self._sink.take()

    def finish(self) -> list[Part]:
        if self._place is _Place.START:
            self._sink.content(self._held)
        elif self._place is _Place.CALLS and self._body is not None:
            self._sink.content(left_over(self._body) if self._body.begun else self._lead + self._body.raw)
        elif self._place is _Place.BEHIND:
            held = self._rest.finish()
            self._sink.content(held if held.strip() else "")
        return self._sink.take()

    def _decide(self, text: str) -> str:
        """Look how the text begins; return what is to be read on, "" while it may be either."""
        bare = text.lstrip()
        if self._begin is not None and bare.startswith(self._begin):
            bare = bare[len(self._begin) :].lstrip()
        elif self._begin is not None and bare and self._begin.startswith(bare):
            bare = ""
        near = len(text) - len(bare) <= MAX_SPACE
        if not bare and near:
            self._held = text
            return ""
        if bare[:1] not in self._opening or not near:
            self._place = _Place.CONTENT
            return text
        self._place = _Place.CALLS
        self._lead = text[: len(text) - len(bare)]
        self._body = self._new_body(self._sink)
        return bare

    def _read_calls(self, text: str) -> str:
        assert self._body is not None
        body = self._body
        at = body.feed(text, 0)
        if body.done:
            self._place = _Place.BEHIND
        elif body.broken and body.in_arguments:
            self._place = _Place.SPOILED
        elif body.broken:
            self._place = _Place.CONTENT
            self._sink.content(body.raw if body.begun else self._lead + body.raw)
        return text[at:]

    def _read_rest(self, text: str) -> str:
        if self._place is _Place.BEHIND:
            before, _, text = self._rest.feed(text)
            self._sink.content(before)
            return text
        if self._place is _Place.SPOILED:
            self._sink.arguments(text)
        else:
            self._sink.content(text)
        return ""
