"""Requests that cannot even be read before their model is in memory: begun once it is there."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from headrace.access.caller import forbidden
from headrace.gateway.http.request import Begin, Done, HttpRequest, Outlet, Stream, Streaming
from headrace.gateway.http.routes import Route
from headrace.planes import Cancellable, NotInMemoryError
from headrace_protocol.errors import InferError


class Later:
    """Implements request.Streaming: `begin` is called when the model is there, `fail` where that comes to nothing."""

    __slots__ = ("_begin", "_fail", "_stream", "_waiting")

    def __init__(
        self,
        absent: NotInMemoryError,
        http: HttpRequest,
        begin: Callable[[], Cancellable],
        fail: Callable[[Exception], None],
    ) -> None:
        """Begin to wait. Raises InferError where the model is not to be waited for."""
        caller = http.caller
        if caller is not None and not caller.may_ask(absent.model):
            raise forbidden(f"caller '{caller.name}' may not ask model '{absent.model}'")
        self._begin = begin
        self._fail = fail
        self._stream: Cancellable | None = None
        self._waiting: Cancellable | None = absent.wait(self._there, self._failed)

    def resume(self) -> None:
        """Go on: see request.Streaming."""
        if self._stream is not None:
            self._stream.resume()  # type: ignore[attr-defined] # only streams are resumed

    def cancel(self) -> None:
        """Its client is gone."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.cancel()
        elif self._stream is not None:
            self._stream.cancel()

    def _there(self) -> None:
        self._waiting = None
        try:
            self._stream = self._begin()
        except Exception as error:  # what it raises is the answer
            self._fail(error.with_traceback(None))

    def _failed(self, error: InferError) -> None:
        self._waiting = None
        self._fail(error)


def patient(begin: Begin) -> Begin:
    """Return an endpoint that waits for a model of which it has to know more than its name."""

    @wraps(begin)
    def later(http: HttpRequest, route: Route, done: Done) -> Cancellable:
        try:
            return begin(http, route, done)
        except NotInMemoryError as absent:
            return Later(absent, http, lambda: begin(http, route, done), done)

    return later


def patient_stream(stream: Stream) -> Stream:
    """Return an endpoint, of an answer in pieces, that waits for a model of which it has to know more than its name."""

    @wraps(stream)
    def later(http: HttpRequest, route: Route, outlet: Outlet) -> Streaming:
        try:
            return stream(http, route, outlet)
        except NotInMemoryError as absent:
            return Later(absent, http, lambda: stream(http, route, outlet), outlet.answer)

    return later
