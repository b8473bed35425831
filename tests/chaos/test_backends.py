"""The same deaths in every backend: what was in the process fails at once, everyone else is served, and it comes back."""

from __future__ import annotations

import asyncio
import os
import queue
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator

import numpy as np
import psutil
import pytest
import pytest_asyncio
import tritonclient.grpc as grpcclient

from doors import DOORS, Door, Outcome, SteadyLoad, open_door
from ensembles import add_ensemble, ident
from figures import backend_pid, metric, wait_until
from harness import RunningServer, running
from repositories import add_identity
from victims import (
    BACKENDS,
    FAULTS,
    LIMITED,
    LONG,
    MEMORY,
    OWN_CODE,
    STREAMING,
    add_accumulator,
    add_fragile,
    add_streaming,
    sent,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

STEADY = np.ones((1, 3), np.float32)
AT_ONCE_S = 2.0
INT32 = {"INPUT0": "INT32 1"}, {"OUTPUT0": "INT32 1"}
LARGE = 4 << 20
"""Numbers, for which a model needs 256 MiB: more than a process may take that has reached its limit."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    add_identity(repository, "steady")
    add_identity(repository, "before", datatype="INT32", dims="1", max_batch_size=1, allow_misbehaviour="false")
    for backend in BACKENDS:
        add_fragile(repository, backend, backend)
        add_fragile(repository, f"{backend}_sibling", backend)
        steps = [ident("before", "INPUT0", "x"), ident(backend, "x", "OUTPUT0")]
        add_ensemble(repository, f"{backend}_ensemble", steps, *INT32, extra="max_batch_size: 1")
    for backend in OWN_CODE:
        add_fragile(repository, f"{backend}_twice", backend, instances=2)
        add_fragile(repository, f"{backend}_large", backend, dims="-1")
    with running(repository, "--backend-restart-limit=1000", "--backend-restart-window-secs=1") as started:
        yield started


@pytest_asyncio.fixture(params=DOORS, loop_scope="module")
async def door(request: pytest.FixtureRequest, server: RunningServer) -> AsyncIterator[Door]:
    """A client of either door, while others are served without one failure."""
    async with SteadyLoad(server, "steady", STEADY, clients=1) as others, open_door(server, request.param) as door:
        yield door
        await others.more(4)
    assert others.failures() == []


async def tell(door: Door, backend: str, value: int, model: str = "") -> Outcome:
    row, parameters = sent(backend, value)
    return await door.infer(model or backend, row, parameters=parameters)


async def works(door: Door, model: str) -> None:
    np.testing.assert_array_equal((await door.infer(model, np.array([[5]], np.int32))).array, [[5]])


def gone(outcome: Outcome) -> bool:
    return outcome.code == "UNAVAILABLE" and "backend process" in outcome.text and outcome.seconds < AT_ONCE_S


async def pending(server: RunningServer, model: str) -> int:
    """Return how many requests wait: all instances are at work then."""
    return await asyncio.to_thread(metric, server, "nv_inference_pending_request_count", model)


async def queued(server: RunningServer, door: Door, model: str, *values: int, member: str = "") -> list:
    """Return requests that wait behind what occupies every instance of a model (an ensemble's member), or soon will."""
    tasks: list[asyncio.Task[Outcome]] = []
    for value in values:
        while True:
            task = asyncio.create_task(door.infer(model, np.array([[value]], np.int32)))
            while not task.done() and await pending(server, member or model) <= len(tasks):
                await asyncio.wait([task], timeout=0.005)
            if not task.done():
                tasks.append(task)
                break
    return tasks


async def are_served(tasks: list[asyncio.Task[Outcome]], *values: int) -> None:
    for value, outcome in zip(values, await asyncio.gather(*tasks), strict=True):
        np.testing.assert_array_equal(outcome.array, [[value]])


# --- Requests that are the end of their process ---------------------------------------------------------------------


ENDS = [(backend, fault) for backend in BACKENDS if backend != "onnxruntime" for fault in FAULTS]


@pytest.mark.parametrize(("backend", "fault"), ENDS)
async def test_a_request_that_ends_its_process_fails_and_the_next_is_served(
    server: RunningServer, door: Door, backend: str, fault: str
) -> None:
    before = backend_pid(server, backend)
    assert gone(failed := await tell(door, backend, FAULTS[fault])), failed
    await works(door, backend)
    await asyncio.to_thread(wait_until, "the old process is reaped", lambda: not psutil.pid_exists(before))


# --- Processes that are killed while they work ------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
@pytest.mark.parametrize("backend", BACKENDS)
async def test_what_runs_in_a_killed_process_fails_at_once_and_what_waits_is_served_by_the_next(
    server: RunningServer, door: Door, backend: str, number: signal.Signals
) -> None:
    running_one = asyncio.create_task(tell(door, backend, LONG))
    waiting = await queued(server, door, backend, 1, 2, 3)
    killed = time.monotonic()
    os.kill(backend_pid(server, backend), number)
    failed = await running_one
    assert failed.ended - killed < AT_ONCE_S
    assert (failed.code, "backend process" in failed.text) == ("UNAVAILABLE", True), failed
    await are_served(waiting, 1, 2, 3)
    await works(door, f"{backend}_sibling")


@pytest.mark.parametrize("backend", OWN_CODE)
async def test_instances_in_processes_of_their_own_die_alone(server: RunningServer, door: Door, backend: str) -> None:
    model = f"{backend}_twice"
    pids = loaded_pids(server, model)
    running_ones = [asyncio.create_task(tell(door, backend, LONG, model)) for _ in pids]
    waiting = await queued(server, door, model, 1)
    os.kill(pids[0], signal.SIGKILL)
    done, others = await asyncio.wait(running_ones, return_when=asyncio.FIRST_COMPLETED, timeout=AT_ONCE_S)
    assert [task.result().code for task in done] == ["UNAVAILABLE"]
    await are_served(waiting, 1)
    assert not any(task.done() for task in others)
    os.kill(pids[1], signal.SIGKILL)
    assert [(await task).code for task in others] == ["UNAVAILABLE"]


def loaded_pids(server: RunningServer, model: str) -> list[int]:
    """Return the processes that serve a model with several, as the log tells it."""
    line = next(line for line in server.lines if f"loaded model {model} version 1 in" in line)
    pids = [int(pid) for pid in re.findall(r"\d+", line.partition(", process ")[2])]
    again = re.compile(rf"model {model}:1 serves again, process (\d+)")
    pids += [int(match[1]) for line in server.lines if (match := again.search(line))]
    return [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.mark.parametrize("backend", BACKENDS)
async def test_readiness_follows_the_process_of_a_model(server: RunningServer, door: Door, backend: str) -> None:
    """What starts processes is stopped meanwhile, so that it can be seen."""
    process = psutil.Process(backend_pid(server, backend))
    zygote = process.parent()
    assert zygote is not None
    assert zygote.pid != server.process.pid
    zygote.suspend()
    try:
        process.kill()
        for path in (f"/v2/models/{backend}/ready", f"/v2/models/{backend}_ensemble/ready"):
            await asyncio.to_thread(server.wait_status, path, 503, 1.0)
        assert server.status("/v2/health/ready") == 400
        assert server.status("/v2/health/live") == 200
        assert server.status(f"/v2/models/{backend}_sibling/ready") == 200
        await works(door, f"{backend}_sibling")
        waiting = await queued(server, door, backend, 1)
    finally:
        zygote.resume()
    await are_served(waiting, 1)
    for path in (f"/v2/models/{backend}/ready", f"/v2/models/{backend}_ensemble/ready", "/v2/health/ready"):
        await asyncio.to_thread(server.wait_status, path, 200)


# --- Memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["onnxruntime", *OWN_CODE])
async def test_a_model_that_gets_no_memory_fails_its_request_and_lives_on(
    server: RunningServer, door: Door, backend: str
) -> None:
    before = backend_pid(server, backend)
    failed = await tell(door, backend, MEMORY)
    assert failed.code == "INTERNAL", failed
    assert "memory" in failed.text.lower() or "alloc" in failed.text, failed
    await works(door, backend)
    assert backend_pid(server, backend) == before


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
@pytest.mark.parametrize("backend", OWN_CODE)
async def test_a_process_at_its_limit_of_memory_fails_what_does_not_fit_and_serves_what_does(
    server: RunningServer, door: Door, backend: str
) -> None:
    model = f"{backend}_large"
    before = backend_pid(server, model)
    large = np.zeros((1, LARGE), np.int32)
    await works(door, model)
    assert (await tell(door, backend, LIMITED, model)).ok
    failed = await door.infer(model, large)
    assert failed.code in ("INTERNAL", "UNAVAILABLE"), failed
    await works(door, model)
    if backend_pid(server, model) == before:
        os.kill(before, signal.SIGKILL)
    assert (await door.infer(model, large)).ok


# --- Ensembles ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
async def test_an_ensemble_with_a_member_that_dies_fails_naming_it_and_the_next_request_is_served(
    server: RunningServer, door: Door, backend: str
) -> None:
    model = f"{backend}_ensemble"
    running_one = asyncio.create_task(tell(door, backend, LONG, model))
    waiting = await queued(server, door, model, 1, 2, member=backend)
    os.kill(backend_pid(server, backend), signal.SIGKILL)
    failed = await running_one
    assert failed.code == "UNAVAILABLE", failed
    assert f"step model '{backend}'" in failed.text
    assert "backend process" in failed.text
    await are_served(waiting, 1, 2)


# --- Sequences and streams --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of models that remember or stream, and of one that does neither."""
    repository = tmp_path_factory.mktemp("models")
    add_identity(repository, "steady")
    for backend in BACKENDS:
        add_accumulator(repository, f"{backend}_sums", backend)
    for backend in STREAMING:
        add_streaming(repository, f"{backend}_stream", backend)
    with running(repository, "--backend-restart-limit=1000", "--backend-restart-window-secs=1") as started:
        yield started


async def add(door: Door, model: str, sequence: int, flags: str = "") -> Outcome:
    """Add the sequence's number to its sum."""
    given = {"sequence_id": sequence, "sequence_start": "s" in flags, "sequence_end": "e" in flags}
    return await door.infer(model, np.array([[sequence]], np.int32), parameters=given)


@pytest.mark.parametrize("kind", DOORS)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_the_sequences_of_a_killed_process_are_over_and_the_next_begin_from_nothing(
    lasting: RunningServer, backend: str, kind: str
) -> None:
    model = f"{backend}_sums"
    async with SteadyLoad(lasting, "steady", STEADY, clients=1) as others, open_door(lasting, kind) as door:
        for flags, turn in (("s", 1), ("", 2)):
            sums = [(await add(door, model, number, flags)).array.item() for number in (1, 2, 3)]
            assert sums == [turn * number for number in (1, 2, 3)]
        os.kill(backend_pid(lasting, model), signal.SIGKILL)
        lost = [await add(door, model, number) for number in (1, 2, 3)]
        assert {outcome.code for outcome in lost} <= {"INVALID_ARGUMENT", "UNAVAILABLE"}, lost
        assert all("start flag" in outcome.text for outcome in lost if outcome.code == "INVALID_ARGUMENT")
        for flags, turn in (("s", 1), ("", 2), ("e", 3)):
            sums = [(await add(door, model, number, flags)).array.item() for number in (1, 2, 3)]
            assert sums == [turn * number for number in (1, 2, 3)]
        await others.more(4)
    assert others.failures() == []
    assert metric(lasting, "headrace_sequences_active", model) == 0


@pytest.mark.parametrize("backend", STREAMING)
async def test_a_stream_whose_process_is_killed_ends_with_an_error_and_the_next_is_whole(
    lasting: RunningServer, backend: str
) -> None:
    model = f"{backend}_stream"
    assert await asyncio.to_thread(streamed, lasting, model, 3) == [7, 7, 7]
    *before, last = await asyncio.to_thread(
        streamed, lasting, model, 100_000, lambda: os.kill(backend_pid(lasting, model), signal.SIGKILL)
    )
    assert set(before) == {7}
    assert "backend process" in str(last)
    assert await asyncio.to_thread(streamed, lasting, model, 3) == [7, 7, 7]


def streamed(
    server: RunningServer, model: str, responses: int, after_the_first: Callable[[], None] | None = None
) -> list:
    """Return the numbers that came in a stream of the stock client, and its error, if any."""
    arrived: queue.Queue = queue.Queue()
    tensor = grpcclient.InferInput("INPUT0", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.array([[7]], np.float32))
    got: list = []
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: arrived.put(error or result))
        client.async_stream_infer(
            model,
            [tensor],
            enable_empty_final_response=True,
            parameters={"responses": responses, "response_delay_ms": 5},
        )
        while True:
            result = arrived.get(timeout=30)
            if isinstance(result, Exception):
                return [*got, result]
            if result.get_response().outputs:
                got.append(result.as_numpy("OUTPUT0").item())
                if after_the_first is not None:
                    after_the_first()
                    after_the_first = None
            if result.get_response().parameters["triton_final_response"].bool_param:
                return got
