"""Reads one call that a model writes as a JSON object, in pieces: `{"name": ..., "arguments": {...}}`. Pure.

The members may come in any order. A call begins for the client when its name is known and its arguments begin; from
there on they are passed on as they are written. Until then everything is kept, so that what turns out to be no call is
content with nothing lost.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Collection
from typing import Final

from headrace.gateway.http.openai.tools.json_scanner import ValueScanner, skip_space
from headrace.gateway.http.openai.tools.parts import PartSink

MAX_HELD: Final = 1 << 16
"""Characters that an object may have before it is a call; what is longer is content."""
NAME: Final = "name"
ARGUMENTS: Final = ("arguments", "parameters")
NO_ARGUMENTS: Final = "{}"


class _Place(enum.Enum):
    OPENING = 1
    FIRST_KEY = 2
    KEY = 3
    IN_KEY = 4
    COLON = 5
    VALUE = 6
    IN_VALUE = 7
    BEHIND_VALUE = 8


class _Kind(enum.Enum):
    """What the value is that is being read."""

    NAME = 1
    ARGUMENTS = 2
    """Kept, to be looked at as a whole: the name is not known yet, or they are no object."""
    PASSED_ON = 3
    """Arguments, passed on as they come."""
    OTHER = 4


class CallReader:
    """Reads one object.

    `accepts` says whether a name may be called; `others` which further members may stand before the call, None for any.
    """

    def __init__(self, sink: PartSink, accepts: Callable[[str], bool], others: Collection[str] | None = None) -> None:
        self._sink = sink
        self._accepts = accepts
        self._others = others
        self._place = _Place.OPENING
        self._scanner = ValueScanner()
        self._kind = _Kind.OTHER
        self._read: list[str] = []
        """The pieces of the key or value that is being read, where it is kept."""
        self._key = ""
        self._name: str | None = None
        self._arguments: str | None = None
        """Those that came before the name."""
        self._raw: list[str] = []
        self._held = 0
        self.begun = False
        self.done = False
        self.broken = False
        """It is no call, or no JSON from the position on that `feed` returned."""

    @property
    def raw(self) -> str:
        """Everything that was read, as long as the call has not begun; "" from then on."""
        return "" if self.begun else "".join(self._raw)

    @property
    def in_arguments(self) -> bool:
        """Whether the arguments have begun and not ended."""
        return self._place is _Place.IN_VALUE and self._kind is _Kind.PASSED_ON

    def feed(self, text: str, at: int) -> int:
        """Read on from `at`; return where the object ends or breaks, or the length of `text`."""
        while at < len(text) and not (self.done or self.broken):
            end = len(text) if self.begun else min(len(text), at + MAX_HELD - self._held)
            start, kept = at, not self.begun
            at = self._step(text, at, end)
            if kept:
                self._raw.append(text[start:at])
                self._held += at - start
                self.broken = self.broken or (self._held >= MAX_HELD and not (self.begun or self.done))
        return at

    def _step(self, text: str, at: int, end: int) -> int:
        """Read the next character that means something, or as much as there is of a key or value."""
        if self._place in (_Place.IN_KEY, _Place.IN_VALUE):
            return self._read_on(text, at, end)
        at = skip_space(text, at, end)
        if at == end:
            return at
        character = text[at]
        if self._place is _Place.OPENING and character == "{":
            self._place = _Place.FIRST_KEY
        elif self._place in (_Place.FIRST_KEY, _Place.KEY) and character == '"':
            self._scanner = ValueScanner()
            self._place = _Place.IN_KEY
            return at
        elif self._place is _Place.COLON and character == ":":
            self._place = _Place.VALUE
        elif self._place is _Place.VALUE and self._begin_value(character):
            return at
        elif self._place is _Place.BEHIND_VALUE and character == ",":
            self._place = _Place.KEY
        elif self._place in (_Place.FIRST_KEY, _Place.BEHIND_VALUE) and character == "}" and self._close():
            pass
        else:
            self.broken = True
            return at
        return at + 1

    def _begin_value(self, character: str) -> bool:
        """Begin the value of the last key, by its first character; return whether there may be such a value."""
        self._scanner = ValueScanner()
        self._place = _Place.IN_VALUE
        given = self.begun or self._arguments is not None
        self._kind = _Kind.OTHER
        if self._key == NAME and self._name is None:
            self._kind = _Kind.NAME
            return character == '"'
        if self._key in ARGUMENTS and not given:
            self._kind = _Kind.ARGUMENTS
            if character == "{" and self._name is not None:
                self._kind = _Kind.PASSED_ON
                self._begin(self._name)
            return character in '{"n'
        return True

    def _read_on(self, text: str, at: int, end: int) -> int:
        start, at = at, self._scanner.feed(text, at, end)
        if self._place is _Place.IN_KEY or self._kind in (_Kind.NAME, _Kind.ARGUMENTS):
            self._read.append(text[start:at])
        elif self._kind is _Kind.PASSED_ON:
            self._sink.arguments(text[start:at])
        self.broken = self._scanner.broken
        if self._scanner.done:
            read = "".join(self._read)
            self._read.clear()
            self.broken = not (self._end_key(read) if self._place is _Place.IN_KEY else self._end_value(read))
        return at

    def _end_key(self, read: str) -> bool:
        key = _string(read)
        self._place = _Place.COLON
        self._key = key or ""
        known = self.begun or self._others is None or key == NAME or key in ARGUMENTS or key in self._others
        return key is not None and known

    def _end_value(self, read: str) -> bool:
        self._place = _Place.BEHIND_VALUE
        if self._kind is _Kind.NAME:
            name = _string(read)
            if not name or not self._accepts(name):
                return False
            self._name = name
        elif self._kind is _Kind.ARGUMENTS:
            self._arguments = _object(read)
            if self._arguments is None:
                return False
        if self._name is not None and self._arguments is not None and not self.begun:
            self._begin(self._name)
            self._sink.arguments(self._arguments)
        return True

    def _close(self) -> bool:
        """End the object; return whether it is a call."""
        if not self.begun and self._name is not None:
            self._begin(self._name)
            self._sink.arguments(NO_ARGUMENTS)
        self.done = self.begun
        return self.done

    def _begin(self, name: str) -> None:
        self.begun = True
        self._sink.begin(name)


def _string(text: str) -> str | None:
    """Return what a JSON string says, None where it is none. Line breaks may stand in it."""
    try:
        value = json.loads(text, strict=False)
        if not isinstance(value, str):
            return None
        value.encode()  # half of a surrogate pair is no text
    except ValueError:
        return None
    return value


def _object(text: str) -> str | None:
    """Return the text of an object that may have been written as a string, or as null, once more; None for others."""
    if text == "null":
        return NO_ARGUMENTS
    inner = _string(text) if text.startswith('"') else text
    return inner if inner is not None and inner.lstrip().startswith("{") else None
