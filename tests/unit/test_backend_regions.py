"""Clients' shared memory in a backend process: used in place, and no danger to the process when its owner cuts it off."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from backend_process import BackendProcess, identity_config
from headrace_protocol.datatype import BYTES, from_numpy
from headrace_protocol.messages import (
    AttachRegion,
    Cancel,
    DetachRegion,
    Execute,
    Ping,
    Pong,
    RequestHeader,
    Response,
    Responses,
)
from headrace_protocol.tensor import REGION, Tensor, TensorRef

PAGE = mmap.PAGESIZE
SIZE = 64 * PAGE
ROW = np.arange(PAGE, dtype=np.float32).reshape(1, -1)


@pytest.fixture
def process() -> Iterator[BackendProcess]:
    process = BackendProcess()
    assert process.initialize(identity_config(), instances=2).error is None
    yield process
    process.close()


@pytest.fixture
def strings() -> Iterator[BackendProcess]:
    process = BackendProcess()
    assert process.initialize(identity_config(datatype="TYPE_STRING")).error is None
    yield process
    process.close()


@pytest.fixture
def memory() -> Iterator[int]:
    """A client's object, as the server holds it."""
    fd = os.memfd_create("client")
    os.ftruncate(fd, SIZE)
    yield fd
    os.close(fd)


def place(offset: int, nbytes: int, region: int = 1) -> TensorRef:
    return TensorRef(offset, nbytes, REGION, region)


def attach(process: BackendProcess, fd: int, number: int = 1, offset: int = 0, nbytes: int = SIZE) -> None:
    process.send(AttachRegion(number, offset, nbytes), Ping(number), descriptors=[fd])
    assert process.receive()[0] == [Pong(number)]


def run(
    process: BackendProcess,
    batch: int,
    source: TensorRef,
    target: TensorRef | None,
    shape: tuple[int, ...] = ROW.shape,
    datatype: str = "FP32",
    **parameters: object,
) -> None:
    regions = () if target is None else (("OUTPUT0", target),)
    header = RequestHeader(1, parameters=parameters or None, regions=regions)  # type: ignore[arg-type]
    tensor = Tensor("INPUT0", datatype, shape, source)
    process.send(Execute(batch, (batch - 1) % 2, (tensor,), (header,), None, TensorRef(0, 1 << 16)))


def output(responses: Responses) -> Tensor:
    if responses.batched is not None:
        return responses.batched[0]
    (response,) = responses.responses
    assert response.error is None, response.error
    return response.outputs[0]


def error(responses: Responses) -> tuple[str, str]:
    assert responses.batched is None
    (response,) = responses.responses
    assert isinstance(response, Response)
    assert response.error is not None
    return response.error.code, response.error.message


def test_inputs_are_read_and_outputs_written_where_the_client_has_them(process: BackendProcess, memory: int) -> None:
    os.pwrite(memory, ROW.tobytes(), 0)
    attach(process, memory)
    run(process, 1, place(0, ROW.nbytes), place(ROW.nbytes, 2 * ROW.nbytes))
    tensor = output(process.results()[0])
    assert (tensor.shape, tensor.ref) == (ROW.shape, place(ROW.nbytes, ROW.nbytes))
    assert os.pread(memory, ROW.nbytes, ROW.nbytes) == ROW.tobytes()


@pytest.mark.parametrize("start", [100, PAGE - 4, PAGE + 3])
@pytest.mark.parametrize("offset", [0, 1, 4092])
def test_a_region_and_a_tensor_may_begin_anywhere(
    process: BackendProcess, memory: int, start: int, offset: int
) -> None:
    """Also where no element is aligned: such tensors are copied by the backend process."""
    small = ROW[:, :100]
    os.pwrite(memory, small.tobytes(), start + offset)
    attach(process, memory, offset=start, nbytes=SIZE - start)
    run(process, 1, place(offset, 400), place(offset + 401, 400), (1, 100))
    assert output(process.results()[0]).ref.source == REGION
    assert os.pread(memory, 400, start + offset + 401) == small.tobytes()


def test_an_output_may_take_the_place_of_its_input(process: BackendProcess, memory: int) -> None:
    os.pwrite(memory, ROW.tobytes(), 8)
    attach(process, memory)
    run(process, 1, place(8, ROW.nbytes), place(4, ROW.nbytes))
    assert output(process.results()[0]).ref.source == REGION
    assert os.pread(memory, ROW.nbytes, 4) == ROW.tobytes()


def test_strings_go_into_a_region_too(strings: BackendProcess, memory: int) -> None:
    wire = bytes(from_numpy(np.array([b"some", b"strings"], object), BYTES))
    attach(strings, memory)
    strings.arena.view[: len(wire)] = wire
    run(strings, 1, TensorRef(0, len(wire)), place(10, 100), (1, 2), "BYTES")
    assert output(strings.results()[0]).ref == place(10, len(wire))
    assert os.pread(memory, len(wire), 10) == wire


def test_an_output_that_its_place_cannot_hold_goes_to_the_server_which_says_so(
    process: BackendProcess, memory: int
) -> None:
    attach(process, memory)
    run(process, 1, place(0, ROW.nbytes), place(0, ROW.nbytes - 1))
    tensor = output(process.results()[0])
    assert (tensor.ref.source == REGION, tensor.ref.nbytes) == (False, ROW.nbytes)


def test_memory_that_is_cut_off_while_a_request_runs_costs_that_request_alone(
    process: BackendProcess, memory: int
) -> None:
    other = os.memfd_create("other client")
    os.ftruncate(other, SIZE)
    os.pwrite(other, ROW.tobytes(), 0)
    attach(process, memory)
    attach(process, other, number=2)
    run(process, 1, place(0, SIZE // 2), place(SIZE // 2, SIZE // 2), (1, SIZE // 8), delay_ms=400)
    run(process, 2, place(0, ROW.nbytes, 2), place(ROW.nbytes, ROW.nbytes, 2), delay_ms=500)
    os.ftruncate(memory, PAGE)
    first, done, _ = process.results()
    assert done.batch == 1
    code, message = error(first)
    assert (code, "INPUT0" in message, "shortened" in message) == ("INVALID_ARG", True, True)
    second, done, _ = process.results()
    assert (done.batch, output(second).ref.source) == (2, REGION)
    assert os.pread(other, ROW.nbytes, ROW.nbytes) == ROW.tobytes()
    os.close(other)


def test_the_region_stays_unusable_and_a_new_one_of_the_object_works(process: BackendProcess, memory: int) -> None:
    attach(process, memory)
    run(process, 1, place(0, ROW.nbytes), place(0, ROW.nbytes), delay_ms=200)
    os.ftruncate(memory, 0)
    assert error(process.results()[0])[0] == "INVALID_ARG"
    os.ftruncate(memory, SIZE)
    run(process, 2, place(0, ROW.nbytes), None)
    assert "register it again" in error(process.results()[0])[1]
    process.send(DetachRegion(1))
    attach(process, memory, number=2)
    os.pwrite(memory, ROW.tobytes(), 0)
    run(process, 3, place(0, ROW.nbytes, 2), place(ROW.nbytes, ROW.nbytes, 2))
    assert output(process.results()[0]).ref.region == 2
    assert os.pread(memory, ROW.nbytes, ROW.nbytes) == ROW.tobytes()


def test_an_object_that_is_too_short_when_it_is_attached_fails_its_requests(
    process: BackendProcess, memory: int
) -> None:
    attach(process, memory, nbytes=SIZE + PAGE)
    run(process, 1, place(0, ROW.nbytes), None)
    assert error(process.results()[0])[0] == "INVALID_ARG"


def test_a_bus_error_elsewhere_still_ends_the_process(process: BackendProcess, memory: int) -> None:
    attach(process, memory)
    run(process, 1, place(0, ROW.nbytes), None, signal="SIGBUS")
    assert process.wait() == -signal.SIGBUS


def test_a_cancelled_request_ends_and_its_region_can_be_detached(process: BackendProcess, memory: int) -> None:
    attach(process, memory)
    run(process, 1, place(0, ROW.nbytes), place(0, ROW.nbytes), hang=True)
    process.send(Cancel(1, -1))
    assert error(process.results()[0])[0] == "CANCELLED"
    process.send(DetachRegion(1))
    run(process, 2, place(0, ROW.nbytes), None)
    assert error(process.results()[0])[0] == "INTERNAL"


def test_a_detached_region_leaves_no_mapping_and_no_descriptor(process: BackendProcess, memory: int) -> None:
    child = psutil.Process(process.process.pid)
    attach(process, memory)
    run(process, 1, place(0, ROW.nbytes), place(0, ROW.nbytes))
    process.results()
    process.send(DetachRegion(1))
    run(process, 2, TensorRef(0, 4), None, (1, 1))
    process.results()
    before = child.num_fds()
    for number in range(2, 12):
        attach(process, memory, number=number)
        run(process, 2 * number, place(0, ROW.nbytes, number), place(PAGE, ROW.nbytes, number))
        process.results()
        process.send(DetachRegion(number))
    run(process, 2, TensorRef(0, 4), None, (1, 1))
    process.results()
    assert child.num_fds() == before
    assert not [area for area in child.memory_maps() if "client" in area.path]
