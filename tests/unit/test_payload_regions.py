"""Batches of requests whose tensors lie in clients' shared memory: in place alone, copied in company."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from configs import model, tensor
from headrace.instances.payload import Payload, UnreadableInputError
from headrace.instances.regions import Attachments, Region, RequestRegions, Slice
from headrace.instances.signature import ModelSignature, PreparedRequest
from headrace.types import InferenceRequest, InferenceResponse, InputTensor, RegionRef, RequestedOutput
from headrace_protocol.arena import Arena
from headrace_protocol.datatype import BYTES, FP32
from headrace_protocol.errors import ErrorCode, InferError
from headrace_protocol.framing import MAX_DESCRIPTORS
from headrace_protocol.messages import AttachRegion, DetachRegion, Execute, Response
from headrace_protocol.tensor import REGION, Tensor, TensorRef

SIGNATURE = ModelSignature(model([tensor("A", "FP32", 2)], [tensor("A2", "FP32", 2)], 8), 1)
STRINGS = ModelSignature(model([tensor("A", "BYTES", -1)], [tensor("A2", "BYTES", -1)], 8), 1)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(1 << 16)
    yield arena
    assert not arena.ranges.allocated_bytes
    arena.close()


@pytest.fixture
def region() -> Iterator[Region]:
    fd = os.memfd_create("client")
    os.write(fd, np.arange(64, dtype=np.float32).tobytes())
    region = Region(7, "r", 256, fd=fd)
    yield region
    region.drop()
    assert region.fd == -1


def asking(
    region: Region, rows: int = 1, offset: int | None = 0, out: tuple[int, int] | None = (128, 64)
) -> PreparedRequest:
    """Return a request that reads at `offset` (None: from its own body) and writes to `out` (None: the response)."""
    request = InferenceRequest("m")
    nbytes = 8 * rows
    source = None if offset is None else RegionRef("r", offset, nbytes)
    request.inputs = [InputTensor("A", FP32, (rows, 2), b"" if source else bytes(nbytes), source)]
    request.outputs = None if out is None else [RequestedOutput("A2", region=RegionRef("r", *out))]
    regions = RequestRegions(
        {} if offset is None else {"A": Slice(region, offset, nbytes)},
        {} if out is None else {"A2": Slice(region, *out)},
    )
    return SIGNATURE.prepare(request, regions)


def drop(*requests: PreparedRequest) -> None:
    for request in requests:
        request.regions.drop()


def there(region: Region, count: int, offset: int = 128) -> list[float]:
    return np.frombuffer(region.read(offset, 4 * count), np.float32).tolist()


def told(command: Execute, ref: TensorRef | None = None) -> Tensor:
    source = command.inputs[0]
    return Tensor("A2", source.datatype, source.shape, ref or source.ref)


def test_a_request_alone_is_told_by_reference_and_nothing_is_copied(arena: Arena, region: Region) -> None:
    request = asking(region, 2, 16)
    payload = Payload(SIGNATURE, [request])
    command = payload.gather(arena, 1, 0)
    assert command.inputs[0].ref == TensorRef(16, 16, REGION, 7)
    assert command.requests[0].regions == (("A2", TensorRef(128, 64, REGION, 7)),)
    (result,) = payload.scatter([told(command, TensorRef(128, 16, REGION, 7))], [], [])
    assert isinstance(result, InferenceResponse)
    assert [(o.in_region, o.data, o.shape) for o in result.outputs] == [(True, b"", (2, 2))]
    assert (payload.copied_in, payload.take_copied_out()) == (0, 0)
    result.release()
    payload.release()
    drop(request)


def test_a_backend_that_answers_in_the_arena_has_its_output_copied(arena: Arena, region: Region) -> None:
    request = asking(region, 1, None)
    payload = Payload(SIGNATURE, [request])
    command = payload.gather(arena, 1, 0)
    arena.view[command.space.offset : command.space.offset + 8] = np.array([5, 6], np.float32).tobytes()
    (result,) = payload.scatter([told(command, TensorRef(command.space.offset, 8))], [], [])
    assert result.outputs[0].in_region
    assert there(region, 2) == [5, 6]
    assert (payload.copied_in, payload.take_copied_out(), payload.take_copied_out()) == (8, 8, 0)
    result.release()
    payload.release()
    drop(request)


def test_in_company_rows_are_read_and_written_by_the_server(arena: Arena, region: Region) -> None:
    requests = [asking(region, 2, 16), asking(region, 1, None, (144, 8)), asking(region, 1, 0, None)]
    payload = Payload(SIGNATURE, requests)
    command = payload.gather(arena, 1, 0)
    assert [header.regions for header in command.requests] == [(), (), ()]
    ref = command.inputs[0].ref
    assert np.frombuffer(arena.slice(ref.offset, ref.nbytes), np.float32).tolist() == [4, 5, 6, 7, 0, 0, 0, 1]
    first, second, third = payload.scatter([told(command)], [], [])
    assert there(region, 6) == [4, 5, 6, 7, 0, 0]
    assert [result.outputs[0].in_region for result in (first, second, third)] == [True, True, False]
    assert np.frombuffer(third.outputs[0].data, np.float32).tolist() == [0, 1]
    for result in (first, second, third):
        result.release()
    payload.release()
    drop(*requests)


def test_without_descriptors_a_request_alone_is_copied_too(arena: Arena, region: Region) -> None:
    request = asking(region, 1, 16)
    payload = Payload(SIGNATURE, [request])
    payload.in_place = None
    command = payload.gather(arena, 1, 0)
    assert (command.inputs[0].ref.source == REGION, command.requests[0].regions) == (False, ())
    (result,) = payload.scatter([told(command)], [], [])
    assert there(region, 2) == [4, 5]
    result.release()
    payload.release()
    drop(request)


def test_an_input_that_cannot_be_read_is_told_with_its_request_and_nothing_is_taken(
    arena: Arena, region: Region
) -> None:
    requests = [asking(region, 1, 0), asking(region, 1, 64)]
    os.ftruncate(region.fd, 68)
    with pytest.raises(UnreadableInputError) as caught:
        Payload(SIGNATURE, requests).gather(arena, 1, 0)
    assert (caught.value.index, caught.value.error.code) == (1, ErrorCode.INVALID_ARG)
    drop(*requests)


@pytest.mark.parametrize("shrunk", [False, True])
def test_an_output_that_does_not_fit_fails_its_request_alone(arena: Arena, region: Region, shrunk: bool) -> None:
    requests = [asking(region, 1, 0, (200, 8 if shrunk else 7)), asking(region, 1, 0, (128, 8))]
    payload = Payload(SIGNATURE, requests)
    command = payload.gather(arena, 1, 0)
    if shrunk:
        os.ftruncate(region.fd, 204)
    bad, good = payload.scatter([told(command)], [], [])
    assert isinstance(bad, InferError)
    assert bad.code is ErrorCode.INVALID_ARG
    assert shrunk or all(part in bad.message for part in ("'A2'", " 8 bytes", " 7 bytes", "'r'"))
    assert isinstance(good, InferenceResponse)
    good.release()
    payload.release()
    drop(*requests)


@pytest.mark.parametrize(
    "ref",
    [
        TensorRef(120, 8, REGION, 7),
        TensorRef(128, 8, REGION, 8),
        TensorRef(128, -8, REGION, 7),
        TensorRef(128, 72, REGION, 7),
        TensorRef(0, 8, REGION, 7),
    ],
)
def test_a_backend_that_claims_another_place_is_not_believed(arena: Arena, region: Region, ref: TensorRef) -> None:
    request = asking(region)
    payload = Payload(SIGNATURE, [request])
    command = payload.gather(arena, 1, 0)
    (result,) = payload.scatter([told(command, ref)], [], [])
    assert isinstance(result, InferError)
    assert result.code is ErrorCode.INTERNAL
    payload.release()
    drop(request)


def test_in_company_no_output_can_be_in_a_region(arena: Arena, region: Region) -> None:
    requests = [asking(region), asking(region)]
    payload = Payload(SIGNATURE, requests)
    command = payload.gather(arena, 1, 0)
    results = payload.scatter([told(command, TensorRef(128, 16, REGION, 7))], [], [])
    assert [result.code for result in results] == [ErrorCode.INTERNAL] * 2
    payload.release()
    drop(*requests)


def test_a_batch_keeps_its_regions_open_until_the_backend_and_the_responses_are_done(arena: Arena) -> None:
    region = Region(1, "r", 256, fd=os.memfd_create("client"))
    os.ftruncate(region.fd, 256)
    request = asking(region)
    payload = Payload(SIGNATURE, [request])
    payload.gather(arena, 1, 0)
    region.drop()
    drop(request)
    assert region.fd != -1
    payload.release()
    assert region.fd == -1


def test_gpu_memory_makes_a_request_run_alone() -> None:
    cuda = Region(2, "g", 8, cuda_handle=bytes(64))
    keys = set()
    for _ in range(2):
        request = InferenceRequest("m")
        request.inputs = [InputTensor("A", FP32, (1, 2), b"", RegionRef("g", 0, 8))]
        keys.add(SIGNATURE.prepare(request, RequestRegions({"A": Slice(cuda, 0, 8)}, {})).shape_key)
    assert len(keys) == 2


def test_strings_in_gpu_memory_are_left_to_the_backend() -> None:
    cuda = Region(2, "g", 8, cuda_handle=bytes(64))
    request = InferenceRequest("m")
    request.inputs = [InputTensor("A", BYTES, (1, 2), b"", RegionRef("g", 0, 8))]
    assert STRINGS.prepare(request, RequestRegions({"A": Slice(cuda, 0, 8)}, {})).rows == 1


def test_a_response_of_a_stream_goes_into_the_region_and_its_end_is_told(arena: Arena, region: Region) -> None:
    request = asking(region)
    payload = Payload(SIGNATURE, [request])
    payload.gather(arena, 1, 0)
    for value, final in ((1.0, False), (2.0, True)):
        data = np.array([[value, value]], np.float32).tobytes()
        output = Tensor("A2", "FP32", (1, 2), TensorRef(0, 8, -2), None, data)
        ((index, response, last),) = payload.stream([Response(0, (output,), final=final)], [])
        assert (index, last, response.outputs[0].in_region) == (0, final, True)
        assert there(region, 2) == [value, value]
        response.release()
    payload.release()
    drop(request)


def test_a_response_of_a_stream_that_does_not_fit_is_an_error_of_ours_and_not_the_last_from_the_backend(
    arena: Arena, region: Region
) -> None:
    request = asking(region, out=(128, 4))
    payload = Payload(SIGNATURE, [request])
    payload.gather(arena, 1, 0)
    output = Tensor("A2", "FP32", (1, 2), TensorRef(0, 8, -2), None, bytes(8))
    ((_, response, last),) = payload.stream([Response(0, (output,), final=False)], [])
    assert (isinstance(response, InferError), last) == (True, False)
    payload.release()
    drop(request)


# --- what a process has been given ----------------------------------------------------------------------------------


class Sent:
    """Takes frames in place of a channel."""

    def __init__(self, failing: bool = False) -> None:
        self.frames: list[tuple[list, list[int]]] = []
        self.failing = failing

    def __call__(self, messages: list, descriptors: list[int]) -> None:
        if self.failing:
            raise OSError(24, "too many open files")
        self.frames.append((messages, list(descriptors)))


def some(count: int) -> list[Region]:
    return [Region(n, f"r{n}", 8, fd=os.memfd_create("client"), start=n) for n in range(1, count + 1)]


def test_a_process_is_given_a_region_once_and_told_when_it_is_closed() -> None:
    sent = Sent()
    attachments = Attachments(sent)
    (region,) = some(1)
    fd = region.fd
    attachments.attach([region])
    attachments.attach([region])
    region.drop()
    assert sent.frames == [([AttachRegion(1, 1, 8)], [fd]), ([DetachRegion(1)], [])]


def test_a_frame_carries_as_many_descriptors_as_fit() -> None:
    sent = Sent()
    regions = [*some(MAX_DESCRIPTORS + 1), Region(99, "g", 8, cuda_handle=bytes(64), device=3)]
    Attachments(sent).attach(regions)
    assert [len(descriptors) for _, descriptors in sent.frames] == [MAX_DESCRIPTORS, 1]
    assert sent.frames[1][0][-1] == AttachRegion(99, 0, 8, bytes(64), 3)
    for region in regions:
        region.drop()


def test_a_region_that_could_not_be_given_is_given_later() -> None:
    sent = Sent(failing=True)
    attachments = Attachments(sent)
    regions = some(1)
    with pytest.raises(OSError, match="too many"):
        attachments.attach(regions)
    sent.failing = False
    attachments.attach(regions)
    assert len(sent.frames) == 1
    attachments.close()
    regions[0].drop()
    assert len(sent.frames) == 1
