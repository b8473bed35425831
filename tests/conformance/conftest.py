"""What several tests of a door share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import uvloop

import http_door
from http_connection import OnDoor, Scenario, play


@pytest_asyncio.fixture
async def door() -> AsyncIterator[http_door.Door]:
    """A started HTTP gateway over planes that echo."""
    async with http_door.opened() as door:
        yield door


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def on_door(request: pytest.FixtureRequest) -> OnDoor:
    """Run a scenario of connections with an HTTP door of its own, on each event loop."""

    def run(scenario: Scenario, **settings: Any) -> None:
        request.param(play(scenario, settings))

    return run
