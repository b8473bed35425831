"""Everything at once over every backend, while processes are killed: by hand for as long as you like.

    python tests/chaos/soak_backends.py [--minutes 10] [--seed 1]

tests/storm.py says who asks, who kills and what may come of it. Both halves of the time end in a quiet moment, in which
nothing may be left of what was: requests, sequences, processes, descriptors, memory.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil

from doors import open_door
from ensembles import add_ensemble, ident
from figures import metric, wait_until
from harness import RunningServer, named_shared_memory, running
from repositories import add_identity
from storm import CALM, Storm, row
from victims import (
    BACKENDS,
    STREAMING,
    add_accumulator,
    add_caller,
    add_echo,
    add_fragile,
    add_streaming,
)

FLAGS = (
    "--backend-restart-limit=1000",
    "--backend-restart-window-secs=1",
    "--model-control-mode=explicit",
    "--load-model=*",
    "--cache-config=local,size=1048576",
    "--backend-config=python,cancel-grace-seconds=0.5",
)
WAITING = (
    "nv_inference_pending_request_count",
    "headrace_queue_depth",
    "headrace_sequences_backlog",
    "headrace_sequences_active",
)
INT32 = {"INPUT0": "INT32 1"}, {"OUTPUT0": "INT32 1"}
GROWTH = 48 << 20
"""Bytes by which the server may be larger after the second half than after the first."""
READERS = 4
"""Descriptors by which it may have more: one for each process whose outputs another has read."""


def write_models(repository: Path) -> None:
    add_identity(repository, "before", datatype="INT32", dims="1", max_batch_size=1, allow_misbehaviour="false")
    cached = "response_cache { enable: true }"
    add_identity(repository, "cached", datatype="INT32", dims="1", max_batch_size=1, extra=cached)
    for backend in BACKENDS:
        add_echo(repository, f"{backend}_calm", backend)
        add_fragile(repository, backend, backend, instances=2)
        add_accumulator(repository, f"{backend}_sums", backend, idle_s=1)
        steps = [ident("before", "INPUT0", "x"), ident(backend, "x", "OUTPUT0")]
        add_ensemble(repository, f"{backend}_ensemble", steps, *INT32, extra="max_batch_size: 1")
    for backend in STREAMING:
        add_streaming(repository, f"{backend}_stream", backend)
    add_caller(repository, "caller", "python")


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@dataclass(frozen=True)
class Quiet:
    """What is there when nobody asks."""

    descriptors: int
    memory: int
    processes: int


async def quiet(server: RunningServer, repository: Path) -> Quiet:
    """Wait until everything has come to its end and every model answers; return what is left."""
    models = names(repository)
    for model in models:
        await asyncio.to_thread(server.wait_status, f"/v2/models/{model}/ready", 200)
    for name in ("nv_inference_pending_request_count", "headrace_queue_depth", "headrace_sequences_backlog"):
        for model in models:
            await asyncio.to_thread(
                wait_until, f"no {name} of {model}", lambda n=name, m=model: metric(server, n, m) == 0
            )
    async with open_door(server, "http") as http, open_door(server, "grpc") as native:
        for door in (http, native):
            for model in (*CALM, *BACKENDS, *(f"{backend}_ensemble" for backend in BACKENDS), "cached", "caller"):
                assert (await door.infer(model, row(5))).array.item() == 5, model
            for backend in BACKENDS:
                given = {"sequence_id": 1 << 40, "sequence_start": True, "sequence_end": True}
                assert (await door.infer(f"{backend}_sums", row(5), parameters=given)).array.item() == 5
    expected = len(BACKENDS) * 3 + len(OWN_PROCESSES) + len(STREAMING) + 3
    await asyncio.to_thread(wait_until, f"{expected} processes", lambda: len(server.backends()) == expected, 30.0)
    process = psutil.Process(server.process.pid)
    return Quiet(process.num_fds(), process.memory_info().rss, len(server.descendants()))


OWN_PROCESSES = ("python", "pytorch")
"""Backends that give each of two instances a process."""


async def soak(seconds: float, seed: int) -> Counter[str]:
    """Run both halves, and check what each leaves. Returns what was seen."""
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder)
        write_models(repository)
        seen: Counter[str] = Counter()
        numbers = itertools.count(1)
        shared = names(Path("/dev/shm"))
        with running(repository, *FLAGS) as server:
            left: list[Quiet] = []
            for half in range(2):
                chance = random.Random(seed + half)
                storm = Storm(server, repository, time.monotonic() + seconds / 2, chance, seen, numbers)
                await storm.run()
                left.append(await quiet(server, repository))
            before, after = left
            print(f"after the first half {before}, after the second {after}")
            room = before.descriptors + READERS
            process = psutil.Process(server.process.pid)
            await asyncio.to_thread(wait_until, f"{room} descriptors", lambda: process.num_fds() <= room)
            assert after.memory < before.memory + GROWTH, left
            assert after.processes == before.processes, left
            assert not [path for each in server.descendants() for path in named_shared_memory(each)]
        ours = set(names(Path("/dev/shm"))) - set(shared)
        assert not [name for name in ours if "headrace" in name or "triton" in name], ours
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for what, times in sorted(asyncio.run(soak(60 * options.minutes, options.seed)).items()):
        print(f"{times:8} {what}")


if __name__ == "__main__":
    main()
