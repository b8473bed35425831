"""An HTTP request as the reader hands it over: its head, its whole body, and what was decided when the head was read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NamedTuple, Protocol

from headrace.access.caller import Caller
from headrace.gateway.gatekeeper import Roles
from headrace.gateway.http.answer import Answer
from headrace.gateway.http.compression import Coding, inflate
from headrace.gateway.http.routes import Route
from headrace.gateway.restricted import Restriction
from headrace.observability.trace import HTTP_RECV_END, HTTP_RECV_START, Trace
from headrace.planes import Cancellable

Body = bytes | memoryview
"""A body as it came off the wire; a large one is a view of memory of its own."""

# Names of the headers that are read, as `HttpRequest.fields` has them.
API_KEY: Final = b"x-api-key"
AUTHORIZATION: Final = b"authorization"
ACCEPT_ENCODING: Final = b"accept-encoding"
CONNECTION: Final = b"connection"
CONTENT_ENCODING: Final = b"content-encoding"
CONTENT_LENGTH: Final = b"content-length"
CONTENT_TYPE: Final = b"content-type"
EXPECT: Final = b"expect"
HEADER_LENGTH: Final = b"inference-header-content-length"
REQUEST_ID: Final = b"x-request-id"
TRACEPARENT: Final = b"traceparent"
TRANSFER_ENCODING: Final = b"transfer-encoding"
READ: Final = frozenset(
    (
        ACCEPT_ENCODING,
        CONNECTION,
        CONTENT_ENCODING,
        CONTENT_LENGTH,
        CONTENT_TYPE,
        EXPECT,
        HEADER_LENGTH,
        REQUEST_ID,
        TRACEPARENT,
        TRANSFER_ENCODING,
    )
)
"""All of them, but for those that restrict an endpoint: the others are counted and forgotten."""

Headers = list[tuple[bytes, bytes]]


class HttpRequest:
    """One request. Its owner is the connection, from the end of its head until its answer is written."""

    __slots__ = (
        "answered",
        "began_ns",
        "body",
        "caller",
        "coding",
        "early",
        "fields",
        "headers",
        "keep_alive",
        "method",
        "old",
        "sticky",
        "target",
        "trace",
        "url",
        "whole",
    )

    def __init__(
        self, method: bytes, url: bytes, fields: Mapping[bytes, bytes], headers: Headers | None, *, keep_alive: bool
    ) -> None:
        self.method = method
        self.url = url
        self.fields = fields
        """Values of the headers in READ that are there, by lower-cased name; those of repeated ones joined by commas."""
        self.headers = headers
        """All headers as they came, None where the gateway forwards none."""
        self.keep_alive = keep_alive
        self.old = False
        """Whether it speaks HTTP/1.0."""
        self.answered = False
        """Whether its answer is written, or on its way: what comes after belongs to the next one."""
        self.target: Target | None = None
        """What is asked for; None where `early` says why it is not to be had."""
        self.early: Answer | None = None
        """The answer, where the head was enough to give it."""
        self.coding = Coding.IDENTITY
        """Content coding of the body, which an endpoint gets without it."""
        self.body: Body = b""
        self.whole = True
        """Whether nothing of the request is left unread; otherwise the connection lingers after the answer."""
        self.began_ns = 0
        """Monotonic time at which its first byte was there."""
        self.trace: Trace | None = None
        self.sticky: bytes | None = None
        """Value of the header by which callers stay with a version of a model."""
        self.caller: Caller | None = None
        """Who sent it; None where nobody asks for keys."""

    def text(self, name: bytes) -> str | None:
        """Return a header of READ as text, None where it is missing."""
        value = self.fields.get(name)
        return None if value is None else value.decode("latin-1").strip()

    def traced(self, trace: Trace, received_ns: int) -> None:
        """Note in the trace of its inference when the request came, and later when its answer went."""
        self.trace = trace
        trace.mark(HTTP_RECV_START, self.began_ns)
        trace.mark(HTTP_RECV_END, received_ns)

    def inflate(self, limit: int) -> None:
        """Take the coding off the body. Raises HttpError 413 over `limit` bytes, InferError for damaged data."""
        if self.body:  # an empty one is empty in every coding
            self.body = inflate(self.body, self.coding, limit)
        self.coding = Coding.IDENTITY


class Outlet(Protocol):
    """Where an endpoint puts an answer that comes in pieces: a head, then pieces as they are there. One for a request."""

    @property
    def full(self) -> bool:
        """Whether the client has enough for now: send nothing before `Streaming.resume`."""
        ...

    def answer(self, result: Answer | Exception) -> None:
        """Answer as a whole instead; in place of everything below, and once."""
        ...

    def begin(self, head: Answer) -> None:
        """Say how the answer begins: status, type and headers, which go out with the first piece."""
        ...

    def send(self, piece: bytes, *, last: bool = False) -> None:
        """Send a piece, which may be empty; the answer ends with the last."""
        ...


class Streaming(Cancellable, Protocol):
    """A request under way whose answer comes in pieces. `cancel` means that its client is gone."""

    def resume(self) -> None:
        """Go on: the outlet is not full any more."""
        ...


Reply = Callable[[HttpRequest, Route], Answer]
"""An endpoint that answers at once and takes no body."""
Service = Callable[[HttpRequest, Route], Awaitable[Answer]]
"""An endpoint that takes a body, or time: it has a task."""
Done = Callable[[Answer | Exception], None]
"""Takes what a begun endpoint comes to: its answer, or what it failed with."""
Begin = Callable[[HttpRequest, Route, Done], Cancellable]
"""An endpoint that takes time without a task: its outcome comes by a call, after this returns."""
Stream = Callable[[HttpRequest, Route, Outlet], Streaming]
"""An endpoint whose answer comes in pieces: its outlet is used after this returns."""


class Handler(NamedTuple):
    """What an endpoint does: one of the four."""

    reply: Reply | None = None
    service: Service | None = None
    begin: Begin | None = None
    stream: Stream | None = None
    binary: bool = False
    """Whether its body may have a binary part behind the JSON."""
    codings: bool = True
    """Whether its bodies may be compressed, both ways."""


class Target:
    """Where a path leads: its route, what answers there, and what a client has to show for it."""

    __slots__ = ("begin", "binary", "codings", "methods", "reply", "restriction", "roles", "route", "service", "stream")

    def __init__(self, route: Route, handler: Handler, restriction: Restriction | None, roles: Roles = None) -> None:
        self.route = route
        self.roles = roles
        methods = route.endpoint.methods
        self.methods = frozenset(method.encode() for method in (*methods, *(("HEAD",) if "GET" in methods else ())))
        self.reply, self.service, self.begin, self.stream, self.binary, self.codings = handler
        self.restriction = restriction
