"""Chooses tokens: one row of logits each, a whole step at once. Knows rows and parameters, not requests in a queue.

The choice of a row is a function of its logits, its parameters, its mask, its seed and the number of tokens before it,
and of nothing else: neither of its neighbours nor of what was computed before. Filters never part tokens of equal logits:
all of them stay or all go, so that no order of ties matters. The likeliest of equals is the one of the lowest id.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headrace_backends.llm.device_sampling import draw_all
from headrace_backends.llm.drawing import draw, likeliest
from headrace_backends.llm.logits_processors import adjusts, apply_processors
from headrace_backends.llm.logprobs import TokenLogprob, TokenLogprobs
from headrace_backends.llm.sampling_row import SamplingRow
from headrace_backends.llm.uniform import uniform


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token of one row."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    """Why there is no token; `token_id` is then -1."""


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
    """Choose a token for each row of `logits` [rows, vocabulary]; leaves the logits as they are."""
    tokens = _in_memory(logits, rows) if logits.device.type == "cpu" else _on_device(logits, rows)
    answers = []
    for at, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        if token < 0:
            answers.append(Sampled(-1, error=_no_token(logits[at], row)))
        elif row.params.logprobs is None:
            answers.append(Sampled(token))
        else:
            answers.append(Sampled(token, logprobs_of(logits[at : at + 1], [token], row.params.logprobs)[0]))
    return answers


def _in_memory(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Return each row's token, -1 where there is none. Only rows that are drawn from or adjusted are unpacked."""
    plain = [row.params.greedy and not adjusts(row) for row in rows]
    best = likeliest(logits) if any(plain) else []
    tokens = []
    for at, row in enumerate(rows):
        if plain[at] and math.isfinite(best[at][1]) and _allows(row, best[at][0]):
            tokens.append(best[at][0])
        elif plain[at] and row.mask is None:
            tokens.append(-1)
        else:
            tokens.append(_of_row(logits[at], row))
    return tokens


def _of_row(logits: torch.Tensor, row: SamplingRow) -> int:
    """Return the token of a row: among those that its grammar allows, so that the others cost nothing more."""
    unpacked = logits.float()
    if adjusts(row):
        unpacked = unpacked.clone() if unpacked is logits else unpacked
        apply_processors(unpacked, row)
    values: NDArray[np.float32] = unpacked.numpy()
    allowed = None
    if row.mask is not None:
        if row.mask.problem is not None:
            return -1
        allowed = np.flatnonzero(_bits(row.mask.words, len(values)))
        values = values[allowed]
    if not len(values) or not math.isfinite(values.max()):
        return -1
    at = (
        int(values.argmax())
        if row.params.greedy
        else draw(values, row.params, uniform(row.seed, len(row.output_token_ids)))
    )
    return at if allowed is None else int(allowed[at])


def _on_device(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    work = logits.float()
    changed = [at for at, row in enumerate(rows) if adjusts(row) or row.mask is not None]
    if work is logits and changed:
        work = logits.clone()
    for at in changed:
        _mask(work[at], rows[at])
        if adjusts(rows[at]):
            apply_processors(work[at], rows[at])
    highest, best = work.max(dim=-1)
    tokens: list[int] = best.tolist()
    good = torch.isfinite(highest).tolist()
    drawn = [at for at, row in enumerate(rows) if not row.params.greedy and good[at]]
    if drawn:
        chosen = draw_all(work if len(drawn) == len(rows) else work[drawn], [rows[at] for at in drawn])
        for at, token in zip(drawn, chosen, strict=True):
            tokens[at] = token
    return [token if good[at] else -1 for at, token in enumerate(tokens)]


def _mask(logits: torch.Tensor, row: SamplingRow) -> None:
    if row.mask is None:
        return
    banned = ~_bits(row.mask.words, len(logits)) if row.mask.problem is None else np.ones(len(logits), bool)
    logits.masked_fill_(torch.from_numpy(banned).to(logits.device), float("-inf"))


def _bits(words: NDArray[np.uint32], count: int) -> NDArray[np.bool_]:
    """Return a mask as one truth value for each token."""
    return np.unpackbits(words.view(np.uint8), count=count, bitorder="little").view(np.bool_)


def _allows(row: SamplingRow, token: int) -> bool:
    return row.mask is None or (row.mask.problem is None and bool(int(row.mask.words[token // 32]) >> token % 32 & 1))


def _no_token(logits: torch.Tensor, row: SamplingRow) -> str:
    if row.mask is not None and row.mask.problem is not None:
        return row.mask.problem
    if not bool(torch.isfinite(logits.max())):
        return "the model's logits are not numbers"
    if row.mask is not None and not row.mask.words.any():
        return "the grammar allows no token of the vocabulary here"
    grammar = "the grammar, " if row.mask is not None else ""
    return f"no token may be chosen: {grammar}allowed_token_ids, bad_words, logit_bias and min_tokens leave none"


def logprobs_of(logits: torch.Tensor, chosen: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Return each row's chosen token and its `count` likeliest ones (-1: all), of the logits as they are."""
    if logits.device.type == "cpu":
        return [_logprobs_of_row(row.float().numpy(), token, count) for row, token in zip(logits, chosen, strict=True)]
    values = logits.float()
    picked = values.gather(1, torch.tensor(chosen, device=values.device)[:, None])
    ranks = (values > picked).sum(dim=-1).add_(1).tolist()
    totals = values.logsumexp(dim=-1, keepdim=True)
    own = (picked - totals)[:, 0].tolist()
    wanted = values.shape[1] if count < 0 else min(count, values.shape[1])
    top, ids = (values - totals).topk(wanted, dim=-1)
    return [
        TokenLogprobs(TokenLogprob(token, own[at], ranks[at]), _ranked(top[at].tolist(), ids[at].tolist()))
        for at, token in enumerate(chosen)
    ]


def _logprobs_of_row(values: NDArray[np.float32], token: int, count: int) -> TokenLogprobs:
    peak = values.max()
    total = float(peak) + math.log(float(np.exp(values - peak).sum(dtype=np.float64)))
    picked = values[token]
    chosen = TokenLogprob(token, float(picked) - total, int(np.count_nonzero(values > picked)) + 1)
    wanted = len(values) if count < 0 else min(count, len(values))
    if not wanted:
        return TokenLogprobs(chosen, ())
    rest = len(values) - wanted
    top = np.flatnonzero(values >= np.partition(values, rest)[rest]) if rest else np.arange(len(values))
    top = top[np.lexsort((top, -values[top]))][:wanted]
    return TokenLogprobs(chosen, _ranked((values[top].astype(np.float64) - total).tolist(), top.tolist()))


def _ranked(values: list[float], ids: list[int]) -> tuple[TokenLogprob, ...]:
    """Rank as `logprobs_of` ranks the chosen one: tokens of equal logits share the first of their ranks."""
    ranked: list[TokenLogprob] = []
    for at, (value, token) in enumerate(zip(values, ids, strict=True)):
        rank = ranked[-1].rank if ranked and ranked[-1].logprob == value else at + 1
        ranked.append(TokenLogprob(token, value, rank))
    return tuple(ranked)
