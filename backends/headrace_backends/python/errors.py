"""What models raise, and the errors that they give to requests."""

from __future__ import annotations

import enum
from typing import Final

from headrace_protocol.errors import ErrorCode, InferError


class TritonModelException(Exception):  # noqa: N818 - the name is Triton's
    """What the functions and classes of triton_python_backend_utils raise where they are used wrongly."""


class _Code(enum.IntEnum):
    """The kinds of failure, with Triton's numbers."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


class TritonError:
    """The error that a model gives to one request."""

    __slots__ = ("_code", "_message")

    UNKNOWN: Final = _Code.UNKNOWN
    INTERNAL: Final = _Code.INTERNAL
    NOT_FOUND: Final = _Code.NOT_FOUND
    INVALID_ARG: Final = _Code.INVALID_ARG
    UNAVAILABLE: Final = _Code.UNAVAILABLE
    UNSUPPORTED: Final = _Code.UNSUPPORTED
    ALREADY_EXISTS: Final = _Code.ALREADY_EXISTS
    CANCELLED: Final = _Code.CANCELLED

    def __init__(self, message: str, code: int = _Code.INTERNAL) -> None:
        if not isinstance(message, str):
            raise TypeError(f"TritonError: expected the message as str, got {type(message).__name__}")
        try:
            self._code = _Code(code)
        except ValueError:
            raise TypeError(f"TritonError: expected one of its codes, got {code!r}") from None
        self._message = message

    def message(self) -> str:
        """Return the text."""
        return self._message

    def code(self) -> int:
        """Return the kind of failure: one of the class's constants."""
        return self._code

    def __repr__(self) -> str:
        return f"TritonError({self._message!r}, {self._code.name})"


def as_infer_error(error: TritonError) -> InferError:
    """Return the error as the server is told it."""
    return InferError(ErrorCode[error._code.name], error._message)


def as_triton_error(error: InferError) -> TritonError:
    """Return an error of the server as models see it."""
    return TritonError(error.message, _Code[error.code.value])
