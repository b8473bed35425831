"""How likely tokens were. Pure."""

from __future__ import annotations

from typing import NamedTuple


class TokenLogprob(NamedTuple):
    """One token and how likely it was."""

    token_id: int
    logprob: float
    """Natural logarithm, of the model's own distribution: before temperature, penalties and masks."""
    rank: int
    """1 is the most likely."""


class TokenLogprobs(NamedTuple):
    """The chosen token and the most likely ones, likeliest first; the chosen one may be among them."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


PromptLogprobs = TokenLogprobs | None
"""None for the first token, which nothing predicts."""
