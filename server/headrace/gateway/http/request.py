"""An HTTP request as the reader hands it over: its head, its whole body, and what was decided when the head was read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from headrace.gateway.http.answer import Answer
from headrace.gateway.http.compression import Coding
from headrace.gateway.http.routes import Route
from headrace.planes import Cancellable

Body = bytes | memoryview
"""A body as it came off the wire; a large one is a view of memory of its own."""

# Names of the headers that are read, as `HttpRequest.fields` has them.
ACCEPT_ENCODING: Final = b"accept-encoding"
CONNECTION: Final = b"connection"
CONTENT_ENCODING: Final = b"content-encoding"
CONTENT_LENGTH: Final = b"content-length"
EXPECT: Final = b"expect"
HEADER_LENGTH: Final = b"inference-header-content-length"
TRACEPARENT: Final = b"traceparent"
TRANSFER_ENCODING: Final = b"transfer-encoding"
READ: Final = frozenset(
    (
        ACCEPT_ENCODING,
        CONNECTION,
        CONTENT_ENCODING,
        CONTENT_LENGTH,
        EXPECT,
        HEADER_LENGTH,
        TRACEPARENT,
        TRANSFER_ENCODING,
    )
)
"""All of them: the others are counted and forgotten."""

Headers = list[tuple[bytes, bytes]]


class HttpRequest:
    """One request. Its owner is the connection, from the end of its head until its answer is written."""

    __slots__ = (
        "body",
        "coding",
        "early",
        "fields",
        "headers",
        "keep_alive",
        "method",
        "old",
        "target",
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
        self.target: Target | None = None
        """What is asked for; None where `early` says why it is not to be had."""
        self.early: Answer | None = None
        """The answer, where the head was enough to give it."""
        self.coding = Coding.IDENTITY
        """Content coding of the body."""
        self.body: Body = b""
        self.whole = True
        """Whether nothing of the request is left unread; otherwise the connection lingers after the answer."""

    def text(self, name: bytes) -> str | None:
        """Return a header of READ as text, None where it is missing."""
        value = self.fields.get(name)
        return None if value is None else value.decode("latin-1").strip()


Reply = Callable[[HttpRequest, Route], Answer]
"""An endpoint that answers at once and takes no body."""
Service = Callable[[HttpRequest, Route], Awaitable[Answer]]
"""An endpoint that takes a body, or time."""


Done = Callable[[Answer | Exception], None]
"""Takes what a begun endpoint comes to: its answer, or what it failed with."""
Begin = Callable[[HttpRequest, Route, Done], Cancellable]
"""An endpoint that takes time without a task: its outcome comes by a call, after this returns."""


class Target:
    """Where a path leads: its route and the endpoint, as `reply`, or as `service` and perhaps `begin` too.

    `begin` is for a body as it came; one with a coding needs the service.
    """

    __slots__ = ("begin", "methods", "reply", "route", "service")

    def __init__(self, route: Route, reply: Reply | None, service: Service | None, begin: Begin | None) -> None:
        self.route = route
        self.methods = frozenset(method.encode() for method in route.endpoint.methods)
        self.reply = reply
        self.service = service
        self.begin = begin
