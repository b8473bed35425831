"""A ModelProcess and the process at the other end of its channel, at the moments where that is just gone."""

from __future__ import annotations

import asyncio
import os

import numpy as np
import pytest

from configs import model, tensor
from headrace.clock import SystemClock
from headrace.instances.model_process import ModelProcess, ProcessGoneError
from headrace.instances.payload import Payload
from headrace.instances.process import channel_pair
from headrace.instances.regions import Region, RequestRegions, Slice
from headrace.instances.signature import ModelSignature
from headrace.observability.statistics import ModelStatistics
from headrace.scheduling.driver import SchedulerDriver
from headrace.scheduling.factory import make_scheduler
from headrace.types import InferenceRequest, InputTensor, RegionRef
from headrace_protocol.datatype import FP32
from headrace_protocol.errors import ErrorCode
from headrace_protocol.framing import backend_framer
from headrace_protocol.messages import AttachRegion, DetachRegion, Execute
from headrace_protocol.tensor import REGION

CONFIG = model([tensor("A", "FP32", 1)], [tensor("B", "FP32", 1)], 8)
SIGNATURE = ModelSignature(CONFIG, 1)


class Child:
    """A process of which there is only the far end of the channel."""

    pid = 0

    def __init__(self) -> None:
        self.socket, self.theirs = channel_pair()
        self.killed = False

    def kill(self) -> None:
        self.killed = True

    async def wait(self) -> str:
        return "exit status 1"

    def frames(self) -> list[tuple[list, int]]:
        """Return what was sent: messages, and how many descriptors came with them."""
        self.theirs.setblocking(False)
        found = []
        framer = backend_framer()
        while True:
            try:
                data, _, _, _ = self.theirs.recvmsg(1 << 17, 0)
            except BlockingIOError:
                return found
            found.append(framer.decode(data, []))


class Used:
    """A request whose input lies in a region."""

    def __init__(self) -> None:
        self.region = Region(5, "r", 4, fd=os.memfd_create("client"))
        os.write(self.region.fd, np.float32(7).tobytes())
        request = InferenceRequest("m")
        request.inputs = [InputTensor("A", FP32, (1, 1), b"", RegionRef("r", 0, 4))]
        self.prepared = SIGNATURE.prepare(request, RequestRegions({"A": Slice(self.region, 0, 4)}, {}))

    def payload(self) -> Payload:
        return Payload(SIGNATURE, [self.prepared])

    def close(self) -> None:
        self.prepared.regions.drop()
        self.region.drop()


class OneProcess:
    """A pool of one process."""

    def __init__(self, process: ModelProcess) -> None:
        self.process = process

    def free_process(self) -> ModelProcess | None:
        return self.process if self.process.free else None

    def busy(self) -> int:
        return self.process.busy


def plain() -> InferenceRequest:
    request = InferenceRequest("m", -1, SystemClock.now_ns())
    request.inputs = [InputTensor("A", FP32, (1, 1), np.float32(1).tobytes())]
    return request


async def turns() -> None:
    """Let what is due in the loop happen, and what comes of it."""
    for _ in range(5):
        await asyncio.sleep(0)


def driver_of(pool: OneProcess) -> SchedulerDriver:
    return SchedulerDriver(make_scheduler(CONFIG), pool, SIGNATURE, ModelStatistics(), SystemClock())


@pytest.fixture
async def child():
    child = Child()
    yield child
    child.theirs.close()


@pytest.fixture
async def process(child: Child):
    ended: list[str] = []
    process = ModelProcess(child, 1 << 16, lambda: None, ended.append, lambda *_: None)
    process.free = [0]
    yield process
    process.abort("the test is over")


async def test_a_region_goes_before_the_first_batch_in_it_and_is_taken_back_when_it_is_closed(
    process: ModelProcess, child: Child
) -> None:
    used = Used()
    for _ in range(2):
        process.free = [0]
        process.execute(used.payload(), lambda *_: None)
    attach, *batches = child.frames()
    assert attach == [AttachRegion(5, 0, 4)]
    for (execute,) in batches:
        assert isinstance(execute, Execute)
        assert (execute.inputs[0].ref.source, execute.inputs[0].ref.region) == (REGION, 5)
    process.abort("enough")
    used.close()
    assert used.region.fd == -1


async def test_without_a_descriptor_to_spare_the_tensors_are_copied(
    process: ModelProcess, child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(_fd: int) -> int:
        raise OSError(24, "too many open files")

    used = Used()
    with monkeypatch.context() as context:
        context.setattr("headrace.instances.channel.os.dup", none_left)
        process.execute(used.payload(), lambda *_: None)
    ((execute,),) = child.frames()
    assert execute.inputs[0].ref.source != REGION
    process.abort("enough")
    used.close()


async def test_a_batch_for_a_process_that_is_gone_is_given_back(process: ModelProcess, child: Child) -> None:
    used = Used()
    child.theirs.close()
    with pytest.raises(ProcessGoneError):
        process.execute(used.payload(), lambda *_: None)
    assert not process.busy
    assert not process.free
    await asyncio.sleep(0)
    assert child.killed
    used.close()
    assert used.region.fd == -1


async def test_a_request_for_a_process_that_is_just_gone_waits_for_the_next(
    process: ModelProcess, child: Child
) -> None:
    """It raised ValueError into whoever dispatched, and its client had no answer ever."""
    outcomes = []
    pool = OneProcess(process)
    driver = driver_of(pool)
    child.theirs.close()
    driver.submit(SIGNATURE.prepare(plain()), outcomes.append)
    await turns()
    assert (child.killed, outcomes, driver.waiting) == (True, [], 1)
    next_child = Child()
    pool.process = ModelProcess(next_child, 1 << 16, lambda: None, lambda _: None, lambda *_: None)
    pool.process.free = [0]
    driver.kick()
    await turns()
    assert isinstance(next_child.frames()[0][0], Execute)
    pool.process.abort("the test is over")
    assert [outcome.code for outcome in outcomes] == [ErrorCode.UNAVAILABLE]
    next_child.theirs.close()


async def test_a_fault_of_our_own_leaves_no_request_without_an_answer(
    process: ModelProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("a fault")

    outcomes = []
    driver = driver_of(OneProcess(process))
    monkeypatch.setattr("headrace.instances.payload._header", broken)
    driver.submit(SIGNATURE.prepare(plain()), outcomes.append)
    driver.submit(SIGNATURE.prepare(plain()), outcomes.append)
    await turns()
    assert [outcome.code for outcome in outcomes] == [ErrorCode.INTERNAL] * 2
    assert "could not be handed over" in caplog.text
    assert not process._arena.ranges.allocated_bytes
    assert (process.free, process.busy) == ([0], 0)


async def test_a_batch_for_whose_message_there_is_no_descriptor_fails_and_its_instance_stays_free(
    process: ModelProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object) -> int:
        raise OSError(24, "too many open files")

    outcomes = []
    driver = driver_of(OneProcess(process))
    request = plain()
    request.parameters = {"long": "x" * (1 << 17)}
    monkeypatch.setattr("headrace_protocol.framing.os.memfd_create", none_left)
    driver.submit(SIGNATURE.prepare(request), outcomes.append)
    await turns()
    assert [outcome.code for outcome in outcomes] == [ErrorCode.UNAVAILABLE]
    assert (process.free, process.busy) == ([0], 0)


async def test_a_closed_region_is_taken_back_from_a_process_that_had_it(process: ModelProcess, child: Child) -> None:
    used = Used()
    payload = used.payload()
    process.execute(payload, lambda *_: None)
    payload.release()
    used.close()
    await asyncio.sleep(0)
    assert child.frames()[-1] == [DetachRegion(5)]
