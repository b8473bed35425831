"""What the sampler is told of one row of logits. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace_backends.llm.grammar_masks import RowMask
from headrace_backends.llm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What a row of logits is to be sampled by. Borrowed until the tokens are chosen."""

    params: SamplingParams
    seed: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    """What was generated before this row's token, drafts that this row assumes to be right included."""
    eos_token_ids: frozenset[int] = frozenset()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    mask: RowMask | None = None
    """Which tokens its grammar allows; None allows all."""
