"""Backends and zygotes that crash, hang, lie and never start: what they take along, what is told, and what goes on."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio

from doors import DOORS, Door, SteadyLoad, open_door
from figures import backend_pid, index, wait_until
from harness import RunningServer, running
from repositories import add_identity

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROW = np.ones((1, 3), np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    add_identity(repository, "frail", max_batch_size=4)
    add_identity(
        repository, "batched", max_batch_size=4, extra="dynamic_batching { max_queue_delay_microseconds: 20000000 }"
    )
    add_identity(repository, "steady")
    with running(repository, "--backend-restart-window-secs=1") as server:
        yield server


@pytest_asyncio.fixture(params=DOORS, loop_scope="module")
async def door(request: pytest.FixtureRequest, server: RunningServer) -> AsyncIterator[Door]:
    """A client of either door, while others are served without one failure."""
    async with SteadyLoad(server, "steady", ROW, clients=1) as others, open_door(server, request.param) as door:
        yield door
        await others.more(4)
    assert others.failures() == []


# --- the process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [{"crash": True}, {"signal": "SIGKILL"}, {"signal": "SIGSEGV"}, {"nonsense_frame": True}],
    ids=["crash", "SIGKILL", "SIGSEGV", "nonsense"],
)
async def test_a_request_that_kills_its_backend_fails_and_the_next_is_served(
    server: RunningServer, door: Door, fault: dict[str, str | bool]
) -> None:
    before = backend_pid(server, "frail")
    failed = await door.infer("frail", ROW, parameters=fault)
    assert failed.code == "UNAVAILABLE"
    assert "backend process" in failed.text
    assert failed.seconds < 2.0
    assert (await door.infer("frail", ROW)).ok
    await asyncio.to_thread(wait_until, "another process", lambda: backend_pid(server, "frail") != before)
    await asyncio.to_thread(wait_until, "the old process is reaped", lambda: not psutil.pid_exists(before))


async def test_a_crash_fails_every_request_of_its_batch_and_no_other(server: RunningServer, door: Door) -> None:
    batch = [door.infer("batched", ROW) for _ in range(3)]
    failed = await asyncio.gather(door.infer("batched", ROW, parameters={"crash": True}), *batch)
    assert {outcome.code for outcome in failed} == {"UNAVAILABLE"}
    served = await asyncio.gather(*[door.infer("batched", ROW * number) for number in range(4)])
    for number, outcome in enumerate(served):
        np.testing.assert_array_equal(outcome.array, ROW * number)


async def test_an_exception_fails_the_batch_and_the_process_lives_on(server: RunningServer, door: Door) -> None:
    before = backend_pid(server, "frail")
    failed = await door.infer("frail", ROW, parameters={"fail_all": "out of luck"})
    assert failed.code == "INTERNAL"
    assert "out of luck" in failed.text
    assert (await door.infer("frail", ROW)).ok
    assert backend_pid(server, "frail") == before


# --- its answers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("wrong_dtype", "OUTPUT0.*INT8.*FP32|OUTPUT0.*FP32.*INT8"),
        ("wrong_shape", "OUTPUT0"),
        ("missing_output", "OUTPUT0"),
        ("extra_output", "UNDECLARED"),
    ],
)
async def test_an_answer_that_breaks_the_configuration_is_an_error_for_that_request_alone(
    server: RunningServer, door: Door, fault: str, said: str
) -> None:
    before = backend_pid(server, "batched")
    wrong, *right = await asyncio.gather(
        door.infer("batched", ROW, parameters={fault: True}),
        *[door.infer("batched", ROW * number) for number in range(3)],
    )
    assert wrong.code == "INTERNAL", wrong
    assert re.search(said, wrong.text), wrong.text
    for number, outcome in enumerate(right):
        np.testing.assert_array_equal(outcome.array, ROW * number)
    assert backend_pid(server, "batched") == before


# --- loading ----------------------------------------------------------------------------------------------------------


async def test_a_load_that_hangs_is_ended_and_told(tmp_path: Path) -> None:
    add_identity(tmp_path, "hangs", hang_load="true")
    add_identity(tmp_path, "steady")
    flags = ("--model-load-timeout-secs=1.5", "--exit-on-error=false")
    with running(tmp_path, *flags, ready=False) as server:
        await asyncio.to_thread(server.wait_status, "/v2/models/steady/ready", 200)
        server.wait_for_log("'hangs' version 1: failed to load")
        state, reason = index(server, "hangs")["1"]
        assert state == "UNAVAILABLE"
        assert "1.5 s" in reason
        assert server.status("/v2/health/ready") == 400
        for kind in DOORS:
            async with open_door(server, kind) as door:
                refused = await door.infer("hangs", ROW)
                assert refused.code == "UNAVAILABLE"
                assert "1.5 s" in refused.text
                assert (await door.infer("steady", ROW)).ok
        await asyncio.to_thread(wait_until, "the hung process is gone", lambda: len(server.backends()) == 1)


@pytest.mark.parametrize("kind", DOORS)
async def test_a_load_that_fails_is_told_and_can_be_tried_again(tmp_path: Path, kind: str) -> None:
    folder = add_identity(tmp_path, "m", fail_load="the weights are stale")
    add_identity(tmp_path, "steady")
    flags = ("--model-control-mode=explicit", "--load-model=*", "--exit-on-error=false")
    with running(tmp_path, *flags, ready=False) as server:
        await asyncio.to_thread(server.wait_status, "/v2/models/steady/ready", 200)
        async with open_door(server, kind) as door:
            refused = await door.control("load", "m")
            assert refused.code == "INVALID_ARGUMENT"
            assert "the weights are stale" in refused.text
            assert index(server, "m")["1"] == ("UNAVAILABLE", "the weights are stale")
            config = (folder / "config.pbtxt").read_text()
            (folder / "config.pbtxt").write_text(config.replace("fail_load", "ignored"))
            assert (await door.control("load", "m")).ok
            assert (await door.infer("m", ROW)).ok
        assert server.status("/v2/health/ready") == 200
        assert len(server.backends()) == 2


@pytest.mark.parametrize("kind", DOORS)
async def test_a_crash_loop_ends_with_the_model_unavailable_until_it_is_loaded_anew(tmp_path: Path, kind: str) -> None:
    add_identity(tmp_path, "m", max_batch_size=1)
    add_identity(tmp_path, "steady")
    flags = ("--backend-restart-limit=2", "--model-control-mode=explicit", "--load-model=*")
    with running(tmp_path, *flags) as server:
        async with SteadyLoad(server, "steady", ROW) as others, open_door(server, kind) as door:
            for _ in range(3):
                assert (await door.infer("m", ROW, parameters={"crash": True})).code == "UNAVAILABLE"
            waiting = await asyncio.gather(*[door.infer("m", ROW) for _ in range(3)])
            assert {outcome.code for outcome in waiting} == {"UNAVAILABLE"}
            assert all("failed 3 times" in outcome.text for outcome in waiting), waiting
            state, reason = index(server, "m")["1"]
            assert state == "UNAVAILABLE"
            assert "failed 3 times" in reason
            assert "42" in reason
            assert server.status("/v2/models/m/ready") == 503
            assert server.status("/v2/health/ready") == 400
            assert (await door.control("load", "m")).ok
            assert (await door.infer("m", ROW)).ok
            assert server.status("/v2/health/ready") == 200
            await others.more()
        assert others.failures() == []


# --- the zygote -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DOORS)
async def test_models_outlive_a_killed_zygote_and_new_ones_load(tmp_path: Path, kind: str) -> None:
    add_identity(tmp_path, "m")
    with running(tmp_path, "--model-control-mode=explicit", "--load-model=m") as server:
        (zygote,) = psutil.Process(server.process.pid).children()
        async with SteadyLoad(server, "m", ROW) as load, open_door(server, kind) as door:
            zygote.kill()
            said = f"backend identity: the zygote process {zygote.pid} ended: killed by SIGKILL"
            await asyncio.to_thread(server.wait_for_log, said)
            await load.more()
            add_identity(tmp_path, "late")
            assert (await door.control("load", "late")).ok
            assert (await door.infer("late", ROW)).ok
            (another,) = psutil.Process(server.process.pid).children()
            assert psutil.Process(backend_pid(server, "late")).ppid() == another.pid
            assert (await door.control("unload", "late")).ok
            await load.more()
        assert load.failures() == []
        async with open_door(server, kind) as door:
            orphan = backend_pid(server, "m")
            os.kill(orphan, signal.SIGKILL)
            server.wait_for_log("model m:1: the backend process ended")
            assert (await door.infer("m", ROW)).ok, "an orphan's death is noticed too, and it is started again"
            assert (await door.control("unload", "m")).ok
        await asyncio.to_thread(wait_until, "every model process ends", lambda: not server.backends())
