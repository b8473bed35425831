"""The tensors that keep K and V: one a layer, cut into blocks that the block manager hands out by number.

Knows no request: who owns a block is the block manager's matter.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from headrace_protocol.errors import invalid

NULL_BLOCKS: Final = 1
"""Block 0 is never handed out."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer caches of each token."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def elements(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


def bytes_per_block(shapes: Mapping[int, LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """Return what a block of `block_size` tokens takes in all layers together."""
    return block_size * int(dtype.itemsize) * sum(shape.elements for shape in shapes.values())


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
    """Owns the tensors: `layers[i]` is [blocks, block_size, kv_heads, key_dim + value_dim], K and V side by side."""

    def __init__(
        self,
        shapes: Mapping[int, LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        """Reserve the memory; on CPUs the system gives it page by page as blocks are first written."""
        self.num_blocks: Final = num_blocks
        self.block_size: Final = block_size
        self.device: Final = device or torch.device("cpu")
        self.layers: Final = {
            layer: torch.zeros(
                num_blocks, block_size, shape.kv_heads, shape.key_dim + shape.value_dim, dtype=dtype, device=self.device
            )
            for layer, shape in shapes.items()
        }

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.layers.values())


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _available_bytes(otherwise: int) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return otherwise
