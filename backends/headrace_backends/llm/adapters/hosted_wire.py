"""What crosses between a backend process and an engine that has a process of its own: frames on a stream socket.

A frame is four bytes of length, little-endian, and a MessagePack value of the closed sets below. Knows no engine.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from headrace_backends.llm.engine import EngineCall, EngineStats, Told
from headrace_protocol.errors import ErrorCode, ErrorDetail, FailureReason, InferError
from headrace_protocol.generation import ModelCard

_LENGTH: Final = struct.Struct("<I")
_MOST: Final = 1 << 30
"""Bytes of a frame; more is no frame."""


class Opening(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Load the model. The first frame, and the only one until it is answered."""

    arguments: dict[str, Any]
    """The engine's own, by its own names."""
    adapters: dict[str, str]
    """LoRA adapters: where each name's weights lie."""


class Submit(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Take a call."""

    call: EngineCall


class Abort(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Nobody wants to hear of a call any more."""

    number: int


class Closing(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """End."""


class Opened(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The model is loaded."""

    card: ModelCard
    tokenizer: str
    """Where its tokenizer lies."""
    revision: str | None = None
    trust_remote_code: bool = False


class News(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """What became of calls, and how the engine stands."""

    told: Sequence[Told] = ()
    stats: EngineStats | None = None


class Broken(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The engine cannot be opened, or cannot go on."""

    error: InferError


ToHost = Opening | Submit | Abort | Closing
FromHost = Opened | News | Broken


def _encoded(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [value.shape, np.ascontiguousarray(value, dtype=np.float32).tobytes()]
    if isinstance(value, InferError):
        detail = None if value.detail is None else value.detail.value
        return [value.code.value, value.message, value.reason.value, detail, value.param]
    raise NotImplementedError(type(value))


def _decoded(kind: Any, value: Any) -> Any:
    if kind is InferError:
        code, message, reason, detail, param = value
        return InferError(
            ErrorCode(code),
            message,
            FailureReason(reason),
            detail=None if detail is None else ErrorDetail(detail),
            param=param,
        )
    shape, data = value
    return np.frombuffer(data, np.float32).reshape(shape)


_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=_encoded)
TO_HOST: Final = msgspec.msgpack.Decoder(ToHost, dec_hook=_decoded)
FROM_HOST: Final[msgspec.msgpack.Decoder[FromHost]] = msgspec.msgpack.Decoder(FromHost, dec_hook=_decoded)


def frame(message: ToHost | FromHost) -> bytes:
    """Return a message as it goes over the socket."""
    body = _ENCODER.encode(message)
    return _LENGTH.pack(len(body)) + body


def read_frame(connection: socket.socket) -> bytes | None:
    """Return the next frame's message, encoded; None at the end. Blocking."""
    head = _exactly(connection, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    return _exactly(connection, length) if length <= _MOST else None


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    data = bytearray(count)
    view = memoryview(data)
    done = 0
    while done < count:
        try:
            got = connection.recv_into(view[done:])
        except OSError:
            return None
        if not got:
            return None
        done += got
    return bytes(data)
