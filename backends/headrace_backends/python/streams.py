"""Response senders of a decoupled model: any number of responses to a request, from any thread.

A request is open until its final flag was sent. A model that drops every reference to a request and its sender before
has nothing left to end it with: it is ended here, so that no client waits for ever. To a client that reads too slowly
sending waits, unless the model's code runs in an event loop, which serves other requests: then responses are held here.
"""

from __future__ import annotations

import threading
from collections import deque
from queue import SimpleQueue
from typing import Final, NamedTuple

import numpy as np

from headrace_backends.api import BatchRequest, StreamResponse, send_many
from headrace_backends.python.answers import Answers
from headrace_backends.python.errors import TritonModelException, as_infer_error
from headrace_backends.python.response import InferenceResponse
from headrace_backends.python.sender import CLOSED
from headrace_protocol.datatype import Array
from headrace_protocol.errors import ErrorCode, InferError, cancelled, internal, unavailable
from headrace_protocol.messages import Parameter

MAX_HELD: Final = 1024
"""Responses that are held for a client that reads too slowly; a request that gets more of them fails."""


class _Part(NamedTuple):
    """One response, or the end without one."""

    outputs: dict[str, Array] | None
    parameters: dict[str, Parameter] | None
    final: bool


class StreamReply:
    """How one request is answered. Kept by the request and its senders, and here while responses are held."""

    __slots__ = ("__weakref__", "_closed", "_failed", "_held", "_lock", "_request", "_streams")

    def __init__(self, streams: Streams, request: BatchRequest) -> None:
        self._streams = streams
        self._request = request
        self._lock = threading.Lock()
        self._closed = False
        self._failed = False
        """Whether the request has ended by an error, be the final flag sent or not."""
        self._held: deque[_Part] = deque()

    def send(self, response: InferenceResponse | None, *, final: bool) -> None:
        with self._lock:
            if self._closed:
                raise TritonModelException(CLOSED)
            if not self._failed:
                try:
                    self._send(response, final=final)
                except InferError as error:
                    raise TritonModelException(f"Unable to send response: {error.message}") from error
            if final:
                self._close()

    def _send(self, response: InferenceResponse | None, *, final: bool) -> None:
        request = self._request
        if request.cancelled:
            self._let_go()
            if final:
                request.fail(cancelled())
            return
        if response is not None and response._error is not None:
            self._let_go()
            request.fail(as_infer_error(response._error))
            self._failed = True
        elif not self._streams.waits and (request.paused or self._held):
            self._hold(response, final=final)
        elif response is None:
            request.complete()
        elif not self._streams.waits:
            send_many([StreamResponse(request, *self._part(response, final=final))])
        else:
            self._send_waiting(self._part(response, final=final))

    def _part(self, response: InferenceResponse, *, final: bool) -> _Part:
        return _Part(self._streams.answers.outputs(response), dict(response._parameters) or None, final)

    def _send_waiting(self, part: _Part) -> None:
        """Send, once a slow client has caught up."""
        assert part.outputs is not None
        try:
            self._request.send(part.outputs, part.parameters, final=part.final)
        except InferError as error:
            if error.code is not ErrorCode.CANCELLED:
                raise
            if part.final:
                self._request.fail(cancelled())

    def _hold(self, response: InferenceResponse | None, *, final: bool) -> None:
        """Keep a response until the client has caught up. The model may go on writing into its arrays."""
        if len(self._held) >= MAX_HELD:
            self._let_go()
            self._request.fail(unavailable("the client reads the responses more slowly than the model sends them"))
            self._failed = True
            return
        part = _Part(None, None, final) if response is None else self._part(response, final=final)
        outputs = None if part.outputs is None else {name: np.array(a) for name, a in part.outputs.items()}
        self._held.append(part._replace(outputs=outputs))
        self._streams.hold(self)

    def _let_go(self) -> None:
        """Forget what is held."""
        if self._held:
            self._held.clear()
            self._streams.changed()

    def flush(self) -> bool:
        """Send what is held, as far as the client reads; return whether something still is."""
        with self._lock:
            while self._held and (self._request.cancelled or not self._request.paused):
                part = self._held.popleft()
                try:
                    if self._request.cancelled:
                        self._held.clear()
                        if self._closed:
                            self._request.fail(cancelled())
                    else:
                        send_many([StreamResponse(self._request, *part)])
                except InferError as error:
                    self._held.clear()
                    self._fail(error)
            return bool(self._held)

    @property
    def closed(self) -> bool:
        """Whether the model has sent its final flag."""
        return self._closed

    def is_cancelled(self) -> bool:
        return self._request.cancelled or (self._failed and not self._closed)

    def fail(self, error: InferError) -> None:
        """End the request by an error, unless the model has ended it."""
        with self._lock:
            if not self._closed:
                self._let_go()
                self._fail(error)
                self._close()

    def _fail(self, error: InferError) -> None:
        if not (self._failed or self._request.answered):
            self._request.fail(error)
        self._failed = True

    def _close(self) -> None:
        self._closed = True
        self._streams.ended()

    def __del__(self) -> None:
        if not self._closed:
            self._streams.dropped(self._request, failed=self._failed)


class Streams:
    """The open requests of a decoupled model, and the thread that looks after those that their code cannot."""

    def __init__(self, answers: Answers, at_once: int, *, waits: bool) -> None:
        self.answers: Final = answers
        self.waits: Final = waits
        """Whether sending may wait for a client."""
        self._room: Final = threading.Semaphore(at_once)
        self._events: Final[SimpleQueue[tuple[BatchRequest, bool] | None]] = SimpleQueue()
        """Requests that were dropped, and None where held responses may go on. Finalizers put into it: no lock."""
        self._holding: set[StreamReply] = set()
        self._lock: Final = threading.Lock()
        threading.Thread(target=self._look_after, name="headrace-streams", daemon=True).start()

    def begin(self, request: BatchRequest) -> StreamReply:
        """Return how `request` is answered. Waits while too many are open."""
        self._room.acquire()
        return StreamReply(self, request)

    def ended(self) -> None:
        """Take note that the model has ended a request."""
        self._room.release()

    def hold(self, reply: StreamReply) -> None:
        """Keep `reply`, which has responses for a client that reads too slowly."""
        with self._lock:
            self._holding.add(reply)
        if not reply._request.paused:
            self.changed()  # it has caught up meanwhile

    def changed(self) -> None:
        """Take note that a request was cancelled, or its client has caught up. Does not block."""
        self._events.put(None)

    def dropped(self, request: BatchRequest, *, failed: bool) -> None:
        """Take over a request that nobody can end any more. Called by a finalizer."""
        self._events.put((request, failed))

    def _look_after(self) -> None:
        while True:
            event = self._events.get()
            if event is None:
                self._flush()
            else:
                self._end(*event)
            del event

    def _flush(self) -> None:
        with self._lock:
            holding = list(self._holding)
        done = {reply for reply in holding if not reply.flush()}
        with self._lock:
            self._holding -= {reply for reply in done if not reply._held}

    def _end(self, request: BatchRequest, failed: bool) -> None:
        try:
            if not (failed or request.answered):
                error = internal("the model dropped this request's sender without having sent the final flag")
                request.fail(cancelled() if request.cancelled else error)
        except InferError:
            pass  # it was ended at this moment, with its batch
        self.ended()
