"""A failure that only HTTP has: it never reaches the data plane. And what HTTP says of callers who may not, or not now.

Knows not how it is written down.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from headrace_protocol.errors import ErrorDetail, InferError

STATUS_OF_DETAIL: Final[Mapping[ErrorDetail | None, int]] = {
    ErrorDetail.RATE_LIMITED: 429,
    ErrorDetail.UNAUTHENTICATED: 401,
    ErrorDetail.FORBIDDEN: 403,
}
"""Where the detail of an error says more than its code."""


class HttpError(Exception):
    """No such path, body too large, ...

    `close`: what is left of the body is not worth reading; the connection ends with the answer. `param` and `code` are
    for doors that tell them: the member of the body that is wrong, and a word for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        headers: Mapping[str, str] | None = None,
        *,
        close: bool = False,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = headers
        self.close = close
        self.param = param
        self.code = code


def headers_of(error: InferError) -> dict[str, str] | None:
    """Return what the headers of an answer say of a failure: when to come back, or how to show a key."""
    if error.retry_after_s is not None:
        return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
    return {"WWW-Authenticate": "Bearer"} if error.detail is ErrorDetail.UNAUTHENTICATED else None
