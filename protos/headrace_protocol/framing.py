"""Bytes in, messages out; no sockets.

A frame is one SEQPACKET datagram: a byte that says the form, then a MessagePack array of messages. Form 0 holds the
messages; form 1 holds nothing and the messages lie in the frame's first descriptor (a memfd), for frames that a
datagram cannot carry.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec

from headrace_protocol.messages import ToBackend, ToServer

MAX_DATAGRAM: Final = 64 * 1024
"""Bytes of a frame sent inline; below the kernel's limit for a datagram on a UNIX socket."""
MAX_FRAME: Final = 64 * 1024 * 1024
"""Bytes of the largest frame taken from a memfd."""
MAX_DESCRIPTORS: Final = 16

T = TypeVar("T")


class ProtocolError(Exception):
    """The other side sent something that is not in the closed set: the channel must be closed."""


class Framer(Generic[T]):
    """Encodes lists of messages; decodes frames into lists of T."""

    def __init__(self, incoming: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[list[T]] = msgspec.msgpack.Decoder(list[incoming])

    def encode(self, messages: Sequence[msgspec.Struct]) -> tuple[bytearray, int]:
        """Return (datagram, descriptor); the descriptor is -1 unless the frame had to go into a memfd.

        The caller owns the descriptor, sends it as the datagram's first, and closes it. Raises OSError where there is
        none to be had, or no memory for what it is to hold.
        """
        frame = bytearray(1)
        self._encoder.encode_into(messages, frame, 1)
        if len(frame) <= MAX_DATAGRAM:
            return frame, -1
        fd = os.memfd_create("headrace-frame", os.MFD_CLOEXEC)
        try:
            with os.fdopen(fd, "wb", closefd=False) as file:
                file.write(memoryview(frame)[1:])
        except BaseException:
            os.close(fd)
            raise
        return bytearray(b"\x01"), fd

    def decode(self, datagram: bytes | memoryview, descriptors: list[int]) -> list[T]:
        """Return the messages of a frame; takes (and closes) the first descriptor where the form is 1."""
        try:
            if datagram[0] == 0:
                return self._decoder.decode(memoryview(datagram)[1:])
            if datagram[0] == 1 and descriptors:
                fd = descriptors.pop(0)
                try:
                    return self._decode_file(fd)
                finally:
                    os.close(fd)
        except (msgspec.DecodeError, IndexError, RecursionError) as error:
            raise ProtocolError(f"a frame that cannot be read: {error}") from error
        raise ProtocolError(f"a frame of unknown form {datagram[0]}")

    def _decode_file(self, fd: int) -> list[T]:
        size = os.fstat(fd).st_size
        if not 0 < size <= MAX_FRAME:
            raise ProtocolError(f"a frame of {size} bytes")
        return self._decoder.decode(os.pread(fd, size, 0))  # a mapping could be shortened under the reader


def server_framer() -> Framer[ToServer]:
    """Return the framer for the server's end."""
    return Framer(ToServer)


def backend_framer() -> Framer[ToBackend]:
    """Return the framer for a backend's end."""
    return Framer(ToBackend)
