"""Attention by compiled loops: a layer's K and V are written, single queries are attended to, and long spans, in a call each.

Works on addresses: tensors are those of the step, dense, and of the dtype that the cache is made for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from headrace_backends.llm import kernels
from headrace_backends.llm.attention import Attending, SequenceSpan
from headrace_backends.llm.kernels.pool import Arguments, bits
from headrace_backends.llm.kv_cache import KvCache, LayerShape

_LANES: Final = 8
"""Heads are read so many elements at a time, at least."""
_FEW: Final = 8
"""So many queries of a sequence are attended to one by one: a token and guesses of the next. Each reads all keys."""
_MANY_KEYS: Final = 1 << 13
"""More take longer in one layer than other threads should wait for."""
_FP32, _BF16, _INT8 = range(3)
"""As `kernels.products` has them; that module may not be there."""


def fits(cache: KvCache) -> bool:
    """Say whether compiled loops can work on such a cache."""
    return (
        cache.device.type == "cpu"
        and cache.dtype in {torch.float32, torch.bfloat16}
        and fits_shapes(cache.shapes.values())
        and kernels.available()
    )


def fits_shapes(shapes: Iterable[LayerShape]) -> bool:
    """Say whether compiled loops can work on heads of such widths."""
    return all((shape.key_dim | shape.value_dim) % _LANES == 0 for shape in shapes)


def numbers_of(cache: KvCache) -> int:
    """Return how the cache keeps numbers, as `kernels.products` says it."""
    return _INT8 if cache.eight_bits else _FP32 if cache.dtype == torch.float32 else _BF16


class CompiledStep:
    """What a step's layers have in common: where tokens are kept, and which queries see which blocks."""

    def __init__(self, cache: KvCache, slots: NDArray[np.int64], spans: Sequence[SequenceSpan]) -> None:
        self._cache: Final = cache
        self.slots: Final = slots
        few, many = ([span for span in spans if (span.count <= _FEW) is short] for short in (True, False))
        self._many: Final = many
        self.blocks: Final = np.fromiter(chain.from_iterable(span.blocks for span in (*few, *many)), np.int32)
        """The numbers of all sequences' blocks, one after another."""
        self._table_of_many: Final = sum(len(span.blocks) for span in few)
        self.rows: Final = _rows(few)
        """Single queries, as `kernels.attending` has them."""
        self._long: Final = self._table_of_many * cache.block_size > _MANY_KEYS
        self._tiles: dict[int, NDArray[np.int64]] = {}
        """By the query heads of a KV head."""
        self._threads: Final = torch.get_num_threads()
        self._numbers: Final = numbers_of(cache)

    def keep(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write key [T, kv_heads, Dk] and value [T, kv_heads, Dv]."""
        from headrace_backends.llm.kernels.rows import keeping

        shape, cached = self._cache.shapes[layer], self._cache.layers[layer]
        key, value = _heads_in_a_row(key), _heads_in_a_row(value)
        arguments = Arguments(
            key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0), self.slots.ctypes.data, len(self.slots),
            cached.data_ptr(), shape.kv_heads, cached.stride(2) * cached.itemsize,
        )  # fmt: skip
        run = keeping(self._numbers, self._cache.dtype == torch.bfloat16, shape.key_dim, shape.value_dim)
        run(arguments, self._threads if len(self.slots) * shape.elements > _WORTH_THREADS else 1)

    def attend(self, how: Attending, query: torch.Tensor) -> torch.Tensor:
        """Take query [T, heads, Dk]; return [T, heads, Dv]."""
        from headrace_backends.llm.kernels.attending import attention

        shape = self._cache.shapes[how.layer]
        query = _heads_in_a_row(query)
        out = query.new_empty(query.shape[0], query.shape[1], shape.value_dim)
        group = query.shape[1] // shape.kv_heads
        kind = (self._numbers, self._cache.dtype == torch.bfloat16, shape.key_dim, shape.value_dim, group)
        if len(self.rows):
            attention(*kind)(self._arguments(how, query, out, self.rows), self._threads, long=self._long)
        if self._many:
            from headrace_backends.llm.kernels.prefilling import prefilling

            prefilling(*kind)(self._arguments(how, query, out, self.tiles(group)), self._threads, long=True)
        return out

    def _arguments(self, how: Attending, query: torch.Tensor, out: torch.Tensor, tasks: NDArray[np.int64]) -> Arguments:
        cached = self._cache.layers[how.layer]
        return Arguments(
            query.data_ptr(), query.stride(0), out.data_ptr(), out.stride(0), cached.data_ptr(), cached.shape[2],
            cached.stride(2) * cached.itemsize, tasks.ctypes.data, len(tasks), self.blocks.ctypes.data,
            how.window or 0, bits(how.scaling), bits(how.softcap or 0.0), self._cache.block_size,
        )  # fmt: skip

    def tiles(self, group: int) -> NDArray[np.int64]:
        """Return the tiles of the spans of many queries, for `group` query heads to a KV head; the longest come first.

        They are as `kernels.prefilling` has them.
        """
        from headrace_backends.llm.kernels.prefilling import ROWS

        if group not in self._tiles:
            tiles: list[tuple[int, int, int, int, int]] = []
            table = self._table_of_many
            for span in self._many:
                rows = range(0, span.count * group, ROWS)
                tiles.extend((span.first, span.start, span.count, table, row) for row in reversed(rows))
                table += len(span.blocks)
            self._tiles[group] = np.array(tiles, dtype=np.int64)
        return self._tiles[group]


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
