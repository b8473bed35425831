"""A model version as clients write it, in a path or in a field: one reading for both protocols."""

from __future__ import annotations

from typing import Final

from headrace.types import LATEST
from headrace_protocol.errors import invalid

_MAX: Final = 2**63 - 1


def parse_version(text: str) -> int:
    """Return the version that `text` names; LATEST for the empty text.

    Raises InferError INVALID_ARG for anything else than the decimal digits of a number below 2^63.
    """
    if not text:
        return LATEST
    if len(text) <= 19 and text.isascii() and text.isdigit():
        version = int(text)
        if version <= _MAX:
            return version
    raise invalid(f"model version {text[:40]!r} is not a whole number between 0 and {_MAX}")


def named_version(text: str) -> int:
    """Return the version that a call names by hand, 1 or more. Raises InferError INVALID_ARG."""
    version = parse_version(text)
    if version < 1:
        raise invalid(f"version: expected a number from 1 to {_MAX}, got {text[:40]!r}")
    return version
