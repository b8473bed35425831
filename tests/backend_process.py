"""A real backend process at the end of a socket pair, driven by the server's own framer; for tests of that process."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace_protocol.arena import Arena
from headrace_protocol.datatype import BY_NAME, from_numpy, of_numpy, to_numpy
from headrace_protocol.framing import server_framer
from headrace_protocol.messages import (
    PROTOCOL,
    BatchDone,
    Execute,
    Initialize,
    Log,
    Ready,
    RequestHeader,
    Responses,
    ToServer,
)
from headrace_protocol.tensor import ARENA, Tensor, TensorRef
from headrace_protocol.zygote import MAX_MESSAGE, Exited, Fork, Forked, FromZygote, Hello

LIMIT_S = 30.0


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Return (ours, theirs)."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(LIMIT_S)
    return ours, theirs


def identity_config(max_batch_size: int = 8, datatype: str = "TYPE_FP32", **parameters: str) -> dict[str, Any]:
    """Return the configuration of a model with one input and one output of one varying dimension."""
    return {
        "name": "m",
        "backend": "identity",
        "max_batch_size": max_batch_size,
        "input": [{"name": "INPUT0", "data_type": datatype, "dims": [-1]}],
        "output": [{"name": "OUTPUT0", "data_type": datatype, "dims": [-1]}],
        "parameters": {
            name: {"string_value": value} for name, value in {"allow_misbehaviour": "true", **parameters}.items()
        },
    }


class Conversation:
    """The server's end of a channel: sends messages, collects what comes back, owns an arena."""

    def __init__(self, sock: socket.socket, arena_bytes: int = 1 << 22) -> None:
        self.socket = sock
        self.arena = Arena.create(arena_bytes)
        self.logs: list[Log] = []
        self._framer = server_framer()

    def send(self, *messages: msgspec.Struct, descriptors: Sequence[int] = ()) -> None:
        """Send one frame."""
        frame, spilled = self._framer.encode(messages)
        socket.send_fds(self.socket, [frame], ([spilled] if spilled >= 0 else []) + list(descriptors))
        if spilled >= 0:
            os.close(spilled)

    def receive(self) -> tuple[list[ToServer], list[int]]:
        """Return the next frame that holds more than logs, with its descriptors."""
        while True:
            data, descriptors, _, _ = socket.recv_fds(self.socket, 1 << 17, 16)
            if not data:
                raise EOFError("the backend process closed the channel")
            messages = self._framer.decode(data, descriptors)
            self.logs += [message for message in messages if isinstance(message, Log)]
            others = [message for message in messages if not isinstance(message, Log)]
            if others:
                return others, descriptors

    def begin_loading(
        self,
        config: dict[str, Any],
        directory: Path = Path("/nonexistent"),
        backend: str = "identity",
        instances: int = 1,
        protocol: int = PROTOCOL,
    ) -> None:
        """Send Initialize."""
        names = tuple(f"m_{i}" for i in range(instances))
        where = (str(directory), str(directory / "1"))
        message = Initialize(protocol, backend, "m", 1, *where, config, {}, names, "KIND_CPU", 0, True)
        self.send(message, descriptors=[self.arena.fd])

    def initialize(self, config: dict[str, Any], *where: Any, **more: Any) -> Ready:
        """Send Initialize (arguments as of begin_loading) and return the answer."""
        self.begin_loading(config, *where, **more)
        (ready,), _ = self.receive()
        assert isinstance(ready, Ready)
        return ready

    def execute(
        self,
        number: int,
        array: np.ndarray,
        requests: Sequence[RequestHeader] = (RequestHeader(1),),
        space: int = 1 << 16,
        name: str = "INPUT0",
        offset: int = 0,
    ) -> Execute:
        """Write `array` to the arena at `offset` and return the command to run it; outputs follow it."""
        datatype = of_numpy(array.dtype)
        assert datatype is not None
        data = from_numpy(array, datatype)
        self.arena.view[offset : offset + len(data)] = data
        where = TensorRef(offset, len(data))
        tensor = Tensor(name, datatype.name, array.shape, where)
        behind = (offset + len(data) + 63) & -64
        return Execute(number, 0, (tensor,), tuple(requests), None, TensorRef(behind, space))

    def results(self) -> tuple[Responses, BatchDone, list[int]]:
        """Return the next frame, which must end a batch."""
        (responses, done), descriptors = self.receive()
        assert isinstance(responses, Responses)
        assert isinstance(done, BatchDone)
        return responses, done, descriptors

    def array(self, tensor: Tensor, descriptors: Sequence[int] = ()) -> np.ndarray:
        """Return a copy of an output."""
        ref = tensor.ref
        data = (
            bytes(self.arena.slice(ref.offset, ref.nbytes))
            if ref.source == ARENA
            else os.pread(descriptors[ref.source], ref.nbytes, ref.offset)
        )
        return to_numpy(BY_NAME[tensor.datatype], tensor.shape, data)

    def close(self) -> None:
        """Close the channel and the arena."""
        self.socket.close()
        self.arena.close()


class BackendProcess(Conversation):
    """`python -m headrace_backends run` as the server starts it. End it with `close`."""

    def __init__(self) -> None:
        ours, theirs = channel_pair()
        super().__init__(ours)
        argv = [sys.executable, "-m", "headrace_backends", "run", "--fd", str(theirs.fileno())]
        with theirs:
            self.process = subprocess.Popen(
                argv, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )

    def wait(self) -> int:
        """Return the exit status (minus the signal) once the process has ended."""
        return self.process.wait(LIMIT_S)

    def close(self) -> None:
        """Close the channel; kill the process if that does not end it."""
        super().close()
        try:
            self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            for pipe in (self.process.stdout, self.process.stderr):
                assert pipe is not None
                pipe.close()


class ZygoteProcess:
    """`python -m headrace_backends zygote` as the server starts it. End it with `close`."""

    def __init__(self, backend: str) -> None:
        self.socket, theirs = channel_pair()
        self._decoder = msgspec.msgpack.Decoder(FromZygote)
        self._serial = 0
        self.events: list[FromZygote] = []
        argv = [sys.executable, "-m", "headrace_backends", "zygote"]
        argv += ["--backend", backend, "--fd", str(theirs.fileno())]
        with theirs:
            self.process = subprocess.Popen(argv, pass_fds=[theirs.fileno()])
        hello = self.receive()
        assert isinstance(hello, Hello)
        self.hello = hello

    def receive(self) -> FromZygote:
        """Return the next event."""
        data = self.socket.recv(MAX_MESSAGE)
        if not data:
            raise EOFError("the zygote closed the channel")
        return self._decoder.decode(data)

    def fork(self) -> tuple[int, Conversation]:
        """Return a child's process number and its channel."""
        ours, theirs = channel_pair()
        self._serial += 1
        with theirs:
            socket.send_fds(self.socket, [msgspec.msgpack.encode(Fork(self._serial))], [theirs.fileno()])
        while not isinstance(event := self.receive(), Forked):
            self.events.append(event)
        assert event.serial == self._serial
        assert not event.error
        return event.pid, Conversation(ours)

    def exited(self) -> Exited:
        """Return the next end of a child."""
        event = self.events.pop(0) if self.events else self.receive()
        assert isinstance(event, Exited)
        return event

    def close(self) -> None:
        """Close the control channel and wait for the zygote."""
        self.socket.close()
        try:
            self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


def wait_gone(pid: int) -> None:
    """Wait until a process that is not our child has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(LIMIT_S * 1000), f"process {pid} still runs"
    finally:
        os.close(pidfd)
