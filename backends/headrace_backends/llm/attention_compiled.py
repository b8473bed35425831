"""Attention by compiled loops: what a step keeps is written, and its single queries are attended to, in one call a layer.

Works on addresses: tensors are those of the step, dense, and of the dtype that the cache is made for.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from headrace_backends.llm import kernels
from headrace_backends.llm.attention import Attending, SequenceSpan
from headrace_backends.llm.kv_cache import KvCache

_LANES: Final = 8
"""Heads are read so many elements at a time, at least."""
_FP32, _BF16, _INT8 = range(3)
"""As `kernels.products` has them; that module may not be there."""


def fits(cache: KvCache) -> bool:
    """Say whether compiled loops can work on such a cache."""
    return (
        cache.device.type == "cpu"
        and cache.dtype in {torch.float32, torch.bfloat16}
        and all((shape.key_dim | shape.value_dim) % _LANES == 0 for shape in cache.shapes.values())
        and kernels.available()
    )


class CompiledStep:
    """What a step's layers have in common: where tokens are kept, and which queries see which blocks."""

    def __init__(self, cache: KvCache, slots: NDArray[np.int64], spans: Sequence[SequenceSpan]) -> None:
        """Attend with each query of `spans` by itself."""
        self._cache: Final = cache
        self._slots: Final = slots
        self._blocks: Final = np.fromiter(chain.from_iterable(span.blocks for span in spans), np.int32)
        self._rows: Final = _rows(spans)
        self._threads: Final = torch.get_num_threads()
        self._numbers: Final = _INT8 if cache.eight_bits else _FP32 if cache.dtype == torch.float32 else _BF16

    def keep(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write key [T, kv_heads, Dk] and value [T, kv_heads, Dv]."""
        from headrace_backends.llm.kernels.pool import Arguments
        from headrace_backends.llm.kernels.rows import keeping

        shape, cached = self._cache.shapes[layer], self._cache.layers[layer]
        key, value = _heads_in_a_row(key), _heads_in_a_row(value)
        arguments = Arguments(
            key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0), self._slots.ctypes.data, len(self._slots),
            cached.data_ptr(), shape.kv_heads, cached.stride(2) * cached.itemsize,
        )  # fmt: skip
        run = keeping(self._numbers, self._cache.dtype == torch.bfloat16, shape.key_dim, shape.value_dim)
        run(arguments, self._threads if len(self._slots) * shape.elements > _WORTH_THREADS else 1)

    def attend(self, how: Attending, query: torch.Tensor, out: torch.Tensor) -> None:
        """Take query [T, heads, Dk]; put what the single queries among them find into out [T, heads, Dv]."""
        from headrace_backends.llm.kernels.attending import attention
        from headrace_backends.llm.kernels.pool import Arguments, bits

        if not len(self._rows):
            return
        shape, cached = self._cache.shapes[how.layer], self._cache.layers[how.layer]
        query = _heads_in_a_row(query)
        arguments = Arguments(
            query.data_ptr(), query.stride(0), out.data_ptr(), out.stride(0), cached.data_ptr(), shape.kv_heads,
            cached.stride(2) * cached.itemsize, self._rows.ctypes.data, len(self._rows), self._blocks.ctypes.data,
            how.window or 0, bits(how.scaling), bits(how.softcap or 0.0), self._cache.block_size,
        )  # fmt: skip
        group = query.shape[1] // shape.kv_heads
        narrow = self._cache.dtype == torch.bfloat16
        run = attention(self._numbers, narrow, shape.key_dim, shape.value_dim, group)
        run(arguments, self._threads)


_WORTH_THREADS: Final = 1 << 15
"""Elements that are written sooner than threads are woken."""


def _rows(spans: Sequence[SequenceSpan]) -> NDArray[np.int64]:
    """Return of each query its row among the step's tokens, where its block numbers begin, and how many keys it sees."""
    rows: list[tuple[int, int, int]] = []
    table = 0
    for span in spans:
        rows.extend((span.first + at, table, span.start + at + 1) for at in range(span.count))
        table += len(span.blocks)
    return np.array(rows, dtype=np.int64)


def _heads_in_a_row(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor [T, heads, D] whose heads lie one after another; tokens may lie apart."""
    dense = tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2]
    return tensor if dense else tensor.contiguous()
