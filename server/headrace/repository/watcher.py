"""Polling: looks at the repositories again and again, and applies what has come to rest.

A folder that is being copied changes between two looks; it counts only once two looks a settling time apart agree.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Final, Generic

from headrace.clock import Clock, SystemClock
from headrace.repository.layout import ModelLayout, RepositorySnapshot, scan
from headrace.repository.registry import ModelRegistry
from headrace.repository.sources import M

_log = logging.getLogger(__name__)

SETTLE_S: Final = 1.0


class Settling:
    """Which of the changes seen are at rest. Pure: time is an argument."""

    def __init__(self, settled: RepositorySnapshot, settle_ns: int) -> None:
        self._settle_ns = settle_ns
        self._settled = dict(settled.models)
        self._moving: dict[str, tuple[ModelLayout | None, int]] = {}
        """Models that differ from what is settled: how they looked (None = gone), and since when they look so."""

    @property
    def moving(self) -> bool:
        """Whether another look is due soon."""
        return bool(self._moving)

    def observe(self, seen: RepositorySnapshot, now_ns: int) -> RepositorySnapshot:
        """Return the repositories as they are at rest: what still moves appears as it was before."""
        for name in seen.models.keys() | self._settled.keys() | self._moving.keys():
            self._observe_model(name, seen, now_ns)
        return RepositorySnapshot(dict(self._settled), seen.unreadable, seen.warnings)

    def _observe_model(self, name: str, seen: RepositorySnapshot, now_ns: int) -> None:
        looks = seen.models.get(name)
        settled = self._settled.get(name)
        if looks is None and settled is not None and settled.directory.parent in seen.unreadable:
            looks = settled
        if looks == settled:
            self._moving.pop(name, None)
            return
        before = self._moving.get(name)
        if before is None or before[0] != looks:
            self._moving[name] = (looks, now_ns)
        elif now_ns - before[1] >= self._settle_ns:
            del self._moving[name]
            if looks is None:
                del self._settled[name]
            else:
                self._settled[name] = looks


class RepositoryWatcher(Generic[M]):
    """Keeps a registry at what its repositories hold, for as long as `watching` is entered."""

    def __init__(
        self,
        registry: ModelRegistry[M],
        repositories: Sequence[Path],
        poll_s: float,
        *,
        clock: Clock | None = None,
        settle_s: float = SETTLE_S,
        look: Callable[[Sequence[Path]], RepositorySnapshot] = scan,
    ) -> None:
        self._registry = registry
        self._repositories = tuple(repositories)
        self._poll_s = poll_s
        self._clock = clock if clock is not None else SystemClock()
        self._settle_s = settle_s
        self._look = look
        self._settling: Settling | None = None
        self._warned: tuple[str, ...] = ()

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch until the block ends."""
        watch = asyncio.create_task(self.run(), name="watch the model repositories")
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def run(self) -> None:
        """Look for ever; an interval of 0 means never. Nothing that goes wrong in one look ends the watch."""
        if self._poll_s <= 0:
            return
        while True:
            moving = self._settling is not None and self._settling.moving
            await asyncio.sleep(min(self._settle_s, self._poll_s) if moving else self._poll_s)
            try:
                await self.look()
            except Exception:
                _log.exception("looking at the model repositories failed; the next look comes all the same")

    async def look(self) -> None:
        """Look once, in a thread, and begin what has come to rest; nothing before the initial load has been begun."""
        applied = self._registry.snapshot
        if applied is None:
            return
        if self._settling is None:
            self._settling = Settling(applied, int(self._settle_s * 1e9))
        seen = await asyncio.to_thread(self._look, self._repositories)
        self._warn(seen.warnings)
        self._registry.apply(self._settling.observe(seen, self._clock.now_ns()))

    def _warn(self, warnings: tuple[str, ...]) -> None:
        """Log what is new; a warning that stands is not repeated at every look."""
        for warning in warnings:
            if warning not in self._warned:
                _log.warning("model repositories: %s", warning)
        self._warned = warnings
