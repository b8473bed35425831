"""Clients of every kind at once, and what kills and reloads the models that they ask, for as long as it is told to.

Two kinds of model are asked over both doors. Calm ones are reloaded, and no request to them may fail. Victims are
killed too; a request to them is answered rightly, or with the error that says why not.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import numpy as np
import psutil

from doors import Door, Outcome, open_door
from harness import RunningServer
from streaming import GrpcStream, HttpStream, Stream
from victims import BACKENDS, FAULTS, IDENTITY_FAULTS, STREAMING

CALM = tuple(f"{backend}_calm" for backend in BACKENDS)
HANGS_S = 20.0
"""No request is under way for as long."""
OVER = ("backend process", "is being unloaded", "start flag", "is not available", "is being started")
"""What the errors say that a death may bring."""


@dataclass
class Storm:
    """One half: who asks, who kills, what was seen. `until` is a moment of time.monotonic."""

    server: RunningServer
    repository: Path
    until: float
    chance: random.Random
    seen: Counter[str] = field(default_factory=Counter)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """Names of sequences."""
    doors: tuple[Door, ...] = ()

    async def run(self) -> None:
        async with open_door(self.server, "http") as http, open_door(self.server, "grpc") as native:
            self.doors = (http, native)
            async with grpc.aio.insecure_channel(
                self.server.grpc, [("grpc.use_local_subchannel_pool", 1)]
            ) as self.channel:
                actors: list[Callable[[int], Awaitable[None]]] = [
                    *[self.calm] * 4,
                    *[self.victim] * 4,
                    *[self.sequence] * 4,
                    *[self.ensemble] * 2,
                    *[self.stream] * 3,
                    self.cache,
                    self.call,
                    self.kill,
                    self.reload,
                ]
                await asyncio.gather(*(self.repeat(act, number) for number, act in enumerate(actors)))

    async def repeat(self, act: Callable[[int], Awaitable[None]], number: int) -> None:
        while time.monotonic() < self.until:
            await act(number)

    def door(self) -> Door:
        return self.chance.choice(self.doors)

    def count(self, kind: str, outcome: Outcome) -> None:
        self.seen[f"{kind} {outcome.code}"] += 1

    # --- who asks ---------------------------------------------------------------------------------------------------

    async def calm(self, number: int) -> None:
        """Rows of any length, from small to some hundred kilobytes: always answered, and rightly."""
        length = int(16 * 4096 ** self.chance.random())
        sent = np.full((self.chance.randint(1, 3), length), self.chance.randrange(1 << 30), np.int32)
        outcome = await self.door().infer(CALM[number % len(CALM)], sent)
        self.count("calm", outcome)
        np.testing.assert_array_equal(outcome.array, sent)

    async def victim(self, number: int) -> None:
        backend = self.chance.choice(BACKENDS)
        value, what = self.chance.randrange(1000), self.chance.choice(["ask"] * 12 + ["cancel", "deadline", "end"])
        parameters: dict[str, str | int | bool] = {}
        if what == "end":
            value = self.chance.choice(list(FAULTS.values()))
            if backend == "identity":
                parameters = IDENTITY_FAULTS[value]
        if what == "cancel":
            await self.cancelled(self.door().infer(backend, row(value)))
            return
        try:
            outcome = await self.door().infer(
                backend, row(value), parameters=parameters, timeout=0.004 if what == "deadline" else HANGS_S
            )
        except TimeoutError:
            assert what == "deadline", f"{backend} did not answer {value}"
            self.seen["victim deadline"] += 1
            return
        self.count("victim", outcome)
        self.is_right(outcome, value)

    async def ensemble(self, number: int) -> None:
        value = self.chance.randrange(1000)
        asking = self.door().infer(f"{self.chance.choice(BACKENDS)}_ensemble", row(value))
        if self.chance.random() < 0.1:
            await self.cancelled(asking)
            return
        outcome = await asking
        self.count("ensemble", outcome)
        self.is_right(outcome, value)

    async def call(self, number: int) -> None:
        value = self.chance.randrange(1000)
        outcome = await self.door().infer("caller", row(value))
        self.count("call", outcome)
        self.is_right(outcome, value)

    async def cache(self, number: int) -> None:
        value = self.chance.randrange(50)
        outcome = await self.door().infer("cached", row(value))
        self.count("cached", outcome)
        self.is_right(outcome, value)

    async def sequence(self, number: int) -> None:
        """Add a number that nobody else has a few times; a sequence that was lost is over."""
        model, name, total = f"{self.chance.choice(BACKENDS)}_sums", next(self.numbers), 0
        door, steps = self.door(), self.chance.randint(1, 8)
        for step in range(steps):
            given = {"sequence_id": name, "sequence_start": step == 0, "sequence_end": step == steps - 1}
            asking = door.infer(model, row(name), parameters=given)
            if self.chance.random() < 0.03:
                await self.cancelled(asking)
                return
            outcome = await asking
            total += name
            self.count("sequence", outcome)
            self.is_right(outcome, total)
            if not outcome.ok:
                return

    async def stream(self, number: int) -> None:
        model, value = f"{self.chance.choice(STREAMING)}_stream", float(self.chance.randrange(1000))
        count = self.chance.randint(1, 30)
        asked: dict[str, str | int | bool | float] = {
            "responses": count,
            "response_delay_ms": self.chance.choice([0, 1, 5]),
        }
        sent = np.array([[value]], np.float32)
        opened: Stream
        if self.chance.random() < 0.5:
            opened = await HttpStream.open(self.server, model, sent, asked)
        else:
            opened = await GrpcStream.open(self.channel, model, sent, asked)
            await opened.half_close()
        leave = self.chance.randrange(count) if self.chance.random() < 0.3 else -1
        try:
            got = 0
            while (response := await opened.next()) is not None:
                assert response.item() == value
                got += 1
                if got > leave >= 0:
                    await opened.cancel()
                    self.seen["stream left"] += 1
                    return
            assert got == count, f"{got} of {count} responses"
            self.seen["stream whole"] += 1
        except (AssertionError, grpc.aio.AioRpcError) as error:
            assert any(text in str(error) for text in OVER), error
            self.seen["stream lost"] += 1
            await opened.cancel()

    async def cancelled(self, asking: Awaitable[Outcome]) -> None:
        task = asyncio.ensure_future(asking)
        await asyncio.wait([task], timeout=self.chance.random() * 0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.seen["cancelled"] += 1

    def is_right(self, outcome: Outcome, value: int) -> None:
        if outcome.ok:
            assert outcome.array.item() == value, f"{outcome.array} is somebody else's: expected {value}"
        else:
            assert outcome.code in ("UNAVAILABLE", "INVALID_ARGUMENT"), outcome
            assert any(text in outcome.text for text in OVER), outcome

    # --- who kills and reloads ----------------------------------------------------------------------------------------

    async def kill(self, number: int) -> None:
        await asyncio.sleep(self.chance.uniform(0.05, 0.5))
        victims = [pid for pid, model in served(self.server).items() if model not in CALM and psutil.pid_exists(pid)]
        if victims:
            try:
                os.kill(self.chance.choice(victims), self.chance.choice([signal.SIGKILL, signal.SIGSEGV]))
                self.seen["killed"] += 1
            except ProcessLookupError:
                pass

    async def reload(self, number: int) -> None:
        """Change a model and load it again: what runs goes on, what comes finds the old or the new."""
        await asyncio.sleep(self.chance.uniform(0.2, 1.0))
        model = self.chance.choice([*CALM, *BACKENDS, "cached", "caller", "before", "python_stream"])
        change(self.repository / model / "config.pbtxt", str(self.chance.random()))
        outcome = await self.door().control("load", model)
        self.count("reload of the calm" if model in CALM else "reload", outcome)
        assert outcome.ok or model not in CALM, outcome


def change(config: Path, note: str) -> None:
    """Write another note at the end of a configuration."""
    text = config.read_text().partition("\n# ")[0]
    config.write_text(f"{text}\n# {note}")


def row(value: int) -> np.ndarray:
    return np.array([[value]], np.int32)


def served(server: RunningServer) -> dict[int, str]:
    """Return the model of every process that the log told of."""
    found = {}
    for line in server.lines:
        if match := re.search(r"loaded model (\S+) version \d+ in .*?, process ([\d, ]+)", line):
            found.update(dict.fromkeys(map(int, match[2].split(", ")), match[1]))
        elif match := re.search(r"model (\S+):\d+ serves again, process (\d+)", line):
            found[int(match[2])] = match[1]
    return found
