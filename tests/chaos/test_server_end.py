"""The end of the server, wished or not: what runs is finished in time, and nothing of it is left."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from doors import DOORS, open_door
from harness import RunningServer, named_shared_memory
from repositories import add_identity

ROW = np.ones((1, 3), np.float32)
Start = Callable[..., RunningServer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers of the repository in tmp_path, and sees that each has ended with all its processes."""
    servers: list[RunningServer] = []

    def start(*flags: str, ready: bool = True) -> RunningServer:
        servers.append(RunningServer(tmp_path, *flags))
        if ready:
            servers[-1].wait_ready()
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.kill()


async def end_of(server: RunningServer, number: signal.Signals, timeout: float) -> tuple[int, float]:
    """Signal the server; return its exit status and how long it took. Its processes are gone soon after."""
    below = server.descendants()
    assert [path for process in below for path in named_shared_memory(process)] == []
    started = time.monotonic()
    server.process.send_signal(number)
    status = await asyncio.to_thread(server.process.wait, timeout)
    took = time.monotonic() - started
    _, alive = await asyncio.to_thread(psutil.wait_procs, below, timeout=5)
    assert not alive, f"left behind: {alive}"
    return status, took


@pytest.mark.parametrize("hang", [True, "forever"])
async def test_a_killed_server_takes_its_backends_along(tmp_path: Path, start: Start, hang: bool | str) -> None:
    add_identity(tmp_path, "m")
    add_identity(tmp_path, "loads", hang_load="true")
    server = start(ready=False)
    await asyncio.to_thread(server.wait_status, "/v2/models/m/ready", 200)
    async with open_door(server, "grpc") as door:
        inside = asyncio.create_task(door.infer("m", ROW, parameters={"hang": hang}))
        await asyncio.sleep(0.2)
        assert len(server.backends()) == 2
        status, _ = await end_of(server, signal.SIGKILL, 5)
        assert status == -signal.SIGKILL
        assert (await inside).code == "UNAVAILABLE"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("kind", DOORS)
async def test_a_stop_finishes_what_runs_and_waits_and_refuses_the_rest(
    tmp_path: Path, start: Start, kind: str, number: signal.Signals
) -> None:
    add_identity(tmp_path, "m", max_batch_size=1)
    server = start()
    async with open_door(server, kind) as door, open_door(server, "http") as late:
        accepted = [asyncio.create_task(door.infer("m", ROW, parameters={"delay_ms": 500})) for _ in range(3)]
        await asyncio.sleep(0.3)
        assert (await late.infer("m", ROW, version="9")).code == "NOT_FOUND", "a connection that was open before"
        ending = asyncio.create_task(end_of(server, number, 20))
        await asyncio.to_thread(server.wait_for_log, "stopping")
        for refused in (await door.infer("m", ROW), await late.infer("m", ROW)):
            assert (refused.code, "shutting down" in refused.text) == ("UNAVAILABLE", True), refused
        for path in ("live", "ready"):
            assert await asyncio.to_thread(server.status, f"/v2/health/{path}") == 503
        assert [outcome.code for outcome in await asyncio.gather(*accepted)] == ["OK"] * 3
        status, _ = await ending
        assert status == 0, server.log()
    assert "Traceback" not in server.log()


@pytest.mark.parametrize("hang", [True, "forever"])
async def test_a_stop_cuts_requests_off_at_the_exit_timeout(tmp_path: Path, start: Start, hang: bool | str) -> None:
    add_identity(tmp_path, "m", max_batch_size=1)
    server = start("--exit-timeout-secs=2")
    async with open_door(server, "http") as http, open_door(server, "grpc") as grpc:
        outcomes = [
            asyncio.create_task(door.infer("m", ROW, parameters={"hang": hang})) for door in (http, grpc, http, grpc)
        ]
        await asyncio.sleep(0.3)
        status, took = await end_of(server, signal.SIGTERM, 20)
        assert status == 1, server.log()
        assert 2.0 <= took < 3.5
        for outcome in await asyncio.gather(*outcomes):
            assert outcome.code == "UNAVAILABLE"
            assert "stopping" in outcome.text
    assert "Traceback" not in server.log()


async def test_a_stop_of_an_idle_server_is_quick(tmp_path: Path, start: Start) -> None:
    add_identity(tmp_path, "m")
    add_identity(tmp_path, "n")
    server = start()
    async with open_door(server, "http") as http, open_door(server, "grpc") as grpc:
        assert (await http.infer("m", ROW)).ok
        assert (await grpc.infer("n", ROW)).ok
        status, took = await end_of(server, signal.SIGTERM, 20)
    assert status == 0
    assert took < 2.0


async def test_a_second_signal_ends_the_server_at_once(tmp_path: Path, start: Start) -> None:
    add_identity(tmp_path, "m")
    server = start("--exit-timeout-secs=60")
    async with open_door(server, "grpc") as door:
        inside = asyncio.create_task(door.infer("m", ROW, parameters={"hang": "forever"}))
        await asyncio.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(server.wait_for_log, "stopping")
        status, took = await end_of(server, signal.SIGTERM, 5)
        assert status != 0
        assert took < 1.0
        assert (await inside).code == "UNAVAILABLE"


@pytest.mark.parametrize("how", [{"hang_load": "true"}, {"creation_delay_sec": "60"}])
async def test_a_stop_does_not_wait_for_models_that_load(tmp_path: Path, start: Start, how: dict[str, str]) -> None:
    add_identity(tmp_path, "loads", **how)
    server = start(ready=False)
    await asyncio.to_thread(server.wait_status, "/v2/health/live", 200)
    async with asyncio.timeout(10):
        while not server.backends():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    status, took = await end_of(server, signal.SIGTERM, 20)
    assert status == 0, server.log()
    assert took < 2.0
    assert "Traceback" not in server.log()
