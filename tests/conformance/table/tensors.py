"""An inference as a case describes it, once for both doors; and as each door gets it: by the stock client, or by hand.

By hand is what the stock clients would refuse to send, or could not: wrong sizes, reserved parameters, typed contents.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc.service_pb2 as pb
from tritonclient.utils import np_to_triton_dtype

LENGTH = struct.Struct("<I")
CONTENTS = {
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    **dict.fromkeys(("FP16", "BF16", "FP32"), "fp32_contents"),
    "BOOL": "bool_contents",
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


@dataclass(frozen=True)
class Region:
    """A range of a registered shared-memory region."""

    name: Any
    nbytes: Any
    offset: Any = 0


@dataclass(frozen=True)
class Typed:
    """A parameter that goes into this field over gRPC; over HTTP it is its value."""

    field: str
    value: Any


@dataclass(frozen=True)
class Tensor:
    """An input. `data` is an array; or by hand bytes as they are, or the list of elements as text has it."""

    name: str
    datatype: str
    shape: Sequence[int]
    data: Any = None
    text: bool = False
    """JSON over HTTP, typed contents over gRPC; else binary."""
    region: Region | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    contents: str = ""
    """The typed field over gRPC, where it is not the one of the datatype."""

    def wire(self) -> bytes:
        """Return the little-endian bytes."""
        if isinstance(self.data, bytes):
            return self.data
        if self.datatype == "BYTES":
            return b"".join(LENGTH.pack(len(item)) + item for item in np.asarray(self.data, object).ravel())
        return np.asarray(self.data).tobytes()

    def elements(self) -> list[Any]:
        """Return what `data` of JSON holds."""
        if isinstance(self.data, np.ndarray):
            values = self.data.tolist()
            return _texts(values) if self.datatype == "BYTES" else values
        return self.data  # type: ignore[no-any-return]


def tensor(name: str, data: np.ndarray, *, text: bool = False, **more: Any) -> Tensor:
    """Return an input of an array, with its own datatype and shape."""
    return Tensor(name, np_to_triton_dtype(data.dtype), data.shape, data, text, **more)


@dataclass(frozen=True)
class Output:
    """A requested output."""

    name: str
    binary: bool = True
    classes: int = 0
    region: Region | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Infer:
    """A whole request; called with an `Ask` it is sent. `wire` has it written by hand."""

    model: str
    inputs: Sequence[Tensor]
    outputs: Sequence[Output] | None = None
    version: str = ""
    id: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    wire: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of the stock client: priority, timeout, sequence_id, headers, compression."""

    def __call__(self, ask: Any) -> Any:
        return ask.infer(self)

    @property
    def stock(self) -> bool:
        """Whether the stock client of HTTP can send it."""
        plain = not any(tensor.parameters for tensor in (*self.inputs, *(self.outputs or ())))
        return not self.wire and plain and all(t.region or isinstance(t.data, np.ndarray) for t in self.inputs)


@dataclass(frozen=True)
class Answer:
    """An answered inference, in the same words for both doors."""

    model: str
    version: str
    id: str | None
    parameters: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]
    datatypes: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    order: Sequence[str]


# --- HTTP by hand -----------------------------------------------------------------------------------------------------


def http_body(request: Infer) -> tuple[bytes, int | None]:
    """Return the body, and how long its JSON is where binary data follows."""
    document: dict[str, Any] = {"inputs": [_json_input(one) for one in request.inputs]}
    if request.id:
        document["id"] = request.id
    if request.outputs is not None:
        document["outputs"] = [_json_output(one) for one in request.outputs]
    parameters = {key: _plain(value) for key, value in request.parameters.items()}
    if request.outputs is None:
        parameters.setdefault("binary_data_output", True)
    if parameters:
        document["parameters"] = parameters
    head = json.dumps(document).encode()
    tail = b"".join(one.wire() for one in request.inputs if _is_binary(one))
    return head + tail, len(head) if any(map(_is_binary, request.inputs)) else None


def _is_binary(one: Tensor) -> bool:
    return one.data is not None and not one.text and "binary_data_size" not in one.parameters


def _json_input(one: Tensor) -> dict[str, Any]:
    told: dict[str, Any] = {"name": one.name, "datatype": one.datatype, "shape": list(one.shape)}
    parameters = {key: _plain(value) for key, value in one.parameters.items()} | _json_region(one.region)
    if one.text:
        told["data"] = one.elements()
    elif _is_binary(one):
        parameters["binary_data_size"] = len(one.wire())
    return told | ({"parameters": parameters} if parameters else {})


def _json_output(one: Output) -> dict[str, Any]:
    parameters = {key: _plain(value) for key, value in one.parameters.items()} | _json_region(one.region)
    if one.region is None:
        parameters["binary_data"] = one.binary
    if one.classes:
        parameters["classification"] = one.classes
    return {"name": one.name, "parameters": parameters}


def _json_region(region: Region | None) -> dict[str, Any]:
    if region is None:
        return {}
    told = {"shared_memory_region": region.name, "shared_memory_byte_size": region.nbytes}
    return told | ({"shared_memory_offset": region.offset} if region.offset else {})


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Typed) else value


def _texts(values: Any) -> Any:
    return [_texts(value) for value in values] if isinstance(values, list) else values.decode()


# --- gRPC by hand -----------------------------------------------------------------------------------------------------


def grpc_message(request: Infer) -> pb.ModelInferRequest:
    """Return the message."""
    message = pb.ModelInferRequest(model_name=request.model, model_version=request.version, id=request.id)
    for one in request.inputs:
        into = message.inputs.add(name=one.name, datatype=one.datatype, shape=list(one.shape))
        _set_parameters(into.parameters, one.parameters, one.region)
        if one.text:
            field_name = one.contents or CONTENTS.get(one.datatype, "int_contents")
            values = np.asarray(one.data, object).ravel().tolist()
            getattr(into.contents, field_name).extend(_encoded(values) if field_name == "bytes_contents" else values)
            into.contents.SetInParent()
        elif one.data is not None:
            message.raw_input_contents.append(one.wire())
    for output in request.outputs or ():
        wanted = message.outputs.add(name=output.name)
        _set_parameters(wanted.parameters, output.parameters, output.region)
        if output.classes:
            wanted.parameters["classification"].int64_param = output.classes
    _set_parameters(message.parameters, request.parameters, None)
    return message


def set_parameter(into: Any, value: Any) -> None:
    """Fill an InferParameter, by the type of the value."""
    if isinstance(value, Typed):
        setattr(into, value.field, value.value)
    elif value is not None:
        kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
        setattr(into, kinds[type(value)], value)


def _set_parameters(into: Any, parameters: Mapping[str, Any], region: Region | None) -> None:
    told = dict(parameters)
    if region is not None:
        told |= {"shared_memory_region": region.name, "shared_memory_byte_size": region.nbytes}
        told |= {"shared_memory_offset": region.offset} if region.offset else {}
    for key, value in told.items():
        set_parameter(into[key], value)


def _encoded(values: list[Any]) -> list[bytes]:
    return [value if isinstance(value, bytes) else value.encode() for value in values]
