"""Versions come, go, break and crash under a steady load: no request fails that need not, and none gets a wrong answer."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from onnx import helper, numpy_helper

import onnx_models
from doors import DOORS, SteadyLoad, open_door
from figures import backend_pid, index, metric, wait_until
from harness import RunningServer, running
from repositories import add_identity, add_onnx

ROW = np.ones((1, 3), np.float32)
EXPLICIT = ("--model-control-mode=explicit", "--load-model=m")
POLL = ("--model-control-mode=poll", "--repository-poll-secs=1")
ALL = "version_policy: { all {} }"


def adder(number: int):
    """Return a writer of OUTPUT0 = INPUT0 + number, so that an answer tells which file made it."""

    def write(path: Path) -> None:
        onnx_models.save(
            path,
            [helper.make_node("Add", ["INPUT0", "number"], ["OUTPUT0"])],
            [onnx_models.tensor("INPUT0", ("batch", 3))],
            [onnx_models.tensor("OUTPUT0", ("batch", 3))],
            [numpy_helper.from_array(np.array(number, np.float32), "number")],
        )

    return write


@asynccontextmanager
async def always_ready(server: RunningServer, path: str = "/v2/health/ready") -> AsyncIterator[None]:
    """Assert that readiness does not flicker for the length of the block."""
    answers: list[int] = []

    async def watch() -> None:
        while True:
            answers.append(await asyncio.to_thread(server.status, path))
            await asyncio.sleep(0.02)

    watching = asyncio.create_task(watch())
    yield
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert set(answers) == {200}


async def until_served_by(load: SteadyLoad, version: str) -> None:
    async with asyncio.timeout(30):
        while {outcome.version for outcome in await load.more(10)} != {version}:
            pass


@pytest.mark.parametrize("mode", ["explicit", "poll"])
async def test_a_version_is_replaced_without_a_hole(tmp_path: Path, mode: str) -> None:
    folder = add_identity(tmp_path, "m", creation_delay_sec="0.7")
    with running(tmp_path, *(EXPLICIT if mode == "explicit" else POLL)) as server:
        async with (
            SteadyLoad(server, "m", ROW) as load,
            always_ready(server),
            always_ready(server, "/v2/models/m/ready"),
        ):
            (folder / "2").mkdir()
            (folder / "1").rmdir()
            if mode == "explicit":
                async with open_door(server, "http") as door:
                    assert (await door.control("load", "m")).ok
            await until_served_by(load, "2")
            assert index(server, "m") == {"2": ("READY", "")}
        assert load.failures() == []
        for kind in DOORS:
            async with open_door(server, kind) as door:
                assert (await door.infer("m", ROW, version="1")).code == "NOT_FOUND"


@pytest.mark.parametrize("kind", DOORS)
async def test_requests_inside_the_old_version_end_in_peace(tmp_path: Path, kind: str) -> None:
    folder = add_identity(tmp_path, "m", max_batch_size=1)
    with running(tmp_path, *EXPLICIT) as server:
        async with open_door(server, kind) as door:
            inside = [asyncio.create_task(door.infer("m", ROW, parameters={"delay_ms": 700})) for _ in range(2)]
            await asyncio.sleep(0.2)
            (folder / "2").mkdir()
            assert (await door.control("load", "m")).ok
            assert (await door.infer("m", ROW)).version == "2"
            assert [outcome.version for outcome in await asyncio.gather(*inside)] == ["1", "1"]
        await asyncio.to_thread(wait_until, "the old process ends", lambda: len(server.backends()) == 1)


async def test_a_version_is_added_beside_those_that_serve(tmp_path: Path) -> None:
    folder = add_onnx(tmp_path, "m", adder(1), 1, ALL)
    add_onnx(tmp_path, "m", adder(2), 2)
    with running(tmp_path, *EXPLICIT) as server:
        async with SteadyLoad(server, "m", ROW) as load, SteadyLoad(server, "m", ROW, version="1") as pinned:
            adder(3)(folder / "3" / "model.onnx")
            async with open_door(server, "grpc") as door:
                assert (await door.control("load", "m")).ok
            await until_served_by(load, "3")
        assert [*load.failures(), *pinned.failures()] == []
        assert {outcome.version for outcome in load.outcomes} == {"2", "3"}
        assert {outcome.version for outcome in pinned.outcomes} == {"1"}
        for outcome in [*load.outcomes, *pinned.outcomes]:
            np.testing.assert_array_equal(outcome.array, ROW + int(outcome.version))
        assert index(server, "m") == dict.fromkeys("123", ("READY", ""))


@pytest.mark.parametrize("kind", DOORS)
async def test_a_broken_version_changes_nothing_and_its_reason_is_told(tmp_path: Path, kind: str) -> None:
    folder = add_onnx(tmp_path, "m", adder(3), 3, ALL)
    with running(tmp_path, *EXPLICIT) as server:
        async with (
            SteadyLoad(server, "m", ROW) as load,
            always_ready(server),
            open_door(server, kind) as door,
        ):
            (folder / "4").mkdir()
            (folder / "4" / "model.onnx").write_bytes(b"garbage" * 100)
            refused = await door.control("load", "m")
            assert refused.code == "INVALID_ARGUMENT"
            assert "version 4" in refused.text
            states = index(server, "m")
            assert (states["3"][0], states["4"][0]) == ("READY", "UNAVAILABLE")
            assert "model.onnx" in states["4"][1]
            assert (await door.infer("m", ROW, version="4")).code == "UNAVAILABLE"
            await load.more()
            assert {outcome.version for outcome in load.outcomes} == {"3"}

            adder(4)(folder / "4" / "model.onnx")
            assert (await door.control("load", "m")).ok
            await until_served_by(load, "4")
        assert load.failures() == []


async def test_a_broken_configuration_changes_nothing(tmp_path: Path) -> None:
    folder = add_identity(tmp_path, "m")
    good = (folder / "config.pbtxt").read_text()
    with running(tmp_path, *POLL) as server:
        async with SteadyLoad(server, "m", ROW) as load, always_ready(server):
            (folder / "config.pbtxt").write_text(good + "no_such_field: 1")
            server.wait_for_log("no_such_field")
            (state,) = index(server, "m").values()
            assert state[0] == "READY"
            assert "no_such_field" in state[1]
            await load.more()
            (folder / "config.pbtxt").write_text(good + "metric_tags { key: 'a' value: 'b' }")
            await asyncio.to_thread(wait_until, "the repaired model", lambda: '_a="b"' in server.metrics())
        assert load.failures() == []


@pytest.mark.parametrize("kind", DOORS)
async def test_unload_and_load_under_load(tmp_path: Path, kind: str) -> None:
    add_identity(tmp_path, "m", max_batch_size=1, creation_delay_sec="0.3")
    with running(tmp_path, *EXPLICIT) as server:
        async with SteadyLoad(server, "m", ROW) as load, open_door(server, kind) as door:
            inside = asyncio.create_task(door.infer("m", ROW, parameters={"delay_ms": 600}))
            await asyncio.sleep(0.2)
            unloading = time.monotonic()
            assert (await door.control("unload", "m")).ok
            assert {outcome.code for outcome in await load.more()} == {"UNAVAILABLE"}
            assert (await inside).ok
            assert server.status("/v2/models/m/ready") == 503
            assert (await door.control("load", "m")).ok
            assert {outcome.code for outcome in await load.more()} == {"OK"}
        assert {outcome.code for outcome in load.failures()} == {"UNAVAILABLE"}
        assert all(re.search("unloaded|LOADING", outcome.text) for outcome in load.failures())
        assert min(outcome.ended for outcome in load.failures()) > unloading


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
async def test_a_killed_backend_takes_along_only_the_requests_inside_it(tmp_path: Path, how: signal.Signals) -> None:
    add_identity(tmp_path, "m", max_batch_size=1, creation_delay_sec="1.2")
    add_identity(tmp_path, "other")
    with running(tmp_path) as server:
        victim = psutil.Process(backend_pid(server, "m"))
        async with (
            SteadyLoad(server, "other", ROW) as others,
            open_door(server, "http") as http,
            open_door(server, "grpc") as grpc,
        ):
            inside = asyncio.create_task(grpc.infer("m", ROW, parameters={"hang": True}))
            await asyncio.sleep(0.2)
            queued = asyncio.create_task(http.infer("m", ROW))
            await asyncio.sleep(0.2)
            victim.send_signal(how)
            killed = time.monotonic()
            failed = await inside
            assert failed.code == "UNAVAILABLE"
            assert failed.ended - killed < 1.0
            for path in ("/v2/health/ready", "/v2/models/m/ready"):
                assert server.status(path) != 200
            assert time.monotonic() - killed < 1.0
            assert index(server, "m")["1"][0] == "UNAVAILABLE"
            arrived = await asyncio.gather(http.infer("m", ROW), grpc.infer("m", ROW), queued)
            assert all(outcome.ok for outcome in arrived), "what waits out the restart is served after it"
            assert min(outcome.ended for outcome in arrived) - killed >= 1.0
            assert server.status("/v2/health/ready") == 200
            assert index(server, "m")["1"] == ("READY", "")
            await others.more()
        assert others.failures() == []
        assert metric(server, "headrace_backend_restarts_total", "m") == 1


async def test_ten_loads_and_unloads_leave_the_server_as_it_was(tmp_path: Path) -> None:
    """Also after answers, failures and cancels, whose memory must not wait for a garbage collection."""
    folder = add_onnx(tmp_path, "m", adder(1))
    add_identity(tmp_path, "n")
    with running(tmp_path, "--model-control-mode=explicit") as server:
        process = psutil.Process(server.process.pid)

        def traces() -> tuple[int, int, int]:
            return len(server.descendants()), process.num_fds(), process.num_threads()

        async with open_door(server, "http") as http, open_door(server, "grpc") as grpc:

            async def cycle() -> None:
                for name in ("m", "n"):
                    assert (await http.control("load", name)).ok
                    assert (await http.infer(name, ROW)).ok
                os.utime(folder / "1" / "model.onnx")
                assert (await grpc.control("load", "m")).ok
                assert (await grpc.infer("m", ROW)).ok
                assert (await grpc.infer("n", ROW, parameters={"fail": "no"})).text == "no"
                with pytest.raises(TimeoutError):
                    await grpc.infer("n", ROW, parameters={"hang": True}, timeout=0.1)
                for name in ("m", "n"):
                    assert (await grpc.control("unload", name)).ok
                await asyncio.to_thread(wait_until, "the processes end", lambda: not server.backends())

            for _ in range(2):
                await cycle()
            before = traces()
            for _ in range(8):
                await cycle()

            def no_more() -> bool:
                return all(now <= then for now, then in zip(traces(), before, strict=True))

            await asyncio.to_thread(wait_until, f"{traces()} is no more than {before}", no_more, 3.0)
