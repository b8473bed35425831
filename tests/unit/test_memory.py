"""Free heap pages go back to the system when no request has come for a while, and not before."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from headrace import memory


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set once memory was given back: whether pages truly go is a matter of a whole server (integration/test_scale)."""
    event = asyncio.Event()
    monkeypatch.setattr(memory, "give_back", event.set)
    return event


async def test_memory_is_given_back_when_no_request_came(given: asyncio.Event) -> None:
    async with memory.giving_back_when_idle(lambda: 7, idle_s=0.001):
        async with asyncio.timeout(5):
            await given.wait()


async def test_memory_is_kept_while_requests_come(given: asyncio.Event) -> None:
    looks = itertools.count()
    seen = asyncio.Event()

    def requests() -> int:
        look = next(looks)
        if look >= 20:
            seen.set()
        return look

    async with memory.giving_back_when_idle(requests, idle_s=0.001), asyncio.timeout(5):
        await seen.wait()
    assert not given.is_set()


async def test_nothing_goes_on_after_the_block() -> None:
    async with memory.giving_back_when_idle(lambda: 0):
        assert len(asyncio.all_tasks()) == 2
    assert len(asyncio.all_tasks()) == 1
