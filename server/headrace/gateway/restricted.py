"""Which kinds of calls only those may make who show a header: the operator's groups, parsed once for both doors.

A group is written `<kinds>:<header>=<value>`, kinds separated by commas. Which call is of which kind is the doors' own
table; values are secrets and never part of a message.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

KINDS: Final = (
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
    "rollout",
    "openai",
)

HTTP_ALONE: Final = ("rollout", "openai")
"""Kinds of which gRPC has no call."""

_HEADER: Final = re.compile(r"[0-9a-z_.\-]+")
"""What is a header's name in HTTP and a key of gRPC's metadata alike."""
_VALUE: Final = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
"""What either can carry: visible ASCII, blanks between."""


class Restriction(NamedTuple):
    """What a caller has to show. Not printed: `value` is a secret."""

    header: str
    """In lower case."""
    value: bytes

    def admits(self, shown: bytes | str) -> bool:
        """Return whether `shown` is the value, in a time that does not tell how much of it is right."""
        given = shown.encode("utf-8", "surrogatepass") if isinstance(shown, str) else shown
        return hmac.compare_digest(given, self.value)

    def __repr__(self) -> str:
        return f"Restriction({self.header!r})"


Restrictions = Mapping[str, Restriction]
"""By kind; a kind that is not in it is open to all."""


class Group(NamedTuple):
    """One value of the option."""

    kinds: tuple[str, ...]
    restriction: Restriction


def header_name(text: str) -> str:
    """Return the name of a header or of metadata in lower case; raises ValueError."""
    header = text.strip().lower()
    if not _HEADER.fullmatch(header):
        raise ValueError(f"expected a header of letters, digits, '-', '_' and '.', got {header!r}")
    return header


def parse_group(text: str) -> Group:
    """Parse `<kinds>:<header>=<value>`; raises ValueError with `expected ..., got ...`, the value left out."""
    head, colon, rest = text.partition(":")
    header, equals, value = rest.partition("=")
    if not colon or not equals:
        raise ValueError(f"expected <kinds>:<header>=<value>, got {text.partition('=')[0]!r}")
    kinds = tuple(kind.strip() for kind in head.split(","))
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"expected some of {', '.join(KINDS)} before the colon, got {kind!r}")
    header = header_name(header)
    value = value.strip()
    if not _VALUE.fullmatch(value):
        raise ValueError(f"expected a value of visible ASCII characters for {header!r}, got something else")
    return Group(kinds, Restriction(header, value.encode()))


def by_kind(groups: Iterable[Group]) -> dict[str, Restriction]:
    """Return the restriction of each kind; raises ValueError where a kind is named twice."""
    found: dict[str, Restriction] = {}
    for group in groups:
        for kind in group.kinds:
            if kind in found:
                raise ValueError(f"kind {kind!r} is restricted twice, expected it in one group alone")
            found[kind] = group.restriction
    return found
