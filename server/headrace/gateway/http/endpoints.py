"""What each endpoint does: a call of the data plane or the control plane, with bytes parsed before and written after."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

import msgspec

from headrace.clock import Clock
from headrace.gateway.header_forward import compile_pattern, forward
from headrace.gateway.http import request as fields
from headrace.gateway.http.admission import path_of
from headrace.gateway.http.answer import BINARY, JSON, Answer
from headrace.gateway.http.body import inflated, json_text
from headrace.gateway.http.repository import check_target, decode_index, decode_load, decode_unload
from headrace.gateway.http.request import Begin, Body, Done, HttpRequest, Reply, Service
from headrace.gateway.http.request_codec import HEADER_LENGTH, ResponseForm, decode_request
from headrace.gateway.http.response_codec import encode_response
from headrace.gateway.http.routes import Endpoint, Route
from headrace.gateway.http.settings import HttpSettings
from headrace.planes import Cancellable, ControlPlane, DataPlane, Outcome
from headrace.repository.proto_json import to_dict
from headrace.types import InferenceRequest, InferenceResponse
from headrace_protocol.errors import InferError, unavailable, unsupported


class Endpoints:
    """The endpoints over one data plane and one control plane. Failures are raised: InferError or HttpError."""

    def __init__(self, data: DataPlane, control: ControlPlane, settings: HttpSettings, clock: Clock) -> None:
        self._data = data
        self._control = control
        self._settings = settings
        self._now_ns = clock.now_ns
        self._forwarded = compile_pattern(settings.header_forward_pattern)
        self.services: Final[Mapping[Endpoint, Service]] = {
            Endpoint.INFER: self._infer,
            Endpoint.INDEX: self._index,
            Endpoint.LOAD: self._load,
            Endpoint.UNLOAD: self._unload,
        }
        self.begun: Final[Mapping[Endpoint, Begin]] = {Endpoint.INFER: self._begin_infer}
        self.replies: Final[Mapping[Endpoint, Reply]] = {
            Endpoint.SERVER_METADATA: self._server_metadata,
            Endpoint.LIVE: self._live,
            Endpoint.READY: self._ready,
            Endpoint.MODELS: self._models,
            Endpoint.MODEL_METADATA: self._model_metadata,
            Endpoint.MODEL_READY: self._model_ready,
            Endpoint.MODEL_CONFIG: self._model_config,
            Endpoint.STATISTICS: self._statistics,
            Endpoint.NOT_SERVED: self._not_served,
        }

    async def _infer(self, http: HttpRequest, route: Route) -> Answer:
        request, form = self._decode(http, route, await inflated(http, self._settings.max_input_size))
        return _encode(await self._data.infer(request), form)

    def _begin_infer(self, http: HttpRequest, route: Route, done: Done) -> Cancellable:
        request, form = self._decode(http, route, http.body)
        return self._data.submit(request, partial(_deliver, done, form))

    def _decode(self, http: HttpRequest, route: Route, body: Body) -> tuple[InferenceRequest, ResponseForm]:
        request = InferenceRequest(route.model, route.version, self._now_ns())
        form = decode_request(request, body, http.text(fields.HEADER_LENGTH), self._settings.max_input_size)
        request.trace_context = http.text(fields.TRACEPARENT)
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
        return _json(self._data.server_metadata())

    def _model_metadata(self, _http: HttpRequest, route: Route) -> Answer:
        return _json(self._data.model_metadata(route.model, route.version))

    def _model_config(self, _http: HttpRequest, route: Route) -> Answer:
        return _json(to_dict(self._data.model_config(route.model, route.version)))

    def _statistics(self, _http: HttpRequest, route: Route) -> Answer:
        return _json(to_dict(self._data.statistics(route.model, route.version)))

    def _models(self, _http: HttpRequest, _route: Route) -> Answer:
        names = dict.fromkeys(entry.name for entry in self._control.index(ready_only=True))
        return _json({"models": list(names)})

    async def _index(self, http: HttpRequest, _route: Route) -> Answer:
        body = await json_text(http, self._settings.max_input_size)
        return _json(self._control.index(ready_only=decode_index(body)))

    async def _load(self, http: HttpRequest, route: Route) -> Answer:
        check_target(route.model, route.repository)
        body = await json_text(http, self._settings.max_input_size)
        await self._control.load(route.model, decode_load(body))
        return Answer()

    async def _unload(self, http: HttpRequest, route: Route) -> Answer:
        check_target(route.model, route.repository)
        body = await json_text(http, self._settings.max_input_size)
        await self._control.unload(route.model, unload_dependents=decode_unload(body))
        return Answer()

    def _not_served(self, http: HttpRequest, _route: Route) -> Answer:
        raise unsupported(f"{path_of(http.url)[:80]} is not served yet by this server")


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


def _json(value: object) -> Answer:
    return Answer(msgspec.json.encode(value), content_type=JSON)
