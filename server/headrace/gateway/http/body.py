"""The content of a request's body: inflated where it came compressed, in a thread where that may take long."""

from __future__ import annotations

import asyncio
from typing import Final

from headrace.gateway.http.compression import Coding, inflate
from headrace.gateway.http.request import Body, HttpRequest

_INFLATE_INLINE: Final = 2048
"""Compressed bodies up to this size are inflated in place: they cannot make more than about 2 MB."""


async def inflated(request: HttpRequest, limit: int) -> Body:
    """Return the body of a request whose coding is not identity.

    Raises HttpError 413 over `limit` bytes and InferError for damaged data.
    """
    body = request.body
    if not body:
        return body
    if len(body) <= _INFLATE_INLINE:
        return inflate(body, request.coding, limit)
    return await asyncio.to_thread(inflate, body, request.coding, limit)


async def json_text(request: HttpRequest, limit: int) -> bytes:
    """Return the body of a request that is JSON and nothing else. Raises as `inflated` does."""
    return bytes(request.body if request.coding is Coding.IDENTITY else await inflated(request, limit))
