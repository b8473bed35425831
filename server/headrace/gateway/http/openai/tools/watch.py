"""Finds markers in text that comes in pieces, and holds back only what may be the start of one. Pure."""

from __future__ import annotations

from typing import Final

MAX_SPACE: Final = 64
"""White space just before a marker that counts as part of it, in characters; what is before that is content."""


def begins_at_end(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `marker`, but not all of it."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


class MarkerWatch:
    """Passes text on until one of the markers comes. Models put white space before a marker: it goes with the marker."""

    __slots__ = ("_held", "_markers", "space")

    def __init__(self, *markers: str) -> None:
        self._markers = markers
        self._held = ""
        self.space = ""
        """The white space before the marker that was found last."""

    def feed(self, text: str) -> tuple[str, str | None, str]:
        """Return the content that is sure by now, the marker if one has come, and the text behind that."""
        text = self._held + text
        self._held = ""
        found = [(at, marker) for marker in self._markers if (at := text.find(marker)) >= 0]
        if found:
            at, marker = min(found)
            start = _before_space(text, at)
            self.space = text[start:at]
            return text[:start], marker, text[at + len(marker) :]
        end = len(text) - max((begins_at_end(text, marker) for marker in self._markers), default=0)
        start = _before_space(text, end)
        self._held = text[start:]
        return text[:start], None, ""

    def finish(self) -> str:
        """Return what was held back."""
        held, self._held = self._held, ""
        return held


def _before_space(text: str, end: int) -> int:
    """Return where the white space that ends at `end` begins, at most MAX_SPACE before it."""
    start = max(0, end - MAX_SPACE)
    return start + len(text[start:end].rstrip())
