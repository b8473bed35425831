"""Draws tokens of rows of logits on any device, all rows at once: what an accelerator is good at.

Filters look at the likeliest few hundred tokens and sort a whole row only if it keeps more. The same rules as
`drawing`'s, which draws from rows in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812

from headrace_backends.llm.sampling_params import LOWEST_TEMPERATURE, SamplingParams
from headrace_backends.llm.sampling_row import SamplingRow
from headrace_backends.llm.uniform import uniform

_MARGIN: Final = 64
"""Candidates looked at beyond top_k, so that ties with the last one are seen."""
_CANDIDATES: Final = 256
"""Candidates looked at first where a probability is the limit; a row that needs more is sorted."""
_MOST_CANDIDATES: Final = 1024
_SEGMENT: Final = 512


def draw_all(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Draw a token of each row of fp32 logits, none of which is greedy and each of which has a finite maximum."""
    heat = [max(row.params.temperature, LOWEST_TEMPERATURE) for row in rows]
    scaled = logits / torch.tensor(heat, dtype=torch.float32, device=logits.device)[:, None]
    uniforms = [uniform(row.seed, len(row.output_token_ids)) for row in rows]
    filtered = [at for at, row in enumerate(rows) if _filters(row.params, scaled.shape[1])]
    if not filtered:
        return _from_all(scaled, uniforms)
    tokens = [-1] * len(rows)
    left: list[int] = [at for at in range(len(rows)) if at not in set(filtered)]
    width = _width([rows[at].params for at in filtered], scaled.shape[1])
    picked = _from_candidates(
        scaled[filtered], [rows[at].params for at in filtered], [uniforms[at] for at in filtered], width
    )
    for at, token in zip(filtered, picked, strict=True):
        if token is None:
            tokens[at] = _from_sorted(scaled[at], rows[at].params, uniforms[at])
        else:
            tokens[at] = token
    if left:
        for at, token in zip(left, _from_all(scaled[left], [uniforms[at] for at in left]), strict=True):
            tokens[at] = token
    return tokens


def _filters(params: SamplingParams, vocabulary: int) -> bool:
    return 0 < params.top_k < vocabulary or params.top_p < 1 or params.min_p > 0


def _width(params: Sequence[SamplingParams], vocabulary: int) -> int:
    """Return how many of the likeliest tokens to look at first."""
    wanted = max(each.top_k + _MARGIN if each.top_k > 0 else _CANDIDATES for each in params)
    return min(wanted, _MOST_CANDIDATES, vocabulary)


def _from_all(scaled: torch.Tensor, uniforms: Sequence[float]) -> list[int]:
    """Draw from whole rows: first the segment of the vocabulary, then the token in it. Sums are in fp64."""
    weights = (scaled - scaled.amax(dim=-1, keepdim=True)).exp_()
    weights = F.pad(weights, (0, -weights.shape[1] % _SEGMENT)).view(weights.shape[0], -1, _SEGMENT)
    sums = weights.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    at = torch.arange(len(uniforms), device=scaled.device)
    targets = _targets(uniforms, sums[:, -1])
    segment = torch.searchsorted(sums, targets[:, None], right=True)[:, 0]
    before = torch.where(segment > 0, sums[at, (segment - 1).clamp(min=0)], 0.0)
    inside = weights[at, segment].double().cumsum(dim=-1)
    targets = torch.minimum(targets - before, _below(inside[:, -1]))
    found = segment * _SEGMENT + torch.searchsorted(inside, targets[:, None], right=True)[:, 0]
    tokens: list[int] = found.tolist()
    return tokens


def _from_candidates(
    scaled: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float], width: int
) -> list[int | None]:
    """Draw from the `width` likeliest tokens of each row; None where the filters keep more than those."""
    values, ids = scaled.topk(width, dim=-1)
    weights = (values - values[:, :1]).exp().double()
    kept = torch.ones_like(weights, dtype=torch.bool)
    whole = width == scaled.shape[1]
    totals = weights.sum(dim=-1)
    if not whole and any(each.top_p < 1 for each in params):
        totals = (scaled - values[:, :1]).exp_().sum(dim=-1, dtype=torch.float64)
    limits = []
    for at, each in enumerate(params):
        limit = _limit(values[at], weights[at], each, totals[at], whole=whole)
        limits.append(limit)
        if limit is not None:
            kept[at] = values[at] >= limit
    tokens = _by_id(ids, weights * kept, uniforms)
    return [None if limit is None else token for limit, token in zip(limits, tokens, strict=True)]


def _limit(
    values: torch.Tensor, weights: torch.Tensor, params: SamplingParams, total: torch.Tensor, *, whole: bool
) -> float | None:
    """Return the lowest logit that min_p, top_k and top_p keep, in that order; None where it lies beyond `values`.

    `values` are the highest logits, falling; `weights` their exponentials over the highest's; `total` the sum of all.
    """
    lowest = float(values[-1])
    limit = float("-inf")
    if params.min_p > 0:
        limit = float(values[0]) + math.log(params.min_p)
    if 0 < params.top_k < len(values):
        limit = max(limit, float(values[params.top_k - 1]))
    complete = whole or limit > lowest
    if params.top_p < 1:
        counted = weights * (values >= limit)
        mass = counted.sum() if complete else total
        if not complete and (params.min_p > 0 or params.top_k > 0):
            return None
        before = counted.cumsum(dim=-1) - counted
        last = int((before < params.top_p * mass).sum()) - 1
        limit = max(limit, float(values[max(last, 0)]))
        complete = whole or limit > lowest
    return limit if complete else None


def _from_sorted(scaled: torch.Tensor, params: SamplingParams, number: float) -> int:
    """Draw from one whole row under its filters."""
    token = _from_candidates(scaled[None], [params], [number], scaled.shape[0])[0]
    assert token is not None
    return token


def _by_id(ids: torch.Tensor, weights: torch.Tensor, uniforms: Sequence[float]) -> list[int]:
    """Draw by weight, tokens in the order of their ids; what has no weight changes no sum."""
    ordered, order = ids.sort(dim=-1)
    sums = weights.gather(1, order).cumsum(dim=-1)
    found = torch.searchsorted(sums, _targets(uniforms, sums[:, -1])[:, None], right=True)
    tokens: list[int] = ordered.gather(1, found)[:, 0].tolist()
    return tokens


def _targets(uniforms: Sequence[float], totals: torch.Tensor) -> torch.Tensor:
    """Return each uniform's place on its row's sum, below the end so that a token of weight follows it."""
    return torch.minimum(torch.tensor(uniforms, dtype=torch.float64, device=totals.device) * totals, _below(totals))


def _below(numbers: torch.Tensor) -> torch.Tensor:
    return torch.nextafter(numbers, torch.zeros_like(numbers))
