"""Calls of language models: from a GenerationCall to an answer as a whole, or to a stream of server-sent events.

What is told is a maker's to say: it takes events of the model and gives bytes. Knows no endpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from headrace.gateway.http import request as fields
from headrace.gateway.http.answer import SSE, Answer
from headrace.gateway.http.deadline import Deadline
from headrace.gateway.http.openai.account import account_of
from headrace.gateway.http.openai.directory import LanguageModel
from headrace.gateway.http.openai.exchange import Exchange
from headrace.gateway.http.request import Done, Outlet
from headrace.gateway.http.streaming import OutcomeStream
from headrace.planes import Cancellable, DataPlane, Outcome
from headrace.types import InferenceRequest, InferenceResponse, InputTensor
from headrace_protocol.datatype import BYTES
from headrace_protocol.errors import InferError, internal
from headrace_protocol.generation import (
    CALL_INPUT,
    ENCODER,
    EVENT_DECODER,
    EVENT_OUTPUT,
    GenerationCall,
    GenerationEvent,
)

DONE: Final = b"data: [DONE]\n\n"
PING: Final = b": ping\n\n"
PING_S: Final = 30.0
"""Seconds of silence in a stream after which it tells that it lives: proxies end connections that say nothing."""
_STREAM_HEADERS: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class AnswerMaker(Protocol):
    """Makes one answer of what a model tells."""

    def take(self, event: GenerationEvent, response: InferenceResponse) -> None:
        """Take the next event; `response` has what comes beside it, and is not kept. Raises InferError, HttpError."""
        ...

    def answer(self) -> bytes:
        """Return the JSON of the answer, once everything was taken. Raises InferError."""
        ...


class ChunkMaker(Protocol):
    """Makes a stream of events of what a model tells."""

    def take(self, event: GenerationEvent) -> bytes:
        """Return what an event tells, as server-sent events; nothing while there is nothing to tell.

        What comes first begins the answer, with status 200. Raises InferError.
        """
        ...

    def end(self) -> bytes:
        """Return what ends the stream, once everything was taken. Raises InferError."""
        ...


def begin(
    data: DataPlane,
    model: LanguageModel,
    call: GenerationCall,
    exchange: Exchange,
    on_outcome: Callable[[Outcome], None],
    timeout_us: int = 0,
) -> Cancellable:
    """Send a call to its model. `timeout_us` is how long it may wait in the queue, 0 = as the model is set.

    Raises InferError where it is refused at once; see planes.DataPlane.stream for the rest.
    """
    http = exchange.http
    request = InferenceRequest(model.name, model.version, exchange.now_ns())
    request.id = exchange.request_id
    request.timeout_us = timeout_us
    request.trace_context = http.text(fields.TRACEPARENT)
    request.caller = http.caller
    request.sticky = http.sticky
    request.counts_tokens = True
    payload = ENCODER.encode(call)
    request.inputs.append(InputTensor(CALL_INPUT, BYTES, (1,), len(payload).to_bytes(4, "little") + payload))
    under_way = data.stream(request, on_outcome)
    if request.trace is not None:
        http.traced(request.trace, request.received_ns)
    exchange.account = account_of(exchange, model.id)
    return under_way


def event_of(response: InferenceResponse) -> GenerationEvent | None:
    """Return the event that a response holds; None where it has none. Raises INTERNAL for one that cannot be read."""
    for output in response.outputs:
        if output.name == EVENT_OUTPUT:
            try:
                return EVENT_DECODER.decode(memoryview(output.data)[4:])
            except msgspec.MsgspecError as error:
                raise internal(f"model '{response.model_name}' told what cannot be read: {error}") from None
    return None


class CallAnswer:
    """Implements request.Streaming: a call under way whose answer comes as a whole."""

    __slots__ = ("_done", "_exchange", "_maker", "_told", "under_way")

    def __init__(self, maker: AnswerMaker, exchange: Exchange, done: Done) -> None:
        self._maker = maker
        self._exchange = exchange
        self._done = done
        self._told = False
        self.under_way: Cancellable | None = None

    def take(self, outcome: Outcome) -> None:
        """Take the next outcome of the call."""
        if isinstance(outcome, InferError):
            self.under_way = None
            self._exchange.settle()
            self._done(self._exchange.failure(outcome))
            return
        final = outcome.final
        if final:
            self.under_way = None
        try:
            event = event_of(outcome)
            if event is not None:
                self._told = True
                if self._exchange.account is not None:
                    self._exchange.account.take(event)
                self._maker.take(event, outcome)
            if final:
                self._exchange.settle()
            answer = self._exchange.answer(self._whole()) if final else None
        except Exception as error:
            self.cancel()
            self._done(self._exchange.failure(error))
        else:
            if answer is not None:
                self._done(answer)
        finally:
            outcome.release()

    def resume(self) -> None:
        """Nothing waits."""

    def cancel(self) -> None:
        """Its client is gone, or it failed."""
        under_way, self.under_way = self.under_way, None
        self._exchange.settle()
        if under_way is not None:
            under_way.cancel()

    def _whole(self) -> bytes:
        if not self._told:
            raise _said_nothing()
        return self._maker.answer()


def openai_failure(body: bytes) -> bytes:
    """Return what ends a stream that fails: an event with the failure, then the mark of the end."""
    return b"data: %b\n\n" % body + DONE


class CallStream(OutcomeStream):
    """A call under way whose answer is a stream of events. What is told first decides about the status."""

    __slots__ = ("_begun", "_exchange", "_failed", "_maker", "_silence", "_told")

    def __init__(
        self, maker: ChunkMaker, exchange: Exchange, outlet: Outlet, failed: Callable[[bytes], bytes] = openai_failure
    ) -> None:
        """Make events by `maker`, and by `failed` what ends the stream where it fails, of the JSON of the failure."""
        super().__init__(outlet)
        self._failed = failed
        self._maker = maker
        self._exchange = exchange
        self._begun = self._told = False
        self._silence = Deadline(asyncio.get_running_loop(), self._ping)

    def cancel(self) -> None:
        """Its client is gone, or it failed."""
        self._silence.close()
        self._exchange.settle()
        super().cancel()

    def _pass_on(self, outcome: Outcome) -> None:
        if isinstance(outcome, InferError):
            self.under_way = None
            self._fail(outcome)
            return
        final = outcome.final
        if final:
            self.under_way = None
        try:
            event = event_of(outcome)
            if event is not None and self._exchange.account is not None:
                self._exchange.account.take(event)
            if final:
                self._exchange.settle()
            piece = b"" if event is None else self._maker.take(event)
            self._told = self._told or event is not None
            if final:
                if not self._told:
                    raise _said_nothing()
                piece += self._maker.end()
        except Exception as error:
            self._fail(error)
        else:
            if piece:
                self._send(piece, last=final)
        finally:
            outcome.release()

    def _send(self, piece: bytes, *, last: bool) -> None:
        if not self._begun:
            self._begun = True
            self._outlet.begin(Answer(content_type=SSE, headers={**_STREAM_HEADERS, **self._exchange.headers()}))
        if last:
            self._silence.close()
        else:
            self._silence.set(PING_S)
        self._outlet.send(piece, last=last)

    def _fail(self, error: Exception) -> None:
        self.cancel()
        answer = self._exchange.failure(error)
        if self._begun:
            self._outlet.send(self._failed(answer.body), last=True)
        else:
            self._outlet.answer(answer)

    def _ping(self) -> None:
        if not self._outlet.full:
            self._outlet.send(PING)
        self._silence.set(PING_S)


class Refused:
    """Implements request.Streaming: a request that is answered with a failure before anything was begun."""

    __slots__ = ("_later",)

    def __init__(self, outlet: Outlet, answer: Answer) -> None:
        self._later = asyncio.get_running_loop().call_soon(outlet.answer, answer)  # not before it is known to run

    def resume(self) -> None:
        """Nothing waits."""

    def cancel(self) -> None:
        """Its client is gone."""
        self._later.cancel()


def _said_nothing() -> InferError:
    return internal("the model ended without an answer")
