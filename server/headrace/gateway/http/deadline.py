"""One deadline that is moved often and hardly ever reached: its timer is moved only where it would come too late."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

_CLOCK_STEP = 0.002
"""Seconds by which a timer may come early."""


def _nobody() -> None:
    """Whom a closed deadline calls."""


class Deadline:
    """Calls `expired` once the time set has come, unless another was set before. Close it after use."""

    __slots__ = ("_expired", "_loop", "_timer", "_timer_at", "at")

    def __init__(self, loop: asyncio.AbstractEventLoop, expired: Callable[[], None]) -> None:
        self._loop = loop
        self._expired = expired
        self.at = math.inf
        """The loop's time at which it is reached. May be made infinite, for never."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    def set(self, seconds: float) -> None:
        """Be reached in so many seconds from now."""
        self.at = at = self._loop.time() + seconds
        if at < self._timer_at:
            self._set_timer(at)

    def close(self) -> None:
        """Let go of the timer and of whom it calls, who refers to this. It is not set again."""
        self.at = self._timer_at = math.inf
        self._expired = _nobody
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._on_timer)

    def _on_timer(self) -> None:
        """Look at what was set meanwhile."""
        self._timer = None
        self._timer_at = math.inf
        if self.at <= self._loop.time() + _CLOCK_STEP:
            self._expired()
        elif self.at < math.inf:
            self._set_timer(self.at)
