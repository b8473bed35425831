"""The server's side of a zygote: backend processes forked from one that has the framework imported already.

Forking costs a model a few milliseconds and megabytes where exec costs it a whole import. A backend that says it is
not fork-safe, or a zygote that fails, falls back to exec.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys

import msgspec

from headrace.instances.process import Child, ExecLauncher, channel_pair, describe_status, start
from headrace_protocol.zygote import MAX_MESSAGE, Exited, Fork, Forked, FromZygote, Hello

_log = logging.getLogger("headrace.instances")
_HELLO_TIMEOUT_S = 60.0


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
    """One running zygote. `alive` turns False with its end; children forked before live on."""

    def __init__(self, backend: str, interpreter: str) -> None:
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
            self._popen = start(argv, [theirs.fileno()])
        self.alive = True
        self._socket = ours
        self._decoder = msgspec.msgpack.Decoder(FromZygote)
        self._encoder = msgspec.msgpack.Encoder()
        self._serial = 0
        self._forks: dict[int, asyncio.Future[Forked]] = {}
        self._children: dict[int, ZygoteChild] = {}
        self._early: dict[int, str] = {}
        loop = asyncio.get_running_loop()
        self.hello: asyncio.Future[Hello] = loop.create_future()
        loop.add_reader(ours.fileno(), self._readable)

    async def fork(self) -> Child:
        """Return a new child. Raises OSError where the zygote cannot."""
        ours, theirs = channel_pair()
        self._serial += 1
        answer: asyncio.Future[Forked] = asyncio.get_running_loop().create_future()
        self._forks[self._serial] = answer
        with theirs:
            socket.send_fds(self._socket, [self._encoder.encode(Fork(self._serial))], [theirs.fileno()])
        forked = await answer
        if not forked.pid:
            ours.close()
            raise OSError(forked.error)
        child = ZygoteChild(forked.pid, ours)
        early = self._early.pop(forked.pid, None)
        if early is not None:
            child.exited(early)
        elif self.alive:
            self._children[forked.pid] = child
        else:
            child.orphaned()
        return child

    def _readable(self) -> None:
        try:
            data = self._socket.recv(MAX_MESSAGE)
            message = self._decoder.decode(data) if data else None
        except BlockingIOError:
            return
        except (OSError, msgspec.DecodeError):
            message = None
        match message:
            case None:
                self.close()
            case Hello():
                if not self.hello.done():
                    self.hello.set_result(message)
            case Forked(serial=serial):
                answer = self._forks.pop(serial, None)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case Exited(pid=pid, status=status):
                child = self._children.pop(pid, None)
                if child is not None:
                    child.exited(describe_status(status))
                else:
                    self._early[pid] = describe_status(status)

    def close(self) -> None:
        """Let the zygote end; its children are not touched. Idempotent."""
        if not self.alive:
            return
        self.alive = False
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        if not self.hello.done():
            self.hello.set_result(Hello("the zygote process ended"))
        for answer in self._forks.values():
            if not answer.done():
                answer.set_result(Forked(0, 0, "the zygote process ended"))
        for child in self._children.values():
            child.orphaned()
        self._children.clear()
        self._popen.kill()
        self._popen.wait()


class ZygoteLauncher:
    """Launches processes of one backend: forked where that works, exec'd where it does not."""

    def __init__(self, backend: str, interpreter: str = sys.executable) -> None:
        self._backend = backend
        self._interpreter = interpreter
        self._exec = ExecLauncher(interpreter)
        self._zygote: Zygote | None = None
        self._refused = False
        self._starting = asyncio.Lock()

    async def launch(self) -> Child:
        """Start one process."""
        zygote = await self._ready_zygote()
        if zygote is not None:
            try:
                return await zygote.fork()
            except OSError as error:
                _log.warning("backend %s: the zygote cannot fork (%s), starting a process anew", self._backend, error)
        return await self._exec.launch()

    async def _ready_zygote(self) -> Zygote | None:
        async with self._starting:
            if self._refused:
                return None
            if self._zygote is not None and self._zygote.alive:
                return self._zygote
            zygote = Zygote(self._backend, self._interpreter)
            try:
                async with asyncio.timeout(_HELLO_TIMEOUT_S):
                    hello = await zygote.hello
            except TimeoutError:
                hello = Hello(f"no sign of life within {_HELLO_TIMEOUT_S:g} s")
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
