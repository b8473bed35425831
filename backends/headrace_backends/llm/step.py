"""What one engine step computes, and what the runner answers. Pure: the seam between the scheduler and the model.

A runner writes the K and V of all the step's tokens in a layer before it attends in that layer: requests of one step may
share blocks that are filled in this very step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headrace_backends.llm.logprobs import PromptLogprobs, TokenLogprobs
from headrace_backends.llm.request import GenerationRequest


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledRequest:
    """The tokens of one request that a step computes. The request is borrowed: it is as it was until the update."""

    request: GenerationRequest
    start: int
    """Position of the first token; what lies before it is in the cache."""
    token_ids: Sequence[int]
    """Consecutive tokens, drafts last. Never empty."""
    num_drafts: int
    """How many of the last tokens are guesses to be checked."""
    num_sampled_rows: int
    """Of how many of the last tokens logits are needed and a token is sampled: 0 for a chunk that does not reach the end
    of what is known, else 1 + num_drafts."""
    block_table: tuple[int, ...]

    @property
    def end(self) -> int:
        """Context length of the last token, itself included."""
        return self.start + len(self.token_ids)

    @property
    def draft_token_ids(self) -> Sequence[int]:
        return self.token_ids[len(self.token_ids) - self.num_drafts :]

    def slots(self, block_size: int) -> list[int]:
        """Return where the K and V of each token go: block * block_size + offset."""
        table = self.block_table
        return [table[at // block_size] * block_size + at % block_size for at in range(self.start, self.end)]


@dataclass(frozen=True, slots=True, eq=False)
class SchedulerOutput:
    """One step. Empty where nothing can run: then there is nothing to execute nor to update."""

    scheduled: tuple[ScheduledRequest, ...] = ()
    num_tokens: int = 0
    preempted_ids: tuple[str, ...] = ()
    """Requests that lost their blocks since the last step that was not empty."""
    finished_ids: tuple[str, ...] = ()
    """Requests that ended since the last step that was not empty: state kept for them goes before this step's begins, as an id may return."""

    def __bool__(self) -> bool:
        return bool(self.scheduled)


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What the runner found for one scheduled request."""

    token_ids: Sequence[int] = ()
    """The drafts that were right, and one token more: from 1 to 1 + num_drafts of them, none where no row was sampled."""
    logprobs: Sequence[TokenLogprobs] | None = None
    """One of each token, if the request wants them."""
    prompt_logprobs: Sequence[PromptLogprobs] = ()
    """Of the prompt tokens whose predecessor was computed by this step, in order: token start+1 and so on."""
    pooled: Any = None
    """Of a request that pools, fp32 [width]: for the mean the sum of the hidden states of the step's tokens; for the last,
    the hidden state of the prompt's last token, from the step that computes it."""
    error: str | None = None
    """Ends this request alone."""


class ModelRunner(Protocol):
    """The one part with tensors."""

    def execute(self, step: SchedulerOutput) -> Sequence[StepResult]:
        """Compute a step; one result of each scheduled request, in order. Whatever it raises ends the step's requests."""


def pools(entry: ScheduledRequest) -> bool:
    """Say whether a vector is wanted of these tokens."""
    request = entry.request
    return request.pooling == "mean" or (request.pooling == "last" and entry.end == request.num_prompt_tokens)


def verified(draft_token_ids: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """Return the tokens that stand, given one sampled token of each of the 1 + k rows.

    A row's token is drawn as if the drafts before it were output. The first that differs from its draft replaces it and
    the rest fall; if all are equal, the last row's token is a gift. With one uniform for each position this yields the
    very tokens that generation without drafts would (Leviathan et al. 2023 with a one-hot draft distribution).
    """
    for at, draft in enumerate(draft_token_ids):
        if sampled[at] != draft:
            return list(sampled[: at + 1])
    return list(sampled[: len(draft_token_ids) + 1])


def contradiction(entry: ScheduledRequest, result: StepResult) -> str | None:
    """Return how a result contradicts what was asked."""
    count, rows = len(result.token_ids), entry.num_sampled_rows
    if count > rows or bool(count) != bool(rows):
        return f"the model gave {count} tokens for {rows} rows"
    if tuple(result.token_ids[: count - 1]) != tuple(entry.draft_token_ids[: max(0, count - 1)]):
        return "the model gave other tokens than the drafts that it accepted"
    params = entry.request.params
    if result.pooled is None and pools(entry):
        return "the model gave no vector"
    if params.logprobs is not None and len(result.logprobs or ()) != count:
        return f"the model gave {len(result.logprobs or ())} log probabilities for {count} tokens"
    if params.prompt_logprobs is not None:
        expected = max(0, min(entry.end + 1, entry.request.num_prompt_tokens) - entry.start - 1)
        if len(result.prompt_logprobs) != expected:
            return f"the model gave {len(result.prompt_logprobs)} log probabilities for {expected} tokens of the prompt"
    return None
