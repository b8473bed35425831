"""Streams that are dropped at every moment and in every way leave nothing behind, and nobody else notices.

A thousand are opened and left: before the first response, in the middle, unread, by a cancel, a deadline, a half-closed
or a reset connection. And a long request whose client has gone leaves its instance to the next one at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import numpy as np
import psutil
import pytest

import onnx_models
from doors import SteadyLoad, open_door
from figures import metric, wait_until
from harness import RunningServer, running
from repositories import add_decoupled, add_identity, add_onnx
from streaming import GrpcStream, HttpStream, Link, Stream

STREAMS = 250 if "CI" in os.environ else 1000
"""Of each of the two servers, one a gRPC transport; half of them over HTTP."""
AT_ONCE = 16
SEED = 20260
FREED_WITHIN_S = 0.1
GROWTH = 16 << 20
"""Bytes of memory that a process may keep from one storm to the next, its allocator's whims included."""
STEADY = np.ones((1, 4), np.float32)
SMALL, LARGE = 4, 1 << 14
TRANSPORTS = ("pygrpc-native", "grpcio")


# --- a thousand streams -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What one client does."""

    door: str
    model: str
    ending: str
    size: int
    parameters: dict[str, int]
    after: int
    """Responses that it reads before it goes."""
    pause_s: float

    @classmethod
    def of(cls, chance: random.Random, number: int) -> Plan:
        ending = chance.choice(["end", "at once", "middle", "deadline", "cut", "half-closed", "unread"])
        late = ending in ("at once", "deadline")
        size = LARGE if ending == "unread" else chance.choice([SMALL, SMALL, LARGE])
        count = 200 if ending == "unread" else chance.randint(1, 20 if size == SMALL else 6)
        return cls(
            door=("http", "grpc")[number % 2],
            model=chance.choice(["shared", "shared", "holding"]),
            ending=ending,
            size=size,
            parameters={
                "responses": count,
                "response_delay_ms": chance.randint(0, 4),
                "delay_ms": 10_000 if late and chance.random() < 0.5 else chance.randint(0, 20),
                "empty_final": chance.choice([0, 1]),
            },
            after=chance.randrange(count),
            pause_s=chance.random() * 0.03,
        )


class Storm:
    """Clients that open streams and leave them."""

    def __init__(self, server: RunningServer, seed: int) -> None:
        self._server = server
        self._chance = random.Random(seed)
        self.seen: Counter[str] = Counter()

    async def run(self, count: int) -> None:
        plans = iter([Plan.of(self._chance, number) for number in range(count)])
        async with grpc.aio.insecure_channel(self._server.grpc) as channel, asyncio.TaskGroup() as clients:
            for _ in range(AT_ONCE):
                clients.create_task(self._client(plans, channel))

    async def _client(self, plans: Iterator[Plan], channel: grpc.aio.Channel) -> None:
        for plan in plans:
            late = (grpc.aio.AioRpcError,) if plan.ending == "deadline" else ()
            with contextlib.suppress(*late):
                async with self._opened(plan, channel) as stream, asyncio.timeout(60):
                    await self._follow(plan, stream)
            self.seen[plan.ending] += 1

    @contextlib.asynccontextmanager
    async def _opened(self, plan: Plan, channel: grpc.aio.Channel) -> AsyncIterator[Stream]:
        array = np.full((1, plan.size), plan.size, np.float32)
        parameters = plan.parameters
        async with contextlib.AsyncExitStack() as stack:
            stream: Stream
            if plan.door == "http":
                stream = await HttpStream.open(self._server, plan.model, array, parameters)
            elif plan.ending in ("cut", "unread"):
                link, address = await stack.enter_async_context(Link.to(self._server.grpc))
                own = grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
                stream = await GrpcStream.open(own, plan.model, array, parameters, link=link)
            else:
                timeout = plan.pause_s + 0.001 if plan.ending == "deadline" else None
                stream = await GrpcStream.open(channel, plan.model, array, parameters, timeout=timeout)
            stack.push_async_callback(stream.cancel)
            yield stream

    async def _follow(self, plan: Plan, stream: Stream) -> None:
        match plan.ending:
            case "end":
                await stream.half_close() if plan.door == "grpc" else None
                for _ in range(plan.parameters["responses"]):
                    await self._read(plan, stream)
                assert await stream.next() is None
            case "at once":
                await stream.cancel()
            case "middle":
                for _ in range(plan.after):
                    await self._read(plan, stream)
                await asyncio.sleep(plan.pause_s)
                await stream.cancel()
            case "deadline":
                with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError, asyncio.CancelledError):
                    async with asyncio.timeout(plan.pause_s + 0.001 if plan.door == "http" else None):
                        while await stream.next() is not None:
                            pass
                await stream.cancel()
            case "cut" | "unread":
                await asyncio.sleep(plan.pause_s)
                await stream.cut()
            case "half-closed":
                await stream.half_close()
                await asyncio.sleep(plan.pause_s)
                await stream.cancel()

    async def _read(self, plan: Plan, stream: Stream) -> None:
        np.testing.assert_array_equal(await stream.next(), np.full(plan.size, plan.size, np.float32))


class Kept:
    """What the processes of a server hold on to."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._processes = [psutil.Process(server.process.pid), *server.backends()]
        self._before = [self._held(process) for process in self._processes]

    def _held(self, process: psutil.Process) -> tuple[int, int, int]:
        with process.oneshot():
            return process.num_fds(), process.num_threads(), process.memory_info().rss

    def is_as_before(self) -> bool:
        for process, (fds, threads, memory) in zip(self._processes, self._before, strict=True):
            now_fds, now_threads, now_memory = self._held(process)
            if now_fds > fds or now_threads > threads or now_memory > memory + GROWTH:
                return False
        return all(
            metric(self._server, name, model) == 0
            for model in ("shared", "holding")
            for name in ("nv_inference_pending_request_count", "headrace_queue_depth")
        )

    def __str__(self) -> str:
        after = [self._held(process) for process in self._processes]
        return f"as before (descriptors, threads, bytes): {self._before}, not {after}"


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_thousand_dropped_streams_leave_nothing_behind(tmp_path: Path, transport: str) -> None:
    add_decoupled(tmp_path, "shared")
    add_decoupled(tmp_path, "holding", hold_instance="true", max_batch_size=1)
    config = tmp_path / "holding" / "config.pbtxt"
    config.write_text(config.read_text() + "\ninstance_group [ { kind: KIND_CPU count: 4 } ]")
    add_identity(tmp_path, "steady")
    with running(tmp_path, f"--grpc-transport={transport}") as server:
        storm = Storm(server, SEED)
        async with SteadyLoad(server, "steady", STEADY, pause=0.02) as others:
            await storm.run(STREAMS // 2)
            await served_at_once(server)
            kept = await asyncio.to_thread(Kept, server)
            await storm.run(STREAMS - STREAMS // 2)
            await served_at_once(server)
            await others.more()
            assert others.failures() == []
            for outcome in others.outcomes:
                np.testing.assert_array_equal(outcome.array, STEADY)
        await asyncio.to_thread(wait_until, str(kept), kept.is_as_before, 20.0)
        assert sum(storm.seen.values()) == STREAMS
        assert min(storm.seen.values()) > STREAMS / 20, storm.seen
    # That the server then stopped within its exit timeout, with status 0, says that no request was left inside.


async def served_at_once(server: RunningServer) -> None:
    """Assert that streams to each model, one more than it has instances, are answered in full without delay."""
    async with grpc.aio.insecure_channel(server.grpc) as channel, asyncio.timeout(5):
        for model in ("shared", "holding"):
            streams: list[Stream] = [await HttpStream.open(server, model, STEADY, {"responses": 2}) for _ in range(5)]
            streams += [await GrpcStream.open(channel, model, STEADY, {"responses": 2}) for _ in range(5)]
            for stream in streams:
                for _ in range(2):
                    np.testing.assert_array_equal(await stream.next(), STEADY[0])
                await stream.half_close() if isinstance(stream, GrpcStream) else None
                assert await stream.next() is None


# --- the instance of a client that has gone ---------------------------------------------------------------------------

LONG: dict[str, tuple[np.ndarray, dict[str, int]]] = {
    "slow": (STEADY, {"delay_ms": 10_000}),
    "holding": (STEADY, {"responses": 1000, "response_delay_ms": 10_000}),
    "endless": (STEADY, {}),
}
"""By model: what keeps its one instance for ten seconds or more."""
SHORT = np.zeros((1, 4), np.float32)


@pytest.fixture(scope="module", params=TRANSPORTS)
def server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    add_identity(repository, "slow", max_batch_size=1)
    add_decoupled(repository, "holding", hold_instance="true", max_batch_size=1)
    one_by_one = 'backend: "onnxruntime" max_batch_size: 1 instance_group { count: 1 }'
    add_onnx(repository, "endless", onnx_models.endless, config=one_by_one)
    with running(repository, f"--grpc-transport={request.param}") as started:
        yield started


Going = Callable[[RunningServer, str, str, str], contextlib.AbstractAsyncContextManager[None]]


@contextlib.asynccontextmanager
async def unary(server: RunningServer, door: str, model: str, how: str) -> AsyncIterator[None]:
    """A long request by `infer`; when the block ends its client goes."""
    array, parameters = LONG[model]
    async with open_door(server, door) as client:
        timeout = 1.0 if how == "deadline" else 60.0
        task = asyncio.create_task(client.infer(model, array, parameters=parameters, timeout=timeout))
        yield
        if how == "deadline":
            with contextlib.suppress(TimeoutError):
                await task
        else:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def streamed(server: RunningServer, door: str, model: str, how: str) -> AsyncIterator[None]:
    """A long request on a stream; when the block ends its client goes."""
    array, parameters = LONG[model]
    async with contextlib.AsyncExitStack() as stack:
        stream: Stream
        if door == "http":
            stream = await HttpStream.open(server, model, array, parameters)
        else:
            link, address = await stack.enter_async_context(Link.to(server.grpc))
            channel = grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
            timeout = 1.0 if how == "deadline" else None
            stream = await GrpcStream.open(channel, model, array, parameters, timeout=timeout, link=link)
        yield
        match how:
            case "cut":
                await stream.cut()
            case "half-close":
                await stream.half_close()
            case "deadline":
                with contextlib.suppress(grpc.aio.AioRpcError):
                    while await stream.next() is not None:
                        pass
            case _:
                await stream.cancel()
        if how in ("deadline", "half-close"):
            stack.push_async_callback(stream.cancel)


async def next_answer(server: RunningServer, model: str) -> None:
    """Ask for something short, and read the answer to its end."""
    async with grpc.aio.insecure_channel(server.grpc, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stream = await GrpcStream.open(channel, model, SHORT, {})
        np.testing.assert_array_equal(await stream.next(), SHORT[0])
        await stream.cancel()


async def freed_after(server: RunningServer, model: str, long: contextlib.AbstractAsyncContextManager[None]) -> float:
    """Return after how many seconds of its client's going the instance of a long request answers the next one."""
    clock = asyncio.get_running_loop().time
    async with long:
        waits = False
        while not waits:  # until the long request has the instance: then a short one waits
            short = asyncio.create_task(next_answer(server, model))
            await asyncio.wait([short], timeout=0.2)
            waits = not short.done()
        assert await asyncio.to_thread(metric, server, "nv_inference_pending_request_count", model) == 1
        started = clock()
    await asyncio.wait_for(short, 30)
    return clock() - started


WAYS = [
    *[(unary, door, model, "cancel") for door in ("http", "grpc") for model in ("slow", "endless")],
    *[(streamed, door, model, "cancel") for door in ("http", "grpc") for model in ("slow", "endless", "holding")],
    *[(streamed, door, model, "cut") for door in ("http", "grpc") for model in ("endless", "holding")],
    *[(streamed, "http", model, "half-close") for model in ("endless", "holding")],
]


@pytest.mark.parametrize(("call", "door", "model", "how"), WAYS)
async def test_a_long_request_whose_client_has_gone_leaves_its_instance_to_the_next(
    server: RunningServer,
    call: Going,
    door: str,
    model: str,
    how: str,
) -> None:
    taken = []
    while len(taken) < 3 and min(taken, default=1.0) >= FREED_WITHIN_S:
        taken.append(await freed_after(server, model, call(server, door, model, how)))
    assert min(taken) < FREED_WITHIN_S, taken


@pytest.mark.parametrize(("call", "model"), [(unary, "slow"), (unary, "endless"), (streamed, "holding")])
async def test_a_deadline_that_has_passed_leaves_the_instance_to_the_next(
    server: RunningServer,
    call: Going,
    model: str,
) -> None:
    """The second that the deadline takes is waited for by the client, which then finds the instance free."""
    taken = []
    while len(taken) < 3 and min(taken, default=2.0) >= 1 + FREED_WITHIN_S:
        taken.append(await freed_after(server, model, call(server, "grpc", model, "deadline")))
    assert min(taken) < 1 + FREED_WITHIN_S, taken
