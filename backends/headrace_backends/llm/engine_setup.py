"""What engines under our scheduler make of a model's settings and of calls: limits, adapters, requests. Knows no model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from headrace_backends.llm.admission import SchedulerConfig
from headrace_backends.llm.engine import EngineCall
from headrace_backends.llm.grammar import ReasoningMarks
from headrace_backends.llm.request import GenerationRequest, child_seed
from headrace_backends.llm.settings import Settings
from headrace_backends.llm.waiting import Policy

_LOG: Final = logging.getLogger(__name__)
_BATCHED_TOKENS: Final = 2048


def limits_of(settings: Settings, length: int, vocab_size: int) -> SchedulerConfig:
    tokens = settings.max_num_batched_tokens
    if tokens is None:
        tokens = max(_BATCHED_TOKENS, settings.max_num_seqs, 0 if settings.enable_chunked_prefill else length)
    return SchedulerConfig(
        max_model_len=length,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=tokens,
        policy=Policy(settings.scheduling_policy),
        chunked_prefill=settings.enable_chunked_prefill,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        reserve_full_prompt=settings.scheduler_reserve_full_isl,
        watermark=settings.watermark,
        max_num_queued_reqs=settings.max_num_queued_reqs,
        max_num_queued_tokens=settings.max_num_queued_tokens,
        max_loras=settings.max_loras,
        vocab_size=vocab_size,
    )


def lora_modules_of(settings: Settings) -> Mapping[str, Path]:
    """Return the adapters that are to be loaded."""
    if settings.enable_lora or not settings.lora_modules:
        return settings.lora_modules
    _LOG.warning("adapters are not loaded, as enable_lora is not true: %s", ", ".join(settings.lora_modules))
    return {}


def cache_config_of(settings: Settings, blocks: int) -> Mapping[str, str]:
    """Return what `EngineStats.cache_config` tells."""
    return {
        "block_size": str(settings.block_size),
        "num_gpu_blocks": str(blocks),
        "cache_dtype": settings.kv_cache_dtype,
        "enable_prefix_caching": str(settings.enable_prefix_caching),
    }


def requests_of(
    call: EngineCall, settings: Settings, eos_token_ids: frozenset[int], reasoning: ReasoningMarks | None
) -> Sequence[GenerationRequest]:
    """Return one request of each prompt.

    Where the client gave a seed, each prompt begins at it. Where the settings have one, the same calls in the same
    order get the same tokens.
    """
    params = call.params
    if call.embed:
        params = replace(params, n=1, max_tokens=0, min_tokens=0, detokenize=False, stop=())
    seed = call.seed if settings.seed is None else child_seed(settings.seed, call.number)
    pooling = settings.pooling if call.embed else None
    return [
        GenerationRequest(
            id=f"{call.number}.{at}",
            prompt_token_ids=prompt,
            params=params,
            seed=child_seed(seed, at * params.n) if params.seed is None else params.seed,
            eos_token_ids=eos_token_ids,
            arrival_ns=call.arrival_ns,
            priority=call.priority,
            cache_salt=call.cache_salt,
            lora=call.adapter,
            index=at * params.n,
            structured=call.structured,
            beam=call.beam,
            reasoning=reasoning,
            pooling="mean" if pooling == "mean" else None if pooling is None else "last",
        )
        for at, prompt in enumerate(call.prompts)
    ]
