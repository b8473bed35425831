"""An inference holds its lease until it is finished or cancelled, and its memory no longer than someone reads it."""

from __future__ import annotations

import asyncio

import pytest

from configs import model, tensor
from headrace.dataplane import RegistryDataPlane
from headrace.instances.signature import ModelSignature
from headrace.scheduling.handing_over import hand_over
from headrace.types import InferenceRequest, InferenceResponse, InputTensor, ServerMetadata
from headrace_protocol.datatype import FP32
from headrace_protocol.errors import ErrorCode, InferError, unavailable


class Driver:
    """Holds what is submitted until the test completes it."""

    def __init__(self) -> None:
        self.done = []
        self.cancelled = []

    def submit(self, _prepared, done):
        self.done.append(done)
        return len(self.done) - 1

    def cancel(self, pending) -> None:
        self.cancelled.append(pending)


class Model:
    def __init__(self) -> None:
        self.config = model([tensor("A", "FP32", 1)], [tensor("B", "FP32", 1)], 8)
        self.name, self.version, self.labels = "m", 1, {}
        self.signature = ModelSignature(self.config, 1)
        self.driver = Driver()
        self.sequences = None


class Registry:
    def __init__(self) -> None:
        self.model = Model()
        self.leases = 0

    def acquire(self, _name: str, _version: int) -> Model:
        self.leases += 1
        return self.model

    def release(self, _model: Model) -> None:
        self.leases -= 1


class Answer(InferenceResponse):
    def __init__(self) -> None:
        self.released = 0
        super().__init__("m", 1, [], release=self.count)

    def count(self) -> None:
        self.released += 1

    __slots__ = ("released",)


def request(rows: int = 1) -> InferenceRequest:
    made = InferenceRequest("m")
    made.inputs = [InputTensor("A", FP32, (rows, 1), bytes(4 * rows))]
    return made


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def plane(registry: Registry) -> RegistryDataPlane:
    return RegistryDataPlane(registry, ServerMetadata("t", "1", ()), strict_readiness=True)


async def begun(plane: RegistryDataPlane) -> asyncio.Task[InferenceResponse]:
    task = asyncio.ensure_future(plane.infer(request()))
    await asyncio.sleep(0)
    return task


async def test_an_answer_ends_the_lease(plane: RegistryDataPlane, registry: Registry) -> None:
    task = await begun(plane)
    assert registry.leases == 1
    answer = Answer()
    registry.model.driver.done[0](answer)
    assert await task is answer
    assert (registry.leases, answer.released) == (0, 0)


async def test_an_error_is_raised_and_ends_the_lease(plane: RegistryDataPlane, registry: Registry) -> None:
    task = await begun(plane)
    registry.model.driver.done[0](unavailable("no"))
    with pytest.raises(InferError, match="no"):
        await task
    assert registry.leases == 0


async def test_a_cancelled_caller_cancels_the_request(plane: RegistryDataPlane, registry: Registry) -> None:
    task = await begun(plane)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert registry.model.driver.cancelled == [0]
    assert registry.leases == 0


async def test_an_answer_in_the_turn_of_the_cancel_is_released(plane: RegistryDataPlane, registry: Registry) -> None:
    task = await begun(plane)
    answer = Answer()
    registry.model.driver.done[0](answer)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (answer.released, registry.leases, registry.model.driver.cancelled) == (1, 0, [])


async def test_a_request_that_does_not_fit_leaves_no_lease(plane: RegistryDataPlane, registry: Registry) -> None:
    with pytest.raises(InferError, match="batch size 9"):
        await plane.infer(request(rows=9))
    assert registry.leases == 0


async def test_cancelling_twice_or_after_the_end_gives_the_lease_back_once(
    plane: RegistryDataPlane, registry: Registry
) -> None:
    first = plane.submit(request(), lambda _: None)
    second = plane.submit(request(), lambda _: None)
    first.cancel()
    first.cancel()
    registry.model.driver.done[1](Answer())
    second.cancel()
    assert registry.leases == 0
    assert registry.model.driver.cancelled == [0]


@pytest.mark.parametrize("begin", ["submit", "stream"])
async def test_a_door_that_fails_to_take_an_answer_is_told_so_and_the_lease_ends_once(
    plane: RegistryDataPlane, registry: Registry, begin: str
) -> None:
    told = []

    def fails_once(outcome) -> None:
        told.append(outcome)
        if len(told) == 1:
            raise ZeroDivisionError

    getattr(plane, begin)(request(), fails_once)
    answer = Answer()
    assert not hand_over(registry.model.driver.done[0], answer)
    assert (told[0], told[1].code) == (answer, ErrorCode.INTERNAL)
    assert (answer.released, registry.leases, plane.under_way()) == (1, 0, 0)


async def test_a_door_that_gives_up_as_it_fails_gives_its_lease_back_once(
    plane: RegistryDataPlane, registry: Registry
) -> None:
    def gives_up(outcome) -> None:
        if isinstance(outcome, InferenceResponse):
            stream.cancel()
            raise ZeroDivisionError

    stream = plane.stream(request(), gives_up)
    answer = Answer()
    answer.final = False
    assert not hand_over(registry.model.driver.done[0], answer)
    assert registry.model.driver.cancelled == [0]
    assert (registry.leases, plane.under_way()) == (0, 0)


async def test_draining_waits_for_what_runs_and_refuses_the_rest(plane: RegistryDataPlane, registry: Registry) -> None:
    task = await begun(plane)
    draining = asyncio.ensure_future(plane.drain(5))
    await asyncio.sleep(0)
    with pytest.raises(InferError, match="shutting down"):
        await plane.infer(request())
    assert not draining.done()
    registry.model.driver.done[0](Answer())
    assert await draining
    await task
