"""Calls that stand behind a marker in a text that is content otherwise, as those of Hermes, Qwen and Mistral. Pure."""

from __future__ import annotations

from headrace.gateway.http.openai.message import Part
from headrace.gateway.http.openai.tools.body import CallsBody, NewBody, left_over
from headrace.gateway.http.openai.tools.parts import PartSink
from headrace.gateway.http.openai.tools.watch import MarkerWatch


class MarkedCalls:
    """Implements ToolParser. `end` is the marker that closes what `begin` opens; it may be missing."""

    def __init__(self, sink: PartSink, begin: str, end: str | None, new_body: NewBody) -> None:
        self._sink = sink
        self._begin = begin
        self._end = end
        self._new_body = new_body
        self._watch = MarkerWatch(begin)
        """Reads what is content, and the rest of arguments that are no JSON."""
        self._body: CallsBody | None = None
        self._lead = ""
        """The marker of the body, with the white space before it."""
        self._spoiled = False
        """Whether the watch reads arguments."""
        self._spoke = True
        """Whether anything was said since the last call."""

    def feed(self, text: str) -> list[Part]:
        while text:
            text = self._read_content(text) if self._body is None else self._read_calls(self._body, text)
        return self._sink.take()

    def finish(self) -> list[Part]:
        if self._body is not None:
            lead = "" if self._body.begun else self._lead
            self._sink.content(lead + left_over(self._body))
        else:
            held = self._watch.finish()
            if self._spoiled:
                self._sink.arguments(held)
            elif self._spoke or held.strip():
                self._sink.content(held)
        return self._sink.take()

    def _read_content(self, text: str) -> str:
        before, marker, text = self._watch.feed(text)
        if self._spoiled:
            self._sink.arguments(before)
        else:
            self._sink.content(before)
            self._spoke = self._spoke or bool(before.strip())
        if marker is not None:
            self._spoiled = False
            self._lead = self._watch.space + marker
            if marker == self._begin:
                self._body = self._new_body(self._sink)
            else:
                self._watch = MarkerWatch(self._begin)
        return text

    def _read_calls(self, body: CallsBody, text: str) -> str:
        at = body.feed(text, 0)
        if body.begun:
            self._spoke = False
        if not (body.done or body.broken):
            return ""
        self._body = None
        self._spoiled = body.in_arguments
        closing = (self._end,) if self._end is not None and body.begun else ()
        self._watch = MarkerWatch(self._begin, *closing)
        if body.broken and not self._spoiled:
            content = body.raw if body.begun else self._lead + body.raw
            self._sink.content(content)
            self._spoke = self._spoke or bool(content.strip())
        return text[at:]
