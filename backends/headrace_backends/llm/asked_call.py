"""AskedCall: one request to a language model, read, checked and tokenised; and what is told of it, apart from its form.

Pure. Knows neither tensors nor the JSON that clients send and get: forms write it (`events.py`, `v2_tensors.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace_backends.llm.beam import BeamRules
from headrace_backends.llm.logprobs import PromptLogprobs
from headrace_backends.llm.output import GenerationOutput
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_protocol.datatype import Array
from headrace_protocol.generation import StructuredOutput, Timing


@dataclass(frozen=True, slots=True, eq=False)
class AskedPrompt:
    """One prompt of a call."""

    token_ids: Sequence[int]
    text: str | None = None
    """As it is told: with `echo` alone."""
    in_reasoning: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class AskedCall:
    """What a client wants of the engine."""

    prompts: tuple[AskedPrompt, ...]
    params: SamplingParams
    """As the engine gets them: `n` are all choices that it generates of each prompt."""
    told_n: int = 1
    """Choices of each prompt that are told; where that is fewer than `params.n`, the likeliest."""
    tells_logprobs: bool = False
    """Whether the client asked for them; the engine is also asked where only their sums are needed."""
    stream: bool = False
    echo: bool = False
    return_token_ids: bool = False
    structured: StructuredOutput | None = None
    priority: int = 0
    cache_salt: str | None = None
    adapter: str | None = None
    beam: BeamRules | None = None
    """Beam search in place of sampling."""
    embed: bool = False
    dimensions: int | None = None
    normalize: bool = True


@dataclass(slots=True, eq=False)
class PromptNote:
    """What the engine said of a prompt."""

    num_cached_tokens: int = 0
    logprobs: tuple[PromptLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class News:
    """What is to be told of a call at once."""

    outputs: Sequence[GenerationOutput]
    """One of each choice of which something is new; `index` is the told one, prompt * told_n + choice."""
    prompts: Sequence[PromptNote] | None = None
    """In the first news alone."""
    timing: Timing | None = None
    """In the last news alone."""
    vectors: NDArray[np.float32] | None = None
    """Of a call with `embed`: [prompts, dimensions]."""


class Form(Protocol):
    """How a client is told: which tensors hold it."""

    def write(self, call: AskedCall, news: News) -> Mapping[str, Array]:
        """Return the outputs of one response."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """A request as it was read: either a call for the engine with the form of its answer, or the answer at once."""

    call: AskedCall | None = None
    form: Form | None = None
    answer: Mapping[str, Array] = field(default_factory=dict)
