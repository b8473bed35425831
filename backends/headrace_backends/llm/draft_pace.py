"""How far to guess ahead for one request: as far as its guesses were worth lately. Pure.

The length doubles while all of a draft is right, and goes half the way to what was right where not. Guesses that keep being
wrong cost time, so they pause, longer each time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

_FIRST_REACH = 4.0
_LONGEST_PAUSE = 256


@dataclass(frozen=True, slots=True)
class PaceConfig:
    """How pace is set."""

    most: int
    """Tokens of one draft at most."""
    patience: int = 3
    """Drafts in a row without a right guess after which a request pauses."""
    pause: int = 16
    """Tokens that the first pause lasts. A pause after no right guess since the one before lasts twice as long as that."""


@dataclass(slots=True)
class Pace:
    """The last draft of one request, and what is to be made of it."""

    config: PaceConfig
    reach: float = _FIRST_REACH
    misses: int = 0
    """Drafts in a row without a right guess."""
    pause: int = 0
    """Tokens that the last pause lasted; 0 after a right guess."""
    paused_until: int = 0
    """Length of the sequence."""
    guess: list[int] = field(default_factory=list)
    guessed_at: int = -1

    def next_length(self, tokens: Sequence[int]) -> int:
        """Learn from what became of the last draft, of which `tokens` tell; return how long the next may be, 0 in a pause."""
        self._learn(tokens)
        if len(tokens) < self.paused_until:
            return 0
        return min(math.ceil(self.reach), self.config.most)

    def drafted(self, guess: list[int], length: int) -> None:
        """Remember what is guessed to follow `length` tokens."""
        self.guess, self.guessed_at = guess, length

    def _learn(self, tokens: Sequence[int]) -> None:
        guess, new = self.guess, len(tokens) - self.guessed_at
        if not guess or not new:
            return
        self.guess = []
        right = 0
        while right < min(new, len(guess)) and tokens[self.guessed_at + right] == guess[right]:
            right += 1
        if right == len(guess):
            self.reach = min(2.0 * max(self.reach, right), self.config.most)
        else:
            self.reach = max(1.0, (self.reach + right) / 2)
        if right:
            self.misses = self.pause = 0
            return
        self.misses += 1
        if self.misses == self.config.patience:
            self.misses = 0
            self.pause = min(2 * self.pause, _LONGEST_PAUSE) or self.config.pause
            self.paused_until = len(tokens) + self.pause
