"""Everything at once: answers, failures, cancels, deadlines, crashes and reloads, in an arena that is almost too small."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import numpy as np
import psutil

from doors import Door, open_door
from figures import metric, wait_until
from harness import running
from repositories import add_identity

CLIENTS = 12
TURNS = 40
ARENA = 4 << 20
WIDTH = 16384
"""64 KiB a row: some sixty requests whose memory was never given back would fill the arena."""


async def client(door: Door, number: int, seen: Counter[str]) -> None:
    chance = random.Random(number)
    for turn in range(TURNS):
        rows = chance.randint(1, 2)
        sent = np.full((rows, WIDTH), number * TURNS + turn, np.float32)
        fault = chance.choices(
            ["none", "fail", "wrong_shape", "cancel", "deadline", "crash"], [50, 10, 5, 20, 10, 4 if number == 0 else 0]
        )[0]
        match fault:
            case "none":
                outcome = await door.infer("m", sent)
                if outcome.ok:
                    np.testing.assert_array_equal(outcome.array, sent)
                seen[outcome.code] += 1
            case "cancel":
                task = asyncio.create_task(door.infer("m", sent, parameters={"delay_ms": chance.randrange(10)}))
                await asyncio.sleep(chance.random() * 0.03)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                seen["cancelled"] += 1
            case "deadline":
                try:
                    late = await door.infer("m", sent, parameters={"hang": True}, timeout=0.05 + chance.random() * 0.05)
                    assert late.code == "UNAVAILABLE", "only a crash in its batch ends it before the deadline"
                except TimeoutError:
                    seen["deadline"] += 1
            case _:
                outcome = await door.infer("m", sent, parameters={fault: True})
                assert outcome.code in ("INTERNAL", "UNAVAILABLE"), outcome
                seen[fault] += 1


async def test_a_storm_leaves_the_server_as_it_was(tmp_path: Path) -> None:
    folder = add_identity(
        tmp_path,
        "m",
        max_batch_size=8,
        execute_delay_ms="2",
        extra="instance_group [ { kind: KIND_CPU count: 2 } ] dynamic_batching { max_queue_delay_microseconds: 2000 }",
    )
    flags = (f"--arena-byte-size={ARENA}", "--model-control-mode=explicit", "--load-model=m")
    with running(tmp_path, *flags) as server:
        process = psutil.Process(server.process.pid)
        seen: Counter[str] = Counter()
        for storm in range(2):
            async with open_door(server, "http") as http, open_door(server, "grpc") as grpc:
                storming = [asyncio.create_task(client((http, grpc)[n % 2], n, seen)) for n in range(CLIENTS)]
                await asyncio.sleep(1)
                (folder / str(2 + storm)).mkdir()
                assert (await http.control("load", "m")).ok
                await asyncio.gather(*storming)
                for door in (http, grpc) * 5:
                    assert (await door.infer("m", np.ones((8, WIDTH), np.float32))).ok
            for waiting in ("nv_inference_pending_request_count", "headrace_queue_depth"):
                assert metric(server, waiting, "m") == 0
            await asyncio.to_thread(wait_until, "one process", lambda: len(server.backends()) == 1)
            if storm == 0:
                before = process.num_fds()
        await asyncio.to_thread(wait_until, f"again {before} descriptors", lambda: process.num_fds() <= before, 5.0)
        print(seen)
        assert seen["OK"] > 0.8 * (seen["OK"] + seen["UNAVAILABLE"])
