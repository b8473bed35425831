"""The body of an infer answer, InferenceResponse to bytes. Sans-IO."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from headrace.gateway.http.json_data import unpack
from headrace.gateway.http.request_codec import ResponseForm
from headrace.types import InferenceResponse, Parameter
from headrace_protocol.datatype import Buffer


class _Output(msgspec.Struct, gc=False, omit_defaults=True):
    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: dict[str, int] | None = None
    data: list[Any] | msgspec.Raw | None = None


class _Response(msgspec.Struct, gc=False, omit_defaults=True):
    model_name: str
    model_version: str
    outputs: list[_Output]
    id: str | None = None
    parameters: dict[str, Parameter] | None = None


_encoder: Final = msgspec.json.Encoder()


def encode_response(response: InferenceResponse, form: ResponseForm) -> tuple[bytes, int | None]:
    """Return the body, and the length of its JSON part where binary data follows it (else None).

    Outputs stay in the order in which they were produced. Copies their bytes: the response may be released afterwards.
    Raises InferError INVALID_ARG where JSON was asked for and cannot carry an output.
    """
    outputs: list[_Output] = []
    tail: list[Buffer] = []
    tail_size = 0
    listed = form.binary
    for output in response.outputs:
        binary = form.binary_by_default if listed is None else listed.get(output.name, False)
        encoded = _Output(output.name, output.datatype.name, output.shape)
        if binary:
            size = memoryview(output.data).nbytes
            encoded.parameters = {"binary_data_size": size}
            tail.append(output.data)
            tail_size += size
        elif not output.in_region:
            encoded.data = unpack(output.name, output.datatype, output.shape, output.data)
        outputs.append(encoded)
    head = _encoder.encode(
        _Response(response.model_name, str(response.model_version), outputs, form.id, response.parameters or None)
    )
    if tail_size == 0:
        return head, None
    return b"".join((head, *tail)), len(head)
