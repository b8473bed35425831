"""The tensors that keep K and V: one a layer, cut into blocks that the block manager hands out by number.

Knows no request: who owns a block is the block manager's matter.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from headrace_protocol.errors import invalid

NULL_BLOCKS: Final = 1
"""Block 0 is never handed out."""
_FACTORS: Final = 4
"""Bytes that a token and head of 8-bit numbers has more: a bf16 factor of its key and one of its value."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer caches of each token."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def elements(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


def bytes_per_block(
    shapes: Mapping[int, LayerShape], block_size: int, dtype: torch.dtype, *, eight_bits: bool = False
) -> int:
    """Return what a block of `block_size` tokens takes in all layers together."""
    if eight_bits:
        return block_size * sum(shape.elements + _FACTORS * shape.kv_heads for shape in shapes.values())
    return block_size * int(dtype.itemsize) * sum(shape.elements for shape in shapes.values())


def takes_eight_bits(kv_cache_dtype: str) -> bool:
    """Return whether the cache keeps integers: "auto" is the model's own dtype. Raises INVALID_ARG for what is neither."""
    if kv_cache_dtype not in {"auto", "int8"}:
        raise invalid(f"kv_cache_dtype: expected auto or int8, got '{kv_cache_dtype}'")
    return kv_cache_dtype == "int8"


def memory_budget(fraction: float) -> int:
    """Return how many bytes the cache may take, so that this process takes `fraction` of the memory with it.

    The memory is the machine's or the control group's, whichever is less; never more than is free now.
    """
    if not 0 < fraction <= 1:
        raise invalid(f"memory fraction: expected more than 0 and at most 1, got {fraction}")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(int(total * fraction) - _resident_bytes(), _available_bytes(total))


def blocks_that_fit(memory: int, block_bytes: int, block_size: int, max_model_len: int) -> int:
    """Return how many blocks `memory` bytes hold. Raises INVALID_ARG where one request of full length does not fit."""
    blocks = max(0, memory) // block_bytes
    check_blocks(blocks, block_size, max_model_len, block_bytes)
    return blocks


def check_blocks(blocks: int, block_size: int, max_model_len: int, block_bytes: int) -> None:
    """Raise INVALID_ARG where one request of full length does not fit into so many blocks."""
    needed = NULL_BLOCKS + -(-max_model_len // block_size)
    if blocks < needed:
        raise invalid(
            f"the KV cache has {blocks} blocks of {block_size} tokens; one request of max_model_len {max_model_len} "
            f"needs {needed}, {needed * block_bytes / 2**20:.0f} MiB: give it more memory or lower max_model_len"
        )


class KvCache:
    """Owns the tensors: `layers[i]` is [blocks, block_size, kv_heads, key_dim + value_dim], K and V side by side.

    With `eight_bits` those are integers, and 4 bytes more stand behind them: what a token's key and value in this head are to
    be multiplied by, each a bf16 number, so that their largest element is 127 of them.
    """

    def __init__(
        self,
        shapes: Mapping[int, LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
        *,
        eight_bits: bool = False,
    ) -> None:
        """Reserve the memory; on CPUs the system gives it page by page as blocks are first written."""
        self.num_blocks: Final = num_blocks
        self.block_size: Final = block_size
        self.dtype: Final = dtype
        """What comes in and goes out."""
        self.device: Final = device or torch.device("cpu")
        self.shapes: Final = dict(shapes)
        self.eight_bits: Final = eight_bits
        self.layers: Final = {
            layer: _zeros(
                (
                    num_blocks,
                    block_size,
                    shape.kv_heads,
                    shape.key_dim + shape.value_dim + (_FACTORS if eight_bits else 0),
                ),
                torch.int8 if eight_bits else dtype,
                self.device,
            )
            for layer, shape in shapes.items()
        }

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.layers.values())

    def keep(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write key [T, kv_heads, Dk] and value [T, kv_heads, Dv] into slots [T]."""
        cached = self.layers[layer]
        parts = (key, value)
        if self.eight_bits:
            kept, factors = zip(*(_in_eight_bits(part) for part in parts), strict=True)
            parts = (*kept, torch.cat(factors, dim=-1).view(torch.int8))
        cached.view(-1, *cached.shape[2:]).index_copy_(0, slots, torch.cat(parts, dim=-1))

    def key_and_value(self, layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Part what was read of a layer's tokens, [..., elements], into key [..., Dk] and value [..., Dv]."""
        shape = self.shapes[layer]
        after = shape.key_dim + shape.value_dim
        key, value = rows[..., : shape.key_dim], rows[..., shape.key_dim : after]
        if not self.eight_bits:
            return key, value
        factors = rows[..., after:].contiguous().view(torch.bfloat16).float()
        return (key * factors[..., :1]).to(self.dtype), (value * factors[..., 1:]).to(self.dtype)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros; on CPUs such that no page of them is there before it is written. PyTorch's own are written at once."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def _in_eight_bits(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return heads [..., D] as integers of 8 bits, and what to multiply them by, [..., 1] of bf16."""
    wide = numbers.float()
    factor = (wide.abs().amax(dim=-1, keepdim=True) / 127).to(torch.bfloat16)
    inverse = torch.where(factor > 0, 1 / factor.float(), 0.0)
    return (wide * inverse).round().clamp(-127, 127).to(torch.int8), factor


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _available_bytes(otherwise: int) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return otherwise
