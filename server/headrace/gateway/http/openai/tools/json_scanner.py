"""Finds where a JSON value ends, in text that comes in pieces. Pure.

It looks at brackets and quotes alone: that numbers and commas are where they may be is for whoever reads the value.
"""

from __future__ import annotations

import re
from typing import Final

MAX_DEPTH: Final = 100

_SPACE: Final = re.compile(r"[ \t\r\n]*")
_IN_STRING: Final = re.compile(r'[^"\\]*')
_OUTSIDE: Final = re.compile(r'[^"{}\[\]]*')
_BARE: Final = re.compile(r"[-+.0-9A-Za-z]*")
_CLOSERS: Final = {"{": "}", "[": "]"}


def skip_space(text: str, at: int, end: int) -> int:
    """Return where the first character is that is no white space, `end` if there is none before."""
    return _SPACE.match(text, at, end).end()  # type: ignore[union-attr]  # it matches nothing too


class ValueScanner:
    """Looks for the end of one value, whose first character is the first that it gets."""

    __slots__ = ("_bare", "_begun", "_closers", "_escaped", "_in_string", "broken", "done")

    def __init__(self) -> None:
        self._begun = False
        self._bare = False
        self._closers: list[str] = []
        self._in_string = False
        self._escaped = False
        self.done = False
        self.broken = False
        """It is no value, from the position on that `feed` returned."""

    def feed(self, text: str, at: int, end: int) -> int:
        """Read on from `at`; return where the value ends, or `end` where it has not ended before."""
        if not self._begun and at < end:
            self._begun = True
            self._bare = _BARE.match(text[at]).end() > 0  # type: ignore[union-attr]
            self.broken = not self._bare and text[at] not in '"{['
        if self._bare:
            at = _BARE.match(text, at, end).end()  # type: ignore[union-attr]
            self.done = at < end
            return at
        while at < end and not (self.done or self.broken):
            at = self._string(text, at, end) if self._in_string else self._outside(text, at, end)
        return at

    def _string(self, text: str, at: int, end: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        at = _IN_STRING.match(text, at, end).end()  # type: ignore[union-attr]
        if at == end:
            return at
        if text[at] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.done = not self._closers
        return at + 1

    def _outside(self, text: str, at: int, end: int) -> int:
        at = _OUTSIDE.match(text, at, end).end()  # type: ignore[union-attr]
        if at == end:
            return at
        character = text[at]
        if character == '"':
            self._in_string = True
        elif character in _CLOSERS:
            if len(self._closers) == MAX_DEPTH:
                self.broken = True
                return at
            self._closers.append(_CLOSERS[character])
        elif self._closers[-1] != character:
            self.broken = True
            return at
        else:
            self._closers.pop()
            self.done = not self._closers
        return at + 1
