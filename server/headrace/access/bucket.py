"""TokenBucket: so many a second, and so many at once. Pure: time is an argument."""

from __future__ import annotations

from typing import Final

_NS_PER_S: Final = 1_000_000_000


class TokenBucket:
    """Holds up to `burst` tokens and gains `rate` of them a second. It may go into debt, which it pays off first."""

    __slots__ = ("_at_ns", "_level", "burst", "rate")

    def __init__(self, rate: float, burst: float, now_ns: int) -> None:
        self.rate = rate
        self.burst = burst
        self._level = burst
        self._at_ns = now_ns

    def take(self, count: float, now_ns: int) -> float:
        """Take `count` tokens and return 0; or take none, and return the seconds until there would be as many.

        More than `burst` are never there at once: then it is enough that the bucket is full.
        """
        self._fill(now_ns)
        wanted = min(count, self.burst)
        if self._level >= wanted:
            self._level -= count
            return 0.0
        return (wanted - self._level) / self.rate

    def wait(self, now_ns: int) -> float:
        """Return the seconds until the bucket is out of debt; 0 where it is."""
        self._fill(now_ns)
        return max(0.0, -self._level / self.rate)

    def charge(self, count: float, now_ns: int) -> None:
        """Take `count` tokens, be they there or not."""
        self._fill(now_ns)
        self._level -= count

    def resize(self, rate: float, burst: float, now_ns: int) -> None:
        """Change how fast it fills and how much it holds; what is in it stays, as far as there is room."""
        self._fill(now_ns)
        self.rate, self.burst = rate, burst
        self._level = min(self._level, burst)

    def _fill(self, now_ns: int) -> None:
        passed = now_ns - self._at_ns
        if passed > 0:
            self._level = min(self.burst, self._level + self.rate * passed / _NS_PER_S)
            self._at_ns = now_ns
