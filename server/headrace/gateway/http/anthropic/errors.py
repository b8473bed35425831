"""How failures look to Anthropic's clients."""

from __future__ import annotations

from typing import Final

import msgspec

from headrace.gateway.http.answer import Answer
from headrace.gateway.http.http_error import HttpError
from headrace.gateway.http.openai.errors import as_http
from headrace_protocol.errors import InferError

_MAX_MESSAGE: Final = 8000
_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""By status; any other is invalid_request_error below 500, and api_error from there."""


def is_anthropic(path: str) -> bool:
    """Return whether a path is of this door."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def body_of(error: HttpError) -> bytes:
    """Return the JSON that carries a failure; a very long sentence is cut."""
    message = error.message if len(error.message) <= _MAX_MESSAGE else error.message[:_MAX_MESSAGE] + "..."
    kind = _TYPES.get(error.status) or ("invalid_request_error" if error.status < 500 else "api_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})


def answer_to(error: InferError | HttpError) -> Answer:
    """Return what the client is told of a failure."""
    http = as_http(error)
    return Answer(body_of(http), http.status, headers=http.headers, close=http.close)
