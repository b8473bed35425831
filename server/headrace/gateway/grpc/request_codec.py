"""From the bytes of a ModelInferRequest to the request of the data plane. No sockets, no gRPC library.

Sentences name the input, output or parameter that is wrong, what was expected and what came.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from google.protobuf.message import DecodeError

from headrace.gateway.grpc.contents import typed_to_wire
from headrace.gateway.grpc.wire import split_raw
from headrace.gateway.version import parse_version
from headrace.types import (
    MAX_RANK,
    SEQUENCE_END,
    SEQUENCE_START,
    InferenceRequest,
    InputTensor,
    Parameter,
    RegionRef,
    RequestedOutput,
)
from headrace_protocol._generated import grpc_service_pb2 as pb
from headrace_protocol.datatype import BY_NAME, Buffer, element_count
from headrace_protocol.errors import invalid

MAX_ITEMS: Final = 4096
"""Inputs, outputs, or parameters of one request."""
MAX_CORRELATION_ID: Final = 128
_SPLIT_ABOVE: Final = 65536
"""Bytes of a message above which copying its tensors costs more than looking for them."""
_REGION: Final = "shared_memory_region"
_OFFSET: Final = "shared_memory_offset"
_BYTE_SIZE: Final = "shared_memory_byte_size"
_REGION_KEYS: Final = frozenset((_REGION, _OFFSET, _BYTE_SIZE))
_HTTP_ONLY: Final = ("headers", "binary_data_output")
_EMPTY_FINAL: Final = "triton_enable_empty_final_response"

Parameters = Mapping[str, pb.InferParameter]
RawContents = list[memoryview] | list[bytes]


def decode_infer(data: bytes, received_ns: int) -> InferenceRequest:
    """Return the request that `data`, an encoded ModelInferRequest, holds. Its tensors may be views of `data`.

    Raises InferError INVALID_ARG for whatever is not well formed.
    """
    message, raw = parse_infer(data)
    return read_infer(message, raw, received_ns)


def parse_infer(data: bytes) -> tuple[pb.ModelInferRequest, RawContents]:
    """Return the message that `data` holds, and its raw contents, which may be views of `data`. Raises INVALID_ARG."""
    split = split_raw(data) if len(data) > _SPLIT_ABOVE else None
    try:
        if split is None:
            message = pb.ModelInferRequest.FromString(data)
            return message, list(message.raw_input_contents)
        header, raw = split
        return pb.ModelInferRequest.FromString(header), raw
    except DecodeError as error:
        raise invalid(f"the request is not a well-formed ModelInferRequest: {error}") from None


def read_infer(message: pb.ModelInferRequest, raw: RawContents, received_ns: int) -> InferenceRequest:
    """Return the request that a message and its raw contents are; see decode_infer."""
    request = InferenceRequest(message.model_name, parse_version(message.model_version), received_ns)
    request.id = message.id
    if message.parameters:
        _read_parameters(message.parameters, request)
    if message.outputs:
        request.outputs = _read_outputs(message.outputs)
    request.inputs = _read_inputs(message.inputs, raw)
    return request


def _read_inputs(tensors: Iterable[pb.ModelInferRequest.InferInputTensor], raw: RawContents) -> list[InputTensor]:
    inputs: list[InputTensor] = []
    names: set[str] = set()
    taken = 0
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
        data: Buffer
        region = _read_region("input", name, tensor.parameters) if tensor.parameters else None
        if region is not None:
            if tensor.HasField("contents"):
                raise invalid(f"input '{name}' has contents although its data lie in shared memory")
            data = b""
        elif raw:
            if tensor.HasField("contents"):
                raise invalid(f"input '{name}' has typed contents although the request has raw_input_contents")
            if taken == len(raw):
                raise invalid(
                    f"input '{name}' has no data: raw_input_contents has {len(raw)} entries, "
                    "one for each input that is not in shared memory"
                )
            data = raw[taken]
            taken += 1
        elif tensor.HasField("contents"):
            data = typed_to_wire(name, datatype, shape, tensor.contents)
        elif element_count(shape) == 0:
            data = b""
        else:
            raise invalid(f"input '{name}' has no data: neither raw_input_contents nor contents nor shared memory")
        inputs.append(InputTensor(name, datatype, shape, data, region))
    if len(raw) > taken:
        named = ", ".join(f"'{tensor.name}'" for tensor in inputs if tensor.region is None)
        raise invalid(
            f"raw_input_contents has {len(raw)} entries, expected {taken}: "
            f"one for each input that is not in shared memory ({named[:200] or 'none'})"
        )
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
            wanted.region = _read_region("output", name, output.parameters)
            _read_output_parameters(output.parameters, wanted)
            if wanted.region is not None and wanted.classification:
                raise invalid(
                    f"output '{name}' cannot have both parameters 'shared_memory_region' and 'classification'"
                )
        requested.append(wanted)
    return requested


def _read_output_parameters(parameters: Parameters, wanted: RequestedOutput) -> None:
    others: dict[str, Parameter] = {}
    for key, parameter in parameters.items():
        if key == "classification":
            wanted.classification = _class_count(wanted.name, parameter)
        elif key not in _REGION_KEYS:
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


def _read_region(kind: str, name: str, parameters: Parameters) -> RegionRef | None:
    """Return where in shared memory the tensor lies, None where its parameters name no region."""
    if len(parameters) > MAX_ITEMS:
        raise invalid(f"{kind} '{name}': a tensor has at most {MAX_ITEMS} parameters")
    if _REGION not in parameters:
        for key in (_OFFSET, _BYTE_SIZE):
            if key in parameters:
                raise invalid(f"{kind} '{name}' has parameter '{key}' but no '{_REGION}' that it belongs to")
        return None
    region = parameters[_REGION]
    if region.WhichOneof("parameter_choice") != "string_param":
        raise invalid(f"{kind} '{name}': parameter '{_REGION}' takes a string_param, got {_kind(region)}")
    if not region.string_param:
        raise invalid(f"{kind} '{name}': parameter '{_REGION}' takes the name of a region, got an empty text")
    if _BYTE_SIZE not in parameters:
        raise invalid(f"{kind} '{name}' has parameter '{_REGION}' but no '{_BYTE_SIZE}'")
    nbytes = _range(kind, name, _BYTE_SIZE, parameters[_BYTE_SIZE])
    offset = _range(kind, name, _OFFSET, parameters[_OFFSET]) if _OFFSET in parameters else 0
    return RegionRef(region.string_param, offset, nbytes)


def _range(kind: str, name: str, key: str, parameter: pb.InferParameter) -> int:
    if parameter.WhichOneof("parameter_choice") != "int64_param":
        raise invalid(f"{kind} '{name}': parameter '{key}' takes an int64_param, got {_kind(parameter)}")
    if parameter.int64_param < 0:
        raise invalid(f"{kind} '{name}': parameter '{key}' takes a number >= 0, got {parameter.int64_param}")
    return parameter.int64_param


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
            request.empty_final = _boolean(key, parameter)
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
