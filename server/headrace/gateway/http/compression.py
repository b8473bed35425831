"""Content codings, both ways: bodies inflated under a limit, and the coding of an answer chosen from Accept-Encoding.

Pure: bytes in, bytes out. zlib lets other threads run while it works, so the caller may do big ones in a thread.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Sequence
from typing import Final

from headrace.gateway.http.errors import HttpError, too_large
from headrace_protocol.errors import InferError, invalid


class Coding(enum.Enum):
    """A content coding that is spoken here."""

    IDENTITY = "identity"
    GZIP = "gzip"
    DEFLATE = "deflate"


ACCEPTED: Final = "gzip, deflate"
"""What a client is told when it sends another coding."""

_NAMES: Final = {coding.value: coding for coding in Coding} | {"x-gzip": Coding.GZIP}
_GZIP_BITS: Final = 16 + zlib.MAX_WBITS
_ZLIB_BITS: Final = zlib.MAX_WBITS
_RAW_BITS: Final = -zlib.MAX_WBITS
_LEVEL: Final = 1  # tensors hardly shrink further at higher levels, and the client waits
_CHUNK: Final = 65536
_MAX_MEMBERS: Final = 10_000


def request_coding(values: Sequence[str]) -> Coding:
    """Return the coding that Content-Encoding headers name. Raises HttpError 415 for unknown or stacked codings."""
    names = [name for value in values for part in value.split(",") if (name := part.strip().lower())]
    codings = [name for name in names if name != Coding.IDENTITY.value]
    if not codings:
        return Coding.IDENTITY
    coding = _NAMES.get(codings[0])
    if len(codings) > 1 or coding is None:
        raise HttpError(
            415,
            f"Content-Encoding {', '.join(codings)[:80]!r} is not supported; one of {ACCEPTED} is",
            {"Accept-Encoding": ACCEPTED},
        )
    return coding


def response_coding(accept: str) -> Coding:
    """Return the coding with the highest weight in an Accept-Encoding value; the first of equals, `*` left aside."""
    best, best_weight = Coding.IDENTITY, 0.0
    for part in accept.split(","):
        name, *arguments = part.split(";")
        coding = _NAMES.get(name.strip().lower())
        weight = _weight(arguments)
        if coding is not None and weight > best_weight:
            best, best_weight = coding, weight
    return best


def _weight(arguments: Sequence[str]) -> float:
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key.strip().lower() == "q":
            try:
                weight = float(value)
            except ValueError:
                return 0.0
            return weight if 0.0 <= weight <= 1.0 else 0.0
    return 1.0


def inflate(body: bytes | memoryview, coding: Coding, limit: int) -> bytes:
    """Return `body` decoded. Nothing past `limit` bytes is ever inflated.

    Raises HttpError 413 over the limit, InferError INVALID_ARG for a body that is damaged, cut short or followed by
    bytes that are not part of it. gzip may have several members; deflate may be zlib's format or raw.
    """
    if coding is Coding.IDENTITY:
        return bytes(body)
    bits = _GZIP_BITS if coding is Coding.GZIP else (_ZLIB_BITS if _has_zlib_header(body) else _RAW_BITS)
    view = memoryview(body)
    pieces: list[bytes] = []
    total = offset = 0
    for _ in range(_MAX_MEMBERS):
        stream = zlib.decompressobj(bits)
        while not stream.eof:
            if offset == len(view):
                raise invalid(f"the {coding.value} body ends before its data does")
            # Small bites: what a member leaves over is copied, and there may be many members.
            chunk = view[offset : offset + _CHUNK]
            try:
                piece = stream.decompress(chunk, limit - total + 1)
            except zlib.error as error:
                raise _damaged(coding, offset, error) from None
            total += len(piece)
            if total > limit:
                raise too_large(
                    f"the {coding.value} body is larger than {limit} bytes when inflated, which is the limit"
                )
            pieces.append(piece)
            offset += len(chunk) - len(stream.unused_data)
        if offset == len(view):
            return b"".join(pieces)
        if coding is not Coding.GZIP:
            raise invalid(f"{len(view) - offset} bytes follow the end of the {coding.value} body")
    raise invalid(f"the gzip body has more than {_MAX_MEMBERS} members")


def _has_zlib_header(body: bytes | memoryview) -> bool:
    """Return whether deflated data comes in zlib's format, as the standard has it, and not raw, as some send it."""
    return len(body) >= 2 and body[0] & 0x0F == 8 and int.from_bytes(body[:2], "big") % 31 == 0


def _damaged(coding: Coding, offset: int, error: zlib.error) -> InferError:
    return invalid(f"the {coding.value} body is damaged or followed by other bytes, near byte {offset}: {error}")


def compress(body: bytes, coding: Coding) -> bytes:
    """Return `body` in the given coding; deflate in zlib's format."""
    if coding is Coding.IDENTITY:
        return body
    return zlib.compress(body, _LEVEL, wbits=_GZIP_BITS if coding is Coding.GZIP else _ZLIB_BITS)
