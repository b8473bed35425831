"""A Redis that is down, silent or talks nonsense is a miss within a bounded time, and is left alone after that."""

from __future__ import annotations

import asyncio
import time

import pytest

from headrace.cache_options import RedisSettings
from headrace.clock import SystemClock
from headrace.redis_cache import MAX_ENTRY_BYTES, MAX_INSERTIONS, Breaker, RedisCache
from redis_servers import free_port, impostor, running_redis

SECOND = 1_000_000_000
KEY = bytes(32)


def make(port: int, **settings) -> RedisCache:
    fast = {"connect_timeout_ms": 100, "socket_timeout_ms": 100, "wait_timeout_ms": 100, **settings}
    return RedisCache(RedisSettings("127.0.0.1", port, **fast), SystemClock())


async def insertions(cache: RedisCache) -> None:
    await asyncio.gather(*cache._insertions)


def test_a_server_that_failed_is_asked_again_after_a_second_then_after_twice_the_time():
    breaker = Breaker()
    assert breaker.failed(0)
    now = 0
    for pause_s in (1, 2, 4, 8, 16, 30, 30):
        assert not breaker.allows(now + pause_s * SECOND - 1)
        now += pause_s * SECOND
        assert breaker.allows(now)
        assert not breaker.allows(now), "one call finds out for all"
        assert not breaker.failed(now), "it is no news"
    assert breaker.allows(now + 30 * SECOND)
    assert breaker.succeeded()
    assert breaker.allows(now)
    assert not breaker.succeeded()


def test_failures_of_calls_under_way_do_not_put_the_next_look_off():
    breaker = Breaker()
    breaker.failed(0)
    breaker.failed(SECOND // 2)
    assert breaker.allows(SECOND)


async def test_a_real_redis_gives_back_what_was_kept():
    with running_redis() as server:
        cache = make(server.port)
        assert await cache.fetch(KEY) is None
        cache.put(KEY, b"\0block\xff" * 100_000)
        await insertions(cache)
        assert await cache.fetch(KEY) == b"\0block\xff" * 100_000
        assert cache.counts.errors == 0
        await cache.close()
        other = make(server.port)
        assert await other.fetch(KEY) is not None, "others read what this one wrote"
        await other.close()


async def test_entries_are_forgotten_after_their_time_to_live():
    with running_redis() as server:
        cache = make(server.port, ttl_s=100)
        cache.put(KEY, b"block")
        await insertions(cache)
        assert 0 < int(server.cli("TTL", '"headrace:1:' + "\\x00" * 32 + '"').strip(b":\r\n")) <= 100
        await cache.close()


async def test_a_password_is_sent_and_a_wrong_one_is_a_miss():
    with running_redis("--requirepass", "secret") as server:
        right, wrong = make(server.port, password="secret"), make(server.port, password="other")
        right.put(KEY, b"block")
        await insertions(right)
        assert await right.fetch(KEY) == b"block"
        assert await wrong.fetch(KEY) is None
        assert wrong.counts.errors == 1
        await right.close()
        await wrong.close()


async def test_a_redis_that_is_full_is_left_alone_and_lookups_miss():
    with running_redis("--maxmemory", "1mb") as server:
        cache = make(server.port)
        cache.put(KEY, bytes(2 << 20))
        await insertions(cache)
        assert cache.counts.errors == 1
        await cache.close()


async def test_a_redis_that_comes_back_is_used_again():
    with running_redis() as server:
        cache = make(server.port)
        server.stop()
        assert await cache.fetch(KEY) is None
        server.start()
        cache._breaker._again_ns = 0
        cache.put(KEY, b"x")
        assert cache.counts.skipped == 1, "not while it is left alone"
        assert await cache.fetch(KEY) is None
        cache.put(KEY, b"block")
        await insertions(cache)
        assert await cache.fetch(KEY) == b"block"
        await cache.close()


@pytest.mark.parametrize("reply", [None, b"garbage\r\n", b"$5\r\nab", b"-ERR no\r\n", b":7\r\n"], ids=str)
async def test_what_is_no_redis_costs_a_bounded_time_once(reply):
    with impostor(reply) as port:
        cache = make(port)
        started = time.monotonic()
        assert await cache.fetch(KEY) is None
        assert time.monotonic() - started < 2
        await cache.close()


async def test_while_it_is_left_alone_nothing_is_waited_for():
    with impostor(None) as port:
        cache = make(port)
        await cache.fetch(KEY)
        started = time.monotonic()
        for _ in range(1000):
            assert await cache.fetch(KEY) is None
        assert time.monotonic() - started < 0.5
        assert cache.counts.errors == 1
        await cache.close()


async def test_nobody_listening_is_a_miss():
    cache = make(free_port())
    assert await cache.fetch(KEY) is None
    assert cache.counts.errors == 1
    await cache.close()


async def test_insertions_under_way_are_bounded_in_number_and_size():
    with impostor(None) as port:
        cache = make(port, socket_timeout_ms=60_000)
        cache.put(KEY, bytes(MAX_ENTRY_BYTES + 1))
        assert cache.counts.skipped == 1
        for _ in range(MAX_INSERTIONS + 5):
            cache.put(KEY, b"block")
        assert len(cache._insertions) == MAX_INSERTIONS
        assert cache.counts.skipped == 6
        async with asyncio.timeout(5):
            await cache.close()
