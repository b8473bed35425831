"""The one error class and its eight codes. Edge tables (HTTP, gRPC) live in the gateways."""

from __future__ import annotations

import enum


class ErrorCode(enum.Enum):
    """What kind of failure it is; names are Triton's."""

    UNKNOWN = "UNKNOWN"
    INTERNAL = "INTERNAL"
    NOT_FOUND = "NOT_FOUND"
    INVALID_ARG = "INVALID_ARG"
    UNAVAILABLE = "UNAVAILABLE"
    UNSUPPORTED = "UNSUPPORTED"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    CANCELLED = "CANCELLED"


class FailureReason(enum.Enum):
    """Why an accepted request failed: the `reason` label of nv_inference_request_failure."""

    REJECTED = "REJECTED"
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"
    OTHER = "OTHER"


class ErrorDetail(enum.Enum):
    """What programs want to tell apart within a code; the doors that have words for it say it."""

    CONTEXT_LENGTH = "context_length_exceeded"
    """A prompt that leaves the model no room."""
    QUEUE_FULL = "queue_full"
    """Too much waits: it may be tried again."""
    RATE_LIMITED = "rate_limited"
    """The caller asks too often."""
    UNAUTHENTICATED = "unauthenticated"
    """Nothing says who calls."""
    FORBIDDEN = "forbidden"
    """The caller is known, and may not do this."""


class InferError(Exception):
    """A failure with a code and a sentence for the caller that names what is wrong."""

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        reason: FailureReason = FailureReason.OTHER,
        *,
        detail: ErrorDetail | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = reason
        self.detail = detail
        self.param = param
        """The field of the request that is wrong, where it is one."""
        self.retry_after_s: float | None = None
        """After how many seconds it is worth another try, where that is known."""

    def __repr__(self) -> str:
        return f"InferError({self.code.value}, {self.message!r})"


def invalid(message: str) -> InferError:
    """Return an INVALID_ARG error: the caller's mistake."""
    return InferError(ErrorCode.INVALID_ARG, message)


def not_found(message: str) -> InferError:
    """Return a NOT_FOUND error."""
    return InferError(ErrorCode.NOT_FOUND, message)


def unavailable(message: str, reason: FailureReason = FailureReason.OTHER) -> InferError:
    """Return an UNAVAILABLE error: it may work later or elsewhere."""
    return InferError(ErrorCode.UNAVAILABLE, message, reason)


def unsupported(message: str) -> InferError:
    """Return an UNSUPPORTED error."""
    return InferError(ErrorCode.UNSUPPORTED, message)


def internal(message: str, reason: FailureReason = FailureReason.OTHER) -> InferError:
    """Return an INTERNAL error: not the caller's fault."""
    return InferError(ErrorCode.INTERNAL, message, reason)


def cancelled(message: str = "the request was cancelled") -> InferError:
    """Return a CANCELLED error."""
    return InferError(ErrorCode.CANCELLED, message, FailureReason.CANCELED)
