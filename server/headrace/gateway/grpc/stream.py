"""One ModelStreamInfer call: reads requests while the ledger allows, begins them, writes their answers.

It knows a transport as two functions, `read` and `write`, and inference as the data plane. A request's failure is a
message of the stream, which goes on, unless the client asked for a gRPC status instead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from headrace.gateway.grpc.request_codec import parse_infer, read_infer
from headrace.gateway.grpc.response_codec import encode_stream_end, encode_stream_error, encode_stream_response
from headrace.gateway.grpc.stream_ledger import Answer, StreamLedger, StreamRequest
from headrace.observability.trace import (
    GRPC_SEND_END,
    GRPC_SEND_START,
    GRPC_WAITREAD_END,
    GRPC_WAITREAD_START,
    Trace,
)
from headrace.planes import DataPlane, Outcome
from headrace.types import InferenceRequest
from headrace_protocol.errors import InferError, internal, unavailable

_log = logging.getLogger(__name__)

Read = Callable[[], Awaitable[bytes | None]]
"""Returns the next message, None once the client has sent its last."""
Write = Callable[[bytes], Awaitable[None]]
"""Returns once the message has left, or the transport still has room."""
Annotate = Callable[[InferenceRequest], None]
"""Adds what the metadata of the call say to each of its requests; raises InferError."""


class InferStream:
    """One stream. `run` is its whole life."""

    def __init__(
        self,
        data: DataPlane,
        now_ns: Callable[[], int],
        annotate: Annotate,
        max_message_size: int,
        *,
        status_errors: bool,
        ledger: StreamLedger | None = None,
    ) -> None:
        self._data = data
        self._now_ns = now_ns
        self._annotate = annotate
        self._max_message_size = max_message_size
        self._status_errors: Final = status_errors
        """Whether the first failure ends the call with its status."""
        self._ledger = ledger or StreamLedger()
        self._changed = asyncio.Event()
        """For the writer: there may be an answer, or an end."""
        self._room = asyncio.Event()
        """For the reader: something was written."""
        self._stopping = False

    async def run(self, read: Read, write: Write) -> None:
        """Serve the stream until the client has closed its side and every answer is written.

        Raises InferError where the call shall end with a status. Cancelling it cancels every request under way.
        """
        reader = asyncio.ensure_future(self._read_all(read))
        reader.add_done_callback(lambda _: self._changed.set())
        try:
            await self._write_all(write, reader)
        finally:
            reader.cancel()
            self._abandon()
            await asyncio.gather(reader, return_exceptions=True)

    def stop(self) -> None:
        """Read no more; the call ends UNAVAILABLE once what is under way is answered."""
        self._stopping = True
        self._changed.set()

    async def _read_all(self, read: Read) -> None:
        ledger = self._ledger
        while True:
            while not ledger.may_read():
                self._room.clear()
                await self._room.wait()
            data = await read()
            if data is None:
                ledger.half_close()
                return
            if not self._stopping:
                self._begin(data)

    def _begin(self, data: bytes) -> None:
        request, ordered, problem = StreamRequest(), True, None
        try:
            message, raw = parse_infer(data)
            request = StreamRequest(message.id, message.model_name, message.model_version)
            inference = read_infer(message, raw, self._now_ns())
            request.empty_final = inference.empty_final
            self._annotate(inference)
            ordered = not self._data.decoupled(inference.model_name, inference.model_version)
            request.inference = self._data.stream(inference, partial(self._on_outcome, request))
            if inference.trace is not None:
                trace_received(inference.trace, inference.received_ns)
        except Exception as error:
            problem = _told(error)
        self._ledger.begin(request, len(data), ordered=ordered)
        if problem is not None:
            self._on_outcome(request, problem)

    def _on_outcome(self, request: StreamRequest, outcome: Outcome) -> None:
        answer = Answer(request, outcome, isinstance(outcome, InferError) or outcome.final)
        if self._ledger.put(answer):
            self._changed.set()
        else:
            answer.release()

    async def _write_all(self, write: Write, reader: asyncio.Future[None]) -> None:
        ledger = self._ledger
        while not ledger.finished:
            answer = ledger.take()
            if answer is not None:
                try:
                    data = self._message(answer)
                    if data is not None:
                        _trace_sending(answer)
                        await write(data)
                    _trace_sent(answer)
                finally:
                    answer.release()
                ledger.written(answer)
                self._room.set()
            elif self._stopping and not ledger.under_way:
                raise unavailable("the server is stopping")
            else:
                if reader.done():
                    reader.result()  # raises what ended it, where that was not the client's half-close
                await self._changed.wait()
                self._changed.clear()

    def _message(self, answer: Answer) -> bytes | None:
        """Return what an answer becomes on the wire, None where that is nothing."""
        request, outcome, _ = answer
        if isinstance(outcome, InferError):
            return self._failed(request, outcome)
        if outcome.empty and not request.empty_final:
            return None
        try:
            if outcome.empty:
                return encode_stream_end(request.id, request.model, request.version)
            return encode_stream_response(outcome, request.id, self._max_message_size)
        except Exception as error:
            if request.inference is not None:
                request.inference.cancel()
            for other in self._ledger.cut(request):
                other.release()
            return self._failed(request, _told(error))

    def _failed(self, request: StreamRequest, error: InferError) -> bytes:
        if self._status_errors:
            raise InferError(error.code, error.message)
        return encode_stream_error(error, request.id, request.model, request.version)

    def _abandon(self) -> None:
        requests, answers = self._ledger.abandon()
        for request in requests:
            if request.inference is not None:
                request.inference.cancel()
                request.inference = None
        for answer in answers:
            answer.release()


def trace_received(trace: Trace, received_ns: int) -> None:
    """Note down when a message was there. How long it took to come is known to the transports alone."""
    trace.mark(GRPC_WAITREAD_START, received_ns)
    trace.mark(GRPC_WAITREAD_END, received_ns)


def _trace_sending(answer: Answer) -> None:
    if not isinstance(answer.outcome, InferError) and answer.outcome.trace is not None:
        answer.outcome.trace.sending(GRPC_SEND_START)


def _trace_sent(answer: Answer) -> None:
    if answer.last and not isinstance(answer.outcome, InferError) and answer.outcome.trace is not None:
        answer.outcome.trace.sending(GRPC_SEND_START)
        answer.outcome.trace.mark(GRPC_SEND_END)


def _told(error: Exception) -> InferError:
    """Return what the client is told about `error`, without the frames that it came through: they hold the request."""
    if isinstance(error, InferError):
        return error.with_traceback(None)
    _log.error("a request of ModelStreamInfer failed", exc_info=error)
    return internal("the server failed to answer a request of ModelStreamInfer; its log has the reason")
