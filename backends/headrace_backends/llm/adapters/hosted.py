"""An engine that has a process of its own, in a Python of its own, as `engine.Engine` wants it: this is the side that asks.

The process is the first of a group, and whatever the engine starts belongs to that: the group ends with the engine's
process, and with this one (`engine_host`). Knows no engine by name.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from headrace_backends.llm.adapters.hosted_wire import (
    FROM_HOST,
    Abort,
    Broken,
    Closing,
    News,
    Opened,
    Opening,
    Submit,
    ToHost,
    frame,
    read_frame,
)
from headrace_backends.llm.adapters.process_group import end_group
from headrace_backends.llm.engine import EngineCall, EngineStats, Listener, TextCodec, Told
from headrace_protocol.errors import InferError, internal, unavailable
from headrace_protocol.generation import ModelCard

_CLOSING_S: Final = 10
_DYING_S: Final = 2
"""Seconds between a socket's end and its process's."""
_CLEARING_S: Final = 5
"""Seconds for what the engine shared to be removed; on a busy machine it may take longer, and nobody waits then."""
_LOOK_S: Final = 0.01


class HostedEngine:
    """Implements `engine.Engine`. The thread that tells is the one that reads the socket."""

    def __init__(
        self,
        name: str,
        argv: Callable[[int], Sequence[str]],
        variables: Mapping[str, str],
        opening: Opening,
        describe: Callable[[Opened], tuple[ModelCard, TextCodec]],
    ) -> None:
        """Take what there is to start.

        `argv` makes the command that serves the descriptor it is given; `describe` adds to the card what the engine does
        not know, and opens the tokenizer; `name` is for messages.
        """
        self._name: Final = name
        self._argv: Final = argv
        self._variables: Final = variables
        self._opening: Final = opening
        self._describe: Final = describe
        self._sending: Final = threading.Lock()
        """Guards the socket's writing side and `_calls`."""
        self._calls: Final[dict[int, int]] = {}
        """How many choices of each call have not ended."""
        self._ending: Final = threading.Lock()
        """Guards `_process`."""
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._card: ModelCard | None = None
        self._text: TextCodec | None = None
        self._stats = EngineStats()
        self._listener: Listener | None = None
        self._closing = False
        self._ended: InferError | None = None
        """What calls are told that come too late; guarded by `_sending`."""

    def open(self, listener: Listener) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = self._started(theirs.fileno())
            except BaseException:
                ours.close()
                raise
        self._socket = ours
        try:
            self._card, self._text = self._describe(self._opened(ours))
        except BaseException:
            self._end_process(0)
            self._disconnect()
            raise
        self._listener = listener
        self._reader = threading.Thread(target=self._read, args=(listener,), name="headrace-engine-news", daemon=True)
        self._reader.start()

    @property
    def card(self) -> ModelCard:
        assert self._card is not None, "not open"
        return self._card

    @property
    def text(self) -> TextCodec:
        assert self._text is not None, "not open"
        return self._text

    def submit(self, call: EngineCall) -> None:
        assert self._listener is not None, "not open"
        plain = replace(call, prompts=tuple([int(token) for token in prompt] for prompt in call.prompts))
        with self._sending:
            ended = self._ended
            if ended is None:
                self._calls[call.number] = 1 if call.embed else len(call.prompts) * call.params.n
                self._send(Submit(plain))
        if ended is not None:
            self._listener.told([Told(call.number, error=ended)])

    def abort(self, number: int) -> None:
        with self._sending:
            if self._calls.pop(number, None) is not None:
                self._send(Abort(number))

    def stats(self) -> EngineStats:
        return self._stats

    def healthy(self) -> bool:
        return self._listener is not None and self._ended is None

    def close(self) -> None:
        self._closing = True
        with self._sending:
            self._send(Closing())
        self._end_process(_CLOSING_S)
        if self._reader is not None:
            self._reader.join()
        self._disconnect()

    def _started(self, descriptor: int) -> subprocess.Popen[bytes]:
        argv = self._argv(descriptor)
        try:
            return subprocess.Popen(
                argv,
                env=dict(self._variables),
                stdin=subprocess.DEVNULL,
                stdout=2,  # an engine that prints must not disturb whoever reads the server's stdout
                pass_fds=[descriptor],
                start_new_session=True,
            )
        except OSError as error:
            raise unavailable(f"{self._name} cannot be started: {error}") from error

    def _opened(self, connection: socket.socket) -> Opened:
        with self._sending:
            self._send(self._opening)
        data = read_frame(connection)
        if data is None:
            how = self._end_process(_DYING_S)
            raise unavailable(f"{self._name} {how} while it loaded the model; what it printed says why")
        message = FROM_HOST.decode(data)
        if isinstance(message, Opened):
            return message
        raise (
            message.error if isinstance(message, Broken) else internal(f"{self._name} told of calls before it had any")
        )

    def _read(self, listener: Listener) -> None:
        """Pass on what the engine tells, until its end."""
        error: InferError | None
        try:
            error = self._pass_on(listener)
        except Exception as fault:  # a fault of our own: calls must not wait for ever
            error = internal(f"what {self._name} told could not be taken: {type(fault).__name__}: {fault}")
        how = self._end_process(0 if error is not None else _CLOSING_S if self._closing else _DYING_S)
        if self._closing:
            error = unavailable("the model is being unloaded")
        reason = error or unavailable(f"{self._name} {how}")
        with self._sending:
            self._ended = reason
            left = sorted(self._calls)
            self._calls.clear()
        if left:
            listener.told([Told(number, error=reason) for number in left])
        if not self._closing:
            listener.broke(reason)

    def _pass_on(self, listener: Listener) -> InferError | None:
        """Pass on what the engine tells until it says why it ends, or does not."""
        assert self._socket is not None
        while (data := read_frame(self._socket)) is not None:
            message = FROM_HOST.decode(data)
            if isinstance(message, Broken):
                return message.error
            if isinstance(message, News):
                self._stats = message.stats or self._stats
                news = self._wanted(message.told)
                if news:
                    listener.told(news)
        return None

    def _wanted(self, told: Sequence[Told]) -> list[Told]:
        """Return what is of calls that nobody aborted; note which end by it."""
        kept = []
        with self._sending:
            for each in told:
                left = self._calls.get(each.number)
                if left is None:
                    continue
                kept.append(each)
                left -= sum(output.finished for output in each.outputs)
                if left <= 0 or each.error is not None or each.vectors is not None:
                    del self._calls[each.number]
                else:
                    self._calls[each.number] = left
        return kept

    def _send(self, message: ToHost) -> None:
        """Write a message, with `_sending` held. That nobody reads it any more is for the reader to tell."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendall(frame(message))

    def _end_process(self, seconds: float) -> str:
        """Let the process end within that time, then end it with all that it has started; return how it ended. Idempotent."""
        with self._ending:
            process, self._process = self._process, None
            if process is None:
                return "has ended"
            deadline = time.monotonic() + seconds
            while (gone := _exited(process.pid)) is False and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
            # not reaped yet, so that the group's number is nobody else's
            end_group(process.pid, _CLEARING_S)
            status = process.wait()
            if not gone:
                return "hung and was killed"
            return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"

    def _disconnect(self) -> None:
        with self._sending:
            if self._socket is not None:
                self._socket.close()
                self._socket = None


def _exited(pid: int) -> bool:
    """Say whether a child has ended, and leave it to be reaped."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
