"""A JSON body of the control endpoints: checked for depth, decoded into its struct, refused with the field's path."""

from __future__ import annotations

import binascii
from typing import TypeVar

import msgspec

from headrace.gateway.http.json_text import check_depth, malformed

_Body = TypeVar("_Body")


def decode_body(decoder: msgspec.json.Decoder[_Body], body: bytes | memoryview, what: str) -> _Body:
    """Return `body` decoded. Raises InferError INVALID_ARG, which names the field; `what` stands for the body."""
    text = bytes(body)
    check_depth(text, what)
    try:
        return decoder.decode(text)
    except (msgspec.MsgspecError, ValueError) as error:
        raise malformed(error, what) from None


def from_base64(text: str) -> bytes:
    """Return what `text` stands for. Raises ValueError for anything but whole base64, padding included."""
    if len(text) % 4 or text.endswith("==="):  # which the decoder overlooks
        raise ValueError
    return binascii.a2b_base64(text, strict_mode=True)
