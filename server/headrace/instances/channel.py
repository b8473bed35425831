"""The server's end of the socket to one backend process: frames in and out on the event loop.

It knows sockets and framing, and nothing of models: whoever owns it gets messages and one notice of the end.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from headrace_protocol.framing import MAX_DATAGRAM, MAX_DESCRIPTORS, Framer, ProtocolError
from headrace_protocol.messages import ToBackend, ToServer

MAX_QUEUED_FRAMES: Final = 4096
"""Frames kept for a backend that does not read; beyond it the channel is given up."""
RETRY_S: Final = 0.005
"""Seconds after which a frame is sent again, where too many descriptors were on their way to be read."""
_BUFFER_BYTES: Final = MAX_DATAGRAM + 1
_CUT_OFF: Final = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)


class BackendChannel:
    """Owns its socket until `close`. Descriptors that come with a frame are the receiver's to close."""

    def __init__(
        self,
        sock: socket.socket,
        framer: Framer[ToServer],
        on_frame: Callable[[list[ToServer], list[int]], None],
        on_closed: Callable[[str], None],
    ) -> None:
        self._socket = sock
        self._framer = framer
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._outgoing: deque[tuple[bytes | bytearray, list[int]]] = deque()
        self._buffer = bytearray(_BUFFER_BYTES)
        self._closed = False
        self._retry: asyncio.TimerHandle | None = None
        self.on_drained: Callable[[], None] | None = None
        """Called when frames had to wait and the last of them is on its way."""
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._readable)

    @property
    def closed(self) -> bool:
        """Whether nothing is sent any more."""
        return self._closed

    @property
    def drained(self) -> bool:
        """Whether no frame waits for the other side to read."""
        return not self._outgoing

    def send(self, messages: Sequence[ToBackend], descriptors: Sequence[int] = ()) -> None:
        """Send one frame; the descriptors are duplicated into it and stay the caller's.

        Where the other side is gone it is `closed` then, and the notice comes later: never while somebody sends. Raises
        OSError where descriptors run out; nothing was sent then.
        """
        if self._closed:
            return
        frame, spilled = self._framer.encode(messages)
        if spilled < 0 and not descriptors and not self._outgoing:
            try:
                self._socket.send(frame)
                return
            except BlockingIOError:
                pass
            except OSError as error:
                self._fail_later(f"cannot send to the backend process: {error}")
                return
        held = [] if spilled < 0 else [spilled]
        try:
            for descriptor in descriptors:
                held.append(os.dup(descriptor))  # noqa: PERF401 - those made before one that fails have to be closed
        except OSError:
            _close_all(held)
            raise
        if len(self._outgoing) >= MAX_QUEUED_FRAMES:
            _close_all(held)
            self._fail_later(f"the backend process left {MAX_QUEUED_FRAMES} frames unread")
            return
        self._outgoing.append((frame, held))
        if self._retry is None:
            self._flush()

    def _flush(self) -> None:
        while self._outgoing:
            frame, held = self._outgoing[0]
            try:
                socket.send_fds(self._socket, [frame], held)
            except BlockingIOError:
                self._loop.add_writer(self._socket.fileno(), self._writable)
                return
            except OSError as error:
                if error.errno == errno.ETOOMANYREFS:  # the system counts those on their way, and none was taken
                    self._loop.remove_writer(self._socket.fileno())
                    self._retry = self._loop.call_later(RETRY_S, self._writable)
                    return
                self._fail_later(f"cannot send to the backend process: {error}")
                return
            self._outgoing.popleft()
            _close_all(held)
        if not self._closed:
            self._loop.remove_writer(self._socket.fileno())

    def _writable(self) -> None:
        self._retry = None
        self._flush()
        if not self._closed and not self._outgoing and self.on_drained is not None:
            self.on_drained()

    def _readable(self) -> None:
        """Take one frame; where more wait, the loop calls again, and other sockets get their turn between."""
        descriptors: list[int] = []
        try:
            nbytes, ancillary, flags, _ = self._socket.recvmsg_into([self._buffer], _ANCILLARY_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(f"the backend process is gone: {error}")
            return
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
                descriptors.extend(numbers)
        reason = ""
        if not nbytes:
            reason = "the backend process ended"
        elif flags & _CUT_OFF:
            reason = "the backend process sent a frame that is too large"
        else:
            try:
                messages = self._framer.decode(memoryview(self._buffer)[:nbytes], descriptors)
            except ProtocolError as error:
                reason = f"the backend process sent {error}"
        if reason:
            _close_all(descriptors)
            self._fail(reason)
            return
        self._on_frame(messages, descriptors)

    def fail(self, reason: str) -> None:
        """Give the channel up because of what the other side did; the owner is told as for any other end."""
        self._fail(reason)

    def _fail(self, reason: str) -> None:
        if not self._closed:
            self.close()
            self._on_closed(reason)

    def _fail_later(self, reason: str) -> None:
        """Close now, and tell the owner once whoever sends has come to an end with it."""
        self.close()
        self._loop.call_soon(self._on_closed, reason)

    def close(self) -> None:
        """Close without notice. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        if self._retry is not None:
            self._retry.cancel()
        self._socket.close()
        while self._outgoing:
            _close_all(self._outgoing.popleft()[1])


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
