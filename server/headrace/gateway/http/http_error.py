"""A failure that only HTTP has: it never reaches the data plane. Knows not how it is written down."""

from __future__ import annotations

from collections.abc import Mapping


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
