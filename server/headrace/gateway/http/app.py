"""The HTTP gateway: listens, finds the endpoint of each request, and makes an HTTP answer of what it returns or raises.

It owns the listening socket and its connections.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, cast

from aiohttp import web

from headrace.clock import Clock, SystemClock
from headrace.gateway.http.answer import Answer
from headrace.gateway.http.compression import Coding, compress, response_coding
from headrace.gateway.http.connection import WebServer
from headrace.gateway.http.endpoints import Endpoints
from headrace.gateway.http.errors import STATUS, HttpError, error_body
from headrace.gateway.http.routes import resolve
from headrace.gateway.http.settings import HttpSettings
from headrace.gateway.http.wire import WireResponse
from headrace.planes import ControlPlane, DataPlane
from headrace_protocol.errors import InferError

__all__ = ["HttpGateway", "HttpSettings"]

_log: Final = logging.getLogger(__name__)

_COMPRESS_INLINE: Final = 65536
"""Answers up to this size are compressed in place; larger ones in a thread."""
_LAST_WRITES: Final = 0.1
"""Seconds that connections get at least to write out answers, also where the grace of a stop is used up."""


class HttpGateway:
    """The HTTP door. Constructing is not starting: `start` opens the port, `stop` closes it."""

    def __init__(
        self, data: DataPlane, control: ControlPlane, settings: HttpSettings, clock: Clock | None = None
    ) -> None:
        self._settings = settings
        self._endpoints = Endpoints(data, control, settings, clock or SystemClock()).functions
        self._listener: asyncio.Server | None = None
        self._server: WebServer | None = None
        self._open = 0
        """Requests whose endpoint is at work."""
        self._stopping = False
        self._all_done = asyncio.Event()

    async def start(self) -> int:
        """Listen; return the bound port. Raises OSError, naming address and port, where they cannot be had."""
        loop = asyncio.get_running_loop()
        settings = self._settings
        self._server = WebServer(self._handle, settings, loop)
        try:
            self._listener = await loop.create_server(
                self._server,
                settings.address,
                settings.port,
                backlog=settings.backlog,
                reuse_port=settings.reuse_port or None,
            )
        except OSError as error:
            where = f"{settings.address}:{settings.port}"
            raise OSError(error.errno, f"cannot serve HTTP on {where}: {error.strerror or error}") from error
        port: int = self._listener.sockets[0].getsockname()[1]
        return port

    async def stop(self, grace_s: float) -> None:
        """Accept no more connections, let open requests finish for `grace_s` seconds, then cut what is left."""
        if self._listener is None or self._server is None:
            return
        self._listener.close()
        self._stopping = True
        deadline = asyncio.get_running_loop().time() + grace_s
        if self._open:
            try:
                await asyncio.wait_for(self._all_done.wait(), grace_s)
            except TimeoutError:
                _log.warning("%d HTTP requests are cut: not finished within %s s", self._open, grace_s)
        self._server.pre_shutdown()
        await self._server.shutdown(max(deadline - asyncio.get_running_loop().time(), _LAST_WRITES))
        self._listener = self._server = None

    async def _handle(self, http: web.BaseRequest) -> web.StreamResponse:
        self._open += 1
        try:
            answer = await self._answer(http)
            response = await self._respond(http, answer)
        finally:
            self._open -= 1
            if self._stopping and not self._open:
                self._all_done.set()
        return cast("web.StreamResponse", response)  # all that aiohttp asks of one: see wire.py

    async def _answer(self, http: web.BaseRequest) -> Answer:
        """Return what the endpoint answers; whatever it raises, cancelling aside, becomes an answer too."""
        try:
            route = resolve(http.rel_url.raw_path)
            if route is None:
                raise HttpError(404, "no such path")
            methods = route.endpoint.methods
            if http.method not in methods:
                allowed = ", ".join(methods)
                raise HttpError(405, f"method {http.method[:20]} is not allowed here, {allowed} is", {"Allow": allowed})
            return await self._endpoints[route.endpoint](http, route)
        except InferError as error:
            return Answer(error_body(error.message), STATUS[error.code])
        except HttpError as error:
            return Answer(error_body(error.message), error.status, headers=error.headers, close=error.close)
        except Exception as error:
            if isinstance(error, ConnectionError) and http.transport is None:
                raise  # the client is gone: there is nobody to answer
            _log.exception("an HTTP request failed: %r", http.rel_url.raw_path[:200])
            return Answer(error_body("internal error; the server's log has the details"), 500)

    async def _respond(self, http: web.BaseRequest, answer: Answer) -> WireResponse:
        body = answer.body
        headers = dict(answer.headers) if answer.headers else {}
        if body:
            headers["Content-Type"] = answer.content_type
            if len(body) >= self._settings.min_compress_size and "Accept-Encoding" in http.headers:
                headers["Vary"] = "Accept-Encoding"
                coding = response_coding(",".join(http.headers.getall("Accept-Encoding")))
                if coding is not Coding.IDENTITY:
                    body = (
                        compress(body, coding)
                        if len(body) <= _COMPRESS_INLINE
                        else await asyncio.to_thread(compress, body, coding)
                    )
                    headers["Content-Encoding"] = coding.value
        return WireResponse(http, answer.status, body, headers, close=answer.close or self._stopping)
