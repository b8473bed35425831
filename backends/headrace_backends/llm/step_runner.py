"""What every runner has in common: from the logits of a step's rows to the results of its requests.

Grammars' masks are filled beside the forward. Knows no model, no queue, no clock and no text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from headrace_backends.llm.grammar import GrammarState
from headrace_backends.llm.grammar_masks import MaskFiller, RowMask
from headrace_backends.llm.logprobs import TokenLogprobs
from headrace_backends.llm.sampler import Sampled, logprobs_of, sample
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_backends.llm.sampling_row import SamplingRow
from headrace_backends.llm.step import ScheduledRequest, SchedulerOutput, StepResult, verified
from headrace_backends.llm.thinking import forced_token

_ROWS_AT_ONCE: Final = 64
"""Prompt rows whose log probabilities are taken at a time: fp32 copies of logits are large."""


class StepRunner(ABC):
    """A `ModelRunner` but for the model. Not for two threads at once."""

    def __init__(self, vocab_size: int) -> None:
        """`vocab_size` is the width of the logits."""
        self._masks: Final = MaskFiller(vocab_size)

    @abstractmethod
    def _logits(self, scheduled: Sequence[ScheduledRequest], rows: Sequence[int]) -> torch.Tensor:
        """Compute a step; return the logits [rows, vocabulary] that follow those of its tokens, counted through all entries."""

    @abstractmethod
    def _pooled(self, scheduled: Sequence[ScheduledRequest]) -> Mapping[int, NDArray[np.float32]]:
        """Return, by its place, what each entry of the step just computed that pools gives: see `StepResult.pooled`."""

    def execute(self, step: SchedulerOutput) -> Sequence[StepResult]:
        if not step.scheduled:
            return []
        with torch.inference_mode():
            return self._execute(step)

    def _execute(self, step: SchedulerOutput) -> list[StepResult]:
        sampled_rows, prompt_rows = _rows(step.scheduled)
        self._masks.begin(_constrained(step.scheduled))
        try:
            logits = self._logits(step.scheduled, sampled_rows + prompt_rows)
        finally:
            masks = self._masks.masks()
        rows = [row for entry in step.scheduled for row in _sampling_rows(entry, masks.get(entry.request.id))]
        tokens = sample(logits[: len(sampled_rows)], rows) if rows else []
        rest = logits[len(sampled_rows) :]
        pooled = self._pooled(step.scheduled)
        results, used, told = [], 0, 0
        for at, entry in enumerate(step.scheduled):
            mine = tokens[used : used + entry.num_sampled_rows]
            used += entry.num_sampled_rows
            wanted = _num_prompt_rows(entry)
            result = _result(entry, mine, _prompt_logprobs(entry, rest[told : told + wanted]))
            results.append(replace(result, pooled=pooled[at]) if at in pooled else result)
            told += wanted
        return results


def _rows(scheduled: Sequence[ScheduledRequest]) -> tuple[list[int], list[int]]:
    """Return the step's tokens whose logits are sampled, and those whose logits tell how likely the prompt was."""
    sampled: list[int] = []
    prompt: list[int] = []
    first = 0
    for entry in scheduled:
        after = first + len(entry.token_ids)
        sampled.extend(range(after - entry.num_sampled_rows, after))
        prompt.extend(range(first, first + _num_prompt_rows(entry)))
        first = after
    return sampled, prompt


def _num_prompt_rows(entry: ScheduledRequest) -> int:
    """Return of how many of the entry's first tokens the prompt has the next, if those are to be told of."""
    if entry.request.params.prompt_logprobs is None:
        return 0
    return max(0, min(entry.end, entry.request.num_prompt_tokens - 1) - entry.start)


def _constrained(scheduled: Sequence[ScheduledRequest]) -> dict[str, tuple[GrammarState, Sequence[int]]]:
    """Return what the masks of the step's sampled rows follow from, by the requests' ids."""
    return {
        entry.request.id: (entry.request.grammar, entry.draft_token_ids)
        for entry in scheduled
        if entry.num_sampled_rows and entry.request.grammar is not None
    }


def _sampling_rows(entry: ScheduledRequest, masks: Sequence[RowMask] | None) -> list[SamplingRow]:
    """Return what each sampled row of the entry is sampled by; later rows take the drafts before them for output."""
    request = entry.request
    rows = []
    for at in range(entry.num_sampled_rows):
        output = [*request.output_token_ids, *entry.draft_token_ids[:at]] if at else request.output_token_ids
        row = SamplingRow(
            request.params,
            request.seed,
            request.prompt_token_ids,
            output,
            request.eos_token_ids,
            request.bad_word_ids,
            None if masks is None else masks[at],
        )
        forced = forced_token(request, output)
        rows.append(row if forced is None else _forced(row, forced))
    return rows


def _forced(row: SamplingRow, token_id: int) -> SamplingRow:
    """Return a row of which only this token can come."""
    params = SamplingParams(temperature=0, allowed_token_ids=(token_id,), logprobs=row.params.logprobs)
    return SamplingRow(params, row.seed, row.prompt_token_ids, row.output_token_ids)


def _prompt_logprobs(entry: ScheduledRequest, logits: torch.Tensor) -> list[TokenLogprobs]:
    count = entry.request.params.prompt_logprobs
    if count is None:
        return []
    prompt, told = entry.request.prompt_token_ids, []
    for at in range(0, len(logits), _ROWS_AT_ONCE):
        part = logits[at : at + _ROWS_AT_ONCE]
        first = entry.start + at + 1
        told.extend(logprobs_of(part, prompt[first : first + len(part)], count))
    return told


def _result(entry: ScheduledRequest, sampled: Sequence[Sampled], prompt: Sequence[TokenLogprobs]) -> StepResult:
    tokens = verified(entry.draft_token_ids, [each.token_id for each in sampled]) if sampled else []
    kept = sampled[: len(tokens)]
    error = next((each.error for each in kept if each.error is not None), None)
    if error is not None:
        return StepResult(error=error)
    logprobs = [each.logprobs for each in kept if each.logprobs is not None]
    wanted = entry.request.params.logprobs is not None
    return StepResult(tokens, logprobs if wanted else None, tuple(prompt))
