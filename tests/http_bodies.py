"""Bodies of infer requests over HTTP, decoded or refused: what the tests of the codec share."""

from __future__ import annotations

import json

import pytest

from headrace.gateway.http.request_codec import decode_request
from headrace.types import InferenceRequest
from headrace_protocol.errors import ErrorCode, InferError

LIMIT = 1 << 20


def decode(body: bytes | str | dict, header: str | None = None, limit: int = LIMIT):
    if isinstance(body, dict):
        body = json.dumps(body)
    if isinstance(body, str):
        body = body.encode()
    request = InferenceRequest("m")
    return request, decode_request(request, body, header, limit)


def refusal(body, header: str | None = None) -> str:
    with pytest.raises(InferError) as caught:
        decode(body, header)
    assert caught.value.code is ErrorCode.INVALID_ARG
    return caught.value.message


def tensor(datatype: str, shape: list, data: object) -> dict:
    return {"inputs": [{"name": "X", "shape": shape, "datatype": datatype, "data": data}]}


def packed(datatype: str, shape: list, data: object) -> bytes:
    request, _ = decode(tensor(datatype, shape, data))
    return bytes(request.inputs[0].data)


def binary(size: object = 16, shape: object = (4,), **more: object) -> dict:
    return {"name": "X", "shape": list(shape), "datatype": "FP32", "parameters": {"binary_data_size": size}, **more}


def with_tail(header: dict, tail: bytes) -> tuple[bytes, str]:
    text = json.dumps(header).encode()
    return text + tail, str(len(text))
