"""The options of residency."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

_UNITS: Final = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_SIZE: Final = re.compile(r"(\d+)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, slots=True)
class ResidencyOptions:
    """What a user sets."""

    budget: int
    """Bytes, > 0."""
    pins: tuple[str, ...] = ()
    """Names of models that stay in memory, with * and ? as in file names."""
    wait_s: float = 60.0
    """How long a request without a deadline waits for its model."""
    min_residence_s: float = 1.0


def byte_size(text: str) -> int:
    """Parse a number of bytes, like 8G or 512M: powers of 1024. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"expected a number of bytes like 8G or 512M, got {text!r}")
    return int(match[1]) << _UNITS[match[2].lower()]


def residency_options(values: Mapping[str, Any]) -> ResidencyOptions | None:
    """Return what the parsed options say; None where all models stay in memory."""
    if not values["model-memory-budget"]:
        return None
    return ResidencyOptions(
        values["model-memory-budget"],
        values["pin-model"],
        values["model-wait-secs"],
        values["model-min-residence-secs"],
    )
