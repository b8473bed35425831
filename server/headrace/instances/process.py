"""Backend processes from the server's side: started from an argument vector, watched by pidfd, always reaped.

It knows how a process comes and goes, not what it is told. A child is given one end of a socket pair and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from headrace.instances.variables import VariablePolicy

SOCKET_BUFFER: Final = 1 << 20


class Child(Protocol):
    """A running backend process. `socket` is the server's end of the channel, owned by whoever takes it."""

    pid: int
    socket: socket.socket

    def kill(self) -> None:
        """Send SIGKILL. Harmless once it has ended."""
        ...

    async def wait(self) -> str:
        """Return how it ended ("exit status 1", "killed by SIGSEGV") once it has."""
        ...


class Launcher(Protocol):
    """Starts backend processes of one kind."""

    async def launch(self) -> Child:
        """Start one process. Raises OSError where the system refuses."""
        ...


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Return (ours, theirs): a SEQPACKET pair with room for a few frames."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
    return ours, theirs


def describe_status(code: int) -> str:
    """Return a sentence part for an exit code as subprocess gives it (negative = signal)."""
    if code >= 0:
        return f"exit status {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


class ExecLauncher:
    """Starts each process anew: `python -m headrace_backends run`."""

    def __init__(self, interpreter: str = sys.executable, variables: VariablePolicy | None = None) -> None:
        self._interpreter = interpreter
        self._variables = variables or VariablePolicy()

    async def launch(self) -> Child:
        """Start a process; returns once it was exec'd, before it is ready."""
        ours, theirs = channel_pair()
        with theirs:
            argv = [self._interpreter, "-m", "headrace_backends", "run", "--fd", str(theirs.fileno())]
            return ExecChild(start(argv, [theirs.fileno()], self._variables.select(os.environ)), ours)


def start(argv: Sequence[str], descriptors: Sequence[int], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a program that inherits `descriptors`, the standard error and `variables` alone.

    In a session of its own, so that a ^C or a signal to the server's group reaches the server, which ends it in order.
    """
    return subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=2, pass_fds=descriptors, start_new_session=True, env=variables
    )


class ExecChild:
    """A child of ours, reaped through its pidfd."""

    def __init__(self, popen: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self.pid = popen.pid
        self.socket = sock
        self._popen = popen
        self._pidfd = os.pidfd_open(popen.pid)
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[str] = loop.create_future()
        loop.add_reader(self._pidfd, self._exited)

    def _exited(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self._ended.set_result(describe_status(self._popen.wait()))

    def kill(self) -> None:
        """Send SIGKILL unless it has been reaped."""
        if self._pidfd >= 0:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def wait(self) -> str:
        """Return how the process ended."""
        return await asyncio.shield(self._ended)
