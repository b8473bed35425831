"""How failures look over HTTP: the total table from ErrorCode to status, and the failures of the transport itself."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

import msgspec

from headrace.gateway.http.answer import Answer
from headrace.gateway.http.anthropic import errors as anthropic
from headrace.gateway.http.http_error import STATUS_OF_DETAIL, HttpError, headers_of
from headrace.gateway.http.openai import errors as openai
from headrace.gateway.http.paths import path_of
from headrace_protocol.errors import ErrorCode, InferError

__all__ = ["HttpError", "answer_to", "error_body", "failure", "too_large"]

_log: Final = logging.getLogger(__name__)

_MAX_MESSAGE: Final = 8000
"""Characters: clients' names and values come back in sentences, and may be long."""

STATUS: Final[Mapping[ErrorCode, int]] = {
    ErrorCode.UNKNOWN: 400,
    ErrorCode.INTERNAL: 500,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.INVALID_ARG: 400,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.UNSUPPORTED: 501,
    ErrorCode.ALREADY_EXISTS: 400,
    ErrorCode.CANCELLED: 400,
}


def too_large(message: str) -> HttpError:
    """Return the 413 of a body, or a part of it, that passes a limit; `message` names the limit."""
    return HttpError(413, message, close=True)


def error_body(message: str) -> bytes:
    """Return the JSON object that every failing answer carries; a very long sentence is cut."""
    if len(message) > _MAX_MESSAGE:
        message = message[:_MAX_MESSAGE] + "..."
    return msgspec.json.encode({"error": message})


def answer_to(error: HttpError | InferError, url: bytes) -> Answer:
    """Return what the client is told of a failure of a request for `url`, in the words of that door."""
    path = path_of(url)
    if anthropic.is_anthropic(path):
        return anthropic.answer_to(error)
    if openai.is_openai(path):
        return openai.answer_to(error)
    if isinstance(error, InferError):
        status = STATUS_OF_DETAIL.get(error.detail) or STATUS[error.code]
        return Answer(error_body(error.message), status, headers=headers_of(error))
    return Answer(error_body(error.message), error.status, headers=error.headers, close=error.close)


def failure(error: Exception, url: bytes) -> Answer:
    """Return what the client is told of any failure of a request for `url`; a fault of our own goes to the log."""
    if isinstance(error, InferError | HttpError):
        return answer_to(error, url)
    _log.error("an HTTP request failed: %r", url[:200], exc_info=error)
    return answer_to(HttpError(500, "internal error; the server's log has the details"), url)
