"""An answer that comes in pieces, as bytes for its connection: in chunks, or as it comes for HTTP/1.0."""

from __future__ import annotations

from typing import Protocol

from headrace.gateway.http.answer import Answer
from headrace.gateway.http.request import HttpRequest
from headrace.gateway.http.wire import LAST_CHUNK, chunk_of, stream_head_of
from headrace.observability.trace import HTTP_SEND_END, HTTP_SEND_START


class Line(Protocol):
    """What the outlet needs of its connection."""

    @property
    def writing_paused(self) -> bool: ...

    @property
    def leaving(self) -> bool: ...

    def finished(self, request: HttpRequest, result: Answer | Exception) -> None: ...

    def write(self, data: bytes) -> None: ...

    def streamed(self, *, keep_alive: bool) -> None: ...


class ConnectionOutlet:
    """Implements request.Outlet for one request of a connection."""

    __slots__ = ("_connection", "_ended", "_head", "_keep_alive", "_request")

    def __init__(self, connection: Line, request: HttpRequest) -> None:
        self._connection = connection
        self._request = request
        self._ended = False
        self._head: Answer | None = None
        self._keep_alive = request.keep_alive and not request.old

    @property
    def full(self) -> bool:
        """Whether the client has enough for now."""
        return self._connection.writing_paused

    def answer(self, result: Answer | Exception) -> None:
        """Answer as a whole."""
        self._connection.finished(self._request, result)

    def begin(self, head: Answer) -> None:
        """Take the head for the first piece."""
        self._head = head

    def send(self, piece: bytes, *, last: bool = False) -> None:
        """Send a piece; nothing after the last one, which belongs to another answer by then."""
        if self._ended:
            return
        self._ended = last
        old = self._request.old
        data = piece if old or not piece else chunk_of(piece)
        if last and not old:
            data += LAST_CHUNK
        trace = self._request.trace
        if self._head is not None:
            if trace is not None:
                trace.mark(HTTP_SEND_START)
            self._keep_alive = self._keep_alive and not self._connection.leaving
            data = stream_head_of(self._head, old=old, keep_alive=self._keep_alive) + data
            self._head = None
        self._connection.write(data)
        if last:
            if trace is not None:
                trace.mark(HTTP_SEND_END)
            self._connection.streamed(keep_alive=self._keep_alive)
