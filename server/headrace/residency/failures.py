"""Models that failed to load, and for how long they are not tried again. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

FIRST_PAUSE_NS: Final = 1_000_000_000
LONGEST_PAUSE_NS: Final = 60_000_000_000


class _Failure(NamedTuple):
    reason: str
    pause_ns: int
    until_ns: int


class Failures:
    """By model. The pause doubles with each failure in a row."""

    def __init__(self) -> None:
        self._failures: dict[str, _Failure] = {}

    def note(self, name: str, reason: str, now_ns: int) -> None:
        """Take note of a load that failed."""
        before = self._failures.get(name)
        pause = FIRST_PAUSE_NS if before is None else min(2 * before.pause_ns, LONGEST_PAUSE_NS)
        self._failures[name] = _Failure(reason, pause, now_ns + pause)

    def forget(self, name: str) -> None:
        """Have a model tried again: it was loaded, or is another now."""
        self._failures.pop(name, None)

    def reason(self, name: str, now_ns: int) -> str:
        """Return why a model is not tried now; "" where it may be."""
        failure = self._failures.get(name)
        return failure.reason if failure is not None and now_ns < failure.until_ns else ""
