"""The driver of sequences completes each request once, and tells processes what ends unseen by them."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from configs import model, tensor
from headrace.clock import SystemClock
from headrace.instances.signature import ModelSignature
from headrace.observability.statistics import ModelStatistics
from headrace.repository.model_config import SequenceBatching
from headrace.scheduling.ordering import OrderedRelease
from headrace.scheduling.sequence import SequenceBatcher
from headrace.scheduling.sequence_driver import InstancePlace, SequenceDriver
from headrace.types import SEQUENCE_END, SEQUENCE_START, InferenceRequest, InferenceResponse, InputTensor
from headrace_protocol.arena import Arena
from headrace_protocol.datatype import FP32
from headrace_protocol.errors import ErrorCode, FailureReason, InferError
from headrace_protocol.messages import BatchDone, Error, Response
from headrace_protocol.tensor import Tensor

START, END = SEQUENCE_START, SEQUENCE_END


class FakeProcess:
    """Stands where a backend process would: it answers when it is told to, and notes what it is told."""

    def __init__(self, instances: int, arena_bytes: int = 1 << 16) -> None:
        self.arena = Arena.create(arena_bytes)
        self.free = list(range(instances))
        self.running: dict[int, tuple] = {}
        self.cancels: list[tuple[int, int]] = []
        self.ended: list[int] = []
        self.number = 0
        self.gate = None

    def execute(self, payload, on_done, on_response, instance) -> int:
        command = payload.gather(self.arena, self.number + 1, instance)
        self.number += 1
        self.free.remove(instance)
        self.running[instance] = (self.number, payload, command, on_done, on_response)
        return self.number

    def cancel(self, batch: int, request: int) -> None:
        self.cancels.append((batch, request))

    def end_sequences(self, numbers) -> None:
        self.ended += numbers


class Rig:
    """A driver over fake processes; it is its own InstancePool."""

    def __init__(self, max_batch_size: int = 4, instances: int = 1, *, processes: int = 1, **batching) -> None:
        settings = SequenceBatching(**{"oldest": True, "max_idle_us": 60_000_000, **batching})
        config = model([tensor("A", "FP32", 1)], [tensor("B", "FP32", 1)], max_batch_size, sequence_batching=settings)
        self.hosts = [type("Host", (), {"process": FakeProcess(instances)})() for _ in range(processes)]
        self.signature = ModelSignature(config, 1)
        self.statistics = ModelStatistics()
        self.occupied: list[bool] = []
        places = [InstancePlace(host, slot) for host in self.hosts for slot in range(instances)]
        ordering = OrderedRelease() if settings.preserve_ordering else None
        self.batcher = SequenceBatcher(settings, max_batch_size, len(places), "m", ordering)
        self.driver = SequenceDriver(
            self.batcher,
            places,
            self,
            self.signature,
            self.statistics,
            SystemClock(),
            ordering,
            iterative=settings.iterative,
        )
        self.driver.on_occupied = self.occupied.append

    def free_process(self):
        raise AssertionError("sequences are bound to instances")

    def busy(self) -> int:
        return sum(len(host.process.running) for host in self.hosts if host.process is not None)

    def submit(self, sequence: int | str, value: float, flags: int = 0, timeout_us: int = 0) -> Asked:
        request = InferenceRequest("m", -1, SystemClock.now_ns())
        request.correlation_id, request.flags, request.timeout_us = sequence, flags, timeout_us
        request.inputs = [InputTensor("A", FP32, (1, 1), np.full((1, 1), value, np.float32).tobytes())]
        return Asked(self.driver, self.signature.prepare(request))

    def finish(self, instance: int = 0, host: int = 0, *responses: Response) -> None:
        """Answer what runs in an instance with its own inputs, or with `responses`."""
        process = self.hosts[host].process
        number, payload, command, on_done, _ = process.running.pop(instance)
        source = command.inputs[0]
        outputs = None if responses else [Tensor("B", source.datatype, source.shape, source.ref)]
        results = payload.scatter(outputs, responses, [])
        process.free.append(instance)
        on_done(payload, results, BatchDone(number, 1, 2, 3))
        payload.release()
        self.driver.kick()

    def die(self, host: int = 0) -> FakeProcess:
        """End a process as ModelProcess does: what runs fails, then it is gone, and the driver looks again."""
        process, error = self.hosts[host].process, InferError(ErrorCode.UNAVAILABLE, "it died", FailureReason.BACKEND)
        for _, payload, _, on_done, _ in process.running.values():
            on_done(payload, [error] * len(payload.requests), None)
            payload.release()
        process.running.clear()
        self.hosts[host].process = None
        self.driver.kick()
        return process

    def headers(self, instance: int = 0, host: int = 0):
        """Return what a running batch tells the process of its requests."""
        return self.hosts[host].process.running[instance][2].requests


class Asked:
    """A request that was submitted, and what became of it."""

    def __init__(self, driver: SequenceDriver, prepared) -> None:
        self.future = asyncio.get_running_loop().create_future()
        self.pending = driver.submit(prepared, self.done)

    def done(self, outcome: InferenceResponse | InferError) -> None:
        if isinstance(outcome, InferenceResponse):
            self.future.set_result(float(np.frombuffer(outcome.outputs[0].data, np.float32)[0]))
            outcome.release()
        else:
            self.future.set_result(outcome)

    async def outcome(self) -> float | InferError:
        async with asyncio.timeout(5):
            return await self.future


async def turn() -> None:
    """Let what is due in the loop happen."""
    for _ in range(4):
        await asyncio.sleep(0)


async def failed(asked: Asked, code: ErrorCode, text: str = "") -> None:
    outcome = await asked.outcome()
    assert isinstance(outcome, InferError), outcome
    assert outcome.code is code
    assert text in outcome.message


async def test_requests_of_a_sequence_run_one_after_the_other_and_those_of_others_beside_them() -> None:
    rig = Rig()
    asked = [rig.submit(1, 10, START), rig.submit(1, 11), rig.submit(2, 20, START), rig.submit(1, 12, END)]
    await turn()
    assert [(h.correlation_id, h.flags) for h in rig.headers()] == [(1, START), (2, START)]
    numbers = [h.sequence for h in rig.headers()]
    assert len(set(numbers)) == 2
    assert all(numbers)
    rig.finish()
    await turn()
    assert [(h.correlation_id, h.flags, h.sequence) for h in rig.headers()] == [(1, 0, numbers[0])]
    rig.finish()
    await turn()
    assert [(h.correlation_id, h.flags) for h in rig.headers()] == [(1, END)]
    rig.finish()
    assert [await a.outcome() for a in asked] == [10, 11, 20, 12]
    assert (rig.statistics.execution_count, rig.statistics.inference_count, rig.statistics.pending) == (3, 4, 0)
    assert rig.hosts[0].process.ended == []
    assert rig.driver.active == 1


async def test_a_refused_request_is_not_counted_and_holds_nothing() -> None:
    rig = Rig()
    for sequence in (0, "", 5):
        with pytest.raises(InferError) as caught:
            rig.submit(sequence, 1)
        assert caught.value.code is ErrorCode.INVALID_ARG
    assert rig.statistics.fail_count == rig.statistics.pending == 0
    assert rig.occupied == []


async def test_cancelling_a_request_cancels_what_waits_of_its_sequence_and_frees_the_slot_once() -> None:
    rig = Rig(max_candidate_sequences=1)
    running, second, third = rig.submit(1, 1, START), rig.submit(1, 2), rig.submit(1, 3)
    await turn()
    other = rig.submit(2, 20, START)
    rig.driver.cancel(second.pending)
    await failed(third, ErrorCode.CANCELLED, "same sequence")
    await turn()
    rig.batcher.check_integrity()
    assert rig.driver.active == 1, "the first still runs in the slot"
    with pytest.raises(InferError, match="start flag"):
        rig.submit(1, 4)
    rig.finish()
    assert await running.outcome() == 1
    await turn()
    assert [h.correlation_id for h in rig.headers()] == [2]
    assert rig.hosts[0].process.ended == [1], "the process has to forget the first before the slot is given on"
    rig.finish()
    assert await other.outcome() == 20
    assert rig.statistics.failures[FailureReason.CANCELED] == 2
    assert rig.statistics.pending == 0


async def test_cancelling_a_running_request_ends_its_sequence_when_it_is_over() -> None:
    rig = Rig()
    running, waiting = rig.submit(1, 1, START), rig.submit(1, 2)
    await turn()
    rig.driver.cancel(running.pending)
    assert rig.hosts[0].process.cancels == [(1, 0)]
    await failed(waiting, ErrorCode.CANCELLED)
    assert rig.driver.active == 1
    rig.finish()
    await turn()
    assert rig.driver.active == 0
    assert rig.hosts[0].process.ended == [1]
    assert rig.occupied == [True, False]
    assert not running.future.done()


async def test_what_waits_of_a_lost_sequence_fails_and_what_has_not_begun_goes_on() -> None:
    rig = Rig(max_candidate_sequences=1)
    running, waiting, backlog = rig.submit(1, 1, START), rig.submit(1, 2), rig.submit(2, 3, START | END)
    await turn()
    dead = rig.die()
    await failed(running, ErrorCode.UNAVAILABLE, "it died")
    await failed(waiting, ErrorCode.UNAVAILABLE, "start it again")
    with pytest.raises(InferError, match="start flag"):
        rig.submit(1, 4)
    assert rig.driver.backlog == 1
    rig.hosts[0].process = FakeProcess(1)
    rig.driver.kick()
    await turn()
    rig.finish()
    assert await backlog.outcome() == 3
    assert dead.ended == []
    assert rig.statistics.failures[FailureReason.BACKEND] == 2


async def test_a_process_that_was_replaced_unseen_has_lost_its_sequences_too() -> None:
    rig = Rig()
    first = rig.submit(1, 1, START)
    await turn()
    rig.finish()
    assert await first.outcome() == 1
    rig.hosts[0].process = FakeProcess(1)
    with pytest.raises(InferError, match="start flag"):
        rig.submit(1, 2)


async def test_sequences_stay_in_their_instance_and_go_to_the_least_loaded_first() -> None:
    rig = Rig(instances=2, processes=2, max_candidate_sequences=2)
    asked = [rig.submit(n, n, START) for n in range(1, 6)]
    await turn()
    where = [(h, i, [r.correlation_id for r in rig.headers(i, h)]) for h in (0, 1) for i in (0, 1)]
    assert where == [(0, 0, [1, 5]), (0, 1, [2]), (1, 0, [3]), (1, 1, [4])]
    for host, instance, _ in where:
        rig.finish(instance, host)
    asked += [rig.submit(n, n + 10, END) for n in range(5, 0, -1)]
    await turn()
    assert [sorted(r.correlation_id for r in rig.headers(i, h)) for h, i, _ in where] == [[1, 5], [2], [3], [4]]
    for host, instance, _ in where:
        rig.finish(instance, host)
    assert [await a.outcome() for a in asked] == [1, 2, 3, 4, 5, 15, 14, 13, 12, 11]


async def test_a_batch_that_has_no_room_in_the_arena_waits_for_it_and_fails_where_none_will_come() -> None:
    rig = Rig(instances=2, max_candidate_sequences=1)
    rig.hosts[0].process = process = FakeProcess(2, arena_bytes=4096)
    room = process.arena.allocate(4096 - 128)  # a request and its answer take 128 bytes
    first, blocked = rig.submit(1, 1, START), rig.submit(2, 2, START)
    await turn()
    assert list(process.running) == [0]
    assert rig.driver.waiting == 1
    rig.finish(0)
    await turn()
    assert list(process.running) == [1], "its sequence is bound to the other instance"
    assert await first.outcome() == 1
    more = rig.submit(1, 5)
    await turn()
    rig.driver.cancel(more.pending)
    rig.finish(1)
    assert await blocked.outcome() == 2
    await turn()
    rig.finish(0)
    all_of_it = process.arena.allocate(128)
    none = rig.submit(2, 3)
    await failed(none, ErrorCode.UNAVAILABLE, "arena")
    process.arena.free(all_of_it)
    process.arena.free(room)
    again = rig.submit(2, 5)
    await turn()
    rig.finish(1)
    assert await again.outcome() == 5, "a request that did not run does not end its sequence"
    assert rig.statistics.pending == 0
    rig.batcher.check_integrity()


async def test_answers_are_in_the_order_in_which_requests_could_run_where_that_is_asked_for() -> None:
    rig = Rig(instances=2, max_candidate_sequences=1, preserve_ordering=True)
    told: list[int] = []
    asked = [rig.submit(n, n, START) for n in (1, 2)]
    for number, one in enumerate(asked, 1):
        one.future.add_done_callback(lambda _, number=number: told.append(number))
    waiting = rig.submit(3, 3, START)
    await turn()
    rig.finish(1)
    await turn()
    assert told == []
    rig.driver.cancel(waiting.pending)
    rig.finish(0)
    await turn()
    assert told == [1, 2]
    assert [await a.outcome() for a in asked] == [1, 2]


async def test_an_iterative_model_has_a_request_run_until_it_answers() -> None:
    rig = Rig(iterative=True)
    first, second = rig.submit(0, 1), rig.submit(9, 2)
    await turn()
    own, given = rig.headers()
    assert (own.flags, given.flags, given.correlation_id) == (START, START, 9)
    assert own.correlation_id not in (0, 9)
    rig.finish(0, 0, Response(0, reschedule=True), Response(1, reschedule=True))
    await turn()
    assert [(h.flags, h.correlation_id, h.sequence) for h in rig.headers()] == [
        (0, own.correlation_id, own.sequence),
        (0, 9, given.sequence),
    ]
    rig.finish(0, 0, Response(0, reschedule=True), Response(1, error=Error("INTERNAL", "planned")))
    await failed(second, ErrorCode.INTERNAL, "planned")
    await turn()
    rig.finish()
    assert await first.outcome() == 1
    await turn()
    assert (rig.driver.active, rig.statistics.pending, rig.statistics.execution_count) == (0, 0, 2)
    assert sorted(rig.hosts[0].process.ended) == [own.sequence, given.sequence]


async def test_a_rescheduled_request_that_nobody_waits_for_ends() -> None:
    rig = Rig(iterative=True)
    asked = rig.submit(0, 1)
    await turn()
    rig.driver.cancel(asked.pending)
    rig.finish(0, 0, Response(0, reschedule=True))
    await turn()
    assert (rig.driver.active, rig.driver.waiting) == (0, 0)
    assert rig.statistics.failures[FailureReason.CANCELED] == 1


async def test_rescheduling_is_an_error_where_the_model_is_not_iterative() -> None:
    rig = Rig()
    asked = rig.submit(1, 1, START)
    await turn()
    rig.finish(0, 0, Response(0, reschedule=True))
    await failed(asked, ErrorCode.INVALID_ARG, "iterative_sequence")


async def test_an_idle_sequence_ends_by_the_timer_and_its_process_is_told() -> None:
    rig = Rig(max_idle_us=20_000)
    first = rig.submit(1, 1, START)
    await turn()
    rig.finish()
    assert await first.outcome() == 1
    empty = asyncio.Event()
    rig.driver.on_occupied = lambda _: empty.set()
    async with asyncio.timeout(5):
        await empty.wait()
    assert rig.driver.active == 0
    assert rig.hosts[0].process.ended == [1]


async def test_a_timeout_in_the_backlog_rejects_the_whole_sequence() -> None:
    rig = Rig(max_candidate_sequences=1)
    rig.submit(1, 1, START)
    late, also = rig.submit(2, 2, START, timeout_us=10_000), rig.submit(2, 3)
    await failed(late, ErrorCode.UNAVAILABLE, "waited for a free slot")
    await failed(also, ErrorCode.UNAVAILABLE, "waited for a free slot")
    assert rig.statistics.failures[FailureReason.REJECTED] == 2
    assert rig.driver.backlog == 0


async def test_what_waits_is_answered_when_the_model_ends() -> None:
    rig = Rig(max_candidate_sequences=1)
    running, waiting, backlog = rig.submit(1, 1, START), rig.submit(1, 2), rig.submit(2, 3, START)
    await turn()
    rig.driver.fail_waiting(InferError(ErrorCode.UNAVAILABLE, "over"))
    await failed(waiting, ErrorCode.UNAVAILABLE, "over")
    await failed(backlog, ErrorCode.UNAVAILABLE, "over")
    assert rig.occupied == [True]
    rig.finish()
    assert await running.outcome() == 1
    assert rig.occupied == [True, False]
    assert rig.statistics.pending == 0
