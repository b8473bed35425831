"""The edge table of gRPC: which status each error code becomes, and how its sentence is fitted into a trailer."""

from __future__ import annotations

from typing import Final

import grpc

from headrace_protocol.errors import ErrorCode, ErrorDetail, InferError

STATUS: Final[dict[ErrorCode, grpc.StatusCode]] = {
    ErrorCode.UNKNOWN: grpc.StatusCode.UNKNOWN,
    ErrorCode.INTERNAL: grpc.StatusCode.INTERNAL,
    ErrorCode.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorCode.INVALID_ARG: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    ErrorCode.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    ErrorCode.CANCELLED: grpc.StatusCode.CANCELLED,
}

_OF_DETAIL: Final[dict[ErrorDetail | None, grpc.StatusCode]] = {
    ErrorDetail.RATE_LIMITED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorDetail.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    ErrorDetail.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
}
"""Where the detail says more than the code."""

NUMBER: Final[dict[ErrorCode, int]] = {code: status.value[0] for code, status in STATUS.items()}
"""The same table in the numbers of the wire."""

RESOURCE_EXHAUSTED: Final[int] = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]

_MAX_DETAILS = 2000


def status_of(error: InferError) -> grpc.StatusCode:
    """Return the status of a failure."""
    return _OF_DETAIL.get(error.detail) or STATUS[error.code]


def details(message: str) -> str:
    """Return `message`, cut to what every client takes.

    Clients refuse trailers above 8 KiB, and percent-encoding makes up to three bytes of one.
    """
    if len(message) <= _MAX_DETAILS // 4:
        return message
    encoded = message.encode("utf-8", "replace")
    if len(encoded) <= _MAX_DETAILS:
        return message
    return encoded[:_MAX_DETAILS].decode("utf-8", "ignore") + "..."
