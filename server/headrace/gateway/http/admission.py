"""What can be said of a request when its head is there: where it leads, and how large a body it may bring.

Pure: no sockets. A request that cannot be served is refused here, before its body is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from headrace.gateway.gatekeeper import INDEX, roles_of
from headrace.gateway.http.answer import Answer
from headrace.gateway.http.compression import Coding, request_coding
from headrace.gateway.http.errors import HttpError, too_large
from headrace.gateway.http.paths import path_of
from headrace.gateway.http.request import (
    API_KEY,
    AUTHORIZATION,
    CONTENT_ENCODING,
    CONTENT_LENGTH,
    EXPECT,
    HEADER_LENGTH,
    TRANSFER_ENCODING,
    Handler,
    HttpRequest,
    Target,
)
from headrace.gateway.http.routes import Endpoint, resolve
from headrace.gateway.http.settings import HttpSettings
from headrace.gateway.restricted import Restriction

UNREAD_LIMIT: Final = 65536
"""A body that nobody asked for is read and dropped up to this size, so that its connection can go on."""

_KNOWN_URLS: Final = 1024
_LONGEST_KNOWN_URL: Final = 256


class Admission:
    """The rules, over the endpoints of one gateway. Remembers where the URLs it has seen lead to, up to a bound."""

    def __init__(self, settings: HttpSettings, handlers: Mapping[Endpoint, Handler]) -> None:
        self._handlers = handlers
        self._restricted = settings.restricted
        self._gatekeeper = settings.gatekeeper
        self._max_body = settings.max_body_size
        self._max_parsed = min(settings.max_input_size, settings.max_body_size)
        self._sticky = settings.sticky_header.encode()
        self._known: dict[bytes, Target] = {}

    def admit(self, request: HttpRequest) -> int:
        """Set the request's target and coding, or its answer; return the limit of its body in bytes.

        Raises HttpError 400, 401, 403, 404, 405, 413 (where the length is declared), 415, 417 and 501, and InferError for a
        path that names no version or is not UTF-8.
        """
        target = self._known.get(request.url) or self._find(request.url)
        fields = request.fields
        if target.restriction is not None:
            _check(target, target.restriction, fields)
        if self._gatekeeper is not None and target.roles is not None:
            request.caller = self._gatekeeper.caller(request.text(AUTHORIZATION), request.text(API_KEY))
            asked = target.route.model if target.route.endpoint.kind == "inference" else ""
            self._gatekeeper.check(request.caller, target.roles, asked)
        if request.method not in target.methods:
            request.early = _other_method(request, target)
            return UNREAD_LIMIT
        request.target = target
        request.sticky = fields.get(self._sticky)
        if TRANSFER_ENCODING in fields and fields[TRANSFER_ENCODING].strip().lower() != b"chunked":
            raise HttpError(501, "the only Transfer-Encoding that is served is chunked", close=True)
        if target.reply is not None:
            limit = UNREAD_LIMIT
        else:
            limit = self._max_body if target.binary and HEADER_LENGTH in fields else self._max_parsed
        if CONTENT_ENCODING in fields and target.reply is None:
            request.coding = request_coding((fields[CONTENT_ENCODING].decode("latin-1"),))
            if request.coding is not Coding.IDENTITY:
                limit = self._max_parsed
                if not target.codings:
                    raise _uncoded(request.coding)
        declared = fields.get(CONTENT_LENGTH)
        if declared is not None and int(declared) > limit:
            raise over(limit, f"a body of {int(declared)} bytes was announced")
        if EXPECT in fields and fields[EXPECT].strip().lower() != b"100-continue":
            expectation = fields[EXPECT][:40].decode("latin-1")
            raise HttpError(417, f"expectation {expectation!r} cannot be met; only 100-continue can", close=True)
        return limit

    def _find(self, url: bytes) -> Target:
        route = resolve(path_of(url))
        if route is None:
            raise HttpError(404, "no such path")
        endpoint = route.endpoint
        roles = INDEX if endpoint is Endpoint.INDEX else roles_of(endpoint.kind)
        target = Target(route, self._handlers[endpoint], self._restricted.get(endpoint.kind), roles)
        if len(url) <= _LONGEST_KNOWN_URL:
            if len(self._known) >= _KNOWN_URLS:
                self._known.clear()
            self._known[url] = target
        return target


def _check(target: Target, restriction: Restriction, fields: Mapping[bytes, bytes]) -> None:
    header = restriction.header
    if restriction.admits(fields.get(header.encode(), b"")):
        return
    if target.route.endpoint.kind == "openai" and header == "authorization":
        challenge = {"WWW-Authenticate": "Bearer"}
        raise HttpError(401, "the API key is missing or wrong", challenge, code="invalid_api_key")
    raise HttpError(403, f"this is for those alone who send the header '{header}' with the right value")


def _other_method(request: HttpRequest, target: Target) -> Answer:
    """Return the answer to OPTIONS; raise HttpError 405 for what is not served here."""
    allowed = ", ".join(target.route.endpoint.allowed)
    if request.method == b"OPTIONS":
        return Answer(headers={"Allow": allowed})
    method = request.method[:20].decode("latin-1")
    raise HttpError(405, f"method {method} is not allowed here, {allowed} is", {"Allow": allowed})


def _uncoded(coding: Coding) -> HttpError:
    return HttpError(
        400,
        f"Content-Encoding {coding.value!r} is not taken here; send the body as it is",
        {"Accept-Encoding": "identity"},
    )


def over(limit: int, fact: str) -> HttpError:
    """Return the 413 of a body on the wire."""
    return too_large(f"{fact}, the limit for this request is {limit} bytes")
