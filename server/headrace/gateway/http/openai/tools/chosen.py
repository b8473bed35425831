"""The calls of a choice that a grammar keeps: an array of calls, or the bare arguments of the one function. Pure."""

from __future__ import annotations

from headrace.gateway.http.openai.message import Part
from headrace.gateway.http.openai.tools.parts import PartSink


class NamedChoice:
    """Implements ToolParser: the whole text is the arguments of one function, without the white space around it."""

    def __init__(self, sink: PartSink, name: str) -> None:
        self._sink = sink
        self._name = name
        self._begun = False
        self._space = ""

    def feed(self, text: str) -> list[Part]:
        text = self._space + text if self._begun else text.lstrip()
        bare = text.rstrip()
        self._space = text[len(bare) :]
        if bare:
            if not self._begun:
                self._begun = True
                self._sink.begin(self._name)
            self._sink.arguments(bare)
        return self._sink.take()

    def finish(self) -> list[Part]:
        return []
