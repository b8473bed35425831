"""Split: which version gets a request, by shares of a hundred. Pure: the same key has the same version in every server.

Each key has a point between 0 and 1, and each version with a weight a stretch of that line, in the order of the versions;
the default has what is left. So a version whose weight grows keeps whom it has, and where it is the only one, or the newest,
nobody moves but towards it.
"""

from __future__ import annotations

from bisect import bisect_right
from hashlib import blake2b
from itertools import accumulate
from typing import Final

from headrace.rollout.policy import HUNDRED, TrafficPolicy

Key = str | bytes | int
"""What tells callers, or sequences, apart."""

_GOLDEN: Final = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: multiples of it are spread over 64 bits as evenly as can be (a Weyl sequence)."""
_RANGE: Final = 1 << 64


def point_of(key: Key, salt: bytes) -> float:
    """Return where between 0 and 1 a key lies; another salt places all keys anew."""
    text = key if isinstance(key, bytes) else str(key).encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(text, digest_size=8, key=salt[:64]).digest(), "little") / _RANGE


class Turns:
    """Points for requests that have no key, one after the other: any few of them in a row are spread evenly."""

    __slots__ = ("_state",)

    def __init__(self, start: int = 0) -> None:
        self._state = start % _RANGE

    def next(self) -> float:
        """Return the next point, from 0 to below 1."""
        self._state = (self._state + _GOLDEN) % _RANGE
        return self._state / _RANGE


class Split:
    """The shares of one model's versions."""

    __slots__ = ("_bounds", "_salt", "_turns", "_versions", "sticky_parameter")

    def __init__(self, model: str, policy: TrafficPolicy, turns: Turns) -> None:
        """`policy` has a default."""
        assert policy.default is not None, "weights are of versions beside a default"
        weights = sorted(policy.weights.items())
        self._bounds = [bound / HUNDRED for bound in accumulate(weight for _, weight in weights)]
        self._versions = [*(version for version, _ in weights), policy.default]
        self._salt = model.encode("utf-8", "surrogatepass")
        self._turns = turns
        self.sticky_parameter = policy.sticky_parameter

    def version_of(self, key: Key | None) -> int:
        """Return the version of a request with this key; None = it has none, and gets the next in turn."""
        point = self._turns.next() if key is None else point_of(key, self._salt)
        return self._versions[bisect_right(self._bounds, point)]
