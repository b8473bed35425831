"""Responses of a decoupled model: through payload, process, driver and data plane, each to its own request."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from configs import model, tensor
from headrace import under_way
from headrace.clock import SystemClock
from headrace.dataplane import RegistryDataPlane
from headrace.instances.model_process import ModelProcess
from headrace.instances.signature import ModelSignature
from headrace.observability.statistics import ModelStatistics
from headrace.repository.model_config import DynamicBatching
from headrace.scheduling.driver import SchedulerDriver
from headrace.scheduling.factory import make_scheduler
from headrace.types import InferenceRequest, InputTensor, RequestedOutput, ServerMetadata
from headrace_protocol.datatype import FP32
from headrace_protocol.errors import ErrorCode, FailureReason, InferError
from headrace_protocol.framing import backend_framer
from headrace_protocol.messages import (
    BatchDone,
    Cancel,
    Error,
    Execute,
    Finalize,
    Flow,
    Initialize,
    Ready,
    Response,
    Responses,
)
from headrace_protocol.tensor import INLINE, Tensor, TensorRef

CONFIG = model(
    [tensor("A", "FP32", 1)],
    [tensor("B", "FP32", -1), tensor("C", "FP32", 1)],
    8,
    decoupled=True,
    dynamic_batching=DynamicBatching(preferred_batch_sizes=(8,)),
)


class FarEnd:
    """The other end of a channel: a backend process played by the test."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.socket, self._far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._far.setblocking(False)
        self._framer = backend_framer()
        self._ended = asyncio.get_running_loop().create_future()

    def kill(self) -> None:
        if not self._ended.done():
            self._ended.set_result("killed")

    async def wait(self) -> str:
        return await asyncio.shield(self._ended)

    async def take(self) -> list:
        data = await asyncio.get_running_loop().sock_recv(self._far, 1 << 16)
        return self._framer.decode(memoryview(data), [])

    async def say(self, *messages) -> None:
        frame, _ = self._framer.encode(messages)
        await asyncio.get_running_loop().sock_sendall(self._far, frame)
        for _ in range(4):
            await asyncio.sleep(0)

    def hang_up(self) -> None:
        self._far.close()


class Served:
    """One decoupled model whose backend is played by the test, under a data plane."""

    def __init__(self) -> None:
        self.name, self.version, self.labels, self.config = "m", 1, {}, CONFIG
        self.sequences = None
        self.signature = ModelSignature(CONFIG, 1)
        self.statistics = ModelStatistics(streamed=True)
        self.far = FarEnd()
        self.slots_freed = 0
        self.leases = 0
        self.process = ModelProcess(self.far, 1 << 20, self._slot_free, lambda _: None, lambda *_: None)
        self.driver = SchedulerDriver(
            make_scheduler(CONFIG), self, self.signature, self.statistics, SystemClock(), decoupled=True
        )
        self.plane = RegistryDataPlane(self, ServerMetadata("t", "1", ()), strict_readiness=True)

    def _slot_free(self) -> None:
        self.slots_freed += 1
        self.driver.kick()

    async def load(self) -> None:
        loading = asyncio.ensure_future(
            self.process.initialize(Initialize(2, "b", "m", 1, "", "", {}, {}, ("m_0",), "KIND_CPU", 0, True), 5)
        )
        await self.far.take()
        await self.far.say(Ready())
        await loading

    # what the driver and the plane ask of pool and registry

    def free_process(self):
        return self.process if self.process.free else None

    def busy(self) -> int:
        return self.process.busy

    def acquire(self, _name: str, _version: int):
        self.leases += 1
        return self

    def get(self, _name: str, _version: int):
        return self

    def release(self, _model) -> None:
        self.leases -= 1

    @property
    def held_bytes(self) -> int:
        return self.process._arena.ranges.allocated_bytes


@pytest.fixture
async def served():
    made = Served()
    await made.load()
    yield made
    made.process.abort("the test is over")
    made.far.hang_up()


class Reader:
    """A client of one stream: keeps what came."""

    def __init__(self, served: Served, outputs: list[str] | None = None) -> None:
        request = InferenceRequest("m", -1, SystemClock.now_ns())
        request.id = "mine"
        request.inputs = [InputTensor("A", FP32, (1, 1), b"\0\0\x80\x3f")]
        request.outputs = [RequestedOutput(name) for name in outputs] if outputs else None
        self.got: list = []
        self.stream = served.plane.stream(request, self.got.append)

    def values(self) -> list:
        return [bytes(outcome.outputs[0].data) for outcome in self.got if not outcome.empty]


def inline(name: str, data: bytes, *shape: int) -> Tensor:
    return Tensor(name, "FP32", shape, TensorRef(0, len(data), INLINE), None, data)


def partial(request: int, data: bytes) -> Response:
    return Response(request, (inline("B", data, 1, len(data) // 4),), final=False)


def end(request: int) -> Response:
    return Response(request, final=True, empty=True)


async def executed(served: Served) -> Execute:
    (command,) = await served.far.take()
    assert isinstance(command, Execute)
    return command


async def test_each_response_comes_at_once_and_the_last_says_so(served: Served) -> None:
    reader = Reader(served)
    command = await executed(served)
    await served.far.say(Responses(command.batch, None, (partial(0, b"1111"),)))
    assert reader.values() == [b"1111"]
    assert not reader.got[0].final
    assert reader.got[0].id == "mine"
    await served.far.say(Responses(command.batch, None, (partial(0, b"2222" * 3), end(0))), BatchDone(1, 1, 2, 3))
    assert reader.values() == [b"1111", b"2222" * 3]
    assert reader.got[1].outputs[0].shape == (1, 3)
    assert reader.got[-1].empty
    assert reader.got[-1].final
    assert served.leases == 0
    for response in reader.got:
        response.release()
    assert served.held_bytes == 0


async def test_an_answer_with_outputs_may_be_the_last(served: Served) -> None:
    reader = Reader(served)
    command = await executed(served)
    await served.far.say(
        Responses(command.batch, None, (Response(0, (inline("B", b"1111", 1, 1),)),)), BatchDone(1, 1, 2, 3)
    )
    assert [(r.final, r.empty) for r in reader.got] == [(True, False)]


async def test_requests_of_one_batch_end_each_at_its_own_time(served: Served) -> None:
    first, second = Reader(served), Reader(served)
    command = await executed(served)
    assert len(command.requests) == 2
    await served.far.say(
        Responses(command.batch, None, (end(0), partial(1, b"2222"))), BatchDone(command.batch, 1, 2, 3)
    )
    assert [r.final for r in first.got] == [True]
    assert second.values() == [b"2222"]
    assert served.leases == 1
    await served.far.say(Responses(command.batch, None, (end(1),)))
    assert second.got[-1].final
    assert served.leases == 0


async def test_the_slot_is_free_before_the_last_response_but_not_the_memory(served: Served) -> None:
    reader = Reader(served)
    command = await executed(served)
    await served.far.say(BatchDone(command.batch, 1, 2, 3))
    assert served.process.free == [0]
    assert served.held_bytes > 0
    assert reader.got == []
    await served.far.say(Responses(command.batch, None, (partial(0, b"late"),)))
    assert reader.values() == [b"late"]
    await served.far.say(Responses(command.batch, None, (end(0),)))
    reader.got[0].release()
    reader.got[1].release()
    assert served.held_bytes == 0
    assert served.slots_freed == 2


async def test_outputs_that_were_not_asked_for_are_left_out(served: Served) -> None:
    reader = Reader(served, ["C"])
    command = await executed(served)
    both = (inline("B", b"1111", 1, 1), inline("C", b"2222", 1, 1))
    await served.far.say(Responses(command.batch, None, (Response(0, both, final=False),)))
    assert [output.name for output in reader.got[0].outputs] == ["C"]


async def test_an_error_is_the_last_outcome(served: Served) -> None:
    reader = Reader(served)
    command = await executed(served)
    await served.far.say(
        Responses(command.batch, None, (partial(0, b"1111"), Response(0, error=Error("INVALID_ARG", "no more")))),
        BatchDone(command.batch, 1, 2, 3),
    )
    assert isinstance(reader.got[-1], InferError)
    assert reader.got[-1].code is ErrorCode.INVALID_ARG
    assert served.leases == 0
    assert served.statistics.failures[FailureReason.BACKEND] == 1
    reader.got[0].release()
    assert served.held_bytes == 0


async def test_a_response_after_the_last_ends_the_process(served: Served) -> None:
    reader = Reader(served)
    command = await executed(served)
    await served.far.say(Responses(command.batch, None, (end(0), partial(0, b"1111"))))
    assert [outcome.final for outcome in reader.got] == [True]
    assert await served.far.wait() == "killed"


async def test_after_a_cancel_nothing_comes_and_nothing_is_held(served: Served) -> None:
    reader = Reader(served)
    command = await executed(served)
    await served.far.say(Responses(command.batch, None, (partial(0, b"1111"),)))
    reader.stream.cancel()
    assert served.leases == 0
    (told,) = await served.far.take()
    assert told == Cancel(command.batch, 0)
    await served.far.say(
        Responses(command.batch, None, (partial(0, b"2222"), Response(0, error=Error("CANCELLED", "")))),
        BatchDone(command.batch, 1, 2, 3),
    )
    assert reader.values() == [b"1111"]
    assert served.statistics.failures[FailureReason.CANCELED] == 1
    reader.got[0].release()
    assert served.held_bytes == 0


async def test_a_request_that_waits_can_be_cancelled(served: Served) -> None:
    reader = Reader(served)
    reader.stream.cancel()
    assert served.leases == 0
    assert served.driver.waiting == 0
    assert reader.got == []


async def test_what_runs_in_a_dead_process_fails_once(served: Served) -> None:
    reader = Reader(served)
    command = await executed(served)
    await served.far.say(Responses(command.batch, None, (partial(0, b"1111"),)), BatchDone(command.batch, 1, 2, 3))
    served.far.hang_up()
    await asyncio.sleep(0.01)
    assert [isinstance(outcome, InferError) for outcome in reader.got] == [False, True]
    assert reader.got[1].code is ErrorCode.UNAVAILABLE
    assert served.leases == 0


async def test_a_model_too_far_ahead_is_held_back_until_its_client_has_read(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_way, "MAX_UNREAD", 4)
    reader = Reader(served)
    command = await executed(served)
    await served.far.say(Responses(command.batch, None, tuple(partial(0, b"1111") for _ in range(4))))
    assert await served.far.take() == [Flow(command.batch, 0, True)]
    reader.got[0].release()
    reader.got[1].release()
    reader.got[1].release()  # once is enough
    assert await served.far.take() == [Flow(command.batch, 0, False)]


async def test_large_responses_count_by_their_bytes(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_way, "MAX_UNREAD_BYTES", 1000)
    reader = Reader(served)
    command = await executed(served)
    await served.far.say(Responses(command.batch, None, (partial(0, bytes(1200)),)))
    assert await served.far.take() == [Flow(command.batch, 0, True)]
    reader.got[0].release()
    assert await served.far.take() == [Flow(command.batch, 0, False)]


async def test_a_decoupled_model_is_refused_where_one_answer_is_due(served: Served) -> None:
    request = InferenceRequest("m")
    request.inputs = [InputTensor("A", FP32, (1, 1), bytes(4))]
    with pytest.raises(InferError, match="decoupled") as caught:
        served.plane.submit(request, print)
    assert caught.value.code is ErrorCode.UNSUPPORTED
    assert served.leases == 0


async def test_statistics_tell_requests_and_their_responses(served: Served) -> None:
    reader = Reader(served)
    command = await executed(served)
    await served.far.say(
        Responses(command.batch, None, (partial(0, b"1111"), partial(0, b"2222"), end(0))),
        BatchDone(command.batch, 1, 2, 3),
    )
    assert len(reader.got) == 3
    message = served.statistics.to_proto("m", "1")
    assert (message.inference_count, message.execution_count) == (1, 1)
    assert message.inference_stats.success.count == 1
    assert sorted(message.response_stats) == ["0", "1", "2"]
    assert message.response_stats["0"].success.count == 1
    assert message.response_stats["2"].empty_response.count == 1


async def test_stopping_lets_open_streams_fail(served: Served) -> None:
    reader = Reader(served)
    command = await executed(served)
    await served.far.say(BatchDone(command.batch, 1, 2, 3))
    stopping = asyncio.ensure_future(served.process.stop(0.01))
    assert await served.far.take() == [Finalize()]
    await stopping
    assert isinstance(reader.got[0], InferError)
