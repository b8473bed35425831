"""RestartPolicy: when to start a failed backend again and when to give up. Pure."""

from __future__ import annotations

from collections import deque
from typing import Final

FIRST_DELAY_NS: Final = 100_000_000
LONGEST_DELAY_NS: Final = 30_000_000_000


class RestartPolicy:
    """Back-off doubles with every crash inside `window_ns`; more than `limit` crashes inside it are the end."""

    def __init__(self, limit: int, window_ns: int) -> None:
        self.limit: Final = limit
        self.window_ns: Final = window_ns
        self.restarts = 0
        """Restarts granted since the model was loaded."""
        self._crashes: deque[int] = deque(maxlen=limit + 1)

    def crashed(self, now_ns: int) -> int | None:
        """Record a crash; return the delay before the restart in nanoseconds, or None to give up."""
        self._crashes.append(now_ns)
        while self._crashes and now_ns - self._crashes[0] > self.window_ns:
            self._crashes.popleft()
        count = len(self._crashes)
        if count > self.limit:
            return None
        self.restarts += 1
        return 0 if count == 1 else min(LONGEST_DELAY_NS, FIRST_DELAY_NS << (count - 2))
