"""A model with sequences in it is kept, found again for their next requests, and waited for when the server stops."""

from __future__ import annotations

import asyncio

import pytest

from configs import model, tensor
from headrace.dataplane import RegistryDataPlane
from headrace.instances.signature import ModelSignature
from headrace.types import SEQUENCE_START, InferenceRequest, InferenceResponse, InputTensor, ServerMetadata
from headrace_protocol.datatype import FP32
from headrace_protocol.errors import ErrorCode, InferError


class Sequences:
    """The driver of a model of sequences, played by the test."""

    def __init__(self) -> None:
        self.on_occupied = None
        self.held: set[int | str] = set()
        self.done = []

    def holds(self, correlation_id: int | str) -> bool:
        return correlation_id in self.held

    def submit(self, _prepared, done):
        self.done.append(done)
        return len(self.done)


class Model:
    accepting = True

    def __init__(self) -> None:
        self.config = model([tensor("A", "FP32", 1)], [tensor("B", "FP32", 1)], 8)
        self.name, self.version, self.labels = "m", 1, {}
        self.signature = ModelSignature(self.config, 1)
        self.sequences = self.driver = Sequences()


class Registry:
    """Two copies of a model: the old one drains."""

    def __init__(self) -> None:
        self.old, self.new = Model(), Model()
        self.leases = {id(self.old): 0, id(self.new): 0}

    def acquire(self, _name: str, _version: int) -> Model:
        self.leases[id(self.new)] += 1
        return self.new

    def acquire_where(self, _name: str, _version: int, fits) -> Model | None:
        found = next((model for model in (self.old, self.new) if fits(model)), None)
        if found is not None:
            self.hold(found)
        return found

    def hold(self, model: Model) -> None:
        self.leases[id(model)] += 1

    def release(self, model: Model) -> None:
        self.leases[id(model)] -= 1


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def plane(registry: Registry) -> RegistryDataPlane:
    return RegistryDataPlane(registry, ServerMetadata("t", "1", ()), strict_readiness=True)


def request(sequence: int, flags: int = 0) -> InferenceRequest:
    made = InferenceRequest("m")
    made.correlation_id, made.flags = sequence, flags
    made.inputs = [InputTensor("A", FP32, (1, 1), bytes(4))]
    return made


def answer() -> InferenceResponse:
    return InferenceResponse("m", 1, [])


def test_a_request_goes_to_the_copy_that_has_its_sequence_and_a_start_to_the_new_one(registry, plane) -> None:
    registry.old.sequences.held.add(7)
    for asked, where in (
        (request(7), registry.old),
        (request(7, SEQUENCE_START), registry.new),
        (request(8), registry.new),
    ):
        before = len(where.sequences.done)
        plane.submit(asked, lambda _: None)
        assert len(where.sequences.done) == before + 1
        assert registry.leases[id(where)] == 1
        where.sequences.done[-1](answer())
        assert registry.leases[id(where)] == 0


def test_a_model_is_held_from_its_first_sequence_to_its_last(registry, plane) -> None:
    plane.submit(request(1, SEQUENCE_START), lambda _: None)
    registry.new.sequences.on_occupied(True)
    registry.new.sequences.done[0](answer())
    assert registry.leases[id(registry.new)] == 1
    registry.new.sequences.on_occupied(False)
    assert registry.leases[id(registry.new)] == 0


async def test_a_stopping_server_takes_the_next_requests_of_sequences_and_waits_for_their_ends(registry, plane) -> None:
    plane.submit(request(1, SEQUENCE_START), lambda _: None)
    sequences = registry.new.sequences
    sequences.on_occupied(True)
    sequences.held.add(1)
    sequences.done[0](answer())
    drain = asyncio.create_task(plane.drain(10))
    await asyncio.sleep(0)
    for refused in (request(2, SEQUENCE_START), request(2)):
        with pytest.raises(InferError) as caught:
            plane.submit(refused, lambda _: None)
        assert caught.value.code is ErrorCode.UNAVAILABLE
    plane.submit(request(1), lambda _: None)
    sequences.done[-1](answer())
    await asyncio.sleep(0)
    assert not drain.done()
    sequences.on_occupied(False)
    assert await drain is True


async def test_only_requests_that_are_cut_off_count_against_a_stop(registry, plane) -> None:
    plane.submit(request(1, SEQUENCE_START), lambda _: None)
    registry.new.sequences.on_occupied(True)
    assert await plane.drain(0.01) is False
    registry.new.sequences.done[0](answer())
    assert await plane.drain(0.01) is True
