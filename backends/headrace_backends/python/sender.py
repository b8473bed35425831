"""InferenceResponseSender, and behind it the two ways in which it answers a request.

A request that has a sender is open until its final flag was sent. A model that drops every reference to a request and
its sender before has nothing left to end it with: it is ended here, so that no client waits for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Final, Protocol

from headrace_backends.api import BatchRequest, StreamResponse, send_many
from headrace_backends.python.answers import Answers
from headrace_backends.python.errors import TritonModelException, as_infer_error
from headrace_backends.python.response import InferenceResponse
from headrace_protocol.errors import ErrorCode, InferError, cancelled, internal, unavailable

COMPLETE_FINAL: Final = 1
"""The flag of a request's last response, or of the end without one."""
MAX_OVERRUN: Final = 1024
"""Responses that a model may send from its event loop, which cannot wait, to a client that reads too slowly."""
CLOSED: Final = "Unable to send response: this request has had its final response, its sender is closed."


class Reply(Protocol):
    """How one request is answered by a sender."""

    def send(self, response: InferenceResponse | None, *, final: bool) -> None:
        """Send a response, or only end the request. Raises TritonModelException."""
        ...

    def is_cancelled(self) -> bool:
        """Return whether nobody waits any more."""
        ...


class InferenceResponseSender:
    """Sends the responses of one request, from any thread, also after `execute` has returned."""

    __slots__ = ("_reply",)

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send `response`; with the flag TRITONSERVER_RESPONSE_COMPLETE_FINAL it, or nothing, is the last one.

        Raises TritonModelException where the request has had its last response, or the response cannot be sent.
        """
        if flags not in (0, COMPLETE_FINAL):
            raise TritonModelException(
                f"Unable to send response: the only flag is TRITONSERVER_RESPONSE_COMPLETE_FINAL ({COMPLETE_FINAL}), got {flags}."
            )
        if response is None:
            if not flags:
                raise TritonModelException("Unable to send response: there is neither a response nor the final flag.")
        elif not isinstance(response, InferenceResponse):
            raise TypeError(f"send: expected an InferenceResponse, got {type(response).__name__}")
        self._reply.send(response, final=bool(flags))

    def is_cancelled(self) -> bool:
        """Return whether nobody waits for the request's responses any more."""
        return self._reply.is_cancelled()


class StreamReply:
    """Any number of responses, to a request of a decoupled model."""

    __slots__ = ("_closed", "_failed", "_lock", "_overrun", "_request", "_streams")

    def __init__(self, streams: Streams, request: BatchRequest) -> None:
        self._streams = streams
        self._request = request
        self._lock = threading.Lock()
        self._closed = False
        self._failed = False
        """Whether the server counts it as ended, though the model has not sent its final flag."""
        self._overrun = 0

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
                self._closed = True
                self._streams.ended()

    def _send(self, response: InferenceResponse | None, *, final: bool) -> None:
        request = self._request
        if request.cancelled:
            if final:
                request.fail(cancelled())
            return
        if response is None:
            request.complete()
        elif response._error is not None:
            request.fail(as_infer_error(response._error))
            self._failed = True
        elif threading.get_ident() == self._streams.loop_thread:
            self._send_from_loop(response, final=final)
        else:
            outputs = self._streams.answers.outputs(response)
            try:
                request.send(outputs, dict(response._parameters) or None, final=final)
            except InferError as error:
                if error.code is not ErrorCode.CANCELLED:
                    raise
                if final:
                    request.fail(cancelled())

    def _send_from_loop(self, response: InferenceResponse, *, final: bool) -> None:
        """Send without waiting for a slow client, for others are served by this thread; but not without bound."""
        request = self._request
        self._overrun = self._overrun + 1 if request.paused else 0
        if self._overrun > MAX_OVERRUN:
            request.fail(unavailable("the client reads the responses more slowly than the model sends them"))
            self._failed = True
            return
        outputs = self._streams.answers.outputs(response)
        send_many([StreamResponse(request, outputs, dict(response._parameters) or None, final)])

    def is_cancelled(self) -> bool:
        return self._request.cancelled or (self._failed and not self._closed)

    def fail(self, error: InferError) -> None:
        """End the request by an error, unless the model has ended it."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if not self._failed:
                self._request.fail(error)
            self._streams.ended()

    def __del__(self) -> None:
        if not self._closed:
            self._streams.abandoned(self._request, failed=self._failed)


class Streams:
    """The open requests of a decoupled model, and the thread that ends those which the model has dropped."""

    def __init__(self, answers: Answers, at_once: int) -> None:
        self.answers: Final = answers
        self.loop_thread = 0
        """Identifier of the thread that runs the model's event loop; 0 = there is none."""
        self._room: Final = threading.Semaphore(at_once)
        self._dropped: Final[SimpleQueue[tuple[BatchRequest, bool]]] = SimpleQueue()
        threading.Thread(target=self._end_dropped, name="headrace-dropped-streams", daemon=True).start()

    def begin(self, request: BatchRequest) -> StreamReply:
        """Return how `request` is answered. Waits while too many are open."""
        self._room.acquire()
        return StreamReply(self, request)

    def ended(self) -> None:
        """Take note that a request has ended."""
        self._room.release()

    def abandoned(self, request: BatchRequest, *, failed: bool) -> None:
        """Take over a request that nobody can end any more. Called by a finalizer, so it takes no lock."""
        self._dropped.put((request, failed))

    def _end_dropped(self) -> None:
        while True:
            request, failed = self._dropped.get()
            try:
                if not (failed or request.answered):
                    request.fail(
                        cancelled()
                        if request.cancelled
                        else internal("the model dropped this request's sender without having sent the final flag")
                    )
            except InferError:
                pass  # it was ended at this moment, with its batch
            self.ended()


class SingleReplies:
    """The senders of one batch of a model that is not decoupled: each request gets one response."""

    __slots__ = ("answers", "ended", "lock", "over")

    def __init__(self, answers: Answers) -> None:
        self.answers: Final = answers
        self.lock: Final = threading.Lock()
        """Held while an answer is written into the batch's memory."""
        self.over = False
        """Whether the batch has been given back: nothing may be written any more."""
        self.ended: Final[SimpleQueue[int]] = SimpleQueue()
        """Numbers of the requests that were answered by their senders or can be no more, and -1 to look for cancels."""

    def look_for_cancels(self) -> None:
        """Wake whoever waits: a request was cancelled."""
        self.ended.put(-1)

    def wait(self, waiting: set[int], requests: Sequence[BatchRequest]) -> None:
        """Wait until the requests `waiting` were answered, cancelled, or their senders dropped."""
        while waiting:
            number = self.ended.get()
            waiting.discard(number)
            if number < 0:
                waiting.difference_update([index for index in waiting if requests[index].cancelled])

    def close(self) -> None:
        """Refuse what is sent from now on."""
        with self.lock:
            self.over = True


class SingleReply:
    """One response, to a request of a model that is not decoupled."""

    __slots__ = ("_closed", "_replies", "_request", "answered")

    def __init__(self, replies: SingleReplies, request: BatchRequest) -> None:
        self._replies = replies
        self._request = request
        self._closed = False
        self.answered = False

    def send(self, response: InferenceResponse | None, *, final: bool) -> None:
        replies = self._replies
        with replies.lock:
            if self._closed:
                raise TritonModelException(CLOSED)
            if response is None:
                if not self.answered:
                    raise TritonModelException(
                        "Unable to send response: a model that is not decoupled has to send a response before, or with, the final flag."
                    )
            elif self.answered:
                raise TritonModelException(
                    "Unable to send response: a model that is not decoupled cannot send more than one."
                )
            elif not replies.over:
                replies.answers.answer(self._request, response)
            self.answered = True
            self._closed = final
        if response is not None:
            replies.ended.put(self._request.index)

    def answer_unless_sent(self, response: object) -> bool:
        """Answer by what `execute` returned; return whether the sender had not answered before."""
        replies = self._replies
        with replies.lock:
            if self.answered:
                return False
            self.answered = self._closed = True
            replies.answers.answer(self._request, response)
            return True

    def is_cancelled(self) -> bool:
        return self._request.cancelled

    def __del__(self) -> None:
        self._replies.ended.put(self._request.index)
