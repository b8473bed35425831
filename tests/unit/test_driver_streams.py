"""The driver of a decoupled model counts each response, to the nanosecond, and each request once."""

from __future__ import annotations

import asyncio

from configs import model, tensor
from headrace.instances.signature import ModelSignature
from headrace.observability.statistics import ModelStatistics
from headrace.scheduling.driver import SchedulerDriver
from headrace.scheduling.factory import make_scheduler
from headrace.types import InferenceRequest, InferenceResponse, InputTensor
from headrace_protocol.datatype import FP32
from headrace_protocol.errors import ErrorCode, FailureReason, internal
from headrace_protocol.messages import BatchDone


class HandClock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.ns = 1_000

    def now_ns(self) -> int:
        return self.ns

    def wall_ns(self) -> int:
        return 5_000_000


class OneInstance:
    """Stands where a backend process would; the test says what it answers, and when."""

    def __init__(self) -> None:
        self.running: list = []
        self.cancels: list[tuple[int, int]] = []

    def free_process(self):
        return self

    def busy(self) -> int:
        return len(self.running)

    def execute(self, payload, on_done, on_response, _instance=None) -> int:
        self.running.append((payload, on_done, on_response))
        return len(self.running)

    def cancel(self, batch: int, request: int) -> None:
        self.cancels.append((batch, request))


class Stream:
    """One request under way; `respond` is what its backend does."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.statistics = ModelStatistics(streamed=True)
        self.outcomes: list = []
        self.released = 0
        self._instance = OneInstance()
        config = model([tensor("A", "FP32", 1)], [tensor("B", "FP32", 1)], 8, decoupled=True)
        signature = ModelSignature(config, 1)
        scheduler = make_scheduler(config)
        self.driver = SchedulerDriver(scheduler, self._instance, signature, self.statistics, self.clock, decoupled=True)
        request = InferenceRequest("m", -1, self.clock.now_ns())
        request.inputs = [InputTensor("A", FP32, (2, 1), bytes(8))]
        self.clock.ns += 10  # between arrival and queue
        self.pending = self.driver.submit(signature.prepare(request), self.outcomes.append)
        self.clock.ns += 100  # in the queue

    async def start(self) -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    def respond(self, after_ns: int, *, final: bool = False, empty: bool = False) -> None:
        self.clock.ns += after_ns
        response = InferenceResponse("m", 1, [], release=self._release)
        response.final, response.empty = final, empty
        payload, _, on_response = self._instance.running[0]
        on_response(payload, 0, response)

    def fail(self, after_ns: int) -> None:
        self.clock.ns += after_ns
        payload, _, on_response = self._instance.running[0]
        on_response(payload, 0, internal("no", FailureReason.BACKEND))

    def end_batch(self) -> None:
        payload, on_done, _ = self._instance.running[0]
        on_done(payload, [], BatchDone(1, 7, 8, 9))

    def _release(self) -> None:
        self.released += 1

    def stats(self, key: int):
        return self.statistics.to_proto("m", "1").response_stats[str(key)]


async def test_each_response_is_timed_from_the_one_before() -> None:
    stream = Stream()
    await stream.start()
    stream.respond(1_000)
    stream.respond(20)
    stream.respond(3, final=True, empty=True)
    assert (stream.stats(0).success.count, stream.stats(0).compute_infer.ns) == (1, 1_000)
    assert (stream.stats(1).success.count, stream.stats(1).compute_infer.ns) == (1, 20)
    assert (stream.stats(2).empty_response.count, stream.stats(2).empty_response.ns) == (1, 3)
    assert len(stream.outcomes) == 3


async def test_the_request_is_one_success_from_arrival_to_its_end() -> None:
    stream = Stream()
    await stream.start()
    stream.end_batch()
    for _ in range(4):
        stream.respond(5)
    stream.respond(5, final=True)
    stats = stream.statistics.to_proto("m", "1")
    assert (stats.inference_stats.success.count, stats.inference_stats.success.ns) == (1, 135)
    assert (stats.inference_stats.queue.ns, stats.inference_stats.compute_infer.ns) == (100, 25)
    assert (stats.inference_count, stats.execution_count, stats.last_inference) == (2, 1, 5)
    assert [(batch.batch_size, batch.compute_infer.ns) for batch in stats.batch_stats] == [(2, 8)]
    assert stream.statistics.pending == 0


async def test_the_time_to_the_first_response_is_observed_once() -> None:
    stream = Stream()
    await stream.start()
    stream.respond(50)
    stream.respond(50, final=True)
    assert (stream.statistics.first_response.count, stream.statistics.first_response.sum) == (1, 160)


async def test_an_error_ends_the_request_as_a_failure_after_its_good_responses() -> None:
    stream = Stream()
    await stream.start()
    stream.respond(50)
    stream.fail(7)
    assert (stream.stats(0).success.count, stream.stats(1).fail.count, stream.stats(1).fail.ns) == (1, 1, 7)
    assert stream.statistics.failures[FailureReason.BACKEND] == 1
    assert stream.statistics.success_count == 0


async def test_who_fails_to_take_a_response_gets_an_error_and_the_model_need_not_go_on() -> None:
    stream = Stream()
    told = []

    def fails_at_the_second(outcome) -> None:
        told.append(outcome)
        if len(told) == 2:
            raise ZeroDivisionError

    stream.pending.done = fails_at_the_second
    await stream.start()
    stream.respond(50)
    stream.respond(50)
    assert told[2].code is ErrorCode.INTERNAL
    assert stream._instance.cancels == [(1, 0)]
    stream.respond(50)
    stream.respond(50, final=True)
    assert len(told) == 3
    assert stream.released == 3, "all but the first, which its reader has"


async def test_a_cancelled_request_counts_once_however_much_was_on_its_way() -> None:
    stream = Stream()
    await stream.start()
    stream.respond(50)
    stream.driver.cancel(stream.pending)
    stream.respond(5)
    stream.respond(5)
    stream.respond(5, final=True)
    assert len(stream.outcomes) == 1
    assert stream.released == 3, "what nobody reads keeps its memory"
    assert stream.stats(1).cancel.count == 1
    assert sorted(stream.statistics.to_proto("m", "1").response_stats) == ["0", "1"]
    assert stream.statistics.failures[FailureReason.CANCELED] == 1
    assert stream.statistics.success_count == 0


async def test_a_request_cancelled_in_the_queue_has_no_response_to_count() -> None:
    stream = Stream()
    stream.driver.cancel(stream.pending)
    await stream.start()
    assert not stream.statistics.responses
    assert stream.statistics.failures[FailureReason.CANCELED] == 1
    assert stream.statistics.pending == 0
