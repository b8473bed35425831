"""Computes steps: flattened inputs, one forward, logits of the rows that are sampled, and a token of each.

The one part with both tensors and scheduled requests. Knows no queue, no clock and no text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from headrace_backends.llm.attention import IMPLEMENTATION, STEP, SequenceSpan, ShapeProbe
from headrace_backends.llm.attention_paged import PagedStep
from headrace_backends.llm.grammar import GrammarState
from headrace_backends.llm.grammar_masks import MaskFiller, RowMask
from headrace_backends.llm.kv_cache import KvCache, LayerShape, bytes_per_block, check_blocks
from headrace_backends.llm.logprobs import TokenLogprobs
from headrace_backends.llm.sampler import Sampled, logprobs_of, sample
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_backends.llm.sampling_row import SamplingRow
from headrace_backends.llm.step import ScheduledRequest, SchedulerOutput, StepResult, pools, verified
from headrace_backends.llm.thinking import forced_token
from headrace_protocol.errors import unsupported

_ROWS_AT_ONCE: Final = 64
"""Prompt rows whose log probabilities are taken at a time: fp32 copies of logits are large."""


class TorchRunner:
    """Runs one model of transformers with a paged cache. Not for two threads at once."""

    def __init__(self, model: Any, num_blocks: int, block_size: int, max_model_len: int) -> None:
        """Take over the model's attention and reserve the cache.

        Raises UNSUPPORTED where the model does not let its attention be replaced, INVALID_ARG where the cache is too
        small for one request of `max_model_len` tokens.
        """
        shapes = cached_shapes(model)
        self.block_bytes: Final = bytes_per_block(shapes, block_size, model.dtype)
        check_blocks(num_blocks, block_size, max_model_len, self.block_bytes)
        self._model: Final = model
        self._device: Final[torch.device] = model.device
        self.cache: Final = KvCache(shapes, num_blocks, block_size, model.dtype, model.device)
        self._hidden: torch.Tensor | None = None
        """Of the step that is computed: each token's last hidden state, [1, tokens, width]."""
        model.base_model.register_forward_hook(self._keep_hidden)
        self._masks: Final = MaskFiller(int(model.config.get_text_config().vocab_size))

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

    def _logits(self, scheduled: Sequence[ScheduledRequest], rows: Sequence[int]) -> torch.Tensor:
        """Return the logits [rows, vocabulary] that follow those of the step's tokens, in the model's own dtype."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        spans: list[SequenceSpan] = []
        for entry in scheduled:
            spans.append(SequenceSpan(len(tokens), len(entry.token_ids), entry.start, entry.block_table))
            tokens.extend(entry.token_ids)
            positions.extend(range(entry.start, entry.end))
            slots.extend(entry.slots(self.cache.block_size))
        logits: torch.Tensor = self._model(
            input_ids=self._integers([tokens]),
            position_ids=self._integers([positions]),
            use_cache=False,
            logits_to_keep=self._integers(rows),
            **{STEP: PagedStep(self.cache, spans, slots)},
        ).logits
        return logits[0]

    def _keep_hidden(self, _module: Any, _inputs: Any, output: Any) -> None:
        self._hidden = output[0]

    def _pooled(self, scheduled: Sequence[ScheduledRequest]) -> dict[int, NDArray[np.float32]]:
        """Return what each entry that pools gives of its vector (see `StepResult.pooled`), by its place."""
        hidden, self._hidden = self._hidden, None
        pooled: dict[int, NDArray[np.float32]] = {}
        first = 0
        for at, entry in enumerate(scheduled):
            after = first + len(entry.token_ids)
            if pools(entry):
                assert hidden is not None
                rows = hidden[0, first if entry.request.pooling == "mean" else after - 1 : after]
                pooled[at] = rows.float().sum(dim=0).cpu().numpy()
            first = after
        return pooled

    def _integers(self, values: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)


def cached_shapes(model: Any) -> Mapping[int, LayerShape]:
    """Return what each layer caches, by running one token; the model attends by `attention` from then on.

    Raises UNSUPPORTED where not all of the model's layers attend through transformers' attention interface.
    """
    name = type(model).__name__
    model.set_attn_implementation(IMPLEMENTATION)
    probe = ShapeProbe()
    try:
        with torch.inference_mode():
            one = torch.zeros(1, 1, dtype=torch.long, device=model.device)
            model(input_ids=one, position_ids=one, use_cache=False, logits_to_keep=one[0], **{STEP: probe})
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise unsupported(f"{name} cannot run with paged attention: {error}") from error
    expected = model.config.get_text_config().num_hidden_layers
    if len(probe.layers) != expected:
        raise unsupported(
            f"{name} cannot run with paged attention: {len(probe.layers)} of its {expected} layers use the interface"
        )
    return probe.layers


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
