"""How many blocks a model's KV cache gets: what the settings say, else a part of the memory."""

from __future__ import annotations

from typing import Final

import torch

from headrace_backends.llm.kv_cache import NULL_BLOCKS, check_blocks, memory_budget
from headrace_backends.llm.settings import Settings

_PART_OF_MEMORY: Final = 0.4
"""Where the settings say nothing, on CPUs: other models and the rest of the machine want some too."""
_PART_OF_DEVICE: Final = 0.9
"""The same on GPUs, as vLLM has it."""
_SPARE: Final = 2
"""A part of the memory is not used further than for so many times `max_num_seqs` requests of full length."""


def cache_size(settings: Settings, block_bytes: int, model_length: int, device: str) -> tuple[int, int]:
    """Return the number of blocks, the null block among them, and how many tokens a request may have.

    Where the settings do not say the second, it is lowered to what fits. Raises INVALID_ARG where what they say does not.
    """
    size, length = settings.block_size, min(settings.max_model_len or model_length, model_length)
    if settings.num_gpu_blocks_override is not None:
        blocks = settings.num_gpu_blocks_override
    elif settings.kv_cache_memory_bytes is not None:
        blocks = settings.kv_cache_memory_bytes // block_bytes
    else:
        full = NULL_BLOCKS + _SPARE * settings.max_num_seqs * -(-length // size)
        blocks = min(max(0, _budget(settings.gpu_memory_utilization, device)) // block_bytes, full)
    if settings.max_model_len is None:
        length = max(min(length, (blocks - NULL_BLOCKS) * size), min(length, size))
    check_blocks(blocks, size, length, block_bytes)
    return blocks, length


def _budget(part: float | None, device: str) -> int:
    if not device.startswith("cuda"):
        return memory_budget(part or _PART_OF_MEMORY)
    free, total = map(int, torch.cuda.mem_get_info(torch.device(device)))
    return min(free, int(total * (part or _PART_OF_DEVICE)) - (total - free))
