"""Calls of language models: from a GenerationCall to an answer as a whole, or to a stream of server-sent events.

What is told is a maker's to say: it takes events of the model and gives bytes. Knows no endpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from headrace.access.caller import Caller
from headrace.gateway.http import request as fields
from headrace.gateway.http.answer import SSE, Answer
from headrace.gateway.http.deadline import Deadline
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
    request.counts_tokens = True
    payload = ENCODER.encode(call)
    request.inputs.append(InputTensor(CALL_INPUT, BYTES, (1,), len(payload).to_bytes(4, "little") + payload))
    under_way = data.stream(request, on_outcome)
    if request.trace is not None:
        http.traced(request.trace, request.received_ns)
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


class TokenCharge:
    """Counts the tokens of one call for a caller whose tokens are limited."""

    __slots__ = ("_caller", "_exchange", "_prompt", "_told")

    def __init__(self, caller: Caller, exchange: Exchange) -> None:
        self._caller = caller
        self._exchange = exchange
        self._prompt = 0
        self._told: dict[int, int] = {}

    def take(self, event: GenerationEvent) -> None:
        """Take note of what an event tells."""
        self._prompt += sum(prompt.num_tokens for prompt in event.prompts)
        self._told.update((choice.index, choice.num_tokens) for choice in event.choices if choice.num_tokens)

    def settle(self) -> None:
        """Charge what was used, also of a call that its client has left. Does nothing the second time."""
        tokens, self._prompt = self._prompt + sum(self._told.values()), 0
        self._told.clear()
        if tokens:
            self._caller.charge(tokens, self._exchange.now_ns())


def _charge_of(exchange: Exchange) -> TokenCharge | None:
    caller = exchange.http.caller
    return TokenCharge(caller, exchange) if caller is not None and caller.counts_tokens else None


class CallAnswer:
    """Implements request.Streaming: a call under way whose answer comes as a whole."""

    __slots__ = ("_charge", "_done", "_exchange", "_maker", "_told", "under_way")

    def __init__(self, maker: AnswerMaker, exchange: Exchange, done: Done) -> None:
        self._maker = maker
        self._exchange = exchange
        self._done = done
        self._charge = _charge_of(exchange)
        self._told = False
        self.under_way: Cancellable | None = None

    def take(self, outcome: Outcome) -> None:
        """Take the next outcome of the call."""
        if isinstance(outcome, InferError):
            self.under_way = None
            self._done(self._exchange.failure(outcome))
            return
        final = outcome.final
        if final:
            self.under_way = None
        try:
            event = event_of(outcome)
            if event is not None:
                self._told = True
                if self._charge is not None:
                    self._charge.take(event)
                self._maker.take(event, outcome)
            if final and self._charge is not None:
                self._charge.settle()
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
        if self._charge is not None:
            self._charge.settle()
        if under_way is not None:
            under_way.cancel()

    def _whole(self) -> bytes:
        if not self._told:
            raise _said_nothing()
        return self._maker.answer()


class CallStream(OutcomeStream):
    """A call under way whose answer is a stream of events. What is told first decides about the status."""

    __slots__ = ("_begun", "_charge", "_exchange", "_maker", "_silence", "_told")

    def __init__(self, maker: ChunkMaker, exchange: Exchange, outlet: Outlet) -> None:
        super().__init__(outlet)
        self._maker = maker
        self._exchange = exchange
        self._begun = self._told = False
        self._charge = _charge_of(exchange)
        self._silence = Deadline(asyncio.get_running_loop(), self._ping)

    def cancel(self) -> None:
        """Its client is gone, or it failed."""
        self._silence.close()
        if self._charge is not None:
            self._charge.settle()
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
            if event is not None and self._charge is not None:
                self._charge.take(event)
            if final and self._charge is not None:
                self._charge.settle()
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
            self._outlet.send(b"data: %b\n\n" % answer.body + DONE, last=True)
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
