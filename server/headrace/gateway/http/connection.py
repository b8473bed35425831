"""aiohttp's low-level server as this gateway uses it: what is not well-formed HTTP gets a JSON error, not a traceback."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from headrace.gateway.http.answer import JSON, SERVER
from headrace.gateway.http.errors import error_body
from headrace.gateway.http.settings import HttpSettings

_log: Final = logging.getLogger(__name__)

_LINGER: Final = 1.0
"""Seconds for which a body that nobody reads is drained after the answer, so that the client gets to see it."""

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Connection(web.RequestHandler):
    """One client connection."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what could not be parsed as a request; called by aiohttp. The connection ends with the answer."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer had begun")
        if isinstance(exc, LineTooLong) or (message or "").startswith("Too many headers"):
            status, text = 431, "the request line or the headers are larger than the server takes"
        elif status >= 500:
            _log.error("an HTTP request failed outside its handler", exc_info=exc)
            text = "internal error"
        else:
            text = f"this is not a well-formed HTTP request: {(message or type(exc).__name__).splitlines()[0][:200]}"
        response = web.Response(status=status, body=error_body(text), content_type=JSON, headers={"Server": SERVER})
        response.force_close()
        return response


class WebServer(web.Server):
    """The protocol factory of the listening socket. A client that disconnects cancels the handler of its request."""

    def __init__(self, handler: Handler, settings: HttpSettings, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(handler, handler_cancellation=True, loop=loop)
        self._settings = settings

    def __call__(self) -> web.RequestHandler:
        settings = self._settings
        return Connection(
            self,
            loop=self._loop,
            keepalive_timeout=settings.keepalive_timeout,
            access_log=None,  # type: ignore[arg-type]  # aiohttp itself asks whether there is one
            max_line_size=settings.max_header_line,
            max_field_size=settings.max_header_line,
            max_headers=settings.max_headers,
            lingering_time=_LINGER,
            auto_decompress=False,
        )
