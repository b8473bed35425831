"""Guesses of the next tokens from what the prompt and the output already said (prompt lookup). Pure.

A draft is what followed the most recent place where the newest tokens stood before, the longer match first (prompt lookup
decoding, Saxena 2023). How long it is follows what the request's drafts were worth (`draft_pace`); in large batches, where a
step's time grows with its tokens, there are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace_backends.llm.draft_pace import Pace, PaceConfig
from headrace_backends.llm.request import GenerationRequest

_CANDIDATES = 16
"""Earlier places that are compared for the longest match."""


class Drafter(Protocol):
    """Guesses the next tokens of requests that run."""

    def propose(self, requests: Sequence[GenerationRequest]) -> list[list[int]]:
        """Return guesses for each request, none where there is nothing to guess from."""

    def forget(self, request_id: str) -> None:
        """Let go of what is kept of a request; it may be unknown."""


@dataclass(frozen=True, slots=True)
class NgramConfig:
    """How far guesses go."""

    num_speculative_tokens: int = 8
    """Tokens of one draft at most."""
    prompt_lookup_min: int = 2
    """Newest tokens that must have stood before."""
    prompt_lookup_max: int = 4
    disable_above: int = 16
    """With more running requests than this nothing is guessed."""
    patience: int = 3
    """Drafts in a row without a right guess after which a request pauses."""
    pause: int = 16
    """Tokens that the first pause lasts. A pause after no right guess since the one before lasts twice as long as that."""

    def problems(self) -> list[str]:
        """Return what is wrong with the settings."""
        found = [
            f"{name}: expected 1 at least, got {value}"
            for name in ("num_speculative_tokens", "prompt_lookup_min", "disable_above", "patience", "pause")
            if (value := getattr(self, name)) < 1
        ]
        if self.prompt_lookup_max < self.prompt_lookup_min:
            found.append(
                f"prompt_lookup_max: {self.prompt_lookup_max} is less than prompt_lookup_min, {self.prompt_lookup_min}"
            )
        return found


@dataclass(slots=True)
class _Index:
    """Where each group of `prompt_lookup_min` tokens ended, the latest place first; one entry a token."""

    pace: Pace
    last: dict[tuple[int, ...], int] = field(default_factory=dict)
    earlier: list[int] = field(default_factory=list)
    """Of each place that a group ended: the place before with the same group, or -1."""


class NgramDrafter:
    """Keeps an index of each request's tokens, extended as they come."""

    def __init__(self, config: NgramConfig) -> None:
        """Raise ValueError for settings that are not right."""
        if problems := config.problems():
            raise ValueError("; ".join(problems))
        self._config = config
        self._pace = PaceConfig(config.num_speculative_tokens, config.patience, config.pause)
        self._indexes: dict[str, _Index] = {}

    def propose(self, requests: Sequence[GenerationRequest]) -> list[list[int]]:
        if len(requests) > self._config.disable_above:
            return [[] for _ in requests]
        return [self._propose(request.id, request.token_ids) for request in requests]

    def forget(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)

    def _propose(self, request_id: str, tokens: list[int]) -> list[int]:
        index = self._indexes.get(request_id)
        if index is None:
            index = self._indexes[request_id] = _Index(Pace(self._pace))
        self._extend(index, tokens)
        count = index.pace.next_length(tokens)
        end = self._best(index, tokens) if count else None
        guess = [] if end is None else _continued(tokens, end, count)
        index.pace.drafted(guess, len(tokens))
        return guess

    def _extend(self, index: _Index, tokens: list[int]) -> None:
        """Index the groups that some token follows."""
        size = self._config.prompt_lookup_min
        for end in range(len(index.earlier), len(tokens)):
            if end < size:
                index.earlier.append(-1)
                continue
            group = tuple(tokens[end - size : end])
            index.earlier.append(index.last.get(group, -1))
            index.last[group] = end

    def _best(self, index: _Index, tokens: list[int]) -> int | None:
        """Return where the longest, then latest, earlier match of the newest tokens ends."""
        size, most = self._config.prompt_lookup_min, self._config.prompt_lookup_max
        place = index.last.get(tuple(tokens[len(tokens) - size :]), -1) if len(tokens) >= size else -1
        best, longest = None, 0
        for _ in range(_CANDIDATES):
            if place < 0:
                break
            length = size
            while length < min(most, place) and tokens[place - length - 1] == tokens[-length - 1]:
                length += 1
            if length > longest:
                best, longest = place, length
            if longest == most:
                break
            place = index.earlier[place]
        return best


def _continued(tokens: list[int], end: int, count: int) -> list[int]:
    """Return the `count` tokens that followed `end`; where they reach the end, it goes on with itself."""
    length = len(tokens)
    guess: list[int] = []
    for at in range(end, end + count):
        guess.append(tokens[at] if at < length else guess[at - length])
    return guess
