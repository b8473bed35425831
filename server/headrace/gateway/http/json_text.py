"""JSON text before and beside its decoding: the depth limit, bare NaN and Infinity tokens, and the wording of errors.

Everything here is linear in the text and recurses nowhere, so that what passes may be decoded and walked freely.
"""

from __future__ import annotations

import math
import re
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from headrace_protocol.errors import InferError, invalid

MAX_DEPTH: Final = 100

_T = TypeVar("_T")

# Possessive, and closing quote optional: a string is consumed whole or to the end, never tried twice.
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_OPEN: Final = b"[{"
_CLOSE: Final = b"]}"
_DEPTH_CHUNK: Final = 65536
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(_OPEN + _CLOSE))

# A bare token becomes an object that only the decoder of floats knows; anywhere else it is of a wrong kind.
_MARK: Final = "\0"
_NON_FINITE: Final = ((b"-Infinity", -math.inf), (b"Infinity", math.inf), (b"NaN", math.nan))
_MARKERS: Final = tuple((token, msgspec.json.encode({_MARK: index})) for index, (token, _) in enumerate(_NON_FINITE))

_any_decoder: Final = msgspec.json.Decoder()


def check_depth(text: bytes | memoryview, what: str) -> None:
    """Raise INVALID_ARG where arrays and objects of `text` are nested deeper than MAX_DEPTH."""
    raw = bytes(text)
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return
    brackets = np.frombuffer(_without_strings(raw).translate(None, _NOT_BRACKETS), dtype=np.uint8)
    depth = 0
    for start in range(0, brackets.size, _DEPTH_CHUNK):
        chunk = brackets[start : start + _DEPTH_CHUNK]
        depths = depth + np.cumsum(np.where((chunk == _OPEN[0]) | (chunk == _OPEN[1]), 1, -1))
        if int(depths.max()) > MAX_DEPTH:
            raise invalid(f"{what}: JSON nested deeper than {MAX_DEPTH} levels")
        depth = int(depths[-1])


def _without_strings(raw: bytes) -> bytes:
    # Without escapes every quote begins or ends a string, and splitting is several times faster than matching.
    return _STRING.sub(b"", raw) if b"\\" in raw else b"".join(raw.split(b'"')[::2])


def mark_non_finite(text: bytes | memoryview) -> bytes | None:
    """Return `text` with each bare NaN, Infinity or -Infinity replaced by a marker, or None where there is none."""
    raw = bytes(text)
    if b"NaN" not in raw and b"Infinity" not in raw:
        return None
    pieces: list[bytes] = []
    end = 0
    for string in _STRING.finditer(raw):
        pieces.append(_mark(raw[end : string.start()]))
        pieces.append(string.group())
        end = string.end()
    pieces.append(_mark(raw[end:]))
    return b"".join(pieces)


def _mark(text: bytes) -> bytes:
    for token, marker in _MARKERS:
        text = text.replace(token, marker)
    return text


def non_finite(value: object) -> float | None:
    """Return the number that a marker stands for; None where `value` is no marker."""
    if isinstance(value, dict) and len(value) == 1:
        index = value.get(_MARK)
        if type(index) is int and 0 <= index < len(_NON_FINITE):
            return _NON_FINITE[index][1]
    return None


def decode_any(text: bytes | memoryview | msgspec.Raw, what: str) -> Any:
    """Return JSON `text` as Python values. Its depth has been checked. Raises INVALID_ARG where it is not JSON."""
    try:
        return _any_decoder.decode(text)
    except (msgspec.MsgspecError, ValueError) as error:
        raise malformed(error, what) from None


def decode_marked(decoder: msgspec.json.Decoder[_T], text: bytes) -> _T:
    """Return JSON `text` decoded, in which bare NaN, Infinity and -Infinity may stand. Its depth has been checked.

    Raises msgspec.ValidationError for a field of a wrong kind and ValueError for what is not JSON.
    """
    try:
        return decoder.decode(text)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, ValueError):
        marked = mark_non_finite(text)
        if marked is None:
            raise
    return decoder.decode(marked)


def malformed(error: Exception, what: str) -> InferError:
    """Return what a client is told when msgspec refuses a text: the field's path, what was expected and what came."""
    text, _, where = str(error).replace("`", "'").partition(" - at ")
    if not isinstance(error, msgspec.ValidationError):
        return invalid(f"{what} is not valid JSON: {text}")
    path = where.strip("'").removeprefix("$").removeprefix(".")
    return invalid(f"{what}: {path}: {text[:1].lower()}{text[1:]}" if path else f"{what}: {text[:1].lower()}{text[1:]}")


def describe(value: object) -> str:
    """Return a value of decoded JSON for an error sentence, shortened."""
    number = non_finite(value)
    if number is not None:
        return str(number)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        text = repr(value) if isinstance(value, float) or value.bit_length() <= 512 else "a very long integer"
    elif isinstance(value, str):
        text = repr(value[:41])
    else:
        return "an array" if isinstance(value, list) else "an object"
    return text if len(text) <= 42 else text[:40] + "…"
