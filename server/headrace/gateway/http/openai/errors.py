"""How failures look to OpenAI's clients: the object they read, and the status that decides whether they try again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from headrace.gateway.http.answer import Answer
from headrace.gateway.http.http_error import STATUS_OF_DETAIL, HttpError, headers_of
from headrace.gateway.http.routes import PATHS
from headrace_protocol.errors import ErrorCode, ErrorDetail, FailureReason, InferError

_MAX_MESSAGE: Final = 8000
_RETRY: Final = {"Retry-After": "1"}
"""Seconds: a queue of generations moves slowly, but clients wait longer each time by themselves."""

_STATUS: Final[Mapping[ErrorCode, int]] = {
    ErrorCode.UNKNOWN: 500,
    ErrorCode.INTERNAL: 500,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.INVALID_ARG: 400,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.UNSUPPORTED: 501,
    ErrorCode.ALREADY_EXISTS: 400,
    ErrorCode.CANCELLED: 503,
}
_TYPES: Final = {403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
"""By status; any other is invalid_request_error below 500, and server_error from there."""
_PATHS: Final = frozenset(path for path, endpoint in PATHS.items() if endpoint.kind == "openai")


def is_openai(path: str) -> bool:
    """Return whether a path, known or not, is of these doors."""
    return path == "/v1" or path.startswith("/v1/") or path in _PATHS


def refusal(
    message: str, param: str | None = None, code: str | None = "invalid_value", *, status: int = 400
) -> HttpError:
    """Return the error of a request that is wrong; `param` is the member at fault, written `messages[0].content`."""
    return HttpError(status, message, param=param, code=code)


def missing(param: str) -> HttpError:
    """Return the error of a member that has to be there."""
    return refusal(f"'{param}' is missing", param, "missing_required_parameter")


def unsupported(param: str, message: str) -> HttpError:
    """Return the error of a member that is known and not served."""
    return refusal(message, param, "unsupported_parameter")


def no_such_model(name: str) -> HttpError:
    """Return the error of a model that is not served here."""
    return refusal(f"the model {name[:200]!r} does not exist", "model", "model_not_found", status=404)


def as_http(error: InferError | HttpError) -> HttpError:
    """Return a failure with its status here: 429 where the same request may be taken a little later."""
    if isinstance(error, HttpError):
        return error
    code = None if error.detail is None else error.detail.value
    if error.detail in STATUS_OF_DETAIL:
        code = "invalid_api_key" if error.detail is ErrorDetail.UNAUTHENTICATED else code
        return HttpError(STATUS_OF_DETAIL[error.detail], error.message, headers_of(error), code=code)
    refused = error.reason is FailureReason.REJECTED or error.detail is ErrorDetail.QUEUE_FULL
    if error.code is ErrorCode.UNAVAILABLE and refused:
        return HttpError(429, error.message, _RETRY, param=error.param, code=code or ErrorDetail.QUEUE_FULL.value)
    if error.code is ErrorCode.NOT_FOUND:
        return HttpError(404, error.message, param=error.param or "model", code=code or "model_not_found")
    if error.code is ErrorCode.INVALID_ARG and code is None and error.param is not None:
        code = "invalid_value"
    return HttpError(_STATUS[error.code], error.message, param=error.param, code=code)


def body_of(error: HttpError) -> bytes:
    """Return the JSON that carries a failure; a very long sentence is cut."""
    message = error.message if len(error.message) <= _MAX_MESSAGE else error.message[:_MAX_MESSAGE] + "..."
    kind = _TYPES.get(error.status) or ("invalid_request_error" if error.status < 500 else "server_error")
    told = {"message": message, "type": kind, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": told})


def answer_to(error: InferError | HttpError) -> Answer:
    """Return what the client is told of a failure."""
    http = as_http(error)
    return Answer(body_of(http), http.status, headers=http.headers, close=http.close)
