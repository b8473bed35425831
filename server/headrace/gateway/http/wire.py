"""An answer as bytes on the connection: one head and one body in one write.

It stands where aiohttp expects a StreamResponse, of which its connection uses no more than this: `prepare`,
`write_eof` and `keep_alive`. Ours costs a tenth, for the whole answer is there when it begins.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import Final

from aiohttp import web

from headrace.gateway.http.answer import SERVER

_JOIN_BELOW: Final = 16 * 1024
"""Smaller bodies are joined with the head, which costs less than a vectored write."""
_PAUSE_ABOVE: Final = 64 * 1024
"""Bodies above this size wait until the client has taken most of them before the connection's next request."""
_REASONS: Final = {status.value: status.phrase for status in HTTPStatus}


class _Date:
    """The Date header's text, made anew once a second."""

    __slots__ = ("_second", "_text")

    def __init__(self) -> None:
        self._second = 0
        self._text = ""

    def text(self) -> str:
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._text = formatdate(second, usegmt=True)
        return self._text


_DATE: Final = _Date()


class WireResponse:
    """A whole answer. `keep_alive` says whether the connection goes on after it."""

    __slots__ = ("_body", "_connection", "_head", "_request", "keep_alive")

    def __init__(
        self, request: web.BaseRequest, status: int, body: bytes, headers: Mapping[str, str], *, close: bool
    ) -> None:
        self._request = request
        self._body = body
        self.keep_alive = request.keep_alive and not close
        lines = [f"HTTP/{request.version.major}.{request.version.minor} {status} {_REASONS[status]}\r\n"]
        lines.extend([f"{name}: {value}\r\n" for name, value in headers.items()])
        if not self.keep_alive:
            lines.append("Connection: close\r\n")
        elif request.version < (1, 1):
            lines.append("Connection: keep-alive\r\n")
        lines.append(f"Content-Length: {len(body)}\r\nServer: {SERVER}\r\nDate: {_DATE.text()}\r\n\r\n")
        self._head = "".join(lines).encode()

    async def prepare(self, _request: web.BaseRequest) -> None:
        """Do nothing: everything is written at once."""

    async def write_eof(self) -> None:
        """Write the answer. Raises ConnectionResetError where the client is gone."""
        request = self._request
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client is gone")
        request.writer.output_size += len(self._head) + len(self._body)
        if len(self._body) < _JOIN_BELOW:
            transport.write(self._head + self._body)
            return
        transport.writelines((self._head, self._body))
        if len(self._body) > _PAUSE_ABOVE:
            await request.protocol._drain_helper()
