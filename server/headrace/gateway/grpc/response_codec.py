"""From the responses of the data plane to the bytes of the two response messages. No sockets, no gRPC library."""

from __future__ import annotations

from typing import Final

from headrace.gateway.grpc.wire import byte_count, encode_varint, frame_outputs
from headrace.types import InferenceResponse, Parameter
from headrace_protocol._generated import grpc_service_pb2 as pb
from headrace_protocol.datatype import Buffer
from headrace_protocol.errors import InferError, internal, invalid

_FINAL: Final = "triton_final_response"
_INFER_RESPONSE_KEY: Final = b"\x12"
"""ModelStreamInferResponse.infer_response: field 2, of a length."""


def encode_infer(response: InferenceResponse, limit: int) -> bytes:
    """Return `response` as an encoded ModelInferResponse, tensors in raw_output_contents: one copy.

    Raises InferError INVALID_ARG where it would be longer than `limit` bytes.
    """
    pieces = _frame(_head(response, response.id), response)
    _check_size(byte_count(pieces), limit)
    return b"".join(pieces)


def encode_stream_response(response: InferenceResponse, request_id: str, limit: int) -> bytes:
    """Return `response` as an encoded ModelStreamInferResponse that tells whether it is the last of its request.

    Raises InferError INVALID_ARG where it would be longer than `limit` bytes.
    """
    message = _head(response, request_id)
    message.parameters[_FINAL].bool_param = response.final
    pieces = _frame(message, response)
    inner = byte_count(pieces)
    pieces[:0] = [_INFER_RESPONSE_KEY, encode_varint(inner)]
    _check_size(byte_count(pieces), limit)
    return b"".join(pieces)


def encode_stream_end(request_id: str, model: str, version: str) -> bytes:
    """Return the message that tells the end of a request without a response; model and version as requested."""
    message = pb.ModelInferResponse(id=request_id, model_name=model, model_version=version)
    message.parameters[_FINAL].bool_param = True
    return pb.ModelStreamInferResponse(infer_response=message).SerializeToString()


def encode_stream_error(error: InferError, request_id: str, model: str, version: str) -> bytes:
    """Return the message that tells a request's failure; model and version as requested, empty where nobody knows."""
    return pb.ModelStreamInferResponse(
        error_message=error.message.encode("utf-8", "replace").decode(),
        infer_response=pb.ModelInferResponse(id=request_id, model_name=model, model_version=version),
    ).SerializeToString()


def _head(response: InferenceResponse, request_id: str) -> pb.ModelInferResponse:
    message = pb.ModelInferResponse(
        model_name=response.model_name, model_version=str(response.model_version), id=request_id
    )
    if response.parameters:
        for key, value in response.parameters.items():
            _set_value(key, value, message.parameters[key])
    return message


def _frame(message: pb.ModelInferResponse, response: InferenceResponse) -> list[Buffer]:
    """Return the pieces of the encoded message; a tensor in shared memory has an empty entry of raw contents."""
    outputs = response.outputs
    for output in outputs:
        message.outputs.add(name=output.name, datatype=output.datatype.name, shape=output.shape)
    return frame_outputs(message.SerializeToString(), [output.data for output in outputs])


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise invalid(f"the response has {size} bytes, above the {limit} that one gRPC message may have here")


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
