"""Keeps the numbers of a JSON text to a length: models fall into digits that repeat, and a schema does not end them.

A number that is long enough may still go on where it cannot end: where the schema asks for so many digits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace_backends.llm.grammar import Matcher

_LONGEST: Final = 40
"""Characters of a number; fp64 needs 24, and 38 digits have 128 bits."""
_NUMBER: Final = frozenset(b"0123456789+-.eE")
_QUOTE, _BACKSLASH = b'"\\'


class _Place(NamedTuple):
    """Where a JSON text is."""

    in_string: bool = False
    escaped: bool = False
    length: int = 0
    """Of the number at the end of the text."""

    def after(self, text: bytes) -> _Place:
        in_string, escaped, length = self
        for byte in text:
            if in_string:
                in_string = escaped or byte != _QUOTE
                escaped = not escaped and byte == _BACKSLASH
            else:
                in_string = byte == _QUOTE
                length = length + 1 if byte in _NUMBER else 0
        return _Place(in_string, escaped, length)


class BoundedNumbers:
    """A `Matcher` around the matcher of a JSON text."""

    __slots__ = ("_bytes", "_digits", "_inner", "_places")

    def __init__(self, inner: Matcher, token_bytes: Callable[[int], bytes], digits: NDArray[np.uint32]) -> None:
        """`digits` is the mask of the tokens that begin with a digit."""
        self._inner = inner
        self._bytes = token_bytes
        self._digits = digits
        self._places = [_Place()]

    def accept(self, token_id: int) -> None:
        self._inner.accept(token_id)
        self._places.append(self._places[-1].after(self._bytes(token_id)))

    def validate(self, token_ids: Sequence[int]) -> int:
        return self._inner.validate(token_ids)

    def rollback(self, count: int) -> None:
        self._inner.rollback(count)
        del self._places[len(self._places) - count :]

    def fill(self, row: Any) -> None:
        self._inner.fill(row)
        place = self._places[-1]
        if place.length >= _LONGEST and not place.in_string:
            others = row & ~self._digits
            if others.any():
                row[:] = others

    def forced(self) -> Sequence[int]:
        return self._inner.forced()

    @property
    def may_end(self) -> bool:
        return self._inner.may_end

    @property
    def complete(self) -> bool:
        return self._inner.complete
