"""One fault that servers of this kind had, and the tests that would notice it."""

from __future__ import annotations

from typing import NamedTuple


class Pitfall(NamedTuple):
    """One fault."""

    area: str
    told: str
    points: dict[str, tuple[str, ...]]
