"""The ensemble's driver tells each request's outcome once and, however it ends, lets go of everything."""

from __future__ import annotations

import asyncio
import gc
import os
import weakref

import numpy as np
import pytest

from configs import model, tensor
from headrace.clock import SystemClock
from headrace.ensembles.driver import EnsembleDriver
from headrace.instances.arenas import ArenaTable
from headrace.instances.regions import Region, RequestRegions, Slice
from headrace.instances.signature import ModelSignature
from headrace.observability.statistics import ModelStatistics
from headrace.repository.ensemble_config import Ensemble, EnsembleStep
from headrace.scheduling.ensemble_members import check_members, model_as_member
from headrace.types import InferenceRequest, InferenceResponse, InputTensor, OutputTensor, RegionRef
from headrace_protocol.arena import Arena
from headrace_protocol.datatype import FP32
from headrace_protocol.errors import ErrorCode, FailureReason, InferError, invalid, unavailable


class Step:
    """A request that a member was given."""

    def __init__(self, member: Member, prepared, done) -> None:
        self.member = member
        self.prepared = prepared
        self.done = done
        self.cancelled = False
        self.paused: list[bool] = []

    @property
    def value(self) -> float:
        return float(np.frombuffer(self.prepared.inputs[0].data, np.float32)[0])

    def answer(self, value: float, *, final: bool = True, shape: tuple[int, ...] = (1,)) -> None:
        """Give a response that lies in the member's arena."""
        arena, data = self.member.arena, np.full(shape, value, np.float32).tobytes()
        at = arena.allocate(len(data))
        view = arena.slice(at, len(data))
        view[:] = data
        response = InferenceResponse(
            self.member.name, 1, [OutputTensor("OUTPUT0", FP32, shape, view)], None, lambda: arena.free(at)
        )
        response.final = final
        self.over(response, final=final)

    def over(self, outcome, *, final: bool = True) -> None:
        if final and self.prepared.regions is not None:
            self.prepared.regions.drop()
        self.done(outcome)


class Member:
    """Stands for a model whose requests the test answers; it is its own driver."""

    def __init__(self, name: str, decoupled: bool = False) -> None:
        tensors = [tensor("INPUT0", "FP32", -1)], [tensor("OUTPUT0", "FP32", -1)]
        self.name = name
        self.version = 1
        self.config = model(*tensors, name=name, decoupled=decoupled)
        self.signature = ModelSignature(self.config, 1)
        self.statistics = ModelStatistics()
        self.driver = self
        self.arena = Arena.create(1 << 16)
        self.steps: list[Step] = []
        self.leases = 0
        self.refusal: InferError | None = None

    def submit(self, prepared, done) -> Step:
        if self.refusal is not None:
            raise self.refusal
        self.steps.append(Step(self, prepared, done))
        return self.steps[-1]

    def cancel(self, step: Step) -> None:
        step.cancelled = True
        step.prepared.regions.drop()

    def flow(self, step: Step, *, paused: bool) -> None:
        step.paused.append(paused)


class Bench:
    """An ensemble A -> B with the accesses it needs, which are this object."""

    def __init__(self, decoupled: bool = False, out_dims: tuple[int, ...] = (-1,)) -> None:
        self.a, self.b = Member("A", decoupled), Member("B")
        self.models = {"A": self.a, "B": self.b}
        steps = (
            EnsembleStep("A", -1, {"INPUT0": "INPUT0"}, {"OUTPUT0": "x"}),
            EnsembleStep("B", -1, {"INPUT0": "x"}, {"OUTPUT0": "OUTPUT0"}),
        )
        config = model([tensor("INPUT0", "FP32", -1)], [tensor("OUTPUT0", "FP32", *out_dims)], name="e")
        self.the_plan, problems = check_members(
            config, Ensemble(steps), [model_as_member(m.config) for m in (self.a, self.b)]
        )
        assert not problems
        self.statistics = ModelStatistics(streamed=decoupled)
        self.signature = ModelSignature(config, 1)
        arenas = ArenaTable()
        for member in (self.a, self.b):
            arenas.add(member.arena)
        self.driver = EnsembleDriver(
            Ensemble(steps),
            self,
            self.signature,
            self.statistics,
            self,
            arenas,
            SystemClock(),  # type: ignore[arg-type]
        )
        self.outcomes: list = []

    def plan(self):
        return self.the_plan

    def lease(self, request: InferenceRequest) -> Member:
        member = self.models[request.model_name]
        assert request.nested
        member.leases += 1
        return member

    def give_back(self, member: Member) -> None:
        member.leases -= 1
        assert member.leases >= 0

    def begin(self, member: Member, request: InferenceRequest, regions, _parent, done) -> Step:
        return member.submit(member.signature.prepare(request, regions), done)

    def submit(self, value: float = 1.0, done=None, regions: RequestRegions | None = None):
        request = InferenceRequest("e", -1, SystemClock.now_ns())
        request.id = "mine"
        data = np.full(1, value, np.float32).tobytes() if regions is None else b""
        ref = None if regions is None else RegionRef("r", 0, 4)
        request.inputs = [InputTensor("INPUT0", FP32, (1,), data, ref)]
        return self.driver.submit(self.signature.prepare(request, regions), done or self.outcomes.append)

    def nothing_is_left(self) -> None:
        assert (self.a.leases, self.b.leases) == (0, 0)
        assert (self.a.arena.ranges.allocated_bytes, self.b.arena.ranges.allocated_bytes) == (0, 0)
        assert not self.driver._requests


@pytest.fixture
async def bench():
    return Bench()


def number(response: InferenceResponse) -> float:
    value = float(np.frombuffer(response.outputs[0].data, np.float32)[0])
    response.release()
    return value


async def test_a_request_goes_through_both_steps_and_is_counted_once(bench: Bench) -> None:
    bench.submit(1)
    assert not bench.b.steps
    bench.a.steps[0].answer(2)
    assert bench.b.steps[0].value == 2
    assert bench.a.arena.ranges.allocated_bytes, "the second step still reads it"
    bench.b.steps[0].answer(3)
    (response,) = bench.outcomes
    assert (response.id, response.model_name) == ("mine", "e")
    assert number(response) == 3
    bench.nothing_is_left()
    assert (bench.statistics.success_count, bench.statistics.execution_count) == (1, 1)


async def test_a_step_reads_where_the_one_before_it_wrote(bench: Bench) -> None:
    bench.submit()
    bench.a.steps[0].answer(2)
    memory = bench.b.steps[0].prepared.regions
    (place,) = memory.inputs.values()
    assert place.region.read(place.offset, place.nbytes) == np.float32(2).tobytes()
    bench.b.steps[0].answer(3)
    number(bench.outcomes[0])


async def test_memory_stays_until_the_backend_has_done_with_it_though_the_request_is_cancelled(bench: Bench) -> None:
    pending = bench.submit()
    bench.a.steps[0].answer(2)
    step = bench.b.steps[0]
    step.prepared.regions.hold()  # as a batch does that runs
    bench.driver.cancel(pending)
    assert step.cancelled
    assert bench.a.arena.ranges.allocated_bytes
    step.prepared.regions.drop()
    bench.nothing_is_left()
    assert not bench.outcomes
    assert bench.statistics.failures[FailureReason.CANCELED] == 1
    bench.driver.cancel(pending)
    assert bench.statistics.failures[FailureReason.CANCELED] == 1


@pytest.mark.parametrize("at", ["A", "B"])
async def test_a_failing_step_fails_the_request(bench: Bench, at: str) -> None:
    bench.submit()
    if at == "B":
        bench.a.steps[0].answer(2)
    bench.models[at].steps[0].over(invalid("no"))
    (error,) = bench.outcomes
    assert (error.code, error.message) == (ErrorCode.INVALID_ARG, f"in ensemble 'e', step model '{at}': no")
    bench.nothing_is_left()
    assert bench.statistics.failures[FailureReason.OTHER] == 1


async def test_a_member_that_refuses_at_once_has_submit_raise(bench: Bench) -> None:
    bench.a.refusal = unavailable("the queue is full")
    with pytest.raises(InferError, match="step model 'A': the queue is full") as raised:
        bench.submit()
    assert raised.value.code is ErrorCode.UNAVAILABLE
    bench.nothing_is_left()
    assert not bench.outcomes
    assert bench.statistics.fail_count == 1


async def test_a_member_that_refuses_later_fails_the_request(bench: Bench) -> None:
    bench.submit()
    bench.b.refusal = unavailable("the queue is full")
    bench.a.steps[0].answer(2)
    (error,) = bench.outcomes
    assert error.message == "in ensemble 'e', step model 'B': the queue is full"
    bench.nothing_is_left()


async def test_a_fault_of_our_own_in_a_step_fails_the_request_and_lets_go_of_the_members(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.submit()
    bench.b.refusal = ValueError("a fault")  # type: ignore[assignment]
    bench.a.steps[0].answer(2)
    (error,) = bench.outcomes
    assert error.code is ErrorCode.INTERNAL
    assert "could not begin" in caplog.text
    bench.nothing_is_left()


async def test_a_member_that_is_not_there_has_submit_raise_and_the_others_are_given_back(bench: Bench) -> None:
    leased, bench.lease = bench.lease, None

    def lease(request: InferenceRequest) -> Member:
        if request.model_name == "B":
            raise unavailable("it is gone")
        return leased(request)

    bench.driver._access.lease = lease
    with pytest.raises(InferError, match="step model 'B': it is gone"):
        bench.submit()
    bench.nothing_is_left()


async def test_an_output_of_another_shape_than_the_ensemble_says_is_the_ensemble_s_fault() -> None:
    bench = Bench(out_dims=(3,))
    bench.submit()
    bench.a.steps[0].answer(2)
    bench.b.steps[0].answer(3, shape=(2,))
    (error,) = bench.outcomes
    assert error.code is ErrorCode.INTERNAL
    assert "in ensemble 'e': output 'OUTPUT0' has the shape [2]" in error.message
    bench.nothing_is_left()


async def test_an_ensemble_that_is_taken_down_fails_what_runs(bench: Bench) -> None:
    bench.submit()
    bench.submit()
    bench.driver.fail_waiting(unavailable("gone"))
    assert [str(outcome) for outcome in bench.outcomes] == ["gone", "gone"]
    assert all(step.cancelled for step in bench.a.steps)
    bench.nothing_is_left()


async def test_who_fails_to_take_an_answer_costs_nobody_anything(bench: Bench, caplog) -> None:
    bench.submit(done=lambda _: 1 / 0)
    bench.a.steps[0].over(invalid("no"))
    assert "could not be handed over" in caplog.text
    bench.nothing_is_left()


async def test_who_fails_to_take_a_response_of_a_stream_gets_an_error_and_its_steps_are_cancelled() -> None:
    bench = Bench(decoupled=True)
    told = []

    def fails_once(outcome) -> None:
        told.append(outcome)
        if len(told) == 1:
            raise ZeroDivisionError

    bench.submit(done=fails_once)
    bench.a.steps[0].answer(1, final=False)
    bench.b.steps[0].answer(2)
    assert told[1].code is ErrorCode.INTERNAL
    assert bench.a.steps[0].cancelled
    assert len(told) == 2
    bench.nothing_is_left()


async def test_a_response_given_up_in_the_call_that_brought_it_ends_the_stream() -> None:
    bench = Bench(decoupled=True)
    pending = None

    def give_up(response: InferenceResponse) -> None:
        number(response)
        bench.outcomes.append(response)
        bench.driver.cancel(pending)

    pending = bench.submit(done=give_up)
    stream = bench.a.steps[0]
    for value in (1, 2):
        stream.answer(value, final=False)
    bench.b.steps[1].answer(20)
    bench.b.steps[0].answer(10)
    assert len(bench.outcomes) == 1, "both were ready; the first was enough"
    assert stream.cancelled
    bench.nothing_is_left()


async def test_flow_reaches_the_member_that_streams() -> None:
    bench = Bench(decoupled=True)
    pending = bench.submit()
    bench.driver.flow(pending, paused=True)
    bench.driver.flow(pending, paused=False)
    assert bench.a.steps[0].paused == [True, False]
    bench.driver.cancel(pending)
    bench.nothing_is_left()


async def test_a_stream_is_counted_response_by_response() -> None:
    bench = Bench(decoupled=True)
    bench.submit()
    bench.a.steps[0].answer(1, final=False)
    bench.b.steps[0].answer(2)
    assert bench.statistics.success_count == 0
    bench.a.steps[0].answer(3)
    bench.b.steps[1].answer(4)
    assert [number(outcome) for outcome in bench.outcomes] == [2, 4]
    assert [outcome.final for outcome in bench.outcomes] == [False, True]
    assert [response.success_count for response in bench.statistics.responses] == [1, 1]
    assert (bench.statistics.success_count, sum(bench.statistics.first_response.counts)) == (1, 1)
    bench.nothing_is_left()


async def test_regions_of_the_client_are_held_for_as_long_as_a_step_may_read_them(bench: Bench) -> None:
    region = Region(1, "r", 4, fd=os.memfd_create("client"))
    os.write(region.fd, np.float32(7).tobytes())
    regions = RequestRegions({"INPUT0": Slice(region, 0, 4)}, {})
    region.drop()
    bench.submit(regions=regions)
    memory = bench.a.steps[0].prepared.regions
    assert memory.inputs["INPUT0"].region is region
    assert region.fd != -1
    bench.a.steps[0].answer(2)
    bench.b.steps[0].answer(3)
    assert region.fd == -1
    number(bench.outcomes[0])
    bench.nothing_is_left()


async def test_an_answered_request_leaves_nothing_to_the_garbage_collector(bench: Bench) -> None:
    gc.collect()
    gc.disable()
    try:
        pending = bench.submit()
        request, run = weakref.ref(pending), weakref.ref(pending._run)
        bench.a.steps.pop().answer(2)
        bench.b.steps.pop().answer(3)
        number(bench.outcomes.pop())
        del pending
        await asyncio.sleep(0)
        assert (request(), run()) == (None, None)
    finally:
        gc.enable()
