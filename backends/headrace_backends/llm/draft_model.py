"""Guesses of the next tokens by a smaller model that runs ahead of the large one. Pure: knows steps and blocks, no tensors.

The draft model has a cache and blocks of its own, and a shadow of each request that it guesses for. Before it guesses it takes
in what was generated since, so that wrong guesses fall by being written over; a shadow whose request does not run any more, as
it was preempted or has ended, gives its blocks back. Guesses are greedy: which of them stand is the large model's choice
alone (`step.verified`), so they change no output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from logging import getLogger
from typing import Final

from headrace_backends.llm.block_manager import BlockManager
from headrace_backends.llm.draft_pace import Pace, PaceConfig
from headrace_backends.llm.request import GenerationRequest
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_backends.llm.step import ModelRunner, ScheduledRequest, SchedulerOutput

_LOG: Final = getLogger(__name__)
_FAILURES: Final = 3
"""Guesses that fail one after another before there are no more."""
_GREEDY: Final = SamplingParams(temperature=0, max_tokens=None, detokenize=False)


@dataclass(frozen=True, slots=True)
class DraftModelConfig:
    """How far the draft model runs ahead."""

    max_model_len: int
    """Tokens that the draft model and its cache can hold of one request."""
    vocab_size: int
    """Of the model that checks: a guess beyond it ends the draft before it."""
    num_speculative_tokens: int = 3
    """Tokens of one draft at most."""
    disable_above: int = 16
    """With more running requests than this nothing is guessed."""
    max_num_batched_tokens: int = 512
    """Tokens that the draft model takes in before one guess, of all requests together: a long prompt takes several rounds."""
    patience: int = 3
    pause: int = 16
    """See `draft_pace.PaceConfig`."""

    def problems(self) -> list[str]:
        """Return what is wrong with the settings."""
        names = ("num_speculative_tokens", "disable_above", "max_num_batched_tokens", "max_model_len")
        return [f"{name}: expected 1 at least, got {value}" for name in names if (value := getattr(self, name)) < 1]


@dataclass(slots=True, eq=False)
class _Shadow:
    """A request as the draft model knows it."""

    request: GenerationRequest
    """Certain tokens, and behind them the last guess."""
    certain: int
    """Tokens of the real request when it was last looked at."""
    pace: Pace
    wanted: int = 0
    """Tokens to guess now."""

    def follow(self, real: GenerationRequest) -> None:
        """Take over what was generated since; what was computed of a wrong guess counts as not computed."""
        mine, known = self.request, self.certain
        right = known
        while right < min(mine.num_computed_tokens, real.num_tokens) and mine.token_ids[right] == real.token_ids[right]:
            right += 1
        mine.num_computed_tokens = min(mine.num_computed_tokens, right)
        mine.token_ids[known:] = real.token_ids[known:]
        self.certain = real.num_tokens


class DraftModelDrafter:
    """Owns the draft model's blocks. The runner is the draft model's, with a cache of as many blocks.

    A runner that fails costs the guesses, not the requests; after a few failures in a row there are no more guesses.
    """

    def __init__(self, config: DraftModelConfig, runner: ModelRunner, blocks: BlockManager) -> None:
        """Raise ValueError for settings that are not right."""
        if problems := config.problems():
            raise ValueError("; ".join(problems))
        self._config = config
        self._pace = PaceConfig(config.num_speculative_tokens, config.patience, config.pause)
        self._runner = runner
        self._blocks = blocks
        self._shadows: dict[str, _Shadow] = {}
        self._finished_ids: list[str] = []
        self._failures = 0

    def propose(self, requests: Sequence[GenerationRequest]) -> list[list[int]]:
        """Return guesses for each request; what does not fit into the draft model or its cache has none."""
        for gone in self._shadows.keys() - {request.id for request in requests}:
            self.forget(gone)
        if len(requests) > self._config.disable_above or self._failures == _FAILURES:
            return [[] for _ in requests]
        try:
            guesses = self._guesses(requests)
        except Exception:
            self._failures += 1
            _LOG.exception("the draft model failed: nothing is guessed%s", " any more" * (self._failures == _FAILURES))
            for name in list(self._shadows):
                self.forget(name)
            return [[] for _ in requests]
        self._failures = 0
        return guesses

    def forget(self, request_id: str) -> None:
        shadow = self._shadows.pop(request_id, None)
        if shadow is not None:
            self._blocks.free(shadow.request)
            self._finished_ids.append(request_id)

    def check_integrity(self) -> None:
        """Assert what must hold between any two calls."""
        self._blocks.check_integrity(shadow.request for shadow in self._shadows.values())
        for shadow in self._shadows.values():
            computed = shadow.request.num_computed_tokens
            assert computed <= len(shadow.request.block_table) * self._blocks.block_size
            assert computed <= shadow.request.num_tokens

    def _guesses(self, requests: Sequence[GenerationRequest]) -> list[list[int]]:
        shadows = [self._shadow(request) if _waits_for_one(request) else None for request in requests]
        growing = self._caught_up([shadow for shadow in shadows if shadow is not None])
        for length in range(2, self._config.num_speculative_tokens + 1):
            growing = [shadow for shadow in growing if shadow.wanted >= length and self._reserve(shadow.request, 1)]
            if not growing:
                break
            self._compute([(shadow.request, 1) for shadow in growing])
        return [[] if shadow is None else self._drafted(shadow) for shadow in shadows]

    def _drafted(self, shadow: _Shadow) -> list[int]:
        guess = shadow.request.token_ids[shadow.certain :]
        end = next((at for at, token in enumerate(guess) if token >= self._config.vocab_size), len(guess))
        del guess[end:]
        shadow.pace.drafted(guess, shadow.certain)
        return guess

    def _shadow(self, request: GenerationRequest) -> _Shadow | None:
        """Return what is known of a request, brought up to date; None where it is too long, or there is no room."""
        if request.num_tokens > self._config.max_model_len:
            self.forget(request.id)
            return None
        shadow = self._shadows.get(request.id)
        if shadow is None:
            shadow = self._begin(request)
        else:
            shadow.follow(request)
            del shadow.request.block_hashes[shadow.request.num_computed_tokens // self._blocks.block_size :]
        if shadow is not None:
            shadow.wanted = shadow.pace.next_length(request.token_ids)
        return shadow

    def _begin(self, request: GenerationRequest) -> _Shadow | None:
        mine = GenerationRequest(request.id, tuple(request.token_ids), _GREEDY, seed=0, cache_salt=request.cache_salt)
        cached = self._blocks.lookup(mine)
        if not self._blocks.can_allocate(cached, mine.num_tokens):
            return None
        self._blocks.allocate(mine, cached, mine.num_tokens)
        mine.num_computed_tokens = len(cached) * self._blocks.block_size
        shadow = self._shadows[request.id] = _Shadow(mine, request.num_tokens, Pace(self._pace))
        return shadow

    def _caught_up(self, shadows: Sequence[_Shadow]) -> list[_Shadow]:
        """Take in what is new, within the budget, and guess one token of each that wants it; return those that have it."""
        budget = self._config.max_num_batched_tokens
        step: list[tuple[GenerationRequest, int]] = []
        ready = []
        for shadow in shadows:
            mine = shadow.request
            count = min(mine.num_tokens - mine.num_computed_tokens, budget)
            if not shadow.wanted or not count or not self._reserve(mine, count):
                continue
            if mine.num_computed_tokens + count == mine.num_tokens:
                ready.append(shadow)
            step.append((mine, count))
            budget -= count
        if step:
            starts = [mine.num_computed_tokens for mine, _ in step]
            self._compute(step)
            for (mine, _), start in zip(step, starts, strict=True):
                self._blocks.register(mine, start)
        return ready

    def _reserve(self, mine: GenerationRequest, count: int) -> bool:
        """Give a shadow room for `count` tokens more; say whether there was."""
        end = mine.num_computed_tokens + count
        if end > self._config.max_model_len or not self._blocks.can_append(mine, end):
            return False
        self._blocks.append(mine, end)
        return True

    def _compute(self, counts: Sequence[tuple[GenerationRequest, int]]) -> None:
        """Compute so many tokens of each; where those are all, its next token is guessed."""
        scheduled = []
        for mine, count in counts:
            start, end = mine.num_computed_tokens, mine.num_computed_tokens + count
            entry = ScheduledRequest(
                request=mine,
                start=start,
                token_ids=tuple(mine.token_ids[start:end]),
                num_drafts=0,
                num_sampled_rows=int(end == mine.num_tokens),
                block_table=tuple(mine.block_table),
            )
            scheduled.append(entry)
        step = SchedulerOutput(
            tuple(scheduled), sum(count for _, count in counts), finished_ids=tuple(self._finished_ids)
        )
        self._finished_ids.clear()
        for entry, result in zip(scheduled, self._runner.execute(step), strict=True):
            if result.error is not None:
                raise RuntimeError(result.error)
            entry.request.num_computed_tokens = entry.end
            entry.request.token_ids.extend(result.token_ids)


def _waits_for_one(request: GenerationRequest) -> bool:
    """Say whether all but the newest token is computed, so that guesses can follow; not so while it comes back."""
    return request.num_computed_tokens == request.num_tokens - 1
