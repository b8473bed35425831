"""Ragged and padded inputs and shape tensors in the arena, and outputs on their way back, request by request."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from configs import model, tensor
from headrace.instances.payload import Payload, UnreadableInputError
from headrace.instances.regions import Region, RequestRegions, Slice
from headrace.instances.signature import ModelSignature, PreparedRequest
from headrace.repository.model_config import Cut, Padding
from headrace.types import InferenceRequest, InferenceResponse, InputTensor, RegionRef, RequestedOutput
from headrace_protocol._generated import model_config_pb2 as pb
from headrace_protocol.arena import Arena
from headrace_protocol.datatype import BYTES, FP32, decode_bytes, encode_bytes
from headrace_protocol.errors import ErrorCode, InferError
from headrace_protocol.messages import Execute, Response
from headrace_protocol.tensor import REGION, Tensor, TensorRef

RAGGED = ModelSignature(
    model(
        [tensor("A", "FP32", -1, allow_ragged_batch=True), tensor("B", "FP32", 1)],
        [tensor("A2", "FP32", -1, 2)],
        8,
        scattered={"A2": "A"},
    ),
    1,
)
RAGGED_STRINGS = ModelSignature(
    model(
        [tensor("A", "BYTES", -1, allow_ragged_batch=True)],
        [tensor("A2", "BYTES", -1)],
        8,
        scattered={"A2": "A"},
    ),
    1,
)


def padded(*sizes: int, told: bool = False, any_lengths: bool = False) -> ModelSignature:
    padding = Padding({"A": 9.0}, sizes, any_lengths, {"A2": (Cut(0, "A", 0), Cut(1, "A", 1))})
    made = [pb.BatchInput(target_name=["L"], source_input=["A"])] if told else []
    proto = pb.ModelConfig(name="m", batch_input=made)
    config = model([tensor("A", "FP32", -1, -1)], [tensor("A2", "FP32", -1, -1)], 8, padding=padding, proto=proto)
    return ModelSignature(config, 1)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(1 << 16)
    yield arena
    assert not arena.ranges.allocated_bytes
    arena.close()


def asking(signature: ModelSignature, **arrays: np.ndarray) -> PreparedRequest:
    request = InferenceRequest("m")
    for name, array in arrays.items():
        if array.dtype == np.object_:
            request.inputs.append(InputTensor(name, BYTES, array.shape, encode_bytes(list(array.reshape(-1)))))
        else:
            request.inputs.append(InputTensor(name, FP32, array.shape, array.astype(np.float32).tobytes()))
    return signature.prepare(request)


def seen(arena: Arena, given: Tensor) -> np.ndarray:
    return np.frombuffer(arena.slice(given.ref.offset, given.ref.nbytes), np.float32).reshape(given.shape)


def answered(payload: Payload, arena: Arena, command: Execute, array: np.ndarray) -> list:
    """Return what the requests get where the backend answers the batch with `array` as A2."""
    data = array.astype(np.float32).tobytes()
    arena.view[command.space.offset : command.space.offset + len(data)] = data
    ref = TensorRef(command.space.offset, len(data))
    return finished(payload, payload.scatter([Tensor("A2", "FP32", array.shape, ref)], [], []))


def finished(payload: Payload, results: list) -> list:
    got = [
        result
        if isinstance(result, InferError)
        else np.frombuffer(bytes(result.outputs[0].data), np.float32).reshape(result.outputs[0].shape)
        for result in results
    ]
    for result in results:
        if isinstance(result, InferenceResponse):
            result.release()
    payload.release()
    return got


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def test_a_ragged_input_is_flat_and_tells_the_shape_that_each_request_gave(arena: Arena) -> None:
    requests = [asking(RAGGED, A=ones(1, 3), B=ones(1, 1)), asking(RAGGED, A=2 * ones(2, 1), B=ones(2, 1))]
    assert requests[0].shape_key == requests[1].shape_key
    payload = Payload(RAGGED, requests)
    command = payload.gather(arena, 1, 0)
    assert command.inputs[0].item_shapes == ((1, 3), (2, 1))
    assert seen(arena, command.inputs[0]).tolist() == [1, 1, 1, 2, 2]
    assert command.inputs[1].shape == (3, 1)
    payload.release()


def test_a_ragged_input_is_flat_for_a_request_alone_too(arena: Arena) -> None:
    payload = Payload(RAGGED, [asking(RAGGED, A=ones(2, 3), B=ones(2, 1))])
    command = payload.gather(arena, 1, 0)
    assert (command.inputs[0].shape, command.inputs[0].item_shapes) == ((6,), ((2, 3),))
    payload.release()


def test_an_output_takes_what_varies_from_the_same_place_of_its_input(arena: Arena) -> None:
    requests = [asking(RAGGED, A=ones(1, 3), B=ones(1, 1)), asking(RAGGED, A=ones(2, 1), B=ones(2, 1))]
    payload = Payload(RAGGED, requests)
    got = answered(payload, arena, payload.gather(arena, 1, 0), np.arange(10))
    assert got[0].tolist() == [[[0, 1], [2, 3], [4, 5]]]
    assert got[1].tolist() == [[[6, 7]], [[8, 9]]]


def test_a_response_of_its_own_may_be_flat_too_or_as_the_client_gets_it(arena: Arena) -> None:
    requests = [asking(RAGGED, A=ones(1, 3), B=ones(1, 1)), asking(RAGGED, A=ones(1, 1), B=ones(1, 1))]
    payload = Payload(RAGGED, requests)
    place = payload.gather(arena, 1, 0).space.offset
    arena.view[place : place + 32] = np.arange(8, dtype=np.float32).tobytes()
    flat = Tensor("A2", "FP32", (3, 2), TensorRef(place, 24))
    whole = Tensor("A2", "FP32", (1, 1, 2), TensorRef(place + 24, 8))
    first, second = finished(payload, payload.scatter(None, [Response(0, (flat,)), Response(1, (whole,))], []))
    assert first.tolist() == [[[0, 1], [2, 3], [4, 5]]]
    assert second.tolist() == [[[6, 7]]]


def test_an_output_that_cannot_be_shared_out_is_an_error_of_the_model(arena: Arena) -> None:
    payload = Payload(RAGGED, [asking(RAGGED, A=ones(1, 3), B=ones(1, 1))])
    (got,) = answered(payload, arena, payload.gather(arena, 1, 0), np.arange(5))
    assert got.code is ErrorCode.INTERNAL
    assert "needs 6" in got.message


def test_strings_are_ragged_and_shared_out_too(arena: Arena) -> None:
    first, second = np.array([[b"a", b"bcd", b""]], object), np.array([[b"xyz" * 50]], object)
    payload = Payload(RAGGED_STRINGS, [asking(RAGGED_STRINGS, A=first), asking(RAGGED_STRINGS, A=second)])
    given = payload.gather(arena, 1, 0).inputs[0]
    assert given.shape == (4,)
    results = payload.scatter([Tensor("A2", "BYTES", (4,), given.ref)], [], [])
    assert decode_bytes(results[0].outputs[0].data, 3) == [b"a", b"bcd", b""]
    assert results[1].outputs[0].shape == (1, 1)
    assert decode_bytes(results[1].outputs[0].data, 1) == [b"xyz" * 50]
    for result in results:
        result.release()
    payload.release()


def test_rows_are_padded_at_the_end_of_each_dimension_and_outputs_cut_back(arena: Arena) -> None:
    signature = padded()
    payload = Payload(signature, [asking(signature, A=ones(1, 2, 1)), asking(signature, A=2 * ones(2, 1, 3))])
    command = payload.gather(arena, 1, 0)
    assert command.inputs[0].item_shapes is None
    whole = seen(arena, command.inputs[0])
    assert whole.tolist() == [[[1, 9, 9], [1, 9, 9]], [[2, 2, 2], [9, 9, 9]], [[2, 2, 2], [9, 9, 9]]]
    first, second = answered(payload, arena, command, whole + 1)
    assert first.tolist() == [[[2], [2]]]
    assert second.tolist() == [[[3, 3, 3]], [[3, 3, 3]]]


def test_requests_that_are_alike_are_not_padded(arena: Arena) -> None:
    signature = padded()
    payload = Payload(signature, [asking(signature, A=ones(1, 2, 2)), asking(signature, A=ones(1, 2, 2))])
    command = payload.gather(arena, 1, 0)
    assert command.inputs[0].shape == (2, 2, 2)
    got = answered(payload, arena, command, np.zeros((2, 5, 7)))
    assert [array.shape for array in got] == [(1, 5, 7)] * 2, "what was not padded is not cut"


def test_a_request_without_elements_is_all_padding_and_gets_none_back(arena: Arena) -> None:
    signature = padded()
    payload = Payload(signature, [asking(signature, A=ones(1, 0, 2)), asking(signature, A=ones(1, 1, 1))])
    command = payload.gather(arena, 1, 0)
    assert seen(arena, command.inputs[0]).tolist() == [[[9, 9]], [[1, 9]]]
    got = answered(payload, arena, command, seen(arena, command.inputs[0]).copy())
    assert [array.shape for array in got] == [(1, 0, 2), (1, 1, 1)]


def test_sizes_round_a_request_that_runs_alone_up_and_keep_unlike_ones_apart(arena: Arena) -> None:
    signature = padded(2, 4)
    small, large, beyond = (asking(signature, A=ones(1, n, n)) for n in (1, 3, 5))
    assert len({request.shape_key for request in (small, large, beyond)}) == 3
    assert large.shape_key == asking(signature, A=ones(1, 4, 3)).shape_key
    assert beyond.shape_key != asking(signature, A=ones(1, 6, 6)).shape_key, "beyond the largest, shapes must be equal"
    payload = Payload(signature, [large])
    command = payload.gather(arena, 1, 0)
    assert command.inputs[0].shape == (1, 4, 4)
    (got,) = answered(payload, arena, command, seen(arena, command.inputs[0]).copy())
    assert got.tolist() == ones(1, 3, 3).tolist()


def test_without_sizes_requests_between_two_powers_of_two_share_a_batch() -> None:
    signature, anything = padded(), padded(any_lengths=True)
    lengths = (0, 1, 2, 3, 4, 5, 8, 9)
    keys = [asking(signature, A=ones(1, length, 2)).shape_key for length in lengths]
    together = [[n for n, key in zip(lengths, keys, strict=True) if key == one] for one in dict.fromkeys(keys)]
    assert together == [[0, 2], [1], [3, 4], [5, 8], [9]]
    assert len({asking(anything, A=ones(1, length, 2)).shape_key for length in lengths}) == 1


def test_an_output_that_does_not_follow_the_padded_dimension_is_an_error_of_the_model(arena: Arena) -> None:
    signature = padded()
    payload = Payload(signature, [asking(signature, A=ones(1, 2, 1)), asking(signature, A=ones(1, 1, 3))])
    got = answered(payload, arena, payload.gather(arena, 1, 0), np.zeros((2, 2, 4)))
    assert all(error.code is ErrorCode.INTERNAL and "padded to 3" in error.message for error in got)


def test_a_response_of_a_request_alone_is_cut_or_was_cut_by_the_model(arena: Arena) -> None:
    signature = padded()
    payload = Payload(signature, [asking(signature, A=ones(1, 2, 1)), asking(signature, A=ones(1, 1, 3))])
    command = payload.gather(arena, 1, 0)
    source = command.inputs[0].ref
    whole = Tensor("A2", "FP32", (1, 2, 3), TensorRef(source.offset, 24))
    own = Tensor("A2", "FP32", (1, 1, 3), TensorRef(source.offset + 24, 12))
    first, second = finished(payload, payload.scatter(None, [Response(0, (whole,)), Response(1, (own,))], []))
    assert first.tolist() == [[[1], [1]]]
    assert second.tolist() == [[[1, 1, 1]]]


def test_the_backend_learns_the_shapes_before_padding_where_it_makes_inputs_of_them(arena: Arena) -> None:
    signature = padded(told=True)
    payload = Payload(signature, [asking(signature, A=ones(1, 2, 1)), asking(signature, A=ones(1, 1, 3))])
    assert payload.gather(arena, 1, 0).inputs[0].item_shapes == ((1, 2, 1), (1, 1, 3))
    payload.release()


def in_region(signature: ModelSignature, region: Region, shape: tuple[int, ...]) -> PreparedRequest:
    nbytes = 4 * int(np.prod(shape))
    request = InferenceRequest("m")
    request.inputs = [InputTensor("A", FP32, shape, b"", RegionRef("r", 0, nbytes))]
    request.outputs = [RequestedOutput("A2", region=RegionRef("r", 128, 64))]
    return signature.prepare(request, RequestRegions({"A": Slice(region, 0, nbytes)}, {"A2": Slice(region, 128, 64)}))


@pytest.fixture
def region() -> Iterator[Region]:
    fd = os.memfd_create("client")
    os.write(fd, np.arange(64, dtype=np.float32).tobytes())
    region = Region(7, "r", 256, fd=fd)
    yield region
    region.drop()
    assert region.fd == -1


def test_what_is_to_be_padded_is_copied_out_of_a_clients_memory(arena: Arena, region: Region) -> None:
    signature = padded(4)
    request = in_region(signature, region, (1, 2, 2))
    payload = Payload(signature, [request])
    command = payload.gather(arena, 1, 0)
    assert seen(arena, command.inputs[0])[0, :2, :2].tolist() == [[0, 1], [2, 3]]
    answer = seen(arena, command.inputs[0]) + 1
    arena.view[command.space.offset : command.space.offset + answer.nbytes] = answer.tobytes()
    (result,) = payload.scatter(
        [Tensor("A2", "FP32", answer.shape, TensorRef(command.space.offset, answer.nbytes))], [], []
    )
    assert result.outputs[0].in_region
    result.release()
    payload.release()
    assert np.frombuffer(region.read(128, 16), np.float32).tolist() == [1, 2, 3, 4]
    request.regions.drop()


def test_what_needs_no_padding_stays_in_a_clients_memory(arena: Arena, region: Region) -> None:
    request = in_region(padded(), region, (1, 2, 2))
    payload = Payload(padded(), [request])
    assert payload.gather(arena, 1, 0).inputs[0].ref.source == REGION
    payload.release()
    request.regions.drop()


def test_memory_that_cannot_be_read_fails_its_request_alone_and_takes_nothing(arena: Arena, region: Region) -> None:
    signature = padded()
    os.ftruncate(region.fd, 4)
    request = in_region(signature, region, (1, 2, 2))
    with pytest.raises(UnreadableInputError) as unreadable:
        Payload(signature, [asking(signature, A=ones(1, 1, 1)), request]).gather(arena, 1, 0)
    assert unreadable.value.index == 1
    request.regions.drop()


def test_a_shape_tensor_is_there_once_and_requests_with_other_values_are_apart(arena: Arena) -> None:
    inputs = [tensor("A", "FP32", -1), tensor("B", "FP32", 2, is_shape_tensor=True)]
    signature = ModelSignature(model(inputs, [tensor("A2", "FP32", -1)], 8), 1)
    first, second = (asking(signature, A=ones(1, 3), B=np.array([1, 2])) for _ in range(2))
    other = asking(signature, A=ones(1, 3), B=np.array([1, 3]))
    assert first.shape_key == second.shape_key != other.shape_key
    payload = Payload(signature, [first, second])
    command = payload.gather(arena, 1, 0)
    assert seen(arena, command.inputs[1]).tolist() == [1, 2]
    payload.release()
