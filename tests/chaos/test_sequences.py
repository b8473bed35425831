"""Sequences whose clients cancel, fail, fall silent and lose their backend never see a sum that is not their own."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from doors import DOORS, Door, open_door
from figures import metric, wait_until
from harness import RunningServer, running
from repositories import add_identity
from sequence_models import STATE

IDLE_S = 0.4
CONTROLS = """control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] },
    { name: "END" control [ { kind: CONTROL_SEQUENCE_END bool_false_true: [ false, true ] } ] }
]"""
MODELS = {
    "kept": f"oldest {{ max_candidate_sequences: 3 }} {STATE}",
    "kept_in_rows": f"direct {{ }} {STATE}",
    "told": f"oldest {{ max_candidate_sequences: 3 }} {CONTROLS}",
    "told_in_rows": f"direct {{ }} {CONTROLS}",
}


def add_accumulators(repository: Path, idle_s: float = IDLE_S) -> None:
    for name, batching in MODELS.items():
        extra = f"""
            sequence_batching {{ max_sequence_idle_microseconds: {round(idle_s * 1e6)} {batching} }}
            instance_group [ {{ kind: KIND_CPU count: 2 }} ]"""
        add_identity(repository, name, datatype="INT32", dims="1", max_batch_size=4, extra=extra, accumulate="true")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    add_accumulators(repository)
    with running(repository, "--backend-restart-limit=1000") as started:
        yield started


async def step(door: Door, model: str, sequence: int, value: int, flags: str = "", **parameters: object):
    given = {"sequence_id": sequence, **parameters}
    if "s" in flags:
        given["sequence_start"] = True
    if "e" in flags:
        given["sequence_end"] = True
    return await door.infer(model, np.array([[value]], np.int32), parameters=given)


async def client(door: Door, model: str, number: int, seen: Counter[str], *, crashes: bool) -> None:
    """Add `number` in sequences of its own name; what a request of it does not come to, starts the next one."""
    chance = random.Random(number)
    added = -1
    for _ in range(40):
        fault = chance.choices(["", "fail", "cancel", "silent", "crash"], [50, 6, 6, 1, 2 if crashes else 0])[0]
        flags = ("s" if added < 0 else "") + chance.choice(["", "", "", "e"])
        added = max(added, 0)
        if fault == "cancel":
            task = asyncio.create_task(step(door, model, number, number, flags, delay_ms=chance.randrange(1, 20)))
            await asyncio.sleep(chance.random() * 0.02)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            seen["cancelled"] += 1
            added = -1
            continue
        if fault == "silent":
            await asyncio.sleep(2 * IDLE_S)
        more = {fault: True} if fault in ("fail", "crash") else {}
        outcome = await step(door, model, number, number, flags, **more)
        seen[outcome.code] += 1
        if outcome.ok:
            added += 1
            assert outcome.array.item() == added * number, f"client {number} got a sum of somebody else"
        elif outcome.code == "INVALID_ARGUMENT":
            assert "start flag" in outcome.text
            assert "s" not in flags
            added = -1
        elif outcome.code == "UNAVAILABLE":
            added = -1
        else:
            assert fault == "fail", outcome
        if "e" in flags:
            added = -1


@pytest.mark.parametrize("model", MODELS)
async def test_a_storm_never_mixes_sums_and_leaves_no_sequence_behind(server: RunningServer, model: str) -> None:
    seen: Counter[str] = Counter()
    async with open_door(server, "http") as http, open_door(server, "grpc") as grpc:
        clients = [
            client((http, grpc)[number % 2], model, number, seen, crashes=number == 1) for number in range(1, 13)
        ]
        await asyncio.gather(*clients)
        assert seen["OK"] > 100
        assert seen["cancelled"]
        await asyncio.to_thread(
            wait_until, "no sequence", lambda: metric(server, "headrace_sequences_active", model=model) == 0
        )
        for waiting in ("nv_inference_pending_request_count", "headrace_queue_depth", "headrace_sequences_backlog"):
            assert metric(server, waiting, model) == 0
        for sequence in range(1, 9):
            assert (await step(http, model, sequence, sequence, "se")).array.item() == sequence


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("door", DOORS)
async def test_a_cancelled_sequence_frees_its_slot_once(server: RunningServer, model: str, door: str) -> None:
    """Its slot is given to one other sequence, and never to two."""
    async with open_door(server, door) as client:
        assert (await step(client, model, 1, 1, "s")).array.item() == 1
        second = asyncio.create_task(step(client, model, 1, 1, delay_ms=30_000))
        await asyncio.sleep(0.1)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        await asyncio.sleep(1.5 * IDLE_S)
        assert (await step(client, model, 1, 1)).code == "INVALID_ARGUMENT"
        for number in (2, 3):
            assert (await step(client, model, number, number, "s")).array.item() == number
        for turn in range(2, 8):
            for number in (2, 3):
                assert (await step(client, model, number, number)).array.item() == turn * number
        for number in (2, 3):
            assert (await step(client, model, number, number, "e")).array.item() == 8 * number


async def test_a_killed_backend_ends_its_sequences_alone_and_new_ones_begin_at_once(tmp_path: Path) -> None:
    add_accumulators(tmp_path, idle_s=60)
    with running(tmp_path) as server:
        async with open_door(server, "http") as client:
            for model in MODELS:
                for number in (1, 2, 3):
                    assert (await step(client, model, number, number, "s")).ok
            running_one = asyncio.create_task(step(client, "kept", 1, 1, delay_ms=30_000))
            waiting = asyncio.create_task(step(client, "kept", 1, 1))
            await asyncio.to_thread(
                wait_until, "a request waits", lambda: metric(server, "headrace_queue_depth", "kept") == 1
            )
            victim = next(p for p in server.backends() if f"process {p.pid}" in first_line(server, "kept"))
            os.kill(victim.pid, signal.SIGKILL)
            for task in (running_one, waiting):
                assert (await task).code == "UNAVAILABLE"
            for number in (1, 2, 3):
                assert (await step(client, "kept", number, number)).code == "INVALID_ARGUMENT"
                assert (await step(client, "kept", number, number, "s")).array.item() == number
            for model in MODELS:
                for number in (1, 2, 3):
                    assert (await step(client, model, number, number, "e")).array.item() == 2 * number


def first_line(server: RunningServer, model: str) -> str:
    return next(line for line in server.lines if f"loaded model {model} version" in line)
