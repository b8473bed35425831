"""The driver completes each request exactly once, whatever its scheduler, its backend and its client do."""

from __future__ import annotations

import asyncio
import gc
import os

import numpy as np
import pytest

from configs import model, tensor
from headrace.clock import SystemClock
from headrace.instances.model_process import ProcessGoneError
from headrace.instances.regions import Region, RequestRegions, Slice
from headrace.instances.signature import ModelSignature
from headrace.observability.statistics import ModelStatistics
from headrace.repository.model_config import DynamicBatching, QueuePolicy
from headrace.scheduling.driver import SchedulerDriver
from headrace.scheduling.factory import make_scheduler
from headrace.scheduling.ordering import OrderedRelease
from headrace.types import InferenceRequest, InferenceResponse, InputTensor, RegionRef
from headrace_protocol.arena import Arena
from headrace_protocol.datatype import FP32
from headrace_protocol.errors import ErrorCode, FailureReason, InferError
from headrace_protocol.messages import BatchDone
from headrace_protocol.tensor import Tensor


class OneInstance:
    """Stands where a backend process would: one instance that answers when it is told to."""

    def __init__(self, arena_bytes: int = 1 << 16) -> None:
        self.arena = Arena.create(arena_bytes)
        self.free = [0]
        self.running: list = []
        self.cancels: list[tuple[int, int]] = []
        self.number = 0
        self.on_slot_free = lambda: None

    def free_process(self):
        return self if self.free else None

    def busy(self) -> int:
        return len(self.running)

    def execute(self, payload, on_done, _on_response=None, _instance=None) -> int:
        command = payload.gather(self.arena, self.number + 1, 0)
        self.number += 1
        self.free.pop()
        self.running.append((payload, command, on_done))
        return self.number

    def cancel(self, batch: int, request: int) -> None:
        self.cancels.append((batch, request))

    def finish(self) -> None:
        """Answer what runs with its own inputs."""
        payload, command, on_done = self.running.pop()
        source = command.inputs[0]
        results = payload.scatter([Tensor("B", source.datatype, source.shape, source.ref)], [], [])
        self.free.append(0)
        on_done(payload, results, BatchDone(self.number, 1, 2, 3))
        payload.release()
        self.on_slot_free()


class Asked:
    """A request that was submitted, and what became of it."""

    def __init__(self, driver: SchedulerDriver, prepared) -> None:
        self.future = asyncio.get_running_loop().create_future()
        self.pending = driver.submit(prepared, self.done)

    def done(self, outcome) -> None:
        if isinstance(outcome, InferError):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


def make(max_batch_size: int = 8, arena_bytes: int = 1 << 16, **batching):
    config = model(
        [tensor("A", "FP32", 1)],
        [tensor("B", "FP32", 1)],
        max_batch_size,
        dynamic_batching=DynamicBatching(preferred_batch_sizes=(max_batch_size,), **batching),
    )
    instance = OneInstance(arena_bytes)
    signature = ModelSignature(config, 1)
    ordering = OrderedRelease() if batching.get("preserve_ordering") else None
    statistics = ModelStatistics()
    driver = SchedulerDriver(make_scheduler(config), instance, signature, statistics, SystemClock(), ordering)
    instance.on_slot_free = driver.kick

    def submit(value: float, rows: int = 1):
        request = InferenceRequest("m", -1, SystemClock.now_ns())
        data = np.full((rows, 1), value, np.float32).tobytes()
        request.inputs = [InputTensor("A", FP32, (rows, 1), data)]
        return Asked(driver, signature.prepare(request))

    return driver, instance, statistics, submit


def value(response: InferenceResponse) -> float:
    result = float(np.frombuffer(response.outputs[0].data, np.float32)[0])
    response.release()
    return result


async def turn() -> None:
    """Let what is due in the loop happen."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_requests_of_one_turn_share_a_batch() -> None:
    _, instance, statistics, submit = make()
    pendings = [submit(i) for i in range(5)]
    await turn()
    assert statistics.pending == 0
    instance.finish()
    assert [value(await p.future) for p in pendings] == [0, 1, 2, 3, 4]
    assert (statistics.execution_count, statistics.inference_count) == (1, 5)
    assert not instance.arena.ranges.allocated_bytes


async def test_a_waiting_request_that_is_cancelled_never_runs() -> None:
    driver, instance, statistics, submit = make(max_batch_size=1)
    first, second, third = submit(1), submit(2), submit(3)
    await turn()
    driver.cancel(second.pending)
    assert (statistics.pending, statistics.failures[FailureReason.CANCELED]) == (1, 1)
    instance.finish()
    await turn()
    instance.finish()
    assert [value(await first.future), value(await third.future)] == [1, 3]
    assert not instance.cancels


async def test_a_running_request_that_is_cancelled_is_told_to_the_backend_and_its_answer_dropped() -> None:
    driver, instance, statistics, submit = make()
    kept, gone = submit(1), submit(2)
    await turn()
    driver.cancel(gone.pending)
    assert instance.cancels == [(1, 1)]
    instance.finish()
    assert value(await kept.future) == 1
    assert statistics.failures[FailureReason.CANCELED] == 1
    assert not instance.arena.ranges.allocated_bytes


async def test_a_cancel_after_the_answer_changes_nothing() -> None:
    driver, instance, statistics, submit = make()
    asked = submit(1)
    await turn()
    instance.finish()
    driver.cancel(asked.pending)
    assert value(await asked.future) == 1
    assert not instance.cancels
    assert not statistics.failures[FailureReason.CANCELED]


async def test_who_fails_to_take_an_answer_does_not_cost_the_batch_theirs(caplog: pytest.LogCaptureFixture) -> None:
    _, instance, _, submit = make()
    bad, good = submit(1), submit(2)
    told = []

    def fails_once(outcome) -> None:
        told.append(outcome)
        if len(told) == 1:
            raise ZeroDivisionError

    bad.pending.done = fails_once
    await turn()
    instance.finish()
    assert value(await good.future) == 2
    assert "could not be handed over" in caplog.text
    assert told[1].code is ErrorCode.INTERNAL, "it is told that, and does not wait for ever"
    assert len(told) == 2
    assert not instance.arena.ranges.allocated_bytes, "what the answer held is given back"


async def test_who_cannot_even_take_an_error_costs_nobody_anything() -> None:
    _, instance, _, submit = make()
    bad, good = submit(1), submit(2)
    bad.pending.done = lambda _: 1 / 0
    await turn()
    instance.finish()
    assert value(await good.future) == 2
    assert not instance.arena.ranges.allocated_bytes


async def test_a_full_queue_refuses_and_counts() -> None:
    _, _, statistics, submit = make(max_batch_size=1, default_queue_policy=QueuePolicy(max_queue_size=1))
    submit(1)
    await turn()
    submit(2)
    with pytest.raises(InferError) as refused:
        submit(3)
    assert refused.value.code is ErrorCode.UNAVAILABLE
    assert statistics.failures[FailureReason.REJECTED] == 1


async def test_a_timeout_fires_while_the_instance_is_busy() -> None:
    _, instance, statistics, submit = make(
        max_batch_size=1, default_queue_policy=QueuePolicy(default_timeout_us=20_000)
    )
    running, late = submit(1), submit(2)
    await turn()
    with pytest.raises(InferError, match="timeout"):
        await late.future
    assert statistics.failures[FailureReason.REJECTED] == 1
    instance.finish()
    assert value(await running.future) == 1


async def test_answers_keep_the_order_of_arrival_also_past_a_cancelled_one() -> None:
    driver, instance, _, submit = make(max_batch_size=1, preserve_ordering=True)
    first, second = submit(1), submit(2)
    await turn()
    driver.cancel(second.pending)
    assert not first.future.done()
    instance.finish()
    assert value(await first.future) == 1


async def test_what_waits_is_refused_when_the_model_goes() -> None:
    driver, instance, statistics, submit = make(max_batch_size=1)
    running, waiting = submit(1), submit(2)
    await turn()
    driver.fail_waiting(InferError(ErrorCode.UNAVAILABLE, "gone"))
    with pytest.raises(InferError, match="gone"):
        await waiting.future
    assert statistics.pending == 0
    instance.finish()
    assert value(await running.future) == 1


async def test_tensors_that_never_fit_are_refused_and_the_next_request_runs() -> None:
    _, instance, _, submit = make(max_batch_size=8192, arena_bytes=16384)
    big = submit(1, rows=8192)
    await turn()
    with pytest.raises(InferError, match="arena") as refused:
        await big.future
    assert refused.value.code is ErrorCode.UNAVAILABLE
    small = submit(2)
    await turn()
    instance.finish()
    assert value(await small.future) == 2


async def test_tensors_that_fit_later_wait_for_room() -> None:
    _, instance, _, submit = make(max_batch_size=2048, arena_bytes=16384)
    instance.free = [0, 1]
    first, second = submit(1, rows=1500), submit(2, rows=1500)
    await turn()
    assert len(instance.running) == 1
    instance.finish()
    value(await first.future)
    await turn()
    instance.finish()
    assert value(await second.future) == 2


async def test_an_answered_request_leaves_nothing_to_the_garbage_collector() -> None:
    """Its body, and the arena that its answer lay in, are given back at once."""
    _, instance, _, submit = make()
    gc.collect()
    gc.disable()
    try:
        mapping = instance.arena._map
        pending = submit(1.0)
        await asyncio.sleep(0)
        instance.finish()
        assert value(await pending.future) == 1.0
        del pending
        await asyncio.sleep(0)
        instance.arena.close()
        assert mapping.closed
    finally:
        gc.enable()


async def test_a_batch_whose_process_has_just_gone_runs_in_the_next_one() -> None:
    driver, instance, statistics, submit = make()
    execute, instance.gone = instance.execute, True

    def dying(*arguments):
        if instance.gone:
            instance.free.clear()
            raise ProcessGoneError
        return execute(*arguments)

    instance.execute = dying
    asked = [submit(1), submit(2)]
    await turn()
    assert (driver.waiting, statistics.pending) == (2, 2)
    instance.gone = False
    instance.free.append(0)
    driver.kick()
    await turn()
    instance.finish()
    assert [value(await a.future) for a in asked] == [1, 2]
    assert (driver.waiting, statistics.pending) == (0, 0)


class Regions:
    """A request's places in a region that can become too short; counts who holds it."""

    def __init__(self) -> None:
        self.region = Region(1, "r", 4, fd=os.memfd_create("client"))
        os.write(self.region.fd, np.float32(7).tobytes())
        self.of_request = RequestRegions({"A": Slice(self.region, 0, 4)}, {})
        self.region.drop()

    @property
    def open(self) -> bool:
        return self.region.fd != -1

    def submit(self, driver: SchedulerDriver, signature: ModelSignature) -> Asked:
        request = InferenceRequest("m", -1, SystemClock.now_ns())
        request.inputs = [InputTensor("A", FP32, (1, 1), b"", RegionRef("r", 0, 4))]
        return Asked(driver, signature.prepare(request, self.of_request))


async def test_a_request_whose_memory_cannot_be_read_leaves_the_batch_and_the_others_run() -> None:
    driver, instance, statistics, submit = make()
    bad, good = Regions(), Regions()
    asked = [submit(1), bad.submit(driver, driver._signature), good.submit(driver, driver._signature)]
    os.ftruncate(bad.region.fd, 0)
    await turn()
    await turn()
    with pytest.raises(InferError) as caught:
        await asked[1].future
    assert (caught.value.code, bad.open) == (ErrorCode.INVALID_ARG, False)
    instance.finish()
    assert [value(await asked[i].future) for i in (0, 2)] == [1, 7]
    assert (statistics.pending, statistics.fail_count, statistics.success_count) == (0, 1, 2)
    assert not good.open
    assert not instance.arena.ranges.allocated_bytes


async def test_a_batch_of_which_no_request_can_be_read_does_not_run() -> None:
    driver, instance, _, submit = make()
    execute = instance.execute

    def copying(payload, *arguments):
        payload.in_place = None
        return execute(payload, *arguments)

    instance.execute = copying
    bad = [Regions(), Regions()]
    asked = [regions.submit(driver, driver._signature) for regions in bad]
    for regions in bad:
        os.ftruncate(regions.region.fd, 0)
    await turn()
    await turn()
    for one in asked:
        with pytest.raises(InferError):
            await one.future
    assert not instance.running
    answered = submit(3)
    await turn()
    instance.finish()
    assert value(await answered.future) == 3


@pytest.mark.parametrize("end", ["answer", "cancelled waiting", "cancelled running", "refused", "unloaded"])
async def test_however_a_request_ends_its_regions_are_let_go_of(end: str) -> None:
    driver, instance, _, submit = make(
        max_batch_size=1, default_queue_policy=QueuePolicy(max_queue_size=1 if end == "refused" else 0)
    )
    regions = Regions()
    if end in ("cancelled waiting", "refused", "unloaded"):
        submit(1)
        await turn()
    if end == "refused":
        submit(2)
        with pytest.raises(InferError):
            regions.submit(driver, driver._signature)
        regions.of_request.drop()  # it was never taken: whoever submits lets go
        assert not regions.open
        return
    asked = regions.submit(driver, driver._signature)
    await turn()
    assert regions.open
    if end == "unloaded":
        driver.fail_waiting(InferError(ErrorCode.UNAVAILABLE, "gone"))
        with pytest.raises(InferError):
            await asked.future
    elif end == "answer":
        instance.finish()
        with pytest.raises(InferError):  # for it claims the input's place as its output's
            await asked.future
    else:
        driver.cancel(asked.pending)
        if end == "cancelled running":
            assert regions.open
            instance.finish()
        await turn()
    assert not regions.open


async def test_requests_that_do_not_fit_together_run_one_after_another() -> None:
    """None of them is at fault, so none is refused."""
    driver, instance, _, submit = make(max_batch_size=4096, arena_bytes=16384)
    instance.on_slot_free = lambda: None
    instance.free = []
    asked = [submit(number, rows=900) for number in range(4)]
    await turn()
    instance.free = [0]
    answers: list[float] = []
    while len(answers) < len(asked):
        driver.kick()
        await turn()
        instance.finish()
        await turn()
        answers += [value(one.future.result()) for one in asked[len(answers) :] if one.future.done()]
    assert answers == [0, 1, 2, 3]
    assert not instance.arena.ranges.allocated_bytes
