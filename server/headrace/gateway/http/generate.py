"""generate and generate_stream: one request of any model, answered with one JSON object or with an event a response."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from headrace.clock import Clock
from headrace.gateway.http import request as fields
from headrace.gateway.http.answer import JSON, SSE, Answer
from headrace.gateway.http.errors import failure
from headrace.gateway.http.generate_codec import decode_generate, encode_generated
from headrace.gateway.http.later import patient, patient_stream
from headrace.gateway.http.request import Done, Handler, HttpRequest, Outlet
from headrace.gateway.http.routes import Endpoint, Route
from headrace.gateway.http.settings import HttpSettings
from headrace.gateway.http.streaming import OutcomeStream
from headrace.planes import Cancellable, DataPlane, Outcome
from headrace.types import InferenceRequest
from headrace_protocol.errors import InferError, invalid


class GenerateEndpoints:
    """The two endpoints over a data plane. Failures before a request has begun are raised: InferError or HttpError."""

    def __init__(self, data: DataPlane, settings: HttpSettings, clock: Clock) -> None:
        self._data = data
        self._max_input_size = settings.max_input_size
        self._now_ns = clock.now_ns
        self.handlers: Final[Mapping[Endpoint, Handler]] = {
            Endpoint.GENERATE: Handler(begin=patient(self._generate), codings=False),
            Endpoint.GENERATE_STREAM: Handler(stream=patient_stream(self._generate_stream), codings=False),
        }

    def _generate(self, http: HttpRequest, route: Route, done: Done) -> Cancellable:
        request, identifier = self._decode(http, route)
        single = SingleResponse(identifier, done)
        single.under_way = self._data.stream(request, single.take)
        if request.trace is not None:
            http.traced(request.trace, request.received_ns)
        return single

    def _generate_stream(self, http: HttpRequest, route: Route, outlet: Outlet) -> EventStream:
        request, identifier = self._decode(http, route)
        events = EventStream(identifier, outlet, http.url)
        events.under_way = self._data.stream(request, events.take)
        if request.trace is not None:
            http.traced(request.trace, request.received_ns)
        return events

    def _decode(self, http: HttpRequest, route: Route) -> tuple[InferenceRequest, str | None]:
        request = InferenceRequest(route.model, route.version, self._now_ns())
        request.trace_context = http.text(fields.TRACEPARENT)
        request.caller = http.caller
        request.sticky = http.sticky
        inputs = self._data.model_metadata(route.model, route.version).inputs
        return request, decode_generate(request, http.body, inputs, self._max_input_size)


class SingleResponse:
    """A generate request under way: an answer is made of its one response, an error of none or several."""

    __slots__ = ("_answer", "_done", "_identifier", "under_way")

    def __init__(self, identifier: str | None, done: Done) -> None:
        self._identifier = identifier
        self._done = done
        self._answer: Answer | None = None
        self.under_way: Cancellable | None = None

    def take(self, outcome: Outcome) -> None:
        """Take the next outcome of the request."""
        if isinstance(outcome, InferError):
            self.under_way = None
            self._done(outcome)
            return
        if outcome.final:
            self.under_way = None
        try:
            if not outcome.empty:
                if self._answer is not None:
                    raise _not_single(outcome.model_name, "more than one")
                self._answer = Answer(encode_generated(outcome, self._identifier), content_type=JSON)
        except Exception as error:
            self.cancel()
            self._done(error)
        else:
            if outcome.final:
                self._done(self._answer or _not_single(outcome.model_name, "no"))
        finally:
            outcome.release()

    def cancel(self) -> None:
        """Its client is gone."""
        under_way, self.under_way = self.under_way, None
        if under_way is not None:
            under_way.cancel()


def _not_single(model: str, count: str) -> InferError:
    return invalid(f"model '{model}' gave {count} response; generate takes exactly one, generate_stream any number")


class EventStream(OutcomeStream):
    """A generate_stream request under way, whose responses become server-sent events. The first outcome decides the status."""

    __slots__ = ("_begun", "_identifier", "_url")

    def __init__(self, identifier: str | None, outlet: Outlet, url: bytes) -> None:
        super().__init__(outlet)
        self._identifier = identifier
        self._url = url
        self._begun = False

    def _pass_on(self, outcome: Outcome) -> None:
        if isinstance(outcome, InferError):
            self.under_way = None
            self._fail(outcome)
            return
        if outcome.final:
            self.under_way = None
        try:
            event = b"" if outcome.empty else b"data: %b\n\n" % encode_generated(outcome, self._identifier)
        except Exception as error:
            self._fail(error)
        else:
            self._begin()
            self._outlet.send(event, last=outcome.final)
        finally:
            outcome.release()

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._outlet.begin(Answer(content_type=SSE, headers={"Cache-Control": "no-cache"}))

    def _fail(self, error: Exception) -> None:
        self.cancel()
        if self._begun:
            self._outlet.send(b"data: %b\n\n" % failure(error, self._url).body, last=True)
        else:
            self._outlet.answer(error)
