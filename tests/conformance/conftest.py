"""What several tests of a door share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

import http_door


@pytest_asyncio.fixture
async def door() -> AsyncIterator[http_door.Door]:
    """A started HTTP gateway over planes that echo."""
    async with http_door.opened() as door:
        yield door
