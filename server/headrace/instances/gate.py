"""Gate: what stands between a process and its batches where running takes resources (scheduling/rate_limiter.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.repository.model_config import Need
from headrace.scheduling.rate_limiter import RateLimiter


class Gate:
    """The instances of one supervisor's processes, as the rate limiter sees them. `close` follows."""

    def __init__(
        self,
        limiter: RateLimiter,
        needs: Sequence[Need],
        device: int,
        priority: int,
        wants: Callable[[], bool],
        wake: Callable[[], None],
    ) -> None:
        """Join the line. Raises INVALID_ARG where the instances could never run."""
        self._limiter = limiter
        self._claim = limiter.join(needs, device, priority, wants, wake)
        self._closed = False

    @property
    def open(self) -> bool:
        """Whether a batch may run now."""
        return self._limiter.may_run(self._claim)

    def enter(self) -> None:
        """Note that a batch runs."""
        self._limiter.begin(self._claim)

    def leave(self) -> None:
        """Note that its instance is free again, or gone."""
        self._limiter.end(self._claim)

    def changed(self) -> None:
        """Note that the process has come or gone."""
        self._limiter.look()

    def close(self) -> None:
        """Stand aside: nothing runs here any more. Idempotent."""
        if not self._closed:
            self._closed = True
            self._limiter.leave(self._claim)
