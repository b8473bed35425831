"""Bytes to request messages, for the rpcs of few bytes."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from headrace_protocol.errors import invalid

_Request = TypeVar("_Request", bound=Message)


def parse(kind: type[_Request], data: bytes) -> _Request:
    """Return the message of `kind` that `data` holds. Raises INVALID_ARG where it holds none."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise invalid(f"the request is not a well-formed {kind.DESCRIPTOR.name}: {error}") from None
