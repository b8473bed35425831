"""What is told of one operation of the HTTP door."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from headrace.gateway.http.openapi.schema import Schema


class Operation(NamedTuple):
    """One method of an endpoint."""

    name: str
    """Its operationId; that of a further path has the last parameter that this path adds behind it."""
    summary: str
    success: Schema
    """The answer of 200."""
    failures: tuple[int, ...] = ()
    """Statuses that not any operation may end with; see parts.ANYWHERE."""
    text: str = ""
    headers: tuple[str, ...] = ()
    """Header parameters, besides those that any request may have."""
    body: Schema | None = None
    special: Mapping[str, Schema] = {}
    """Answers that no other operation has, by status."""
    codings: bool = True
    """Whether its answer may come compressed."""
    openai: bool = False
    """Whether failures look as OpenAI's clients know them."""
    anthropic: bool = False
    """Whether failures look as Anthropic's clients know them."""
