"""Histogram and LatencySketch: bounded counters of durations and sizes, cheap to feed and exact to add up.

Nothing here knows models, Prometheus or clocks; values are integers in the caller's unit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

_SUB_BITS = 4
_SUB_BINS = 1 << _SUB_BITS
_OCTAVES = 32
_WINDOW_NS = 60_000_000_000
BINS = _SUB_BINS * (_OCTAVES + 1)
"""Bins of a LatencySketch: 16 an octave, up to 2^36 units (19 hours of microseconds)."""


class Exemplar(NamedTuple):
    """One of the values that a histogram counted."""

    value: int
    trace_id: int
    """Of the trace (W3C's) of what it was measured on."""
    wall_ms: int
    """When, in milliseconds since the epoch."""


class Histogram:
    """Counts of values at most each bound, plus one for those above all bounds, and their exact sum."""

    __slots__ = ("bounds", "counts", "exemplars", "sum")

    def __init__(self, bounds: Sequence[int]) -> None:
        assert list(bounds) == sorted(set(bounds)), "bounds must ascend"
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0
        self.exemplars: dict[int, Exemplar] | None = None
        """By the index of the count it is in, the last value that can be looked up; None = there never was one."""

    def exemplify(self, exemplar: Exemplar) -> None:
        """Remember where one of the values that were counted can be looked up."""
        if self.exemplars is None:
            self.exemplars = {}
        self.exemplars[bisect_left(self.bounds, exemplar.value)] = exemplar

    def observe(self, value: int) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_many(self, value: int, times: int) -> None:
        """Count the same value `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        """How many values were counted."""
        return sum(self.counts)


class LatencySketch:
    """Quantiles within 1/16 of the value, whatever the value, out of a fixed number of bins.

    Each octave is cut into 16 equal bins (the scheme of HDR histograms), so a value is found again to within 6.25 %.
    `counts` only ever grows: the quantiles of a window are those of the difference of two copies, which `recent` keeps.
    """

    __slots__ = ("_copies", "counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * BINS
        self.sum = 0
        self._copies: deque[tuple[int, list[int]]] = deque()

    def observe(self, value: int) -> None:
        """Count one value >= 0; one beyond the last octave counts as the largest."""
        self.sum += value
        shift = value.bit_length() - _SUB_BITS - 1
        if shift < 0:
            self.counts[value] += 1
            return
        if shift >= _OCTAVES:
            self.counts[BINS - 1] += 1
            return
        self.counts[(shift << _SUB_BITS) + (value >> shift)] += 1

    @property
    def count(self) -> int:
        """How many values were counted."""
        return sum(self.counts)

    def recent(self, now_ns: int) -> list[int]:
        """Return the counts of the last minute.

        They are counted from the last call that is a minute old or older, so a caller who asks less often than once a
        minute gets the counts since it asked last. Calls within 12 seconds share a copy: at most 6 are kept.
        """
        copies = self._copies
        while len(copies) > 1 and copies[1][0] <= now_ns - _WINDOW_NS:
            copies.popleft()
        before = copies[0][1] if copies else None
        counts = list(self.counts)
        if not copies or now_ns - copies[-1][0] >= _WINDOW_NS // 5:
            copies.append((now_ns, counts))
        return counts if before is None else [count - earlier for count, earlier in zip(counts, before, strict=True)]


def count_above(counts: Sequence[int], value: int) -> int:
    """Return how many of a sketch's values are above `value` >= 0, those not counted that are up to 1/16 above it."""
    shift = max(0, value.bit_length() - _SUB_BITS - 1)
    return 0 if shift >= _OCTAVES else sum(counts[(shift << _SUB_BITS) + (value >> shift) + 1 :])


def _bin_middle(index: int) -> float:
    if index < _SUB_BINS:
        return float(index)
    shift = (index >> _SUB_BITS) - 1
    low = (index - (shift << _SUB_BITS)) << shift
    return low + ((1 << shift) - 1) / 2


def quantiles(counts: Sequence[int], at: Sequence[float]) -> list[float]:
    """Return the value at each quantile of `at` (ascending) for the `counts` of a sketch; NaN where it is empty."""
    total = sum(counts)
    if not total:
        return [float("nan")] * len(at)
    found: list[float] = []
    seen = 0
    index = -1
    for quantile in at:
        rank = max(1, min(total, round(quantile * total)))
        while seen < rank:
            index += 1
            seen += counts[index]
        found.append(_bin_middle(index))
    return found
