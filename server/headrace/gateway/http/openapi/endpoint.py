"""The endpoint that gives the document away."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Final

import msgspec

from headrace.gateway.http.answer import Answer
from headrace.gateway.http.openapi.document import document
from headrace.gateway.http.request import Handler, HttpRequest
from headrace.gateway.http.routes import Endpoint, Route
from headrace.gateway.restricted import Restrictions


class DocumentEndpoint:
    """The document of one gateway. Made when it is first asked for, which takes some milliseconds, then kept."""

    def __init__(self, restricted: Restrictions) -> None:
        self._restricted = restricted
        self.handlers: Final[Mapping[Endpoint, Handler]] = {Endpoint.OPENAPI: Handler(reply=self._reply)}

    def _reply(self, _http: HttpRequest, _route: Route) -> Answer:
        return Answer(self._text)

    @cached_property
    def _text(self) -> bytes:
        headers = {kind: restriction.header for kind, restriction in self._restricted.items()}
        return msgspec.json.encode(document(headers))
