"""A call to another model as a message, and its response as arrays: what ServerCalls sends and gets.

What the server would take for nonsense is refused here, by INVALID_ARG, before it is sent. Knows no threads and no sockets.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from headrace_backends.outputs import FrameSpace, SpillFile
from headrace_protocol.datatype import BY_NAME, Array, Buffer, DataType, of_numpy, to_numpy
from headrace_protocol.errors import InferError, internal, invalid
from headrace_protocol.messages import Call, CallResponse, Error, Parameter, infer_error
from headrace_protocol.tensor import INLINE, Tensor, TensorRef

LATEST: Final = -1
"""Version of a model that stands for the one the server chooses."""
_MAP_BYTES: Final = 1 << 20
"""Bytes of responses in a descriptor from which on it is mapped, not read: a mapping keeps a descriptor open."""


class CallTensor(NamedTuple):
    """A tensor that a call brings or gets."""

    name: str
    array: Array
    """BYTES: any elements that BYTES outputs may have; those that came are bytes. What came is the caller's to change."""
    datatype: DataType | None = None
    """None = by the array's own type. BF16 has to be named: its elements are uint16 here. Always set in what came."""


@dataclass(frozen=True, slots=True)
class CallRequest:
    """A request to a model of this server."""

    model: str
    inputs: Sequence[CallTensor]
    version: int = LATEST
    outputs: Sequence[str] | None = None
    """Names of the outputs that are wanted; None = all."""
    id: str = ""
    correlation_id: int | str = 0
    flags: int = 0
    """1 = sequence start, 2 = sequence end."""
    timeout_us: int = 0
    """Microseconds that it may wait in the model's queue, where the model lets requests say so; 0 = its own limit."""
    priority: int = 0
    parameters: Mapping[str, Parameter] | None = None


@dataclass(frozen=True, slots=True)
class CallResult:
    """One response to a call. An error is the last one."""

    outputs: tuple[CallTensor, ...] = ()
    parameters: Mapping[str, Parameter] | None = None
    error: InferError | None = None
    final: bool = True
    """Whether no response follows."""
    empty: bool = False
    """Whether it says nothing but that a stream has come to its end."""


def check_model(name: str) -> None:
    """Raise INVALID_ARG for the name of a model that is no text."""
    if not isinstance(name, str):
        raise invalid(f"the name of a model is of type {type(name).__name__}, expected a string")


def _check(request: CallRequest) -> None:
    """Refuse what the server would take for nonsense. Raises INVALID_ARG."""
    for what, text in (
        ("model", request.model),
        ("id", request.id),
        *(("output", name) for name in request.outputs or ()),
    ):
        if not isinstance(text, str):
            raise invalid(f"a call's {what} is of type {type(text).__name__}, expected a string")
    for what, number, least in (
        ("version", request.version, LATEST),
        ("flags", request.flags, 0),
        ("timeout_us", request.timeout_us, 0),
        ("priority", request.priority, 0),
    ):
        if not isinstance(number, int) or number < least:
            raise invalid(f"a call's {what} is {number!r}, expected an integer >= {least}")
    if not isinstance(request.correlation_id, int | str):
        raise invalid(f"a call's correlation_id is {request.correlation_id!r}, expected an integer or a string")
    for name, value in (request.parameters or {}).items():
        if not isinstance(name, str) or not isinstance(value, str | int | bool | float):
            raise invalid(f"parameter {name!r} of a call is {value!r}, expected a string, a number or a bool")
    for tensor in request.inputs:
        if not isinstance(tensor.name, str):
            raise invalid(f"the name of an input is of type {type(tensor.name).__name__}, expected a string")


def encode_request(request: CallRequest, space: FrameSpace, number: int, batch: int, *, decoupled: bool) -> Call:
    """Return the message; its tensors are copied into `space`. Raises INVALID_ARG for what is no request."""
    _check(request)
    return Call(
        number,
        request.model,
        request.version,
        tuple(_place(space, tensor) for tensor in request.inputs),
        batch,
        decoupled,
        None if request.outputs is None else tuple(request.outputs),
        request.id,
        dict(request.parameters) if request.parameters else None,
        request.correlation_id,
        request.flags,
        request.timeout_us,
        request.priority,
    )


def _place(space: FrameSpace, tensor: CallTensor) -> Tensor:
    array = tensor.array
    if not isinstance(array, np.ndarray):
        raise invalid(f"input '{tensor.name}' is of type {type(array).__name__}, expected a numpy array")
    natural = of_numpy(array.dtype)
    datatype = natural if tensor.datatype is None else tensor.datatype
    if natural is None or datatype is None or datatype.numpy != natural.numpy:
        expected = "which is no tensor datatype" if datatype is None else f"which is not {datatype.name}"
        raise invalid(f"input '{tensor.name}' has numpy type {array.dtype}, {expected}")
    return space.place(tensor.name, array, {tensor.name: datatype})


def encode_files(files: Mapping[str, bytes]) -> tuple[SpillFile | None, tuple[tuple[str, TensorRef], ...]]:
    """Return the contents of files as memory that travels with a message, and where each lies in it.

    The caller seals the memory and closes it. Raises INVALID_ARG for what is no file.
    """
    for path, content in files.items():
        if not isinstance(path, str) or not isinstance(content, bytes | bytearray):
            raise invalid(f"file {path!r} of a model: expected a path and its content as bytes")
    if not files:
        return None, ()
    spill = SpillFile()
    refs = []
    for path, content in files.items():
        if content:
            mapping, offset = spill.reserve(len(content))
            mapping[:] = content
        else:
            offset = 0
        refs.append((path.removeprefix("file:"), TensorRef(offset, len(content), 0)))
    return spill, tuple(refs)


def decode_response(message: CallResponse, descriptors: Sequence[int]) -> CallResult:
    """Return the response; the descriptors stay the caller's to close."""
    if message.error is not None:
        return CallResult(error=decode_error(message.error))
    try:
        memory = _contents(descriptors[0]) if descriptors else memoryview(b"")
        outputs = tuple(_tensor(tensor, memory) for tensor in message.outputs)
    except (OSError, InferError) as error:
        text = error.message if isinstance(error, InferError) else str(error)
        return CallResult(error=internal(f"the response of the model cannot be read: {text}"), final=message.final)
    return CallResult(outputs, message.parameters, None, message.final, message.empty)


def _contents(descriptor: int) -> memoryview:
    """Return the bytes of a response's descriptor, private to this process: what is written to them is nobody's."""
    size = os.fstat(descriptor).st_size
    if size >= _MAP_BYTES:
        return memoryview(mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY))
    buffer = bytearray(size)
    os.preadv(descriptor, [buffer], 0)
    return memoryview(buffer)


def _tensor(tensor: Tensor, memory: memoryview) -> CallTensor:
    ref, datatype = tensor.ref, BY_NAME[tensor.datatype]
    data: Buffer = bytearray(tensor.data) if ref.source == INLINE else memory[ref.offset : ref.offset + ref.nbytes]
    return CallTensor(tensor.name, to_numpy(datatype, tensor.shape, data), datatype)


def decode_error(error: Error) -> InferError:
    """Return an error of the server's as one to raise."""
    return infer_error(error)
