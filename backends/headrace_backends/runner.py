"""The main loop of a backend process: handshake, load, then receive, execute, send until the channel closes.

Threads are leader and followers: one holds the right to read; when it has read a batch it passes the right on and runs
the batch itself, so that no batch waits for a hand-over between threads, and Cancel, Ping and the end of the channel
are noticed while batches run. With one slot nothing can be read but those, so the other thread takes the right only
when a batch lasts, or asks something of the server: short batches wake nobody. A thread that waits for such an answer
while it executes reads itself, where nobody else does. Where the backend wants one thread for all that it does (`threads`
is False), the other only reads: what it has read is executed by the first.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NoReturn

import msgspec

from headrace_backends import execution
from headrace_backends.api import Backend
from headrace_backends.batch import Batch
from headrace_backends.calls import ServerCalls
from headrace_backends.channel import Channel
from headrace_backends.discovery import load_backend
from headrace_backends.memory_limit import limit_memory
from headrace_backends.model_memory import ModelMemory
from headrace_backends.readiness import ReadinessCheck
from headrace_backends.relief import ReliefTimer
from headrace_backends.sequences import EndedSequence
from headrace_backends.streaming import StreamingBatch
from headrace_protocol.arena import Arena
from headrace_protocol.errors import InferError, invalid, unavailable
from headrace_protocol.framing import ProtocolError, backend_framer
from headrace_protocol.messages import (
    PROTOCOL,
    AttachRegion,
    CallResponse,
    Cancel,
    ControlResult,
    DetachRegion,
    EndSequences,
    Execute,
    Finalize,
    Flow,
    Initialize,
    Log,
    Ping,
    Pong,
    Ready,
    TellMetrics,
    ToBackend,
)

EXIT_PROTOCOL_ERROR: Final = 3
_LASTING_S: Final = 0.002
"""Seconds of a batch after which a process with one slot reads on in its other thread."""
_LOG_TEXT_LIMIT: Final = 8192
_LOG: Final = logging.getLogger(__name__)


class Runner:
    """Serves one channel. Owns the backend, the arena's mapping and the threads; ends only with the process."""

    def __init__(self, channel: Channel[ToBackend]) -> None:
        self._channel: Final = channel
        self._reading: Final = threading.Lock()
        """The right to read; guards _pending and what _handle touches."""
        self._state: Final = threading.Lock()
        """Guards _running, _open, _unfinished and _finalizing."""
        self._pending: Final[deque[tuple[Batch, list[int]]]] = deque()
        self._running: Final[dict[int, Batch]] = {}
        self._open: Final[dict[int, Batch]] = {}
        """Batches of a decoupled model whose `execute` has returned, but not all of whose requests have ended."""
        self._unfinished = 0
        """Batches taken whose answer is not yet sent: _running is emptied before the send, this after it. An open
        batch counts too, once more."""
        self._finalizing = False
        self._initialize: Initialize | None = None
        self._arena: Arena | None = None
        self._backend: Backend | None = None
        self._model: ModelMemory | None = None
        self._slots = 1
        self._nonce = 0
        """Of the last Ping."""
        self._readiness: ReadinessCheck | None = None
        self._one_thread = False
        """Whether the thread that loaded the model executes every batch."""
        self.sending: Final = threading.Lock()
        self._relief: ReliefTimer | None = None
        """There where the process has one slot."""
        self._thread: Final = _OfThread()
        self._server: Final = ServerCalls(self)

    def run(self) -> NoReturn:
        """Serve until the server says Finalize or goes away; ends the process."""
        while self._initialize is None:
            self._receive()
        self._load(self._initialize)
        self._serve()

    def _load(self, message: Initialize) -> None:
        """Load the model in this thread while a follower watches the channel."""
        assert self._arena is not None
        try:
            if message.protocol != PROTOCOL:
                raise invalid(f"the server speaks protocol {message.protocol}, this backend process {PROTOCOL}")
            limit_memory(message.memory_limit)
            factory = load_backend(message.backend)
            self._slots = execution.slot_count(factory, message.instances)
            self._one_thread = not factory.threads
            if self._slots == 1:
                self._relief = ReliefTimer(_LASTING_S)
                self._relief.set()  # loading may last
                threading.Thread(target=self._relieve, name="headrace-relief", daemon=True).start()
            else:
                for number in range(self._slots):
                    threading.Thread(target=self._serve, name=f"headrace-slot-{number}", daemon=True).start()
            context = execution.model_context(message, execution.available_cores(), self._server)
            self._backend, description = execution.initialize(factory, context)
            self._model = execution.model_memory(self._arena, message.config, description, context.model_directory)
            self._send_ready(execution.ready(description, self._slots))
            if description.is_ready is not None:
                self._readiness = ReadinessCheck(description.is_ready, self._send_pong)
                self._readiness.ask()
        except InferError as error:
            self._send_ready(execution.refusal(error))

    def _send_ready(self, ready: Ready) -> None:
        self.send([ready], ())

    def _serve(self) -> NoReturn:
        """Take turns at reading; run what was read. Every thread of the process ends here."""
        try:
            relief = self._relief
            while True:
                taken = self._take()
                if relief is None:
                    self._run(*taken)
                else:
                    if self._server.waiting:
                        relief.wake()
                    else:
                        relief.set()
                    self._run(*taken)
                    relief.stop()
                del taken  # its views and mappings must not live until the next one
        except BaseException:
            _LOG.exception("the runner failed")
            _exit(1)

    def _relieve(self) -> NoReturn:
        """Read each time that the thread which serves is busy for long, and serve the next batch unless it is to."""
        assert self._relief is not None
        try:
            while True:
                self._relief.wait()
                if self._one_thread:
                    self._read_ahead()
                else:
                    self._run(*self._take())
        except BaseException:
            _LOG.exception("the runner failed")
            _exit(1)

    def _take(self) -> tuple[Batch, list[int]]:
        """Read until there is a batch; the right to read is free afterwards."""
        with self._reading:
            while not self._pending:
                self._receive()
            return self._pending.popleft()

    def _read_ahead(self) -> None:
        """Read until there is a batch, which is left to the thread that waits for the right to read."""
        with self._reading:
            while not self._pending:
                self._receive()

    def _run(self, batch: Batch, descriptors: list[int]) -> None:
        assert self._backend is not None
        self._thread.batch = batch
        messages, spilled = execution.execute(self._backend, batch, descriptors)
        self._thread.batch = None
        with self._state:
            del self._running[batch.number]
            if batch.open:
                self._open[batch.number] = batch
                self._unfinished += 1
        self.send(messages, spilled)
        _close(spilled)
        _close(descriptors)
        if self._is_last():
            self._finish()

    def send(self, messages: Sequence[msgspec.Struct], descriptors: Sequence[int]) -> None:
        """Send one frame; the process ends where the server has gone."""
        try:
            self._channel.send(messages, descriptors)
        except ConnectionError:
            _exit(0)

    def _send_pong(self) -> None:
        self.send([Pong(self._nonce, self._readiness is None or self._readiness.ready)], ())

    # What ServerCalls needs.

    def executing(self) -> Batch | None:
        """Return the batch that this thread executes, if it does."""
        return self._thread.batch

    def watch(self) -> None:
        """Make sure that some other thread reads the channel, without delay.

        With several slots there is one more thread than slots, so one reads always.
        """
        if self._relief is not None and not self._reading.locked():
            self._relief.wake()

    def read_until(self, arrived: Callable[[], bool]) -> None:
        """Read in this thread until `arrived`, if it executes a batch and nobody else reads; else see to it that one does.

        A thread of the backend's own must not read: it would be the one to finalize the backend, which may join it.
        """
        if self._thread.batch is not None and self._reading.acquire(blocking=False):
            try:
                while not arrived() and not self._pending:
                    self._receive()
            finally:
                self._reading.release()
            if not self._server.waiting:
                return
        self.watch()

    def closed(self, batch: StreamingBatch) -> None:
        """Forget a batch that was open after its `execute`. For whichever thread ended its last request."""
        with self._state:
            was_open = self._open.pop(batch.number, None) is not None
        if was_open and self._is_last():
            # not in this thread, which may be one that the backend joins in its finalize
            threading.Thread(target=self._finish, name="headrace-finish", daemon=True).start()

    def _is_last(self) -> bool:
        """Count one batch, or open batch, as done; return whether the process is to end now."""
        with self._state:
            self._unfinished -= 1
            return self._finalizing and not self._unfinished

    def _finish(self) -> NoReturn:
        self._server.close(unavailable("the model is being unloaded: nothing can be asked of the server any more"))
        try:
            if self._backend is not None:
                self._backend.finalize()
        except BaseException:
            _LOG.exception("the backend failed to finalize")
        _exit(0)

    def _receive(self) -> None:
        """Read one frame and act on its messages; batches go to _pending."""
        try:
            frame = self._channel.receive()
            if frame is None:
                _exit(0)
            messages, descriptors = frame
            for message in messages:
                self._handle(message, descriptors)
            _close(descriptors)
        except ProtocolError as error:
            sys.stderr.write(f"headrace backend: {error}\n")
            _exit(EXIT_PROTOCOL_ERROR)

    def _handle(self, message: ToBackend, descriptors: list[int]) -> None:
        if isinstance(message, Execute):
            self._accept(message, descriptors)
        elif isinstance(message, Cancel):
            batch = self._find(message.batch)
            if batch is not None:
                _tell("cancel", partial(batch.cancel, message.request))
                self._server.cancel_with_batches()
        elif isinstance(message, Flow):
            batch = self._find(message.batch)
            if batch is not None:
                _tell("hold back", partial(batch.flow, message.request, paused=message.paused))
        elif isinstance(message, CallResponse):
            self._server.on_response(message, descriptors)
        elif isinstance(message, ControlResult):
            self._server.on_control_result(message)
        elif isinstance(message, TellMetrics):
            self._server.tell_metrics(message.number)
        elif isinstance(message, Ping):
            self._nonce = message.nonce
            self._send_pong()
            if self._readiness is not None:
                self._readiness.ask()
        elif isinstance(message, Finalize):
            with self._state:
                self._finalizing = True
                idle = not self._unfinished
            if idle:
                self._finish()
        elif isinstance(message, Initialize):
            self._take_initialize(message, descriptors)
        elif self._model is None:
            raise ProtocolError(f"{type(message).__name__} before Ready")
        elif isinstance(message, AttachRegion):
            if not descriptors and not message.cuda_handle:
                raise ProtocolError("AttachRegion came without the object's descriptor")
            self._model.regions.attach(message, descriptors)
        elif isinstance(message, EndSequences):
            if self._model.sequences is not None:
                self._end_sequences(self._model.sequences.end(message.sequences))
        elif isinstance(message, DetachRegion):
            self._model.regions.detach(message.number)

    def _end_sequences(self, ended: Sequence[EndedSequence]) -> None:
        """Tell the backend, if it wants to know."""
        told = getattr(self._backend, "end_sequence", None)
        if told is not None:
            for sequence in ended:
                _tell("end a sequence", partial(told, sequence))

    def _find(self, number: int) -> Batch | None:
        with self._state:
            return self._running.get(number) or self._open.get(number)

    def _take_initialize(self, message: Initialize, descriptors: list[int]) -> None:
        if self._initialize is not None:
            raise ProtocolError("a second Initialize")
        if not descriptors:
            raise ProtocolError("Initialize came without the arena's descriptor")
        self._arena = Arena.attach(descriptors.pop(0))
        self._initialize = message

    def _accept(self, message: Execute, descriptors: list[int]) -> None:
        if self._model is None:
            raise ProtocolError("Execute before Ready")
        batch = execution.new_batch(message, self._model, self)
        with self._state:
            if message.batch in self._running or message.batch in self._open:
                raise ProtocolError(f"a second Execute of batch {message.batch}, which still runs")
            if len(self._running) >= self._slots or self._finalizing:
                raise ProtocolError(f"Execute of batch {message.batch} where no slot is free")
            self._running[message.batch] = batch
            self._unfinished += 1
        self._pending.append((batch, [os.dup(fd) for fd in descriptors]))


class _OfThread(threading.local):
    """What is known of each thread."""

    batch: Batch | None = None
    """What it executes now."""


class ChannelHandler(logging.Handler):
    """Sends log records to the server as Log messages. What comes here was chosen by the loggers' levels."""

    def __init__(self, channel: Channel[ToBackend]) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._channel.send([Log(record.levelname, self.format(record)[:_LOG_TEXT_LIMIT])])
        except ConnectionError:
            _exit(0)
        except Exception:
            self.handleError(record)


def serve(fd: int) -> NoReturn:
    """Serve the channel whose socket is `fd`; ends the process."""
    channel = Channel(fd, backend_framer())
    logging.captureWarnings(True)
    logging.getLogger().addHandler(ChannelHandler(channel))
    Runner(channel).run()


def _tell(what: str, call: Callable[[], None]) -> None:
    try:
        call()
    except Exception:
        _LOG.exception("the backend failed to %s", what)


def _close(descriptors: list[int]) -> None:
    for fd in descriptors:
        os.close(fd)


def _exit(status: int) -> NoReturn:
    """End the process now, whatever other threads do: nobody can use their results."""
    sys.stderr.flush()
    os._exit(status)
