"""What crosses the boundary for language models: a call of one, what it tells, and what it says of itself.

A language model takes these as JSON in tensors: `generation_call` holds one GenerationCall, and each response has one
GenerationEvent in `generation_event`. The OpenAI doors speak nothing else, and any v2 client may. Knows no engine.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

CALL_INPUT: Final = "generation_call"
EVENT_OUTPUT: Final = "generation_event"
EMBEDDING_OUTPUT: Final = "embedding"
"""FP32 [texts, width]: with the event of a call whose task is embed."""
CARD_PARAMETER: Final = "language_model"
"""The configuration parameter that holds a ModelCard as JSON; the backend adds it at load."""

Task = Literal["generate", "embed", "tokenize", "detokenize"]


class TokenChance(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One token and how likely it was."""

    id: int
    token: str
    """Its text; half a character is U+FFFD."""
    bytes: tuple[int, ...] | None
    """Its exact bytes, from the vocabulary; None for a special token."""
    logprob: float | None
    """Natural logarithm, before temperature, penalties and masks; -inf, which JSON has not, arrives as None."""
    rank: int


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A chosen token with the likeliest ones at its place, likeliest first."""

    chosen: TokenChance
    top: tuple[TokenChance, ...] = ()


class StructuredOutput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the text has to be. `spec` is a schema (JSON text), a pattern, the choices as a JSON list, or a grammar."""

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar", "structural_tag"]
    spec: str = ""
    after_reasoning: bool = True
    """Where the model reasons first, the constraint begins behind its end."""


class ChatPrompt(msgspec.Struct, frozen=True, omit_defaults=True):
    """A conversation that the model's chat template makes a prompt of."""

    messages: list[dict[str, Any]]
    """As OpenAI has them. Checked at the door; arguments of tool calls are objects, not text."""
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    """In place of the model's own; only where the model's settings trust clients with that."""
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class GenerationCall(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One request of a language model: for all of its prompts and choices together, all or none are taken."""

    task: Task = "generate"
    prompts: list[str | list[int]] | None = None
    """Texts or tokens; exactly one of prompts and chat is given. `detokenize` takes tokens."""
    chat: ChatPrompt | None = None
    sampling: dict[str, Any] = msgspec.field(default_factory=dict)
    """By the names of vLLM's SamplingParams; the backend checks each."""
    structured: StructuredOutput | None = None
    add_special_tokens: bool | None = None
    """None: as is usual, for prompts yes and for chats no."""
    stream: bool = False
    """Whether each step is told. If not, there is one event, with everything."""
    echo: bool = False
    """Whether the prompt's text is told."""
    return_token_ids: bool = False
    priority: int = 0
    """Lower runs first."""
    cache_salt: str | None = None
    adapter: str | None = None
    """Name of a LoRA adapter of the model."""
    best_of: int | None = None
    """Choices to generate of each prompt, of which the `n` likeliest are told."""
    beam_width: int | None = None
    """Beam search of this width in place of sampling."""
    length_penalty: float = 1.0
    dimensions: int | None = None
    """Of embeddings: cut to so many and normalised anew."""
    normalize: bool = True
    return_token_strings: bool = False
    """Of tokenize."""
    resumes: bool = False
    """A second attempt at a call whose first was not answered; for logs alone."""


class PromptTold(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What is told of one prompt, in the first event."""

    num_tokens: int
    num_cached_tokens: int = 0
    """Found in the prefix cache."""
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    token_strings: tuple[str, ...] | None = None
    logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One of each token; None for the first."""
    in_reasoning: bool = False
    """Whether the prompt ends inside of the model's reasoning, as some templates open it."""


class ChoiceDelta(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What is new of one choice. The last one of a choice has a finish reason."""

    index: int
    """prompt * n + choice."""
    text: str = ""
    token_ids: tuple[int, ...] = ()
    """Only where return_token_ids asks for them."""
    num_tokens: int = 0
    """Generated so far, of which some may have no text yet."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One of each new token, if asked for, whether its text is held back or not."""
    finish_reason: Literal["stop", "length", "abort", "error", "repetition"] | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    error: str | None = None


class Timing(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Where the time of a call went, in nanoseconds; in its last event."""

    queue_ns: int = 0
    prefill_ns: int = 0
    decode_ns: int = 0
    preemptions: int = 0


class GenerationEvent(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One response of a language model. It is the last one where the response is final."""

    prompts: tuple[PromptTold, ...] = ()
    """In the first event alone, one of each prompt."""
    choices: tuple[ChoiceDelta, ...] = ()
    timing: Timing | None = None
    text: str | None = None
    """Of detokenize."""


class AdapterCard(msgspec.Struct, frozen=True, omit_defaults=True):
    """A LoRA adapter, which is asked for by its name as if it were a model."""

    name: str
    rank: int = 0


class ModelCard(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a language model says of itself, for the doors."""

    max_model_len: int
    """Tokens of prompt and output together."""
    vocab_size: int
    tasks: tuple[Task, ...] = ("generate", "tokenize", "detokenize")
    engine: str = "headrace"
    dtype: str = ""
    has_chat_template: bool = False
    tool_format: str | None = None
    """hermes, llama3_json, mistral or pythonic: how the model writes calls of tools; None if it does not."""
    reasoning_format: str | None = None
    """think_tags, or None where the model does not set its reasoning apart."""
    adapters: tuple[AdapterCard, ...] = ()
    aliases: tuple[str, ...] = ()
    """Other names under which the OpenAI doors serve it."""
    sampling_defaults: dict[str, float] = msgspec.field(default_factory=dict)
    max_logprobs: int = 20
    embedding_width: int = 0


CALL_DECODER: Final = msgspec.json.Decoder(GenerationCall)
EVENT_DECODER: Final = msgspec.json.Decoder(GenerationEvent)
CARD_DECODER: Final = msgspec.json.Decoder(ModelCard)
ENCODER: Final = msgspec.json.Encoder()
