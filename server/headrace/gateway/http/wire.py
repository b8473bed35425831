"""An answer as bytes for the connection: its head, and the coding of its body."""

from __future__ import annotations

import time
from email.utils import formatdate
from functools import cache
from http import HTTPStatus
from typing import Final

from headrace.gateway.http.answer import SERVER, Answer
from headrace.gateway.http.compression import Coding, response_coding
from headrace.gateway.http.request import ACCEPT_ENCODING, HttpRequest

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK: Final = b"0\r\n\r\n"

_REASONS: Final = {status.value: status.phrase for status in HTTPStatus}


class _Tail:
    """What ends every head: Server and Date, made anew once a second."""

    __slots__ = ("_second", "_text")

    def __init__(self) -> None:
        self._second = 0
        self._text = b""

    def text(self) -> bytes:
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._text = f"\r\nServer: {SERVER}\r\nDate: {formatdate(second, usegmt=True)}\r\n\r\n".encode()
        return self._text


_TAIL: Final = _Tail()


def negotiate(request: HttpRequest, answer: Answer) -> Coding:
    """Choose the coding in which a body goes out to a client that has preferences; put it in the answer's headers."""
    coding = response_coding(request.fields[ACCEPT_ENCODING].decode("latin-1"))
    answer.headers = {**(answer.headers or {}), "Vary": "Accept-Encoding"}
    if coding is not Coding.IDENTITY:
        answer.headers["Content-Encoding"] = coding.value
    return coding


def head_of(answer: Answer, *, old: bool, keep_alive: bool) -> bytes:
    """Return status line and headers; `old` for a client of HTTP/1.0."""
    content_type = answer.content_type if answer.body else ""
    more = b""
    if answer.headers is not None:
        more = "".join([f"{name}: {value}\r\n" for name, value in answer.headers.items()]).encode()
    return b"%b%bContent-Length: %d%b" % (
        _beginning(answer.status, content_type, old, keep_alive),
        more,
        len(answer.body),
        _TAIL.text(),
    )


def stream_head_of(answer: Answer, *, old: bool, keep_alive: bool) -> bytes:
    """Return status line and headers of an answer that comes in pieces: in chunks, or for HTTP/1.0 until the close."""
    lines = "".join([f"{name}: {value}\r\n" for name, value in (answer.headers or {}).items()])
    if not old:
        lines += "Transfer-Encoding: chunked\r\n"
    head = _beginning(answer.status, answer.content_type, old, keep_alive) + lines.encode()
    return head.removesuffix(b"\r\n") + _TAIL.text()


def chunk_of(piece: bytes) -> bytes:
    """Return a piece, which is not empty, as a chunk."""
    return b"%x\r\n%b\r\n" % (len(piece), piece)


@cache  # of a few statuses, two types and two booleans: small
def _beginning(status: int, content_type: str, old: bool, keep_alive: bool) -> bytes:
    lines = [f"HTTP/1.{0 if old else 1} {status} {_REASONS[status]}\r\n"]
    if content_type:
        lines.append(f"Content-Type: {content_type}\r\n")
    if not keep_alive:
        lines.append("Connection: close\r\n")
    elif old:
        lines.append("Connection: keep-alive\r\n")
    return "".join(lines).encode()
