"""Reads calls that a model writes as JSON objects one behind the other, alone or in an array, in pieces. Pure."""

from __future__ import annotations

import enum
from collections.abc import Collection

from headrace.gateway.http.openai.tools.body import Accepts
from headrace.gateway.http.openai.tools.call_reader import MAX_HELD, CallReader
from headrace.gateway.http.openai.tools.json_scanner import skip_space
from headrace.gateway.http.openai.tools.parts import PartSink


class _Place(enum.Enum):
    BEFORE_FIRST = 1
    BEFORE_OBJECT = 2
    IN_OBJECT = 3
    BEHIND_OBJECT = 4


class CallList:
    """Implements CallsBody for an array of calls, and for calls behind each other, with semicolons between or without."""

    def __init__(self, sink: PartSink, accepts: Accepts, others: Collection[str] | None = None) -> None:
        self._sink = sink
        self._accepts = accepts
        self._others = others
        self._place = _Place.BEFORE_FIRST
        self._array = False
        self._reader = self._new()
        self._between: list[str] = []
        """What was read since the last call ended."""
        self._held = 0
        self.begun = False
        self.done = False
        self.broken = False

    @property
    def raw(self) -> str:
        return "".join(self._between) + self._reader.raw

    @property
    def in_arguments(self) -> bool:
        return self._reader.in_arguments

    def feed(self, text: str, at: int) -> int:
        while at < len(text) and not (self.done or self.broken):
            if self._place is _Place.IN_OBJECT:
                at = self._read_object(text, at)
            else:
                start, at = at, self._read_between(text, at, min(len(text), at + MAX_HELD - self._held))
                self._between.append(text[start:at])
                self._held += at - start
                self.broken = self.broken or self._held >= MAX_HELD
        return at

    def _read_object(self, text: str, at: int) -> int:
        reader = self._reader
        at = reader.feed(text, at)
        self.broken = reader.broken
        if reader.begun:
            self.begun = True
            self._between.clear()
            self._held = 0
        if reader.done:
            self._place = _Place.BEHIND_OBJECT
        return at

    def _read_between(self, text: str, at: int, end: int) -> int:
        at = skip_space(text, at, end)
        if at == end:
            return at
        character = text[at]
        if character == "{" and (self._place is not _Place.BEHIND_OBJECT or not self._array):
            self._reader = self._new()
            self._place = _Place.IN_OBJECT
            return at
        if character == "[" and self._place is _Place.BEFORE_FIRST:
            self._array = True
            self._place = _Place.BEFORE_OBJECT
        elif character == (",;"[not self._array]) and self._place is _Place.BEHIND_OBJECT:
            self._place = _Place.BEFORE_OBJECT
        elif character == "]" and self._array and self._place is _Place.BEHIND_OBJECT:
            self.done = True
        else:
            self.broken = True
            return at
        return at + 1

    def _new(self) -> CallReader:
        return CallReader(self._sink, self._accepts, self._others)
