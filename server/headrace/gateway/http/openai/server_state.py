"""GET /health, /version and /load, as vLLM's clients and load balancers ask for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from headrace.gateway.http.answer import Answer, json_answer
from headrace.gateway.http.request import Handler, HttpRequest
from headrace.gateway.http.routes import Endpoint, Route
from headrace.planes import DataPlane
from headrace_protocol.errors import unavailable


class ServerState:
    """The three endpoints over a data plane."""

    def __init__(self, data: DataPlane) -> None:
        self._data = data
        self.handlers: Final[Mapping[Endpoint, Handler]] = {
            Endpoint.HEALTH: Handler(reply=self._health),
            Endpoint.VERSION: Handler(reply=self._version),
            Endpoint.SERVER_LOAD: Handler(reply=self._load),
        }

    def _health(self, _http: HttpRequest, _route: Route) -> Answer:
        if not self._data.ready():
            raise unavailable("the server is not ready")
        return Answer()

    def _version(self, _http: HttpRequest, _route: Route) -> Answer:
        return json_answer({"version": self._data.server_metadata().version})

    def _load(self, _http: HttpRequest, _route: Route) -> Answer:
        return json_answer({"server_load": self._data.under_way()})
