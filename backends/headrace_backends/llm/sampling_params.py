"""How a request wants its tokens chosen: the names, defaults and ranges that vLLM's users know. Pure.

Knows no model and no tokenizer; `parsing` reads them from what a client sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

GREEDY_BELOW = 1e-5
"""A lower temperature takes the most likely token."""
LOWEST_TEMPERATURE = 0.01
"""Temperatures that are not greedy are raised to this."""


class RepetitionDetection(msgspec.Struct, frozen=True, kw_only=True):
    """Ends a request whose last tokens repeat one pattern."""

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2
    """Times the pattern stands at the end."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """What one request asks of the sampler and of the ends of its text. Made by `parsing.parse`, or by code that keeps its ranges."""

    n: int = 1
    temperature: float = 1.0
    """0 is greedy; else from 0.01 to 2."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output: positive logits are divided by it, others multiplied."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    """None: as many as the model's length allows. 0: the prompt is computed and nothing is generated."""
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    """Most likely tokens to tell beside the chosen one; -1 is the whole vocabulary."""
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    """Keep so many tokens of the prompt; -1 is as many as the model's length allows."""
    truncation_side: Literal["left", "right"] = "left"
    """The side that is cut off."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    skip_reading_prefix_cache: bool = False
    thinking_token_budget: int | None = None
    """Tokens of reasoning at most; None is no limit."""
    repetition_detection: RepetitionDetection | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


def truncated(prompt: Sequence[int], params: SamplingParams, max_model_len: int) -> Sequence[int]:
    """Return the part of a prompt that `truncate_prompt_tokens` keeps; -1 leaves room for one token, if one is wanted."""
    keep = params.truncate_prompt_tokens
    if keep is None:
        return prompt
    if keep < 0:
        keep = max_model_len - (params.max_tokens != 0)
    if len(prompt) <= keep:
        return prompt
    return prompt[len(prompt) - keep :] if params.truncation_side == "left" else prompt[:keep]
