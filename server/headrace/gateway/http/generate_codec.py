"""The bodies of generate and generate_stream: a flat JSON object to a request's tensors and parameters, and back. Pure.

A member named like an input of the model becomes that tensor, "id" the request's id, the members of "parameters" are
read like those of the object itself, and every other member becomes a parameter. An answer has a member for each output
and each parameter of the response.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from headrace.gateway.http.json_data import pack_whole, unpack
from headrace.gateway.http.json_text import check_depth, decode_any, decode_marked, describe, malformed
from headrace.gateway.http.parameters import take_parameters
from headrace.types import InferenceRequest, InferenceResponse, InputTensor, TensorMetadata
from headrace_protocol.datatype import BY_NAME
from headrace_protocol.errors import invalid

ID: Final = "id"
NESTED: Final = "parameters"

_REQUEST: Final = "the request"
_ADVICE: Final = "use infer and ask for binary data"

_decoder: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encoder: Final = msgspec.json.Encoder()


def decode_generate(
    request: InferenceRequest, body: bytes | memoryview, inputs: Iterable[TensorMetadata], max_input_size: int
) -> str | None:
    """Fill `request` for a model with these inputs from `body`; return the id that the answer gives back, if any.

    The shape of a tensor is that of the model, with the last of its variable dimensions as long as the elements need
    and the others 1. Raises InferError INVALID_ARG, naming the member at fault, and HttpError 413 for a tensor of more
    than `max_input_size` bytes.
    """
    text = bytes(body)
    check_depth(text, _REQUEST)
    try:
        members = decode_marked(_decoder, text)
    except (msgspec.MsgspecError, ValueError) as error:
        raise malformed(error, _REQUEST) from None
    known = {tensor.name: tensor for tensor in inputs}
    parameters: dict[str, Any] = {}
    identifier: str | None = None
    for name, raw in members.items():
        if name == ID:
            identifier = _identifier(raw)
            if name not in known:
                continue
        if name == NESTED:
            for inner, value in _nested(raw, known).items():
                _place(request, parameters, inner, value, known, max_input_size)
        else:
            _place(request, parameters, name, raw, known, max_input_size)
    request.id = identifier or ""
    if parameters:
        take_parameters(request, parameters)
    return identifier


def _identifier(raw: msgspec.Raw) -> str | None:
    value = decode_any(raw, f"'{ID}'")
    if value is None or isinstance(value, str):
        return value
    raise invalid(f"'{ID}': expected a string, got {describe(value)}")


def _nested(raw: msgspec.Raw, known: Mapping[str, TensorMetadata]) -> dict[str, msgspec.Raw]:
    if NESTED in known:
        raise invalid(f"'{NESTED}' is an input of the model, so that it cannot hold parameters here; use infer")
    try:
        return _decoder.decode(raw) if bytes(raw) != b"null" else {}
    except (msgspec.MsgspecError, ValueError) as error:
        raise malformed(error, f"'{NESTED}'") from None


def _place(
    request: InferenceRequest,
    parameters: dict[str, Any],
    name: str,
    raw: msgspec.Raw,
    known: Mapping[str, TensorMetadata],
    max_input_size: int,
) -> None:
    """Make an input or a parameter of one member."""
    tensor = known.get(name)
    if tensor is None:
        if name in parameters:
            raise invalid(f"parameter '{name}' is given twice, once in '{NESTED}'")
        parameters[name] = decode_any(raw, f"'{name}'")
        return
    if any(placed.name == name for placed in request.inputs):
        raise invalid(f"input '{name}' is given twice, once in '{NESTED}'")
    datatype = BY_NAME[tensor.datatype]
    count, data = pack_whole(name, datatype, raw, max_input_size)
    request.inputs.append(InputTensor(name, datatype, _shape(tensor, count), data))


def _shape(tensor: TensorMetadata, count: int) -> tuple[int, ...]:
    """Return the shape that `count` elements have for this input."""
    fixed = math.prod(dim for dim in tensor.shape if dim >= 0)
    variable = [at for at, dim in enumerate(tensor.shape) if dim < 0]
    if count % fixed or (not variable and count != fixed):
        how = f"a multiple of {fixed}" if variable else str(fixed)
        raise invalid(f"input '{tensor.name}': shape {list(tensor.shape)} takes {how} elements, got {count}")
    shape = [max(dim, 1) for dim in tensor.shape]
    if variable:
        shape[variable[-1]] = count // fixed
    return tuple(shape)


def encode_generated(response: InferenceResponse, identifier: str | None) -> bytes:
    """Return the JSON of one response, on one line. Copies: the response may be released afterwards.

    An output of one element is that element, any other a flat array. Where names meet, outputs go before parameters,
    and both before the names of the protocol. Raises InferError INVALID_ARG where JSON cannot carry an output.
    """
    members: dict[str, Any] = {} if identifier is None else {ID: identifier}
    members["model_name"] = response.model_name
    members["model_version"] = str(response.model_version)
    if response.parameters:
        members.update(response.parameters)
    for output in response.outputs:
        values = unpack(output.name, output.datatype, output.shape, output.data, _ADVICE)
        members[output.name] = _bare(values, output.shape)
    return _encoder.encode(members)


def _bare(values: list[Any] | msgspec.Raw, shape: Sequence[int]) -> Any:
    if math.prod(shape) != 1:
        return values
    return values[0] if isinstance(values, list) else msgspec.Raw(bytes(values)[1:-1])
