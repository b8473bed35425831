"""Requests that share batches, queues and instances of a real server: each gets its own, and no other's, fate."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from doors import DOORS, Door, Outcome, open_door
from figures import Figures, failures, figures, metric, wait_until
from harness import RunningServer, running
from repositories import add_identity

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLIENTS = 32
ROW = np.ones((1, 3), np.float32)
ALPHABET = "abc 가나다라 한국어 문장 🙂🚀🧪 éß\x00"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("models")
    add_identity(repository, "batching", max_batch_size=64, extra="dynamic_batching {}", execute_delay_ms="30")
    add_identity(
        repository, "strings", datatype="STRING", max_batch_size=64, extra="dynamic_batching {}", execute_delay_ms="5"
    )
    add_identity(
        repository,
        "gathering",
        max_batch_size=4,
        extra="dynamic_batching { max_queue_delay_microseconds: 20000000 }",
    )
    add_identity(
        repository,
        "shapes",
        max_batch_size=16,
        extra="dynamic_batching { max_queue_delay_microseconds: 1500000 }",
    )
    add_identity(
        repository,
        "impatient",
        max_batch_size=1,
        extra="dynamic_batching { default_queue_policy { timeout_action: REJECT "
        "default_timeout_microseconds: 500000 max_queue_size: 2 } }",
    )
    add_identity(
        repository,
        "narrow",
        max_batch_size=1,
        extra="dynamic_batching { default_queue_policy { max_queue_size: 2 } }",
    )
    add_identity(
        repository,
        "priorities",
        max_batch_size=1,
        extra="dynamic_batching { priority_levels: 2 default_priority_level: 2 }",
    )
    add_identity(repository, "alone", max_batch_size=1)
    two = "instance_group [ { kind: KIND_CPU count: 2 } ]"
    add_identity(repository, "two", max_batch_size=1, extra=f"{two} dynamic_batching {{}}")
    add_identity(repository, "ordered", max_batch_size=1, extra=f"{two} dynamic_batching {{ preserve_ordering: true }}")
    return repository


@pytest.fixture(scope="module")
def native(repository: Path) -> Iterator[RunningServer]:
    with running(repository) as server:
        yield server


@pytest.fixture(scope="module")
def grpcio(repository: Path) -> Iterator[RunningServer]:
    with running(repository, "--grpc-transport=grpcio") as server:
        yield server


@pytest.fixture(params=[*DOORS, "grpcio"])
def server(request: pytest.FixtureRequest) -> RunningServer:
    """The server behind a door: HTTP, gRPC on the default transport, gRPC on grpcio."""
    return request.getfixturevalue("grpcio" if request.param == "grpcio" else "native")


@pytest_asyncio.fixture(loop_scope="module")
async def door(request: pytest.FixtureRequest, server: RunningServer) -> AsyncIterator[Door]:
    async with open_door(server, request.node.callspec.params["server"]) as door:
        yield door


async def send(door: Door, model: str, *arrays: np.ndarray, **options: object) -> list[Outcome]:
    return await asyncio.gather(*[door.infer(model, array, **options) for array in arrays])


def start(door: Door, model: str, **parameters: str | int | bool) -> asyncio.Task[Outcome]:
    return asyncio.create_task(door.infer(model, ROW, parameters=parameters))


async def arrive() -> None:
    """Let what was sent reach its instance: nothing that a client can see tells when it has."""
    await asyncio.sleep(0.2)


async def end(*tasks: asyncio.Task[Outcome]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def wait_queued(server: RunningServer, model: str, wanted: int) -> None:
    await asyncio.to_thread(
        wait_until, f"{wanted} wait for {model}", lambda: metric(server, "headrace_queue_depth", model) == wanted, 5.0
    )


async def wait_failures(server: RunningServer, model: str, reason: str, wanted: int) -> None:
    await asyncio.to_thread(
        wait_until, f"{wanted} {reason} of {model}", lambda: failures(server, model, reason) == wanted, 5.0
    )


# --- batches ----------------------------------------------------------------------------------------------------------


async def test_32_clients_share_batches_and_get_their_own_rows(server: RunningServer, door: Door) -> None:
    async def client(number: int) -> None:
        for turn in range(6):
            rows = 1 + (number + turn) % 2
            sent = np.array([[number, turn, row] for row in range(rows)], np.float32)
            np.testing.assert_array_equal((await door.infer("batching", sent)).array, sent)

    before = figures(server, "batching")
    await asyncio.gather(*[client(number) for number in range(CLIENTS)])
    done = figures(server, "batching").since(before)
    assert (done.requests, done.rows) == (CLIENTS * 6, CLIENTS * 9)
    assert done.rows / done.executions > 8


async def test_strings_stay_whole_under_load(server: RunningServer, door: Door) -> None:
    async def client(number: int) -> None:
        letters = random.Random(number)
        for _ in range(8):
            texts = ["".join(letters.choices(ALPHABET, k=letters.randrange(14))).encode() for _ in range(87)]
            sent = np.empty((1, 87), object)
            sent[0] = texts
            assert list((await door.infer("strings", sent)).array[0]) == texts

    before = figures(server, "strings")
    await asyncio.gather(*[client(number) for number in range(CLIENTS)])
    done = figures(server, "strings").since(before)
    assert done.rows == CLIENTS * 8
    assert done.executions < done.rows / 2, "the strings have hardly shared a batch"


async def test_a_request_that_fails_in_a_batch_fails_alone(server: RunningServer, door: Door) -> None:
    before = figures(server, "gathering")
    faults = failures(server, "gathering", "BACKEND")
    bad, *good = await asyncio.gather(
        door.infer("gathering", ROW, parameters={"fail": "not this one"}),
        *[door.infer("gathering", ROW * n) for n in range(1, 4)],
    )
    assert (bad.code, bad.text) == ("INTERNAL", "not this one")
    for number, outcome in enumerate(good, 1):
        np.testing.assert_array_equal(outcome.array, ROW * number)
    assert figures(server, "gathering").since(before) == Figures(requests=3, rows=3, executions=1)
    assert failures(server, "gathering", "BACKEND") == faults + 1


async def test_a_request_of_the_wrong_form_never_joins_the_batch(server: RunningServer, door: Door) -> None:
    before = figures(server, "gathering")
    waiting = [asyncio.create_task(door.infer("gathering", ROW * n)) for n in range(1, 4)]
    for wrong, said in (
        (np.ones((1, 2, 2), np.float32), "INPUT0"),
        (np.ones((1, 3), np.int32), "INT32"),
        (np.ones((9, 3), np.float32), "batch size 9"),
        (np.ones((0, 3), np.float32), "batch size 0"),
    ):
        refused = await door.infer("gathering", wrong)
        assert refused.code == "INVALID_ARGUMENT"
        assert said in refused.text
    await door.infer("gathering", ROW)
    for number, outcome in enumerate(await asyncio.gather(*waiting), 1):
        np.testing.assert_array_equal(outcome.array, ROW * number)
    assert figures(server, "gathering").since(before) == Figures(requests=4, rows=4, executions=1)


async def test_unlike_shapes_never_mix_and_do_not_hold_each_other(server: RunningServer, door: Door) -> None:
    before = figures(server, "shapes")
    sent = [np.full((1, length), length, np.float32) for length in range(1, 9)]
    outcomes = await send(door, "shapes", *sent)
    for array, outcome in zip(sent, outcomes, strict=True):
        np.testing.assert_array_equal(outcome.array, array)
    assert figures(server, "shapes").since(before).executions == 8
    waited = sorted(outcome.seconds for outcome in outcomes)
    assert waited[-2] < 1.4, f"of eight shapes only the last may wait for more of its kind: {waited}"


# --- cancelling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_a_request_given_up_in_a_batch_changes_nothing_for_the_others(
    server: RunningServer, door: Door, how: str
) -> None:
    cancelled = failures(server, "gathering", "CANCELED")
    others = [start(door, "gathering", delay_ms=700) for _ in range(3)]
    if how == "deadline":
        with pytest.raises(TimeoutError):
            await door.infer("gathering", ROW, parameters={"delay_ms": 700}, timeout=0.4)
    else:
        leaving = start(door, "gathering", delay_ms=700)
        await arrive()
        await end(leaving)
    for outcome in await asyncio.gather(*others):
        np.testing.assert_array_equal(outcome.array, ROW)
    await wait_failures(server, "gathering", "CANCELED", cancelled + 1)


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_a_hanging_request_given_up_frees_its_instance(server: RunningServer, door: Door, how: str) -> None:
    if how == "deadline":
        with pytest.raises(TimeoutError):
            await door.infer("alone", ROW, parameters={"hang": True}, timeout=0.3)
    else:
        hanging = start(door, "alone", hang=True)
        await arrive()
        hanging.cancel()
    given_up = time.monotonic()
    assert (await door.infer("alone", ROW)).ok
    assert time.monotonic() - given_up < 1.0


async def test_a_request_given_up_in_the_queue_never_runs(server: RunningServer, door: Door) -> None:
    before = figures(server, "alone")
    cancelled = failures(server, "alone", "CANCELED")
    hanging = start(door, "alone", hang=True)
    await arrive()
    waiting = start(door, "alone", crash=True)
    await wait_queued(server, "alone", 1)
    await end(waiting)
    await wait_failures(server, "alone", "CANCELED", cancelled + 1)
    await end(hanging)
    assert (await door.infer("alone", ROW)).ok
    assert figures(server, "alone").since(before).executions == 1


async def test_clients_that_come_and_go_leave_the_model_as_it_was(server: RunningServer, door: Door) -> None:
    """Given up at every point of a request's life, answers that cross the cancel on their way included."""
    chance = random.Random(1)

    async def fickle(number: int) -> None:
        for _ in range(10):
            task = start(door, "batching", delay_ms=chance.randrange(20))
            await asyncio.sleep(chance.random() * 0.1)
            await end(task)

    async def faithful(number: int) -> None:
        for turn in range(10):
            sent = np.array([[number, turn]], np.float32)
            np.testing.assert_array_equal((await door.infer("batching", sent)).array, sent)

    await asyncio.gather(*[fickle(n) for n in range(8)], *[faithful(n) for n in range(8)])
    assert (await door.infer("batching", ROW)).ok


# --- queues -----------------------------------------------------------------------------------------------------------


async def test_a_queue_timeout_fires_while_the_model_is_busy(server: RunningServer, door: Door) -> None:
    rejected = failures(server, "impatient", "REJECTED")
    hanging = start(door, "impatient", hang=True)
    await arrive()
    late = await door.infer("impatient", ROW)
    assert late.code == "UNAVAILABLE"
    waited_ms = re.search(r"waited (\d+) ms for model 'impatient'", late.text)
    assert waited_ms is not None, late.text
    assert 500 <= int(waited_ms[1]) <= 550
    assert 0.5 <= late.seconds < 1.0

    queued = [start(door, "impatient") for _ in range(2)]
    await wait_queued(server, "impatient", 2)
    refused = await door.infer("impatient", ROW)
    assert refused.code == "UNAVAILABLE"
    assert "full" in refused.text
    assert refused.seconds < 0.4
    assert [outcome.code for outcome in await asyncio.gather(*queued)] == ["UNAVAILABLE"] * 2
    assert failures(server, "impatient", "REJECTED") == rejected + 4
    await end(hanging)
    assert (await door.infer("impatient", ROW)).ok


async def test_a_queue_of_two_holds_exactly_two_whatever_the_spacing(server: RunningServer, door: Door) -> None:
    """One runs and two wait: of five that arrive together exactly two are refused, whatever turn they arrive in."""
    for _ in range(5):
        outcomes = await send(door, "narrow", *[ROW] * 5, parameters={"delay_ms": 60})
        assert sorted(outcome.code for outcome in outcomes) == ["OK"] * 3 + ["UNAVAILABLE"] * 2


async def test_a_place_in_the_queue_is_free_again_once_its_request_was_given_up(
    server: RunningServer, door: Door
) -> None:
    hanging = start(door, "narrow", hang=True)
    await arrive()
    stays, leaves = start(door, "narrow"), start(door, "narrow")
    await wait_queued(server, "narrow", 2)
    await end(leaves)
    await wait_queued(server, "narrow", 1)
    comes = start(door, "narrow")
    await wait_queued(server, "narrow", 2)
    assert (await door.infer("narrow", ROW)).code == "UNAVAILABLE"
    await end(hanging)
    assert all(outcome.ok for outcome in await asyncio.gather(stays, comes))


async def test_a_higher_priority_runs_before_what_waits_longer(server: RunningServer, door: Door) -> None:
    hanging = start(door, "priorities", hang=True)
    await arrive()
    ordinary = [start(door, "priorities", delay_ms=50) for _ in range(3)]
    await wait_queued(server, "priorities", 3)
    urgent = start(door, "priorities", delay_ms=50, priority=1)
    await wait_queued(server, "priorities", 4)
    await end(hanging)
    slow = await asyncio.gather(*ordinary)
    assert all(outcome.ok for outcome in slow)
    assert (await urgent).ended < min(outcome.ended for outcome in slow)


# --- instances --------------------------------------------------------------------------------------------------------


async def test_two_instances_run_two_batches_at_once(server: RunningServer, door: Door) -> None:
    first = start(door, "two", hang=True)
    await arrive()
    assert (await door.infer("two", ROW)).ok, "the second instance serves while the first hangs"
    second = start(door, "two", hang=True)
    await arrive()
    third = start(door, "two")
    await wait_queued(server, "two", 1)
    await end(first)
    assert (await third).ok
    await end(second)


async def test_answers_leave_as_they_came_only_where_that_is_asked(server: RunningServer, door: Door) -> None:
    async def race(model: str) -> tuple[Outcome, Outcome]:
        slow = start(door, model, delay_ms=600)
        await arrive()
        quick = await door.infer(model, ROW)
        return await slow, quick

    slow, quick = await race("two")
    assert quick.ended < slow.ended - 0.2
    slow, quick = await race("ordered")
    assert quick.ended > slow.ended - 0.1


async def test_what_came_before_and_was_given_up_or_failed_holds_nothing_back(
    server: RunningServer, door: Door
) -> None:
    leaves = start(door, "ordered", hang=True)
    await arrive()
    waits = start(door, "ordered", fail="broken")
    await arrive()
    await end(leaves)
    assert (await waits).text == "broken"
    assert (await door.infer("ordered", ROW)).ok
