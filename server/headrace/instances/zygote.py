"""The server's side of a zygote: backend processes forked from one that has the framework imported already.

Forking costs a model a few milliseconds and megabytes where exec costs it a whole import. A backend that says it is
not fork-safe, or a zygote that cannot fork, falls back to exec; in the place of one that has died another is started when it
is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping

import msgspec

from headrace.instances.process import Child, ExecLauncher, channel_pair, describe_status, start
from headrace.instances.variables import VariablePolicy
from headrace_protocol.zygote import MAX_MESSAGE, Exited, Fork, Forked, FromZygote, Hello

_log = logging.getLogger("headrace.instances")
_HELLO_TIMEOUT_S = 60.0
_TRIES = 2
"""Zygotes that a launch asks, where one dies as it is asked."""


class ZygoteChild:
    """A grandchild of ours: the zygote reaps it and tells us."""

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self.pid = pid
        self.socket = sock
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._pidfd = -1

    def exited(self, status: str) -> None:
        """Record the end, as the zygote (or its death) tells it."""
        if not self.ended.done():
            self.ended.set_result(status)
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def kill(self) -> None:
        """Send SIGKILL unless it has ended."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def orphaned(self) -> None:
        """Watch the process itself: the zygote is gone and will not tell of its end."""
        if self._pidfd < 0:
            self.exited("ended")
            return
        loop = asyncio.get_running_loop()
        descriptor = self._pidfd

        def gone() -> None:
            loop.remove_reader(descriptor)
            self.exited("ended")

        loop.add_reader(descriptor, gone)

    async def wait(self) -> str:
        """Return how the process ended."""
        return await asyncio.shield(self.ended)


class Zygote:
    """One running zygote. `alive` turns False with its end; children forked before live on.

    Where it dies of itself that is logged at once.
    """

    def __init__(self, backend: str, interpreter: str, variables: Mapping[str, str]) -> None:
        self._backend = backend
        ours, theirs = channel_pair()
        ours.setblocking(False)
        with theirs:
            argv = [
                interpreter,
                "-m",
                "headrace_backends",
                "zygote",
                "--backend",
                backend,
                "--fd",
                str(theirs.fileno()),
            ]
            self._popen = start(argv, [theirs.fileno()], variables)
        self.alive = True
        self._socket = ours
        self._decoder = msgspec.msgpack.Decoder(FromZygote)
        self._encoder = msgspec.msgpack.Encoder()
        self._serial = 0
        self._forks: dict[int, tuple[asyncio.Future[ZygoteChild], socket.socket]] = {}
        """Forks asked for, by serial: who waits for the child, and the server's end of its channel."""
        self._children: dict[int, ZygoteChild] = {}
        loop = asyncio.get_running_loop()
        self.hello: asyncio.Future[Hello | None] = loop.create_future()
        """What it said first; None where it was gone before."""
        loop.add_reader(ours.fileno(), self._readable)

    async def fork(self) -> Child:
        """Return a new child. Raises OSError where the zygote cannot."""
        ours, theirs = channel_pair()
        answer: asyncio.Future[ZygoteChild] = asyncio.get_running_loop().create_future()
        with theirs:
            try:
                socket.send_fds(self._socket, [self._encoder.encode(Fork(self._serial + 1))], [theirs.fileno()])
            except OSError:
                ours.close()
                self._readable()  # it may say no more: that it has died
                raise
        self._serial += 1
        self._forks[self._serial] = answer, ours
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled():
                answer.result().socket.close()
            raise

    def _forked(self, message: Forked) -> None:
        answer, ours = self._forks.pop(message.serial)
        if not message.pid:
            ours.close()
            if not answer.done():
                answer.set_exception(OSError(message.error))
            return
        child = self._children[message.pid] = ZygoteChild(message.pid, ours)
        if answer.done():
            ours.close()  # nobody waits for it any more: it ends with its channel
        else:
            answer.set_result(child)

    def _readable(self) -> None:
        if not self.alive:
            return
        try:
            data = self._socket.recv(MAX_MESSAGE)
            message = self._decoder.decode(data) if data else None
        except BlockingIOError:
            return
        except (OSError, msgspec.DecodeError):
            message = None
        match message:
            case None:
                self._died()
            case Hello():
                if not self.hello.done():
                    self.hello.set_result(message)
            case Forked():
                self._forked(message)
            case Exited(pid=pid, status=status):
                self._children.pop(pid).exited(describe_status(status))

    def _died(self) -> None:
        self.close()
        how = describe_status(self._popen.returncode)
        _log.warning(
            "backend %s: the zygote process %d ended: %s; the models that it started go on, and the next to be loaded "
            "starts another",
            self._backend,
            self._popen.pid,
            how,
        )

    def close(self) -> None:
        """Let the zygote end; its children are not touched. Idempotent."""
        if not self.alive:
            return
        self.alive = False
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        if not self.hello.done():
            self.hello.set_result(None)
        for serial in list(self._forks):
            self._forked(Forked(serial, 0, "the zygote process ended"))
        for child in self._children.values():
            child.orphaned()
        self._children.clear()
        self._popen.kill()
        self._popen.wait()


class ZygoteLauncher:
    """Launches processes of one backend: forked where that works, exec'd where it does not."""

    def __init__(
        self, backend: str, interpreter: str = sys.executable, variables: VariablePolicy | None = None
    ) -> None:
        self._backend = backend
        self._interpreter = interpreter
        self._variables = variables or VariablePolicy()
        self._exec = ExecLauncher(interpreter, self._variables)
        self._zygote: Zygote | None = None
        self._refused = False
        self._starting = asyncio.Lock()

    async def launch(self) -> Child:
        """Start one process. Raises OSError where the system refuses."""
        for _ in range(_TRIES):
            zygote = await self._ready_zygote()
            if zygote is None:
                break
            try:
                return await zygote.fork()
            except OSError as error:
                if zygote.alive:
                    _log.warning(
                        "backend %s: the zygote cannot fork (%s), starting a process anew", self._backend, error
                    )
                    break
        return await self._exec.launch()

    async def _ready_zygote(self) -> Zygote | None:
        """Return one that can fork, starting it where there is none; None where there is to be none, or it died at once."""
        async with self._starting:
            if self._refused:
                return None
            if self._zygote is not None and self._zygote.alive:
                return self._zygote
            zygote = Zygote(self._backend, self._interpreter, self._variables.select(os.environ))
            try:
                async with asyncio.timeout(_HELLO_TIMEOUT_S):
                    hello = await zygote.hello
            except TimeoutError:
                hello = Hello(f"no sign of life within {_HELLO_TIMEOUT_S:g} s")
                _log.warning("backend %s: the zygote gave %s", self._backend, hello.refusal)
            except asyncio.CancelledError:
                zygote.close()
                raise
            if hello is None:
                return None
            if hello.refusal:
                _log.debug("backend %s is not forked: %s", self._backend, hello.refusal)
                self._refused = True
                zygote.close()
                return None
            self._zygote = zygote
            return zygote

    def close(self) -> None:
        """End the zygote."""
        if self._zygote is not None:
            self._zygote.close()
