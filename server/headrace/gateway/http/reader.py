"""Bytes of a connection to HTTP requests, each handed over with its whole body. Sans-IO: knows no transport and no time.

httptools (llhttp) parses. Everything is bounded: the lines and the number of headers, a body by the limit that its
admission sets, the chunks of a chunked one. What cannot be a request becomes one with its answer in `early`, the last
of its connection.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Final

import httptools
import numpy as np

from headrace.gateway.http.admission import UNREAD_LIMIT, over
from headrace.gateway.http.answer import Answer
from headrace.gateway.http.errors import HttpError, answer_to
from headrace.gateway.http.request import (
    API_KEY,
    AUTHORIZATION,
    CONNECTION,
    CONTENT_LENGTH,
    EXPECT,
    READ,
    Headers,
    HttpRequest,
)
from headrace.gateway.http.settings import HttpSettings
from headrace_protocol.errors import InferError

_log: Final = logging.getLogger(__name__)

_MAX_CHUNKS: Final = 65536
_DIRECT_ABOVE: Final = 16384
"""With more than this of a body to come, it is received into its place, past the parser."""

Admit = Callable[[HttpRequest], int]
"""Sets a request's target and returns the limit of its body; raises HttpError or InferError to refuse it."""


def headers_to_read(settings: HttpSettings) -> frozenset[bytes]:
    """Return the names of the headers that a door with these settings looks at, in lower case."""
    keys = {API_KEY, AUTHORIZATION} if settings.gatekeeper is not None else set()
    keys.add(settings.sticky_header.encode())
    return READ | keys | {restriction.header.encode() for restriction in settings.restricted.values()}


class _Stopped(Exception):  # noqa: N818  # no failure: it leaves the parser, the request at fault has its answer
    """Raised in a callback of the parser: nothing after this point is read."""


class RequestReader:
    """The reader of one connection. `feed` it what came; take whole requests from `ready`.

    While `room` is set, the next bytes are received into it and reported by `filled`, instead of being fed.
    """

    __slots__ = (
        "_admit",
        "_body",
        "_chunks",
        "_declared",
        "_fields",
        "_filled",
        "_first_line",
        "_headers",
        "_keep_all",
        "_limit",
        "_line",
        "_lines",
        "_max_headers",
        "_max_line",
        "_parser",
        "_place",
        "_read",
        "_request",
        "_size",
        "_url",
        "began_ns",
        "ended",
        "in_message",
        "ready",
        "room",
        "surplus",
        "wants_continue",
    )

    def __init__(self, settings: HttpSettings, admit: Admit, read: frozenset[bytes] = READ) -> None:
        """`read` are the headers that matter, in lower case."""
        self._admit = admit
        self._read = read
        self._keep_all = bool(settings.header_forward_pattern)
        self._max_line = settings.max_header_line
        self._max_headers = settings.max_headers
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self.ready: deque[HttpRequest] = deque()
        """Requests that are complete, oldest first."""
        self.ended = False
        """Whether the last request of the connection is read: nothing more may be fed."""
        self.surplus = False
        """Whether something came after the last request."""
        self.wants_continue = False
        """Whether the client waits for a 100 before it sends its body."""
        self.room: memoryview | None = None
        self._place = memoryview(b"")
        """Where a body is received directly, `_filled` bytes so far."""
        self._filled = 0
        self._request: HttpRequest | None = None
        """The one whose body is being read; None while a head is."""
        self._line = 0
        """Bytes fed since a line was last complete."""
        self._lines = 0
        """Lines that were complete, pieces of bodies among them; only ever grows."""
        self._limit = 0
        self._body: bytes | bytearray | memoryview = b""
        """What there is of a body that goes through the parser."""
        self.began_ns = 0
        """When what is fed was there: told by the connection, for the requests that begin in it."""
        self.on_message_begin()
        self.in_message = False
        """Whether a request has begun and is not complete."""

    @property
    def in_body(self) -> bool:
        """Whether the head of a request is complete and its body is not."""
        return self._request is not None

    def release(self) -> None:
        """Let go of the parser, which refers back to this reader."""
        self.ended = True
        self.room = None
        self._parser = None

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Parse the next bytes, a few tens of kilobytes at most at once: all requests in them become ready."""
        lines = self._lines
        while True:
            assert self._parser is not None
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = self._head_without_upgrade() + bytes(memoryview(data)[upgrade.args[0] :])
                if self.ended:
                    return
            except httptools.HttpParserError as error:
                self._fail(error)
                return
            else:
                break
        if self.in_message:
            self._line = self._line + len(data) if self._lines == lines else 0
            self._check_unfinished()

    def filled(self, count: int) -> None:
        """Take note of `count` bytes received into `room`."""
        self._filled += count
        if self._filled < len(self._place):
            self.room = self._place[self._filled :]
            return
        # The parser still waits for this body: a new one reads what comes next.
        self._parser = httptools.HttpRequestParser(self)
        self._body = self._place
        self._place = memoryview(b"")
        self.room = None
        self.on_message_complete()

    def time_out(self, message: str) -> None:
        """End the connection for a client that does not go on with its request."""
        self._end(HttpError(408, message, close=True))

    # --- called by the parser -----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self.in_message = True
        self._lines += 1
        self._first_line = self._lines
        self._url = b""
        self._fields: dict[bytes, bytes] = {}
        self._headers: Headers | None = [] if self._keep_all else None
        self._declared = 0
        self._chunks = 0
        self._size = 0
        self._body = b""

    def on_url(self, piece: bytes) -> None:
        self._url += piece

    def on_header(self, name: bytes, value: bytes) -> None:
        self._lines += 1
        if len(name) + len(value) > self._max_line:
            raise self._stop(_head_too_large())
        if self._request is not None:
            self._count_chunk()  # a trailer: not read, and no more of them than of chunks
            return
        key = name.lower()
        if key in self._read:
            fields = self._fields
            fields[key] = value if key not in fields else fields[key] + b", " + value
        if self._headers is not None:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        assert parser is not None
        fields = self._fields
        keep_alive = parser.should_keep_alive()
        request = HttpRequest(parser.get_method(), self._url, fields, self._headers, keep_alive=keep_alive)
        self._request = request
        request.began_ns = self.began_ns
        if self._lines - self._first_line > self._max_headers or len(self._url) > self._max_line:
            raise self._stop(_head_too_large())
        if not keep_alive or CONNECTION in fields:  # who keeps a connection without that header speaks 1.1
            version = parser.get_http_version()
            request.old = version == "1.0"
            if version not in ("1.0", "1.1"):
                raise self._stop(HttpError(505, f"HTTP/{version} is not served; 1.1 and 1.0 are"))
        if CONTENT_LENGTH in fields:
            self._declared = int(fields[CONTENT_LENGTH])
        try:
            self._limit = self._admit(request)
        except (HttpError, InferError) as error:
            request.early = answer_to(error, request.url)
            self._limit = UNREAD_LIMIT
            if request.early.close or self._declared > UNREAD_LIMIT or EXPECT in fields:
                raise self._stop(error) from None
        else:
            self.wants_continue = EXPECT in fields and not request.old

    def on_chunk_header(self) -> None:
        self._lines += 1
        self._count_chunk()

    def on_body(self, piece: bytes) -> None:
        self._lines += 1
        self.wants_continue = False
        if self._size:
            body = self._body
            if not isinstance(body, bytearray):
                self._body = body = bytearray(body)
            body += piece
        else:
            self._body = piece
        self._size += len(piece)
        if self._size > self._limit:
            raise self._stop(over(self._limit, "the body is longer"))

    def on_message_complete(self) -> None:
        request = self._request
        assert request is not None
        body = self._body
        request.body = bytes(body) if isinstance(body, bytearray) else body
        self._body = b""
        self._request = None
        self.in_message = self.wants_continue = False
        self._line = 0
        self.ready.append(request)
        if not request.keep_alive:
            self.ended = True

    # --- limits, failures and the rest that is rare -------------------------------------------------------------------

    def _count_chunk(self) -> None:
        self._chunks += 1
        if self._chunks > _MAX_CHUNKS + 1:  # the last one is empty
            raise self._stop(HttpError(413, f"the body has more than {_MAX_CHUNKS} chunks", close=True))

    def _check_unfinished(self) -> None:
        """Bound what a request may hold in memory before it is complete; receive the rest of a large body directly."""
        request = self._request
        if self._line > self._max_line or (request is None and self._lines - self._first_line > self._max_headers):
            self._end(_head_too_large())
        elif request is not None and self._declared - self._size > _DIRECT_ABOVE:
            try:
                self._place = np.empty(self._declared, np.uint8).data  # takes memory as it is written to
            except MemoryError:
                self._end(HttpError(503, f"there is no memory for a body of {self._declared} bytes", close=True))
                return
            self._place[: self._size] = self._body
            self._filled = self._size
            self._body = b""
            self.room = self._place[self._filled :]

    def _head_without_upgrade(self) -> bytes:
        """Take back the request that asks for another protocol, which is not spoken; return its head without that.

        The parser believes that it has no body.
        """
        request = self.ready.pop()
        if request.method == b"CONNECT":
            self._request = request
            self._end(request.early or HttpError(405, "method CONNECT is not allowed here"))
            return b""
        self.ended = False
        self._parser = httptools.HttpRequestParser(self)
        headers = request.fields.items() if request.headers is None else request.headers
        lines = [b"%b %b HTTP/1.%d" % (request.method, request.url, 0 if request.old else 1)]
        lines += [b"%b: %b" % item for item in headers if item[0].lower() not in (CONNECTION, b"upgrade")]
        lines += [b"Connection: %b\r\n\r\n" % (b"keep-alive" if request.keep_alive else b"close")]
        return b"\r\n".join(lines)

    def _fail(self, error: httptools.HttpParserError) -> None:
        if self.ended:
            self.surplus = True
        elif isinstance(error, httptools.HttpParserCallbackError):
            _log.error("an HTTP request failed while it was read", exc_info=error.__context__)
            self._end(HttpError(500, "internal error; the server's log has the details"))
        else:
            self._end(HttpError(400, f"this is not well-formed HTTP: {str(error)[:200] or 'it cannot be parsed'}"))

    def _stop(self, error: HttpError | InferError) -> _Stopped:
        self._end(error)
        return _Stopped()

    def _end(self, failure: HttpError | InferError | Answer) -> None:
        """Make an answer of the failure, unless the request has one: the last of the connection."""
        request = self._request or HttpRequest(b"", self._url, {}, None, keep_alive=False)
        if request.early is None:
            request.early = failure if isinstance(failure, Answer) else answer_to(failure, request.url)
        request.keep_alive = request.whole = self.in_message = self.wants_continue = False
        self._request = self.room = None
        self._body = b""
        self._place = memoryview(b"")
        self.ended = True
        self.ready.append(request)


def _head_too_large() -> HttpError:
    return HttpError(431, "the request line or the headers are larger than the server takes")
