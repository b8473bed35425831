"""What an endpoint answers, before it is bytes on a connection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

JSON: Final = "application/json"
BINARY: Final = "application/octet-stream"
SSE: Final = "text/event-stream; charset=utf-8"
"""Server-sent events."""
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


def json_answer(value: object) -> Answer:
    """Return the answer that carries a value as JSON."""
    return Answer(msgspec.json.encode(value), content_type=JSON)
