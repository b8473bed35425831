"""What the first bytes of an engine file tell: that it is one, and which TensorRT built it. Pure.

A plan begins with the tag `ftrt`, the number 0 for this form of header, and has the version in its bytes 24 to 27, as
trtexec's --getPlanVersionOnly reads it. Ultralytics' exporter puts a length and as many bytes of JSON before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

HEADER_BYTES: Final = 28
_TAG: Final = b"ftrt"
_MOST_METADATA: Final = 1 << 20
"""Bytes of JSON before a plan."""


@dataclass(frozen=True, slots=True)
class PlanHeader:
    """What is known of an engine file before TensorRT reads it."""

    start: int
    """Where the plan begins in the file."""
    version: str
    """The TensorRT that built it, as 10.3.0.26; "" where the header is of a form that we do not know."""


def read_header(data: memoryview) -> PlanHeader | None:
    """Return the header of the file whose bytes are `data`; None where it is no engine."""
    start = 0
    if bytes(data[:4]) != _TAG:
        length = int.from_bytes(data[:4], "little")
        start = 4 + length
        if not 2 <= length <= _MOST_METADATA or bytes(data[4:5]) != b"{" or bytes(data[start : start + 4]) != _TAG:
            return None
    header = bytes(data[start : start + HEADER_BYTES])
    if len(header) < HEADER_BYTES or header[4:8] != bytes(4):
        return PlanHeader(start, "")
    return PlanHeader(start, ".".join(str(part) for part in header[24:28]))


def same_version(built: str, installed: str) -> bool:
    """Whether an engine that `built` made is one for `installed`, as far as their common numbers go."""
    first, second = built.split("."), installed.split(".")
    common = min(len(first), len(second), 4)
    return first[:common] == second[:common]
