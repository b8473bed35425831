"""Draws a token of one row of logits in memory: numpy, one row at a time, so that a row stays in the processor's cache.

The same rules as `device_sampling`'s, which draws on an accelerator. Knows no masks and no penalties: they come before.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from headrace_backends.llm.sampling_params import LOWEST_TEMPERATURE, SamplingParams
from headrace_backends.llm.uniform import uniform_below

Values = NDArray[np.float32]

_SEGMENT: Final = 512
_HEADS: Final = (1024, 16384)
"""Of the likeliest tokens looked at first where a probability is the limit, before all are."""
_MINUS_INFINITY: Final = 0xFF80
_INFINITY: Final = 0x7F80
"""In bf16."""


def likeliest(logits: torch.Tensor) -> list[tuple[int, float]]:
    """Return each row's likeliest token, the first of equals, with its logit; that is not finite where the row is no good.

    bf16 is not unpacked: as 16-bit integers, positive numbers are in their own order, and above all others but one kind
    of NaN, which is looked for.
    """
    if logits.dtype is not torch.bfloat16:
        return [_likeliest(row) for row in logits.float().numpy()]
    bits = logits.view(torch.int16).numpy()
    best = bits.argmax(axis=-1)
    highest = bits[np.arange(len(bits)), best]
    broken = bits.view(np.uint16).max(axis=-1) > _MINUS_INFINITY
    peaks = (highest.astype(np.uint32) << 16).view(np.float32)
    plain = (highest > 0) & (highest < _INFINITY) & ~broken
    return [
        (int(best[at]), float(peaks[at])) if plain[at] else _likeliest(logits[at].float().numpy())
        for at in range(len(bits))
    ]


def _likeliest(values: Values) -> tuple[int, float]:
    best = int(values.argmax())  # the first that is no number, if there is one
    return best, float(values[best])


def draw(values: Values, params: SamplingParams, number: float) -> int:
    """Draw by the uniform `number` from logits, of which the highest is finite; return the place.

    Temperature, min_p, top_k and top_p in that order; tokens of equal logits stay or go together.
    """
    scaled = values / np.float32(max(params.temperature, LOWEST_TEMPERATURE))
    peak = scaled.max()
    limit = _limit(scaled, peak, params)
    if limit is None:
        return _by_weight(np.exp(scaled - peak), number)
    kept = np.flatnonzero(scaled >= limit)
    return int(kept[_by_weight(np.exp(scaled[kept] - peak), number)])


def _limit(scaled: Values, peak: np.float32, params: SamplingParams) -> np.float32 | None:
    """Return the lowest logit that the filters keep; None where they keep all."""
    limit: np.float32 | None = None
    if params.min_p > 0:
        limit = np.float32(float(peak) + math.log(params.min_p))
    if 0 < params.top_k < len(scaled):
        last = len(scaled) - params.top_k
        lowest = np.partition(scaled, last)[last]
        limit = lowest if limit is None else max(limit, lowest)
    if params.top_p < 1:
        pool = scaled if limit is None else scaled[scaled >= limit]
        lowest = _nucleus(pool, peak, params.top_p)
        limit = lowest if limit is None else max(limit, lowest)
    return limit


def _nucleus(pool: Values, peak: np.float32, part: float) -> np.float32:
    """Return the lowest logit of the likeliest tokens that have at least that part of the whole's probability."""
    wanted = part * float(np.exp(pool - peak).sum(dtype=np.float64))
    for width in (*_HEADS, len(pool)):
        head = np.partition(pool, len(pool) - width)[len(pool) - width :] if width < len(pool) else pool.copy()
        head.sort()
        head = head[::-1]
        sums = np.exp(head - peak).cumsum(dtype=np.float64)
        if sums[-1] >= wanted:
            break
    return np.float32(head[min(int(np.searchsorted(sums, wanted)), len(head) - 1)])


def _by_weight(weights: Values, number: float) -> int:
    """Draw a place by weight: first the segment, then the place in it. Sums are in fp64."""
    whole = len(weights) // _SEGMENT * _SEGMENT
    if not whole:
        sums = weights.cumsum(dtype=np.float64)
        return int(np.searchsorted(sums, uniform_below(number, sums[-1]), side="right"))
    parts = weights[:whole].reshape(-1, _SEGMENT).sum(axis=1, dtype=np.float64)
    sums = np.append(parts, weights[whole:].sum(dtype=np.float64)).cumsum()
    target = uniform_below(number, sums[-1])
    segment = int(np.searchsorted(sums, target, side="right"))
    inside = weights[segment * _SEGMENT : (segment + 1) * _SEGMENT].cumsum(dtype=np.float64)
    rest = min(target - (sums[segment - 1] if segment else 0.0), np.nextafter(inside[-1], 0.0))
    return segment * _SEGMENT + int(np.searchsorted(inside, rest, side="right"))
