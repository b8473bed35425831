"""What a request's parameters do to its logits before a token is chosen: masks, biases and penalties, in place.

In the order that vLLM keeps: allowed tokens, bad words, min_tokens, logit_bias, then the repetition, frequency and
presence penalties.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace_backends.llm.sampling_row import SamplingRow

_BANNED = float("-inf")


def adjusts(row: SamplingRow) -> bool:
    """Say whether anything changes this row's logits."""
    params = row.params
    return (
        bool(row.bad_word_ids)
        or bool(params.logit_bias)
        or params.allowed_token_ids is not None
        or len(row.output_token_ids) < params.min_tokens
        or params.repetition_penalty != 1
        or params.frequency_penalty != 0
        or params.presence_penalty != 0
    )


def apply_processors(logits: torch.Tensor, row: SamplingRow) -> None:
    """Change one row's fp32 logits [vocabulary] as its parameters ask."""
    params = row.params
    if params.allowed_token_ids is not None:
        allowed = _ids(params.allowed_token_ids, logits)
        kept = logits[allowed]
        logits.fill_(_BANNED)
        logits[allowed] = kept
    banned = _ending_bad_words(row.bad_word_ids, row.output_token_ids)
    if len(row.output_token_ids) < params.min_tokens:
        banned.extend(params.stop_token_ids)
        if not params.ignore_eos:
            banned.extend(row.eos_token_ids)
    if banned:
        logits[_ids(banned, logits)] = _BANNED
    if params.logit_bias:
        bias = torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device)
        logits[_ids(params.logit_bias, logits)] += bias
    _penalise(logits, row)


def _penalise(logits: torch.Tensor, row: SamplingRow) -> None:
    params = row.params
    if params.repetition_penalty != 1:
        seen = _ids({*row.prompt_token_ids, *row.output_token_ids}, logits)
        values = logits[seen]
        rate = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / rate, values * rate)
    if (params.frequency_penalty != 0 or params.presence_penalty != 0) and row.output_token_ids:
        used, counts = torch.unique(_ids(row.output_token_ids, logits), return_counts=True)
        logits[used] -= counts * params.frequency_penalty + params.presence_penalty


def _ending_bad_words(words: Sequence[tuple[int, ...]], output: Sequence[int]) -> list[int]:
    """Return the last tokens of the words of which everything else has just been generated."""
    return [
        word[-1]
        for word in words
        if len(word) == 1 or (len(word) - 1 <= len(output) and tuple(output[1 - len(word) :]) == word[:-1])
    ]


def _ids(tokens: Sequence[int] | dict[int, float] | set[int] | frozenset[int], logits: torch.Tensor) -> torch.Tensor:
    """Return the tokens that the vocabulary has: a stop token or an image's placeholder may lie beyond it."""
    return torch.tensor([t for t in tokens if 0 <= t < len(logits)], dtype=torch.long, device=logits.device)
