"""What an endpoint answers, before it is bytes on a connection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

JSON: Final = "application/json"
BINARY: Final = "application/octet-stream"
SERVER: Final = "headrace"
"""What the Server header says."""


class Answer:
    """Status, body and headers. `close`: the connection ends with it."""

    __slots__ = ("body", "close", "content_type", "headers", "status")

    def __init__(
        self,
        body: bytes = b"",
        status: int = 200,
        content_type: str = JSON,
        headers: Mapping[str, str] | None = None,
        *,
        close: bool = False,
    ) -> None:
        self.body = body
        self.status = status
        self.content_type = content_type
        self.headers = headers
        self.close = close
