"""The process's end of the channel to the server: frames with descriptors over a SEQPACKET socket. No decisions."""

from __future__ import annotations

import array
import errno
import os
import socket
import time
from collections.abc import Sequence
from typing import Final, Generic, TypeVar

import msgspec

from headrace_protocol.framing import MAX_DATAGRAM, MAX_DESCRIPTORS, Framer, ProtocolError

T = TypeVar("T")

_ANCILLARY: Final = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
_RETRY_S: Final = 0.001
_CUT_OFF: Final = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)


class Channel(Generic[T]):
    """Owns the socket. One thread may receive while others send: a SEQPACKET datagram is never mixed with another."""

    def __init__(self, fd: int, framer: Framer[T]) -> None:
        self._socket: Final = socket.socket(fileno=fd)
        self._framer: Final = framer
        self._buffer: Final = bytearray(MAX_DATAGRAM)
        os.set_inheritable(fd, False)

    @property
    def fd(self) -> int:
        """The socket's descriptor, -1 once closed."""
        return self._socket.fileno()

    def receive(self) -> tuple[list[T], list[int]] | None:
        """Return the next frame's messages and descriptors (the caller owns them), or None where the peer has gone.

        Blocks. Raises ProtocolError for a frame that cannot be understood.
        """
        try:
            size, ancillary, flags, _ = self._socket.recvmsg_into([self._buffer], _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:
            return None
        if not size:
            return None
        descriptors: list[int] = []
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(data[: len(data) - len(data) % received.itemsize])
                descriptors.extend(received)
        if flags & _CUT_OFF:
            raise ProtocolError(f"a frame of more than {MAX_DATAGRAM} bytes or {MAX_DESCRIPTORS} descriptors")
        return self._framer.decode(memoryview(self._buffer)[:size], descriptors), descriptors

    def send(self, messages: Sequence[msgspec.Struct], descriptors: Sequence[int] = ()) -> None:
        """Send one frame; blocks while the peer's buffer is full. The descriptors stay the caller's.

        Raises ConnectionError where the peer has gone.
        """
        datagram, frame_fd = self._framer.encode(messages)
        if frame_fd < 0 and not descriptors:
            self._socket.send(datagram)
            return
        try:
            rights = array.array("i", descriptors if frame_fd < 0 else [frame_fd, *descriptors])
            self._send_with(datagram, rights)
        finally:
            if frame_fd >= 0:
                os.close(frame_fd)

    def _send_with(self, datagram: bytearray, rights: array.array[int]) -> None:
        while True:
            try:
                self._socket.sendmsg([datagram], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
                return
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:
                    raise
                time.sleep(_RETRY_S)  # the system counts descriptors on their way, and there is nothing to wait on

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
