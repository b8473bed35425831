"""Whether a request may enter the engine: what it can never be given, and what it cannot be given now. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from headrace_backends.llm.request import GenerationRequest
from headrace_backends.llm.waiting import Policy


class RefusalReason(Enum):
    """Why a request did not enter."""

    INVALID = "invalid"
    """It will never be right."""
    TOO_LONG = "too_long"
    """Its prompt leaves no room for a token."""
    BUSY = "busy"
    """Too much waits; it may be tried again."""


class Refusal(NamedTuple):
    """The answer to a request that did not enter; nothing was changed."""

    reason: RefusalReason
    message: str


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The engine's limits. Counts are of requests (each of n choices is one) and of tokens."""

    max_model_len: int
    """Tokens of a prompt and its output together."""
    max_num_seqs: int = 32
    """Requests that run at once."""
    max_num_batched_tokens: int = 2048
    """Tokens of one step."""
    policy: Policy = Policy.FCFS
    chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    """Tokens of one prompt in a step while others run; 0 is no limit of its own."""
    reserve_full_prompt: bool = True
    """A prompt is begun only if all of it has room."""
    watermark: float = 0.0
    """Part of the blocks that are kept from new requests while others run."""
    max_num_queued_reqs: int | None = 2048
    """None is no limit, here and below."""
    max_num_queued_tokens: int | None = None
    max_loras: int | None = None
    """Different adapters that run at once."""
    vocab_size: int | None = None

    def problems(self, num_usable_blocks: int, block_size: int) -> list[str]:
        """Return what is wrong with these limits over a cache of that size; with any of it, some request never ends."""
        room = num_usable_blocks * block_size
        found = []
        if self.max_model_len < 2:
            found.append(f"max_model_len: expected 2 at least, got {self.max_model_len}")
        if self.max_model_len > room:
            found.append(f"max_model_len: {self.max_model_len} tokens do not fit in the KV cache's {room}")
        if self.max_num_seqs < 1:
            found.append(f"max_num_seqs: expected 1 at least, got {self.max_num_seqs}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            found.append(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} is less than max_num_seqs, {self.max_num_seqs}"
            )
        if not self.chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            found.append(
                f"max_num_batched_tokens: without chunked prefill it must not be less than max_model_len, {self.max_model_len}"
            )
        if self.long_prefill_token_threshold < 0:
            found.append(f"long_prefill_token_threshold: expected 0 at least, got {self.long_prefill_token_threshold}")
        if not 0 <= self.watermark < 1:
            found.append(f"watermark: expected a part from 0 to below 1, got {self.watermark}")
        found.extend(
            f"{name}: expected 1 at least, got {limit}"
            for name in ("max_num_queued_reqs", "max_num_queued_tokens", "max_loras")
            if (limit := getattr(self, name)) is not None and limit < 1
        )
        return found


def refusal(
    requests: Sequence[GenerationRequest], config: SchedulerConfig, *, num_waiting: int, num_waiting_tokens: int
) -> Refusal | None:
    """Return why the requests, which enter together or not at all, may not enter."""
    for request in requests:
        if (refused := _never(request, config)) is not None:
            return refused
    count, tokens = len(requests), sum(request.num_prompt_tokens for request in requests)
    queues = (
        ("requests", count, num_waiting, config.max_num_queued_reqs),
        ("tokens", tokens, num_waiting_tokens, config.max_num_queued_tokens),
    )
    for what, wanted, _, most in queues:
        if most is not None and wanted > most:
            return Refusal(RefusalReason.INVALID, f"{wanted} {what} at once are more than may ever wait, {most}")
    for what, wanted, waiting, most in queues:
        if most is not None and waiting + wanted > most:
            return Refusal(RefusalReason.BUSY, f"{waiting} {what} wait; the limit is {most}")
    return None


def _never(request: GenerationRequest, config: SchedulerConfig) -> Refusal | None:
    length = request.num_prompt_tokens
    if not length:
        return Refusal(RefusalReason.INVALID, "the prompt has no tokens")
    wanted = request.params.max_tokens
    least = 0 if wanted == 0 else 1
    if length + least > config.max_model_len:
        message = f"the prompt has {length} tokens; with {least} to generate the model takes {config.max_model_len}"
        return Refusal(RefusalReason.TOO_LONG, message)
    if request.priority and config.policy is not Policy.PRIORITY:
        message = f"priority {request.priority}: this model's scheduling policy is {config.policy.value}, not priority"
        return Refusal(RefusalReason.INVALID, message)
    if config.vocab_size is not None:
        for token in request.prompt_token_ids:
            if not 0 <= token < config.vocab_size:
                message = f"token {token} is not of the vocabulary of {config.vocab_size}"
                return Refusal(RefusalReason.INVALID, message)
    return None
