"""What the backend asks of an engine: ours, vLLM's or llama.cpp's. The seam between doors and generation.

An engine owns a thread (or a process) of its own. Everything here may be called by any thread and returns at once, except
`open` and `close`. Calls have numbers that the backend chose; the engine answers by `Listener.told`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace_backends.llm.beam import BeamRules
from headrace_backends.llm.output import GenerationOutput
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_protocol.errors import InferError
from headrace_protocol.generation import ChatPrompt, ModelCard, StructuredOutput


class TextCodec(Protocol):
    """A model's tokenizer and chat template. Thread-safe. Each method raises INVALID_ARG for what it cannot take."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the tokens of a text."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of tokens; incomplete characters are U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return a token's exact bytes, from the vocabulary; None for a special token or one that is not there."""
        ...

    def render(self, chat: ChatPrompt) -> str:
        """Return the prompt that the chat template makes of a conversation."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class EngineCall:
    """One call as an engine takes it: checked and tokenised. Its choices enter together or not at all."""

    number: int
    prompts: tuple[Sequence[int], ...]
    params: SamplingParams
    """`n` choices of each prompt; choice i of prompt p has the index p * n + i."""
    arrival_ns: int
    seed: int = 0
    """Of the first choice where `params` has none: chosen at random by the backend."""
    structured: StructuredOutput | None = None
    beam: BeamRules | None = None
    """Beam search in place of sampling; the `n` best texts of each prompt are told, at the end."""
    priority: int = 0
    cache_salt: str | None = None
    adapter: str | None = None
    embed: bool = False
    """Whether the prompts' vectors are wanted, and no text."""


@dataclass(frozen=True, slots=True, eq=False)
class Told:
    """What a step tells of one call."""

    number: int
    outputs: Sequence[GenerationOutput] = ()
    """`index` says which choice; `request_id` means nothing here."""
    vectors: NDArray[np.float32] | None = None
    """Of a call with `embed`: [prompts, width], not normalised; comes once, and ends the call."""
    error: InferError | None = None
    """Ends the call; nothing was told of it before, or it broke while it was told."""
    scheduled_ns: int | None = None
    """When the first of its choices first ran; on its last outputs."""
    first_token_ns: int | None = None
    num_preemptions: int = 0


class Listener(Protocol):
    """Who is told. Called by the engine's thread, and must not block."""

    def told(self, news: Sequence[Told]) -> None:
        """Take what one step tells, of all calls together. The last output of each choice has a finish reason."""
        ...

    def broke(self, error: InferError) -> None:
        """Take note that the engine cannot go on; every call has been told so. The process should end."""
        ...


@dataclass(frozen=True, slots=True)
class EngineStats:
    """How an engine stands. Totals only grow."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """Part of the KV cache that is in use, 0 to 1."""
    waiting_tokens: int = 0
    totals: Mapping[str, int] = field(default_factory=dict)
    """prefix_cache_queries, prefix_cache_hits (tokens), preemptions, prompt_tokens, generation_tokens, steps,
    step_tokens, drafts, draft_tokens, accepted_tokens: what the engine counts of these."""
    accepted_per_position: Sequence[int] = ()
    cache_config: Mapping[str, str] = field(default_factory=dict)
    """How the KV cache is set up, which never changes: block_size, num_gpu_blocks, cache_dtype, enable_prefix_caching and
    the like, as text; empty where that is not known. For the metric cache_config_info."""


class Engine(Protocol):
    """A way to continue texts. Constructing is not starting."""

    def open(self, listener: Listener) -> None:
        """Load the model and begin. Raises InferError with the reason."""
        ...

    @property
    def card(self) -> ModelCard:
        """What the model is; known once it is open."""
        ...

    @property
    def text(self) -> TextCodec:
        """Its tokenizer; known once it is open."""
        ...

    def submit(self, call: EngineCall) -> None:
        """Take a call. Never raises: a refusal is told as the call's error."""
        ...

    def abort(self, number: int) -> None:
        """End a call of which nobody wants to hear any more; nothing is told of it afterwards, blocks are free at once."""
        ...

    def stats(self) -> EngineStats:
        """Return how it stands now."""
        ...

    def healthy(self) -> bool:
        """Say whether it can go on: its thread lives and its steps do not all fail."""
        ...

    def close(self) -> None:
        """End everything and free the model."""
        ...


class EngineMaker(Protocol):
    """Makes an engine of a model's settings; a module for each, named in `engines.py`."""

    def __call__(self, source: Path, settings: Mapping[str, Any], *, threads: int, device: str) -> Engine:
        """Return the engine, not open. Raises INVALID_ARG where the settings are wrong, with all that is."""
        ...
