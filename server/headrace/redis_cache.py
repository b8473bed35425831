"""The response cache in a Redis server, shared by all servers that use it.

A Redis that is down, slow or full never costs a request more than a bounded wait, and that only once in a while: after a
failure it is left alone for a time, and every lookup is a miss. What comes from it is not trusted; whoever reads an
entry checks it (response_cache.decode_entry).
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from headrace.cache_options import RedisSettings
from headrace.clock import Clock
from headrace.response_cache import CacheCounts

if TYPE_CHECKING:
    from redis.asyncio import Redis

_log = logging.getLogger("headrace.cache")

PREFIX: Final = b"headrace:1:"
"""Before every key; the number is raised whenever the form of entries changes."""
MAX_ENTRY_BYTES: Final = 64 << 20
MAX_INSERTIONS: Final = 64
"""Insertions under way at once; answers beyond that are not kept."""
MAX_INSERTION_BYTES: Final = 128 << 20
_LEFT_ALONE_NS: Final = 1_000_000_000
_LEFT_ALONE_MOST_NS: Final = 30_000_000_000


class Breaker:
    """Decides whether a server that failed is asked again: after a second, then after twice the time, up to 30 s.

    When the time is over one call is let through; the others wait for what becomes of it.
    """

    def __init__(self) -> None:
        self.broken = False
        self._pause_ns = _LEFT_ALONE_NS
        self._again_ns = 0
        self._probing = False

    def allows(self, now_ns: int) -> bool:
        """Return whether a call may be made now; `failed` or `succeeded` is told of each that was."""
        if not self.broken:
            return True
        if self._probing or now_ns < self._again_ns:
            return False
        self._probing = True
        return True

    def failed(self, now_ns: int) -> bool:
        """Note a failure; return whether it is news."""
        news = not self.broken
        if news or self._probing:
            self._again_ns = now_ns + self._pause_ns
            self._pause_ns = min(2 * self._pause_ns, _LEFT_ALONE_MOST_NS)
        self.broken, self._probing = True, False
        return news

    def succeeded(self) -> bool:
        """Note that a call went well; return whether that is news."""
        news = self.broken
        self.broken = self._probing = False
        self._pause_ns = _LEFT_ALONE_NS
        return news


class RedisCache:
    """A ResponseCache elsewhere. Owns its connections until `close`."""

    name = "redis"
    immediate = False
    shared = True
    largest = MAX_ENTRY_BYTES

    def __init__(self, settings: RedisSettings, clock: Clock) -> None:
        """Connect later, on first use. Raises ImportError where the client library is not installed."""
        self.counts = CacheCounts()
        self._settings = settings
        self._now_ns = clock.now_ns
        self._breaker = Breaker()
        self._redis = _connect(settings)
        self._insertions: set[asyncio.Task[None]] = set()
        self._inserting = 0

    def get(self, key: bytes) -> bytes | None:  # noqa: ARG002 - nothing is known without asking
        return None

    async def fetch(self, key: bytes) -> bytes | None:
        if not self._breaker.allows(self._now_ns()):
            return None
        try:
            async with asyncio.timeout(self._settings.patience_s):
                block = await self._redis.get(PREFIX + key)
        except Exception as error:  # whatever the library raises: it is a miss
            self._failed(error)
            return None
        except asyncio.CancelledError:
            self._gave_up()
            raise
        self._worked()
        return block if isinstance(block, bytes) else None

    def put(self, key: bytes, block: bytes) -> None:
        full = len(self._insertions) >= MAX_INSERTIONS or self._inserting + len(block) > MAX_INSERTION_BYTES
        if full or len(block) > MAX_ENTRY_BYTES or self._breaker.broken:
            self.counts.skipped += 1
            return
        self._inserting += len(block)
        task = asyncio.get_running_loop().create_task(self._insert(key, block), name="insert into redis")
        self._insertions.add(task)
        task.add_done_callback(self._insertions.discard)

    async def _insert(self, key: bytes, block: bytes) -> None:
        started = self._now_ns()
        try:
            async with asyncio.timeout(self._settings.patience_s):
                await self._redis.set(PREFIX + key, block, ex=self._settings.ttl_s or None)
            self._worked()
        except Exception as error:
            self._failed(error)
        finally:
            self._inserting -= len(block)
            self.counts.insertion_ns += self._now_ns() - started

    async def close(self) -> None:
        for task in self._insertions:
            task.cancel()
        await asyncio.gather(*self._insertions, return_exceptions=True)
        await self._redis.aclose()

    def _worked(self) -> None:
        if self._breaker.succeeded():
            _log.info("redis answers again")

    def _failed(self, error: Exception) -> None:
        self.counts.errors += 1
        if self._breaker.failed(self._now_ns()):
            text = str(error) or type(error).__name__
            _log.warning("redis at %s fails, requests go on without it: %s", self._where, text)

    def _gave_up(self) -> None:
        """Note a lookup whose client went away: if it was to find out whether Redis is back, nobody knows yet."""
        if self._breaker.broken:
            self._breaker.failed(self._now_ns())

    @property
    def _where(self) -> str:
        return f"{self._settings.host}:{self._settings.port}"


def _connect(settings: RedisSettings) -> Redis:
    """Return a client that connects when it is first used, tries everything once and waits for nothing for long."""
    from redis.asyncio import BlockingConnectionPool, Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    pool = BlockingConnectionPool(
        host=settings.host,
        port=settings.port,
        db=settings.db,
        username=settings.user,
        password=settings.password,
        socket_timeout=settings.socket_timeout_ms / 1000,
        socket_connect_timeout=settings.connect_timeout_ms / 1000,
        max_connections=settings.pool_size,
        timeout=settings.wait_timeout_ms / 1000,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )
    return Redis.from_pool(pool)
