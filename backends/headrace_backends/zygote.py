"""The zygote: imports a backend's framework once and forks a process for each model, in milliseconds.

It loads no model and starts no thread, so that a fork copies nothing that would be half alive in the child.
"""

from __future__ import annotations

import gc
import os
import select
import socket
import sys
import traceback
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from headrace_backends import runner
from headrace_backends.discovery import load_backend
from headrace_protocol.errors import InferError
from headrace_protocol.zygote import MAX_MESSAGE, Exited, Forked, FromZygote, Hello, ToZygote


class Zygote:
    """Owns the control socket and, through pidfds, the children until they are reaped."""

    def __init__(self, control: socket.socket) -> None:
        self._control: Final = control
        self._encoder: Final = msgspec.msgpack.Encoder()
        self._decoder: Final = msgspec.msgpack.Decoder(ToZygote)
        self._children: Final[dict[int, int]] = {}
        """pidfd -> pid."""
        self._poll: Final = select.poll()

    def run(self, refusal: str) -> NoReturn:
        """Obey until the server goes away; the children then notice the end of their own channels."""
        self._tell(Hello(refusal))
        self._poll.register(self._control, select.POLLIN)
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._control.fileno():
                    self._obey()
                else:
                    self._reap(fd)

    def _obey(self) -> None:
        """Read one order and carry it out."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, MAX_MESSAGE, 1, socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:
            data = b""
        if not data:
            os._exit(0)
        try:
            order = self._decoder.decode(data)
        except msgspec.DecodeError as error:
            _give_up(f"an order that cannot be read: {error}")
        if not descriptors:
            _give_up("a Fork came without a descriptor")
        try:
            pid = os.fork()
        except OSError as error:
            os.close(descriptors[0])
            self._tell(Forked(order.serial, 0, f"fork: {error.strerror}"))
            return
        if pid == 0:
            self._become_runner(descriptors[0])
        os.close(descriptors[0])
        child = os.pidfd_open(pid)
        self._children[child] = pid
        self._poll.register(child, select.POLLIN)
        self._tell(Forked(order.serial, pid))

    def _become_runner(self, channel: int) -> NoReturn:
        """In the child: keep nothing of the zygote but its memory, and serve."""
        try:
            self._control.close()
            for fd in self._children:
                os.close(fd)
            runner.serve(channel)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _reap(self, child: int) -> None:
        self._poll.unregister(child)
        pid = self._children.pop(child)
        _, status = os.waitpid(pid, 0)
        os.close(child)
        self._tell(Exited(pid, os.waitstatus_to_exitcode(status)))

    def _tell(self, event: FromZygote) -> None:
        try:
            self._control.send(self._encoder.encode(event))
        except ConnectionError:
            os._exit(0)


def serve(fd: int, backend: str) -> NoReturn:
    """Serve the control channel whose socket is `fd`; ends the process."""
    zygote = Zygote(socket.socket(fileno=fd))
    refusal = why_not_fork(backend)
    gc.collect()
    gc.freeze()  # the collector would touch, and so copy, every page that the children share
    zygote.run(refusal)


def why_not_fork(backend: str) -> str:
    """Import the backend; return why its processes must not be forked from this one, "" where they may."""
    try:
        if not load_backend(backend).fork_safe:
            return f"backend '{backend}' is not fork-safe"
    except InferError as error:
        return error.message
    threads = sum(1 for _ in Path("/proc/self/task").iterdir())
    return f"importing backend '{backend}' started {threads - 1} threads" if threads > 1 else ""


def _give_up(reason: str) -> NoReturn:
    sys.stderr.write(f"headrace zygote: {reason}\n")
    os._exit(runner.EXIT_PROTOCOL_ERROR)
