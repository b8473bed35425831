"""What the endpoints that call a language model have in common: a failure is answered with the request's id on it."""

from __future__ import annotations

from collections.abc import Callable

from headrace.clock import Clock
from headrace.gateway.http.later import Later
from headrace.gateway.http.openai.call import Refused
from headrace.gateway.http.openai.directory import ModelDirectory
from headrace.gateway.http.openai.exchange import Exchange, random_id
from headrace.gateway.http.request import HttpRequest, Outlet, Streaming
from headrace.gateway.http.routes import Route
from headrace.planes import DataPlane, NotInMemoryError


class CallEndpoint:
    """An endpoint over a data plane. `begin` is its user's to say."""

    def __init__(self, data: DataPlane, clock: Clock, new_id: Callable[[], str] = random_id) -> None:
        self._data = data
        self._clock = clock
        self._new_id = new_id
        self._directory = ModelDirectory(data)

    def __call__(self, http: HttpRequest, route: Route, outlet: Outlet) -> Streaming:
        """Begin a request: request.Stream."""
        del route
        exchange = Exchange(http, self._clock, self._new_id)

        def fail(error: Exception) -> None:
            outlet.answer(exchange.failure(error))

        try:
            try:
                return self.begin(exchange, outlet)
            except NotInMemoryError as absent:
                return Later(absent, http, lambda: self.begin(exchange, outlet), fail)
        except Exception as error:
            return Refused(outlet, exchange.failure(error))

    def begin(self, exchange: Exchange, outlet: Outlet) -> Streaming:
        """Read the request and begin its call. What it raises is the answer."""
        raise NotImplementedError
