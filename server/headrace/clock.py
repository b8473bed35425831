"""Where time comes from, so that everything that decides by time can be driven by a test."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic time for durations and deadlines, wall time for people."""

    def now_ns(self) -> int:
        """Nanoseconds of a clock that never goes back."""
        ...

    def wall_ns(self) -> int:
        """Nanoseconds since the epoch."""
        ...


class SystemClock:
    """The machine's clocks."""

    now_ns = staticmethod(time.monotonic_ns)
    wall_ns = staticmethod(time.time_ns)
