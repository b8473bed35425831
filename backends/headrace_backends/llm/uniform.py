"""The one random number of each token: a function of its request's seed and its place, and of nothing else. Pure."""

from __future__ import annotations

import math
from typing import Final

_MASK: Final = (1 << 64) - 1


def uniform(seed: int, count: int) -> float:
    """Return the number in [0, 1) that chooses the token after `count` others (splitmix64 of the seed's and the count's)."""
    return (_mixed(_mixed(seed) + count + 1) >> 11) * 2.0**-53


def uniform_below(number: float, total: float) -> float:
    """Return a uniform's place on a sum, below the end so that something of weight follows it."""
    return min(number * total, math.nextafter(total, 0.0))


def _mixed(number: int) -> int:
    z = (number + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
