"""Beam search over one prompt: which texts go on, which have ended, and when it is over. Pure.

The algorithm of transformers: of all continuations by one token the likeliest go on; what ends among the first `width` of them is
a result, scored by its log probability over length ** length_penalty. Knows no engine: somebody tells it, for each text that
is alive, the likeliest next tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from headrace_backends.llm.logprobs import TokenLogprob, TokenLogprobs

MAX_WIDTH: Final = 32


@dataclass(frozen=True, slots=True)
class BeamRules:
    """How a beam search is done."""

    width: int
    """Texts that are alive at once, and results at most; 1 to `MAX_WIDTH`."""
    length_penalty: float = 1.0
    """Above 0 favours long texts, below 0 short ones."""
    early_stopping: bool = False
    """Whether it is over when there are `width` results; else when no text that is alive can become better than the worst."""


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """One text so far."""

    token_ids: tuple[int, ...] = ()
    cumulative_logprob: float = 0.0
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of each token, with the likeliest ones at its place."""
    ended_by: int | None = None
    """The token that ended it, which is its last; None for a text at its full length or alive."""


@dataclass(slots=True, eq=False)
class BeamSearch:
    """One search. `alive` are the texts whose next tokens are wanted; empty when it is over."""

    rules: BeamRules
    end_token_ids: frozenset[int]
    max_tokens: int
    """1 at least."""
    min_tokens: int = 0
    """No end before so many tokens."""
    alive: list[Beam] = field(default_factory=lambda: [Beam()], init=False)
    _results: list[tuple[float, Beam]] = field(default_factory=list, init=False)
    """By score, the best first; `width` at most."""

    @property
    def num_candidates(self) -> int:
        """How many of the likeliest next tokens are wanted of each text: enough for `width` that do not end it."""
        return self.rules.width * (1 + max(1, len(self.end_token_ids)))

    def take(self, candidates: Sequence[Sequence[TokenLogprob]]) -> None:
        """Take the likeliest next tokens of each text that is alive, likeliest first."""
        grown = [
            (beam.cumulative_logprob + each.logprob, beam, each, tops)
            for beam, tops in zip(self.alive, candidates, strict=True)
            for each in tops[: self.num_candidates]
        ]
        grown.sort(key=lambda one: -one[0])  # stable: of equal ones that of the better text, then the likelier token
        length = len(self.alive[0].token_ids) + 1
        self.alive = []
        for place, (total, beam, token, tops) in enumerate(grown[: self.num_candidates]):
            ends = token.token_id in self.end_token_ids and length > self.min_tokens
            if token.token_id in self.end_token_ids and not ends:
                continue
            if (ends or length == self.max_tokens) and place >= self.rules.width:
                continue
            longer = Beam(
                (*beam.token_ids, token.token_id),
                total,
                (*beam.logprobs, TokenLogprobs(token, tuple(tops))),
                token.token_id if ends else None,
            )
            if ends or length == self.max_tokens:
                self._results.append((self._score(total, length), longer))
            elif len(self.alive) < self.rules.width:
                self.alive.append(longer)
        self._results.sort(key=lambda one: -one[0])
        del self._results[self.rules.width :]
        if self._over(length):
            self.alive = []

    def best(self, count: int) -> list[Beam]:
        """Return the best results, of which there may be fewer; to be asked when it is over."""
        return [beam for _, beam in self._results[:count]]

    def _score(self, total: float, length: int) -> float:
        return float(total / length**self.rules.length_penalty)

    def _over(self, length: int) -> bool:
        if not self.alive or len(self._results) < self.rules.width:
            return False
        return (
            self.rules.early_stopping or self._score(self.alive[0].cumulative_logprob, length) <= self._results[-1][0]
        )
