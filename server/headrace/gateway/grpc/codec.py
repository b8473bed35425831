"""Between the bytes of the two inference messages and the types of the data plane. No sockets, no gRPC library.

Sentences name the input, output or parameter that is wrong, what was expected and what came.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from google.protobuf.message import DecodeError

from headrace.gateway.grpc.contents import typed_to_wire
from headrace.gateway.grpc.wire import byte_count, frame_outputs, split_raw
from headrace.gateway.version import parse_version
from headrace.types import (
    SEQUENCE_END,
    SEQUENCE_START,
    InferenceRequest,
    InferenceResponse,
    InputTensor,
    OutputTensor,
    Parameter,
    RequestedOutput,
)
from headrace_protocol._generated import grpc_service_pb2 as pb
from headrace_protocol.datatype import BY_NAME, Buffer, element_count
from headrace_protocol.errors import internal, invalid, unsupported

MAX_ITEMS: Final = 4096
"""Inputs, outputs, or parameters of one request."""
MAX_RANK: Final = 64
MAX_CORRELATION_ID: Final = 128
_SPLIT_ABOVE: Final = 65536
"""Bytes of a message above which copying its tensors costs more than looking for them."""
_SHARED_MEMORY: Final = ("shared_memory_region", "shared_memory_offset", "shared_memory_byte_size")
_HTTP_ONLY: Final = ("headers", "binary_data_output")
_EMPTY_FINAL: Final = "triton_enable_empty_final_response"

Parameters = Mapping[str, pb.InferParameter]


def decode_infer(data: bytes, received_ns: int) -> InferenceRequest:
    """Return the request that `data`, an encoded ModelInferRequest, holds. Its tensors may be views of `data`.

    Raises InferError: INVALID_ARG for whatever is not well formed, UNSUPPORTED for shared memory.
    """
    split = split_raw(data) if len(data) > _SPLIT_ABOVE else None
    raw: list[memoryview] | list[bytes]
    try:
        if split is None:
            message = pb.ModelInferRequest.FromString(data)
            raw = list(message.raw_input_contents)
        else:
            header, raw = split
            message = pb.ModelInferRequest.FromString(header)
    except DecodeError as error:
        raise invalid(f"the request is not a well-formed ModelInferRequest: {error}") from None
    request = InferenceRequest(message.model_name, parse_version(message.model_version), received_ns)
    request.id = message.id
    if message.parameters:
        _read_parameters(message.parameters, request)
    if message.outputs:
        request.outputs = _read_outputs(message.outputs)
    request.inputs = _read_inputs(message.inputs, raw)
    return request


def _read_inputs(
    tensors: Iterable[pb.ModelInferRequest.InferInputTensor], raw: list[memoryview] | list[bytes]
) -> list[InputTensor]:
    inputs: list[InputTensor] = []
    names: set[str] = set()
    for tensor in tensors:
        name = tensor.name
        if name in names:
            raise invalid(f"input '{name}' appears more than once")
        names.add(name)
        if len(names) > MAX_ITEMS:
            raise invalid(f"a request has at most {MAX_ITEMS} inputs")
        datatype = BY_NAME.get(tensor.datatype)
        if datatype is None:
            raise invalid(f"input '{name}': unknown datatype '{tensor.datatype}', expected one of {', '.join(BY_NAME)}")
        shape = _read_shape(name, tensor)
        if tensor.parameters:
            _refuse_shared_memory("input", name, tensor.parameters)
        data: Buffer
        if raw:
            if tensor.HasField("contents"):
                raise invalid(f"input '{name}' has typed contents although the request has raw_input_contents")
            if len(inputs) == len(raw):
                raise invalid(f"input '{name}' has no data: raw_input_contents has {len(raw)} entries, one an input")
            data = raw[len(inputs)]
        elif tensor.HasField("contents"):
            data = typed_to_wire(name, datatype, shape, tensor.contents)
        elif element_count(shape) == 0:
            data = b""
        else:
            raise invalid(f"input '{name}' has no data: neither raw_input_contents nor contents")
        inputs.append(InputTensor(name, datatype, shape, data))
    if len(raw) > len(inputs):
        named = ", ".join(f"'{tensor.name}'" for tensor in inputs[:8]) or "none"
        raise invalid(f"raw_input_contents has {len(raw)} entries for {len(inputs)} inputs ({named})")
    return inputs


def _read_shape(name: str, tensor: pb.ModelInferRequest.InferInputTensor) -> tuple[int, ...]:
    dims = tensor.shape
    if len(dims) > MAX_RANK:
        raise invalid(f"input '{name}': a shape has at most {MAX_RANK} dimensions, got {len(dims)}")
    shape = tuple(dims)
    for dim in shape:
        if dim < 0:
            raise invalid(f"input '{name}': a dimension of a request is not negative, got {dim} in {list(shape)}")
    return shape


def _read_outputs(outputs: Iterable[pb.ModelInferRequest.InferRequestedOutputTensor]) -> list[RequestedOutput]:
    requested: list[RequestedOutput] = []
    names: set[str] = set()
    for output in outputs:
        name = output.name
        if name in names:
            raise invalid(f"output '{name}' is requested more than once")
        names.add(name)
        if len(names) > MAX_ITEMS:
            raise invalid(f"a request has at most {MAX_ITEMS} outputs")
        wanted = RequestedOutput(name, binary=True)
        if output.parameters:
            _refuse_shared_memory("output", name, output.parameters)
            _read_output_parameters(output.parameters, wanted)
        requested.append(wanted)
    return requested


def _read_output_parameters(parameters: Parameters, wanted: RequestedOutput) -> None:
    others: dict[str, Parameter] = {}
    for key, parameter in parameters.items():
        if key == "classification":
            wanted.classification = _class_count(wanted.name, parameter)
        else:
            others[key] = _value(key, parameter)
    if others:
        wanted.parameters = others


def _class_count(output: str, parameter: pb.InferParameter) -> int:
    if parameter.WhichOneof("parameter_choice") != "int64_param":
        raise invalid(f"output '{output}': parameter 'classification' takes an int64_param, got {_kind(parameter)}")
    if parameter.int64_param < 1:
        raise invalid(
            f"output '{output}': parameter 'classification' takes a number of classes above 0, "
            f"got {parameter.int64_param}"
        )
    return parameter.int64_param


def _refuse_shared_memory(kind: str, name: str, parameters: Parameters) -> None:
    if len(parameters) > MAX_ITEMS:
        raise invalid(f"{kind} '{name}': a tensor has at most {MAX_ITEMS} parameters")
    for key in _SHARED_MEMORY:
        if key in parameters:
            raise unsupported(f"{kind} '{name}' has parameter '{key}': tensors in shared memory are not served yet")


def _read_parameters(parameters: Parameters, request: InferenceRequest) -> None:
    """Fill `request` from its parameters: those that extensions reserve by meaning, the rest as they are."""
    if len(parameters) > MAX_ITEMS:
        raise invalid(f"a request has at most {MAX_ITEMS} parameters")
    custom: dict[str, Parameter] = {}
    for key, parameter in parameters.items():
        if key == "sequence_id":
            request.correlation_id = _correlation_id(parameter)
        elif key == "sequence_start":
            request.flags |= SEQUENCE_START * _boolean(key, parameter)
        elif key == "sequence_end":
            request.flags |= SEQUENCE_END * _boolean(key, parameter)
        elif key == "priority":
            request.priority = _not_negative(key, parameter, ("int64_param", "uint64_param"))
        elif key == "timeout":
            request.timeout_us = _not_negative(key, parameter, ("int64_param",))
        elif key == _EMPTY_FINAL:
            _boolean(key, parameter)
        elif key.startswith("triton_"):
            raise invalid(f"parameter '{key}' is reserved: of the triton_ keys a request may set {_EMPTY_FINAL} alone")
        elif key in _HTTP_ONLY:
            raise invalid(f"parameter '{key}' is reserved and has no meaning over gRPC")
        else:
            custom[key] = _value(key, parameter)
    if custom:
        request.parameters = custom


def _correlation_id(parameter: pb.InferParameter) -> int | str:
    kind = parameter.WhichOneof("parameter_choice")
    if kind == "int64_param":
        return parameter.int64_param % 2**64  # ids are unsigned: those above 2^63 - 1 arrive as negative numbers
    if kind != "string_param":
        raise invalid(f"parameter 'sequence_id' takes an int64_param or a string_param, got {_kind(parameter)}")
    if len(parameter.string_param) > MAX_CORRELATION_ID:
        raise invalid(
            f"parameter 'sequence_id' takes at most {MAX_CORRELATION_ID} characters, got {len(parameter.string_param)}"
        )
    return parameter.string_param or 0


def _boolean(key: str, parameter: pb.InferParameter) -> bool:
    if parameter.WhichOneof("parameter_choice") != "bool_param":
        raise invalid(f"parameter '{key}' takes a bool_param, got {_kind(parameter)}")
    return parameter.bool_param


def _not_negative(key: str, parameter: pb.InferParameter, kinds: tuple[str, ...]) -> int:
    kind = parameter.WhichOneof("parameter_choice")
    if kind not in kinds:
        raise invalid(f"parameter '{key}' takes an {' or a '.join(kinds)}, got {_kind(parameter)}")
    value = parameter.uint64_param if kind == "uint64_param" else parameter.int64_param
    if value < 0:
        raise invalid(f"parameter '{key}' takes a number >= 0, got {value}")
    return value


def _value(key: str, parameter: pb.InferParameter) -> Parameter:
    match parameter.WhichOneof("parameter_choice"):
        case "bool_param":
            return parameter.bool_param
        case "int64_param":
            return parameter.int64_param
        case "string_param":
            return parameter.string_param
        case "double_param":
            return parameter.double_param
        case _:
            raise invalid(
                f"parameter '{key}' takes a bool_param, an int64_param, a string_param or a double_param, "
                f"got {_kind(parameter)}"
            )


def _kind(parameter: pb.InferParameter) -> str:
    kind = parameter.WhichOneof("parameter_choice")
    return f"a {kind}" if kind else "no value"


def encode_infer(response: InferenceResponse, limit: int) -> bytes:
    """Return `response` as an encoded ModelInferResponse, tensors in raw_output_contents: one copy.

    Raises InferError INVALID_ARG where it would be longer than `limit` bytes.
    """
    message = pb.ModelInferResponse(
        model_name=response.model_name, model_version=str(response.model_version), id=response.id
    )
    if response.parameters:
        for key, value in response.parameters.items():
            _set_value(key, value, message.parameters[key])
    outputs: list[OutputTensor] = response.outputs
    for output in outputs:
        message.outputs.add(name=output.name, datatype=output.datatype.name, shape=output.shape)
    pieces = frame_outputs(message.SerializeToString(), [output.data for output in outputs])
    size = byte_count(pieces)
    if size > limit:
        raise invalid(f"the response has {size} bytes, above the {limit} that one gRPC message may have here")
    return b"".join(pieces)


def _set_value(key: str, value: Parameter, into: pb.InferParameter) -> None:
    if isinstance(value, bool):
        into.bool_param = value
    elif isinstance(value, str):
        into.string_param = value
    elif isinstance(value, float):
        into.double_param = value
    elif -(2**63) <= value < 2**63:
        into.int64_param = value
    elif 0 <= value < 2**64:
        into.uint64_param = value
    else:
        raise internal(f"response parameter '{key}' holds {value}, which 64 bits cannot")
