"""W3C trace context: what `traceparent` says, and ids of our own. Pure but for the randomness of ids."""

from __future__ import annotations

import random
import re
from typing import Final, NamedTuple

_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_LONGEST: Final = 512
_random: Final = random.SystemRandom()


class SpanContext(NamedTuple):
    """A span of somebody's, which may be the parent of ours."""

    trace_id: int
    span_id: int
    sampled: bool


def parse_traceparent(text: str | None) -> SpanContext | None:
    """Return what a `traceparent` says; None where there is none, or one that W3C's rules call invalid."""
    if text is None or len(text) > _LONGEST:
        return None
    match = _TRACEPARENT.fullmatch(text.strip())
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5] is not None):
        return None
    trace_id, span_id = int(match[2], 16), int(match[3], 16)
    if not trace_id or not span_id:
        return None
    return SpanContext(trace_id, span_id, bool(int(match[4], 16) & 1))


def new_trace_id() -> int:
    """Return an id for a trace that begins here."""
    return _random.getrandbits(128) or 1


def new_span_id() -> int:
    """Return an id for a span."""
    return _random.getrandbits(64) or 1
