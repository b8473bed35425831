"""A batch is gathered into the arena and each request gets its own rows back."""

from __future__ import annotations

import fcntl
import os

import numpy as np
import pytest

from configs import model, tensor
from headrace.instances.payload import Payload
from headrace.instances.signature import ModelSignature
from headrace.types import InferenceRequest, InputTensor, RequestedOutput
from headrace_protocol.arena import Arena, ArenaFullError
from headrace_protocol.datatype import BYTES, FP32, decode_bytes, encode_bytes
from headrace_protocol.errors import ErrorCode, InferError
from headrace_protocol.messages import Error, Response
from headrace_protocol.tensor import Tensor, TensorRef

SIGNATURE = ModelSignature(model([tensor("A", "FP32", 2)], [tensor("A2", "FP32", 2)], 8), 1)
STRINGS = ModelSignature(model([tensor("A", "BYTES", -1)], [tensor("A2", "BYTES", -1)], 8), 1)


def prepare(signature: ModelSignature, array: np.ndarray, outputs: list[str] | None = None):
    made = InferenceRequest("m")
    if array.dtype == np.float32:
        made.inputs = [InputTensor("A", FP32, array.shape, array.tobytes())]
    else:
        made.inputs = [InputTensor("A", BYTES, array.shape, encode_bytes(list(array.reshape(-1))))]
    made.outputs = [RequestedOutput(name) for name in outputs] if outputs else None
    return signature.prepare(made)


def rows(*values: float) -> np.ndarray:
    return np.array([[value, value] for value in values], np.float32)


def echo(command, name: str = "A2") -> Tensor:
    source = command.inputs[0]
    return Tensor(name, source.datatype, source.shape, source.ref)


def test_rows_go_in_one_after_another_and_come_back_to_their_owners() -> None:
    arena = Arena.create(1 << 16)
    payload = Payload(SIGNATURE, [prepare(SIGNATURE, rows(1, 2)), prepare(SIGNATURE, rows(3))])
    command = payload.gather(arena, 1, 0)
    assert command.inputs[0].shape == (3, 2)
    assert [header.rows for header in command.requests] == [2, 1]
    first, second = payload.scatter([echo(command)], [], [])
    assert np.frombuffer(first.outputs[0].data, np.float32).tolist() == [1, 1, 2, 2]
    assert second.outputs[0].shape == (1, 2)
    assert np.frombuffer(second.outputs[0].data, np.float32).tolist() == [3, 3]
    arena.close()


def test_memory_is_free_only_when_the_backend_and_every_response_let_go() -> None:
    arena = Arena.create(1 << 16)
    payload = Payload(SIGNATURE, [prepare(SIGNATURE, rows(1)), prepare(SIGNATURE, rows(2))])
    results = payload.scatter([echo(payload.gather(arena, 1, 0))], [], [])
    payload.release()
    for result in results:
        assert arena.ranges.allocated_bytes
        result.release()
        result.release()
    assert not arena.ranges.allocated_bytes
    arena.close()


def test_strings_of_unlike_length_are_cut_between_requests() -> None:
    arena = Arena.create(1 << 16)
    first = np.array([[b"a", b"bcd"]], object)
    second = np.array([[b"", b"xyz" * 50], [b"q", b"r"]], object)
    payload = Payload(STRINGS, [prepare(STRINGS, first), prepare(STRINGS, second)])
    results = payload.scatter([echo(payload.gather(arena, 1, 0))], [], [])
    assert decode_bytes(results[0].outputs[0].data, 2) == [b"a", b"bcd"]
    assert decode_bytes(results[1].outputs[0].data, 4) == [b"", b"xyz" * 50, b"q", b"r"]
    arena.close()


def test_an_error_for_one_request_leaves_the_others_their_rows() -> None:
    arena = Arena.create(1 << 16)
    payload = Payload(SIGNATURE, [prepare(SIGNATURE, rows(1)), prepare(SIGNATURE, rows(2))])
    command = payload.gather(arena, 1, 0)
    results = payload.scatter([echo(command)], [Response(0, error=Error("INVALID_ARG", "no"))], [])
    assert isinstance(results[0], InferError)
    assert results[0].code is ErrorCode.INVALID_ARG
    assert np.frombuffer(results[1].outputs[0].data, np.float32).tolist() == [2, 2]
    arena.close()


def spilled(seals: int) -> int:
    fd = os.memfd_create("spill", os.MFD_ALLOW_SEALING)
    os.write(fd, rows(7).tobytes())
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def test_outputs_in_a_descriptor_of_the_backend_are_read_from_there() -> None:
    arena = Arena.create(1 << 16)
    payload = Payload(SIGNATURE, [prepare(SIGNATURE, rows(1))])
    payload.gather(arena, 1, 0)
    fd = spilled(fcntl.F_SEAL_SHRINK)
    (result,) = payload.scatter([Tensor("A2", "FP32", (1, 2), TensorRef(0, 8, 0))], [], [fd])
    os.close(fd)
    assert np.frombuffer(result.outputs[0].data, np.float32).tolist() == [7, 7]
    arena.close()


def test_a_descriptor_that_the_backend_could_still_shorten_is_not_read() -> None:
    arena = Arena.create(1 << 16)
    payload = Payload(SIGNATURE, [prepare(SIGNATURE, rows(1))])
    payload.gather(arena, 1, 0)
    fd = spilled(fcntl.F_SEAL_GROW)
    (result,) = payload.scatter([Tensor("A2", "FP32", (1, 2), TensorRef(0, 8, 0))], [], [fd])
    os.close(fd)
    assert isinstance(result, InferError)
    assert "not sealed" in result.message
    arena.close()


def test_an_answer_to_a_request_that_there_is_not_leaves_nothing_of_the_frame_behind() -> None:
    arena = Arena.create(1 << 16)
    for give in ("scatter", "stream"):
        payload = Payload(SIGNATURE, [prepare(SIGNATURE, rows(1))])
        output = echo(payload.gather(arena, 1, 0))
        answers = [Response(1, (output,)), Response(0, (output,))]
        with pytest.raises(InferError, match="request 1 of a batch of 1"):
            payload.scatter([output], answers, []) if give == "scatter" else list(payload.stream(answers, []))
        payload.release()
        assert not arena.ranges.allocated_bytes
    arena.close()


@pytest.mark.parametrize(
    "answer",
    [
        Tensor("A2", "FP32", (1, 2), TensorRef(1 << 40, 8)),
        Tensor("A2", "FP32", (1, 2), TensorRef(-8, 8)),
        Tensor("A2", "FP32", (1, 2), TensorRef(0, 8, 3)),
        Tensor("A2", "FP32", (1, 2), TensorRef(0, 9)),
        Tensor("A2", "FP77", (1, 2), TensorRef(0, 8)),
        Tensor("A2", "FP32", (1, -2), TensorRef(0, 8)),
        Tensor("other", "FP32", (1, 2), TensorRef(0, 8)),
    ],
)
def test_nonsense_from_the_backend_is_an_error_of_the_model(answer: Tensor) -> None:
    arena = Arena.create(1 << 16)
    payload = Payload(SIGNATURE, [prepare(SIGNATURE, rows(1))])
    payload.gather(arena, 1, 0)
    (result,) = payload.scatter([answer], [], [])
    assert isinstance(result, InferError)
    assert result.code is ErrorCode.INTERNAL
    arena.close()


def test_a_batch_that_does_not_fit_takes_nothing() -> None:
    arena = Arena.create(4096)
    held = arena.allocate(4000)
    with pytest.raises(ArenaFullError):
        Payload(SIGNATURE, [prepare(SIGNATURE, rows(1))]).gather(arena, 1, 0)
    arena.free(held)
    assert not arena.ranges.allocated_bytes
    arena.close()


def test_one_output_larger_than_the_arena_does_not_keep_later_requests_out_of_it() -> None:
    """Room for as much was asked of the arena for every batch from then on, which no batch could have."""
    signature = ModelSignature(model([tensor("A", "FP32", 2)], [tensor("B", "FP32", -1)], 0), 1)
    signature.learn_output(1, 1 << 20)
    arena = Arena.create(1 << 16)
    request = InferenceRequest("m")
    request.inputs = [InputTensor("A", FP32, (2,), rows(1).tobytes())]
    command = Payload(signature, [signature.prepare(request)]).gather(arena, 1, 0)
    assert 0 < command.space.nbytes <= arena.capacity // 4
    arena.close()


def test_a_missing_output_is_named() -> None:
    arena = Arena.create(1 << 16)
    payload = Payload(SIGNATURE, [prepare(SIGNATURE, rows(1))])
    payload.gather(arena, 1, 0)
    (result,) = payload.scatter([], [], [])
    assert isinstance(result, InferError)
    assert "no output 'A2'" in result.message
    arena.close()
