"""Reading a request's body off the wire: bounded in size and in the time a client may pause, then inflated."""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from headrace.gateway.http.compression import Coding, inflate, request_coding
from headrace.gateway.http.errors import HttpError, too_large
from headrace.gateway.http.settings import HttpSettings

_INFLATE_INLINE = 2048
"""Compressed bodies up to this size are inflated in place: they cannot make more than about 2 MB."""


async def read_body(request: web.BaseRequest, settings: HttpSettings, *, with_binary: bool) -> bytes:
    """Return the body, decoded. `with_binary`: part of it may be binary data, which max_input_size does not bind.

    Raises HttpError 413 (before reading where the client declares the length), 408, 415, 417 and 400, and InferError
    for damaged compressed data.
    """
    coding = _coding_of(request)
    plain = coding is Coding.IDENTITY
    limit = settings.max_body_size if with_binary and plain else min(settings.max_input_size, settings.max_body_size)
    declared = request.content_length
    if declared is not None and declared > limit:
        raise _over(limit, f"a body of {declared} bytes was announced")
    if "Expect" in request.headers:
        await _answer_expectation(request)
    body = await _read(request, limit, settings.body_idle_timeout)
    if plain or not body:
        return body
    if len(body) <= _INFLATE_INLINE:
        return inflate(body, coding, settings.max_input_size)
    return await asyncio.to_thread(inflate, body, coding, settings.max_input_size)


def _coding_of(request: web.BaseRequest) -> Coding:
    if "Content-Encoding" not in request.headers:
        return Coding.IDENTITY
    return request_coding(request.headers.getall("Content-Encoding"))


async def _read(request: web.BaseRequest, limit: int, idle_timeout: float) -> bytes:
    content = request.content
    pieces: list[bytes] = []
    total = 0
    try:
        while not content.at_eof():
            if content.is_eof():
                piece = content.read_nowait()
            else:
                async with asyncio.timeout(idle_timeout):
                    piece = await content.readany()
            total += len(piece)
            if total > limit:
                raise _over(limit, "the body is longer")
            pieces.append(piece)
    except TimeoutError:
        raise HttpError(408, f"no byte of the body came for {idle_timeout} seconds", close=True) from None
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise HttpError(400, f"the body is not well-formed HTTP: {type(error).__name__}", close=True) from None
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def _answer_expectation(request: web.BaseRequest) -> None:
    expectation = request.headers["Expect"]
    if expectation.lower() != "100-continue":
        raise HttpError(417, f"expectation {expectation[:40]!r} cannot be met; only 100-continue can", close=True)
    if request.version >= (1, 1) and not request.content.is_eof():
        writer = request.writer
        await writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        writer.output_size = 0  # the answer itself has not begun


def _over(limit: int, fact: str) -> HttpError:
    return too_large(f"{fact}, the limit for this request is {limit} bytes")
