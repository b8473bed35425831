"""What every answer and every chunk of one request has around its choices, encoded once."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from headrace.gateway.http.openai.directory import LanguageModel
from headrace.gateway.http.openai.exchange import Exchange

encode: Final = msgspec.json.Encoder().encode
NULL: Final = b"null"


def envelope(prefix: str, kind: str, exchange: Exchange, model: LanguageModel) -> bytes:
    """Return the JSON of an answer up to its choices; `prefix` is what its id begins with, `kind` its `object`."""
    head: dict[str, Any] = {
        "id": f"{prefix}-{exchange.request_id}",
        "object": kind,
        "created": exchange.created,
        "model": model.id,
        "system_fingerprint": model.fingerprint,
    }
    return encode(head)[:-1] + b',"choices":['


def optional(value: Any) -> bytes:
    """Return a value as JSON; most are null."""
    return NULL if value is None else encode(value)
