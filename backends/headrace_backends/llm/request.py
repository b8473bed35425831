"""One generation and where it stands. Pure: knows no scheduler, no tensor and no tokenizer.

Invariant between steps: the KV of tokens [0, num_computed_tokens) is in the cache, and the newest sampled token's is not;
it is computed by the step that samples the one after.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, Protocol

from headrace_backends.llm.beam import BeamRules
from headrace_backends.llm.grammar import Grammar, GrammarState, ReasoningMarks
from headrace_backends.llm.logprobs import PromptLogprobs
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_protocol.generation import StructuredOutput

_MASK = (1 << 64) - 1


class FinishReason(Enum):
    """Why a generation ended; the values are the words that clients read."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


class Status(Enum):
    """Where a request is."""

    WAITING = "waiting"
    WAITING_FOR_GRAMMAR = "waiting for its grammar"
    """Not to be run before what its text has to be is compiled."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Waiting again: its blocks were given to others, so its tokens will be computed again."""
    FINISHED = "finished"


class TextOutput(Protocol):
    """The text of one generation as it grows; the scheduler shows it each token."""

    def append(self, token_id: int, *, check_stop: bool) -> str | None:
        """Take the next token; return the stop string that it completed."""

    def finish(self, *, check_stop: bool) -> str | None:
        """Take the end of the tokens; return the stop string that it completed."""

    def take(self, *, final: bool = False) -> str:
        """Return the new text that is certain; with `final`, all that is left."""


@dataclass(slots=True, eq=False)
class GenerationRequest:
    """One sequence of tokens that is being continued. The scheduler that it was given to alone changes its state.

    A request for n > 1 is n of these (see `children`): they share the prompt's blocks through the prefix cache.
    """

    id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    seed: int
    """Taken modulo 2^64. The k-th token is drawn from (seed, k) alone, so that no batch, preemption or draft changes it."""
    eos_token_ids: frozenset[int] = frozenset()
    arrival_ns: int = 0
    priority: int = 0
    """Lower runs first."""
    cache_salt: str | None = None
    """Only requests of equal salt share cached blocks."""
    lora: str | None = None
    index: int = 0
    """Which of the n choices this is."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """`params.bad_words` as tokens."""
    text: TextOutput | None = None
    beam: BeamRules | None = None
    """Of a request for a beam search, which is never scheduled itself: see `beam_searches`."""
    places: int = 1
    """How many places in the order of arrival it takes: the others are for requests that go on with it."""
    structured: StructuredOutput | None = None
    """What its text has to be."""
    reasoning: ReasoningMarks | None = None
    """How the model sets its reasoning apart; needed for `params.thinking_token_budget` alone."""
    pooling: Literal["last", "mean"] | None = None
    """Of a request whose prompt's vector is wanted: of its last token, or the mean of all. `params.max_tokens` is 0."""

    status: Status = field(default=Status.WAITING, init=False)
    max_tokens: int = field(default=0, init=False)
    """Set at admission: what the request asked for, within the model's length."""
    order: int = field(default=0, init=False)
    """Set at admission: its place among all arrivals."""
    token_ids: list[int] = field(default_factory=list, init=False)
    """Prompt and output."""
    output_token_ids: list[int] = field(default_factory=list, init=False)
    draft_token_ids: list[int] = field(default_factory=list, init=False)
    """Guesses that the next step checks."""
    num_computed_tokens: int = field(default=0, init=False)
    num_cached_tokens: int = field(default=0, init=False)
    """Prompt tokens found in the prefix cache when it was first run."""
    block_table: list[int] = field(default_factory=list, init=False)
    """Append-only while the request runs."""
    block_hashes: list[bytes] = field(default_factory=list, init=False)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=lambda: [None], init=False)
    """Of the prompt's tokens as far as computed, if asked for."""
    pooled: Any = field(default=None, init=False)
    """The vector, or the sum of those so far (see `step.StepResult.pooled`)."""
    compilation: Future[Grammar] | None = field(default=None, init=False)
    """Of `structured`; shared by all choices."""
    grammar: GrammarState | None = field(default=None, init=False)
    """Where the output stands in it; set when it is compiled, and kept through preemption."""
    num_preemptions: int = field(default=0, init=False)
    passed_over: int = field(default=0, init=False)
    """How often another was admitted that came later, while this was the first in order."""
    suspect: bool = field(default=False, init=False)
    """A step with it failed: it runs alone until it is known whether it was the cause."""
    finish_reason: FinishReason | None = field(default=None, init=False)
    stop_reason: int | str | None = field(default=None, init=False)
    """The stop token or the stop string; None for the end of the text."""
    error: str | None = field(default=None, init=False)
    scheduled_ns: int | None = field(default=None, init=False)
    first_token_ns: int | None = field(default=None, init=False)
    finished_ns: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.seed &= _MASK

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens that are certain: drafts do not count."""
        return len(self.token_ids)

    @property
    def num_tokens_with_drafts(self) -> int:
        return len(self.token_ids) + len(self.draft_token_ids)

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.output_token_ids.append(token_id)


def child_seed(seed: int, index: int) -> int:
    """Return the seed of the index-th of n choices (splitmix64); the first keeps the seed itself."""
    if index == 0:
        return seed & _MASK
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def child_id(request_id: str, index: int) -> str:
    """Return the id of the index-th of n choices; the first keeps the request's own."""
    return request_id if index == 0 else f"{request_id}/{index}"
