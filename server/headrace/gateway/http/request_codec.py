"""The body of an infer request, bytes to InferenceRequest. Sans-IO: knows headers by value, no sockets.

Inputs are memoryviews of the body where they came as binary data; JSON data is converted to the wire form.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from headrace.gateway.http.errors import too_large
from headrace.gateway.http.json_data import pack
from headrace.gateway.http.json_text import check_depth, decode_marked, describe, malformed
from headrace.gateway.http.parameters import scalar, take_parameters
from headrace.gateway.http.regions import REGION, REGION_KEYS, REGION_OFFSET, REGION_SIZE, names_region, take_region
from headrace.types import MAX_RANK, InferenceRequest, InputTensor, Parameter, RegionRef, RequestedOutput
from headrace_protocol.datatype import BY_NAME, BYTES, Buffer, DataType
from headrace_protocol.errors import InferError, invalid

HEADER_LENGTH: Final = "Inference-Header-Content-Length"

_MAX_SIZE: Final = 2**63 - 1
_MIN_STRING: Final = 4  # bytes that the shortest element of BYTES takes: its length
_REQUEST: Final = "the request"

DATA: Final = "data"
BINARY: Final = "binary_data_size"


class _Input(msgspec.Struct, gc=False):
    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] | None = None
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Output(msgspec.Struct, gc=False):
    name: str
    parameters: dict[str, Any] | None = None


class _Request(msgspec.Struct, gc=False):
    inputs: list[_Input]
    id: str | None = None
    parameters: dict[str, Any] | None = None
    outputs: list[_Output] | None = None


_decoder: Final = msgspec.json.Decoder(_Request)


class ResponseForm:
    """How the client wants its answer: what `encode_response` needs to know of the request."""

    __slots__ = ("binary", "binary_by_default", "id")

    def __init__(self) -> None:
        self.id: str | None = None
        """As the client sent it; None where it sent none, and then the answer has none."""
        self.binary_by_default = False
        """Form of the outputs that the client did not list."""
        self.binary: dict[str, bool] | None = None
        """Form of each listed output."""


def decode_request(
    request: InferenceRequest, body: bytes | memoryview, header_length: str | None, max_input_size: int
) -> ResponseForm:
    """Fill `request` from `body` and return the form its answer takes.

    `header_length` is the value of Inference-Header-Content-Length, None where absent. Raises InferError
    INVALID_ARG, naming the field or the length at fault; HttpError 413 over the limit.
    """
    form = ResponseForm()
    json_size = len(body) if header_length is None else _parse_header_length(header_length, len(body))
    if json_size == 0 and header_length is not None:
        request.raw_body = memoryview(body)
        form.binary_by_default = True
        return form
    if json_size > max_input_size:
        raise too_large(f"the JSON part of the request takes {json_size} bytes, the limit is {max_input_size}")
    parsed = _decode_json(body, json_size, header_length)
    form.id = parsed.id
    if parsed.id is not None:
        request.id = parsed.id
    if parsed.parameters:
        form.binary_by_default = take_parameters(request, parsed.parameters)
    if parsed.outputs:
        form.binary = {}
        request.outputs = [_take_output(output, form.binary) for output in parsed.outputs]
    _take_inputs(request, parsed.inputs, memoryview(body)[json_size:], header_length, max_input_size)
    return form


def _parse_header_length(text: str, body_size: int) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 19:
        size = int(text)
        if size <= body_size:
            return size
        raise invalid(f"{HEADER_LENGTH} is {size}, but the body has only {body_size} bytes")
    raise invalid(f"{HEADER_LENGTH} {text[:40]!r} is not a number of bytes between 0 and the body's {body_size}")


def _decode_json(body: bytes | memoryview, json_size: int, header_length: str | None) -> _Request:
    text = body if type(body) is bytes and json_size == len(body) else bytes(memoryview(body)[:json_size])
    check_depth(text, _REQUEST)
    try:
        return decode_marked(_decoder, text)
    except (msgspec.MsgspecError, ValueError) as error:
        raise _bad_json(error, text, header_length) from None


def _bad_json(error: Exception, text: bytes, header_length: str | None) -> InferError:
    failure = malformed(error, _REQUEST)
    if isinstance(error, msgspec.ValidationError):
        return failure
    if header_length is not None:
        return invalid(f"{failure.message}; {HEADER_LENGTH} says that the JSON part is {header_length} bytes long")
    if b'"binary_data_size"' in text:
        return invalid(f"{failure.message}; binary data needs the header {HEADER_LENGTH}, which is missing")
    return failure


def _take_output(output: _Output, binary: dict[str, bool]) -> RequestedOutput:
    name = output.name
    if name in binary:
        raise invalid(f"output '{name}' is asked for twice")
    requested = RequestedOutput(name)
    if output.parameters:
        custom: dict[str, Parameter] = {}
        in_region = False
        for key, value in output.parameters.items():
            if key == "binary_data":
                if type(value) is not bool:
                    raise invalid(f"output '{name}': 'binary_data': expected true or false, got {describe(value)}")
                requested.binary = value
            elif key == "classification":
                if type(value) is not int or not 1 <= value <= _MAX_SIZE:
                    raise invalid(
                        f"output '{name}': 'classification': expected a number of classes above 0, got {describe(value)}"
                    )
                requested.classification = value
            elif key in REGION_KEYS:
                in_region = True
            else:
                custom[key] = scalar(f"output '{name}': '{key}'", value)
        requested.parameters = custom or None
        if in_region:
            _put_into_region(requested, output.parameters)
    binary[name] = requested.binary
    return requested


def _put_into_region(requested: RequestedOutput, parameters: dict[str, Any]) -> None:
    requested.region = take_region(f"output '{requested.name}'", parameters)
    if requested.binary or requested.classification:
        other = "binary_data" if requested.binary else "classification"
        raise invalid(f"output '{requested.name}': '{REGION}' and '{other}' exclude each other")


def _take_inputs(
    request: InferenceRequest, inputs: list[_Input], tail: memoryview, header_length: str | None, max_input_size: int
) -> None:
    offset = 0
    end = len(tail)
    names: set[str] = set()
    for parsed in inputs:
        name = parsed.name
        if name in names:
            raise invalid(f"input '{name}' is in the request twice")
        names.add(name)
        datatype = BY_NAME.get(parsed.datatype)
        if datatype is None:
            raise invalid(
                f"input '{name}': unknown datatype {describe(parsed.datatype)}; known are {', '.join(BY_NAME)}"
            )
        count = _element_count(name, parsed.shape, datatype)
        data: Buffer
        region: RegionRef | None = None
        source = _source(parsed)
        if source is REGION:
            region = take_region(f"input '{name}'", parsed.parameters or {})
            data = b""
        elif source is BINARY:
            size = _binary_size(parsed, datatype, count)
            if size > end - offset:
                raise _too_short(name, size, end - offset, header_length)
            data = tail[offset : offset + size]
            offset += size
        else:
            if count * datatype.itemsize > max_input_size:
                raise too_large(
                    f"input '{name}': JSON data of shape {parsed.shape} takes {count * datatype.itemsize} bytes, "
                    f"the limit is {max_input_size}; send it as binary data"
                )
            assert isinstance(parsed.data, msgspec.Raw)
            data = pack(name, datatype, parsed.shape, count, parsed.data)
        request.inputs.append(InputTensor(name, datatype, tuple(parsed.shape), data, region))
    if offset != end:
        raise invalid(
            f"{end - offset} bytes of the body belong to no input: the inputs' 'binary_data_size' add up to {offset}, "
            f"{end} bytes follow the JSON part"
        )


def _element_count(name: str, shape: list[int], datatype: DataType) -> int:
    if len(shape) > MAX_RANK:
        raise invalid(f"input '{name}': a shape has at most {MAX_RANK} dimensions, got {len(shape)}")
    for dim in shape:
        if not 0 <= dim <= _MAX_SIZE:
            raise invalid(f"input '{name}': dimension {describe(dim)} of shape is not between 0 and {_MAX_SIZE}")
    if 0 in shape:
        return 0
    count = 1
    for dim in shape:
        count *= dim
        if count * (datatype.itemsize or _MIN_STRING) > _MAX_SIZE:
            raise invalid(f"input '{name}': a tensor of this shape would take more than {_MAX_SIZE} bytes")
    return count


def _source(parsed: _Input) -> str:
    """Return where an input's elements are: in `data`, in the binary section or in a region."""
    given = parsed.parameters or {}
    data, binary = parsed.data is not msgspec.UNSET, BINARY in given
    if data is not binary and (len(given) == binary or not names_region(given)):
        return BINARY if binary else DATA
    sources = [DATA] if data else []
    sources += [key for key in (BINARY, REGION) if key in given]
    if sources == [REGION]:
        return REGION
    if len(sources) == 1 or (not sources and names_region(given)):
        raise invalid(f"input '{parsed.name}': '{REGION_OFFSET}' and '{REGION_SIZE}' say nothing without '{REGION}'")
    raise invalid(
        f"input '{parsed.name}': exactly one of 'data', parameter '{BINARY}' and parameter '{REGION}' has to be given, "
        f"got {' and '.join(map(repr, sources)) or 'none'}"
    )


def _binary_size(parsed: _Input, datatype: DataType, count: int) -> int:
    assert parsed.parameters is not None
    size = parsed.parameters["binary_data_size"]
    if type(size) is not int or not 0 <= size <= _MAX_SIZE:
        raise invalid(
            f"input '{parsed.name}': 'binary_data_size': expected a number of bytes between 0 and {_MAX_SIZE}, "
            f"got {describe(size)}"
        )
    if datatype is not BYTES and size != count * datatype.itemsize:
        raise invalid(
            f"input '{parsed.name}': 'binary_data_size' is {size}, but shape {parsed.shape} of {datatype.name} "
            f"takes {count * datatype.itemsize} bytes"
        )
    return size


def _too_short(name: str, size: int, left: int, header_length: str | None) -> InferError:
    reason = f"input '{name}': 'binary_data_size' is {size}, but {left} bytes are left in the body"
    if header_length is None:
        reason += f"; without the header {HEADER_LENGTH} the whole body is taken as JSON"
    return invalid(reason)
