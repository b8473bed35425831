"""What each endpoint does: a call of the data plane or the control plane, with bytes parsed before and written after."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import msgspec
from aiohttp import web

from headrace.clock import Clock
from headrace.gateway.http.answer import BINARY, JSON, Answer
from headrace.gateway.http.body import read_body
from headrace.gateway.http.header_forward import compile_pattern, forward
from headrace.gateway.http.repository import check_target, decode_index, decode_load, decode_unload
from headrace.gateway.http.request_codec import HEADER_LENGTH, decode_request
from headrace.gateway.http.response_codec import encode_response
from headrace.gateway.http.routes import Endpoint, Route
from headrace.gateway.http.settings import HttpSettings
from headrace.planes import ControlPlane, DataPlane
from headrace.repository.proto_json import to_dict
from headrace.types import InferenceRequest
from headrace_protocol.errors import unavailable, unsupported

EndpointFunction = Callable[[web.BaseRequest, Route], Awaitable[Answer]]


class Endpoints:
    """The endpoints over one data plane and one control plane. Failures are raised: InferError or HttpError."""

    def __init__(self, data: DataPlane, control: ControlPlane, settings: HttpSettings, clock: Clock) -> None:
        self._data = data
        self._control = control
        self._settings = settings
        self._now_ns = clock.now_ns
        self._forwarded = compile_pattern(settings.header_forward_pattern)
        self.functions: Final[Mapping[Endpoint, EndpointFunction]] = {
            Endpoint.INFER: self._infer,
            Endpoint.SERVER_METADATA: self._server_metadata,
            Endpoint.LIVE: self._live,
            Endpoint.READY: self._ready,
            Endpoint.MODELS: self._models,
            Endpoint.MODEL_METADATA: self._model_metadata,
            Endpoint.MODEL_READY: self._model_ready,
            Endpoint.MODEL_CONFIG: self._model_config,
            Endpoint.STATISTICS: self._statistics,
            Endpoint.INDEX: self._index,
            Endpoint.LOAD: self._load,
            Endpoint.UNLOAD: self._unload,
            Endpoint.NOT_SERVED: self._not_served,
        }

    async def _infer(self, http: web.BaseRequest, route: Route) -> Answer:
        headers = http.headers
        request = InferenceRequest(route.model, route.version, self._now_ns())
        header_length = headers.get(HEADER_LENGTH)
        body = await read_body(http, self._settings, with_binary=header_length is not None)
        form = decode_request(request, body, header_length, self._settings.max_input_size)
        request.trace_context = headers.get("traceparent")
        if self._forwarded is not None:
            forward(request, headers.items(), self._forwarded)
        response = await self._data.infer(request)
        try:
            payload, json_size = encode_response(response, form)
        finally:
            response.release()
        if json_size is None:
            return Answer(payload)
        return Answer(payload, content_type=BINARY, headers={HEADER_LENGTH: str(json_size)})

    async def _live(self, _http: web.BaseRequest, _route: Route) -> Answer:
        return self._health(self._data.live())

    async def _ready(self, _http: web.BaseRequest, _route: Route) -> Answer:
        return self._health(self._data.ready())

    def _health(self, good: bool) -> Answer:
        if self._data.exiting():
            raise unavailable("the server is exiting")
        return Answer(status=200 if good else 400)

    async def _model_ready(self, _http: web.BaseRequest, route: Route) -> Answer:
        if self._data.model_ready(route.model, route.version):
            return Answer()
        raise unavailable(f"model '{route.model}' is not ready")

    async def _server_metadata(self, _http: web.BaseRequest, _route: Route) -> Answer:
        return _json(self._data.server_metadata())

    async def _model_metadata(self, _http: web.BaseRequest, route: Route) -> Answer:
        return _json(self._data.model_metadata(route.model, route.version))

    async def _model_config(self, _http: web.BaseRequest, route: Route) -> Answer:
        return _json(to_dict(self._data.model_config(route.model, route.version)))

    async def _statistics(self, _http: web.BaseRequest, route: Route) -> Answer:
        return _json(to_dict(self._data.statistics(route.model, route.version)))

    async def _models(self, _http: web.BaseRequest, _route: Route) -> Answer:
        names = dict.fromkeys(entry.name for entry in self._control.index(ready_only=True))
        return _json({"models": list(names)})

    async def _index(self, http: web.BaseRequest, _route: Route) -> Answer:
        body = await read_body(http, self._settings, with_binary=False)
        return _json(self._control.index(ready_only=decode_index(body)))

    async def _load(self, http: web.BaseRequest, route: Route) -> Answer:
        check_target(route.model, route.repository)
        body = await read_body(http, self._settings, with_binary=False)
        await self._control.load(route.model, decode_load(body))
        return Answer()

    async def _unload(self, http: web.BaseRequest, route: Route) -> Answer:
        check_target(route.model, route.repository)
        body = await read_body(http, self._settings, with_binary=False)
        await self._control.unload(route.model, unload_dependents=decode_unload(body))
        return Answer()

    async def _not_served(self, http: web.BaseRequest, _route: Route) -> Answer:
        raise unsupported(f"{http.rel_url.raw_path[:80]} is not served yet by this server")


def _json(value: object) -> Answer:
    return Answer(msgspec.json.encode(value), content_type=JSON)
