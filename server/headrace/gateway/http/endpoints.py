"""The endpoints of the data plane: health, metadata, statistics and infer, with bytes parsed before and written after."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

from headrace.clock import Clock
from headrace.gateway.header_forward import compile_pattern, forward
from headrace.gateway.http import request as fields
from headrace.gateway.http.answer import BINARY, Answer, json_answer
from headrace.gateway.http.request import Done, Handler, HttpRequest
from headrace.gateway.http.request_codec import HEADER_LENGTH, ResponseForm, decode_request
from headrace.gateway.http.response_codec import encode_response
from headrace.gateway.http.routes import Endpoint, Route
from headrace.gateway.http.settings import HttpSettings
from headrace.planes import Cancellable, DataPlane, Outcome
from headrace.repository.proto_json import to_dict
from headrace.types import InferenceRequest, InferenceResponse
from headrace_protocol.errors import InferError, unavailable


class DataEndpoints:
    """The endpoints over one data plane. Failures are raised: InferError or HttpError."""

    def __init__(self, data: DataPlane, settings: HttpSettings, clock: Clock) -> None:
        self._data = data
        self._settings = settings
        self._now_ns = clock.now_ns
        self._forwarded = compile_pattern(settings.header_forward_pattern)
        self.handlers: Final[Mapping[Endpoint, Handler]] = {
            Endpoint.LIVE: Handler(reply=self._live),
            Endpoint.READY: Handler(reply=self._ready),
            Endpoint.MODEL_READY: Handler(reply=self._model_ready),
            Endpoint.SERVER_METADATA: Handler(reply=self._server_metadata),
            Endpoint.MODEL_METADATA: Handler(reply=self._model_metadata),
            Endpoint.MODEL_CONFIG: Handler(reply=self._model_config),
            Endpoint.STATISTICS: Handler(reply=self._statistics),
            Endpoint.INFER: Handler(begin=self._begin_infer, binary=True),
        }

    def _begin_infer(self, http: HttpRequest, route: Route, done: Done) -> Cancellable:
        request, form = self._decode(http, route)
        under_way = self._data.submit(request, partial(_deliver, done, form))
        if request.trace is not None:
            http.traced(request.trace, request.received_ns)
        return under_way

    def _decode(self, http: HttpRequest, route: Route) -> tuple[InferenceRequest, ResponseForm]:
        request = InferenceRequest(route.model, route.version, self._now_ns())
        form = decode_request(request, http.body, http.text(fields.HEADER_LENGTH), self._settings.max_input_size)
        request.trace_context = http.text(fields.TRACEPARENT)
        request.caller = http.caller
        request.sticky = http.sticky
        if self._forwarded is not None and http.headers is not None:
            forward(request, http.headers, self._forwarded)
        return request, form

    def _live(self, _http: HttpRequest, _route: Route) -> Answer:
        return self._health(self._data.live())

    def _ready(self, _http: HttpRequest, _route: Route) -> Answer:
        return self._health(self._data.ready())

    def _health(self, good: bool) -> Answer:
        if self._data.exiting():
            raise unavailable("the server is exiting")
        return Answer(status=200 if good else 400)

    def _model_ready(self, _http: HttpRequest, route: Route) -> Answer:
        if self._data.model_ready(route.model, route.version):
            return Answer()
        raise unavailable(f"model '{route.model}' is not ready")

    def _server_metadata(self, _http: HttpRequest, _route: Route) -> Answer:
        return json_answer(self._data.server_metadata())

    def _model_metadata(self, _http: HttpRequest, route: Route) -> Answer:
        return json_answer(self._data.model_metadata(route.model, route.version))

    def _model_config(self, _http: HttpRequest, route: Route) -> Answer:
        return json_answer(to_dict(self._data.model_config(route.model, route.version)))

    def _statistics(self, _http: HttpRequest, route: Route) -> Answer:
        return json_answer(to_dict(self._data.statistics(route.model, route.version)))


def _encode(response: InferenceResponse, form: ResponseForm) -> Answer:
    try:
        payload, json_size = encode_response(response, form)
    finally:
        response.release()
    if json_size is None:
        return Answer(payload)
    return Answer(payload, content_type=BINARY, headers={HEADER_LENGTH: str(json_size)})


def _deliver(done: Done, form: ResponseForm, outcome: Outcome) -> None:
    result: Answer | Exception
    try:
        result = outcome if isinstance(outcome, InferError) else _encode(outcome, form)
    except Exception as error:
        result = error
    done(result)
