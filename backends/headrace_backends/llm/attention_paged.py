"""Attention of one step over the paged cache.

Each layer's call writes the K and V of all the step's tokens before it attends, so that requests may share blocks that this
very step fills. It attends by compiled loops; where those cannot be had, by PyTorch's fused operator, one sequence after the
other. Either way a sequence's numbers do not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from headrace_backends.llm.attention import Attending, SequenceSpan
from headrace_backends.llm.attention_compiled import CompiledStep, fits
from headrace_backends.llm.kv_cache import KvCache


class PagedStep:
    """Paged attention of one step, over the cache it is given. Borrows the cache until the forward is over."""

    def __init__(
        self, cache: KvCache, spans: Sequence[SequenceSpan], slots: Sequence[int], *, compiled: bool = True
    ) -> None:
        """Attend over `spans`; token t of the step is cached in slot `slots[t]`. `compiled`: by compiled loops if possible."""
        self.cache: Final = cache
        places = np.fromiter(slots, np.int64, len(slots))
        self.compiled: Final = CompiledStep(cache, places, spans) if compiled and fits(cache) else None
        """What compiled loops are told; None where they are not used."""
        if self.compiled is None:
            self._slots: Final = torch.from_numpy(places).to(cache.device)
            self._sequences: Final = [_Sequence(span, cache.block_size, cache.device) for span in spans]

    def attend(self, how: Attending, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if self.compiled is not None:
            self.compiled.keep(how.layer, key, value)
            return self.compiled.attend(how, query)
        self.cache.keep(how.layer, self._slots, key, value)
        out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        for sequence in self._sequences:
            rows = slice(sequence.first, sequence.first + sequence.count)
            fresh = (key[rows], value[rows])
            out[rows] = self._of_one(how, sequence, query[rows], fresh)
        return out

    def _of_one(
        self, how: Attending, sequence: _Sequence, query: torch.Tensor, fresh: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Attend with the queries of one sequence, of which K and V are `fresh`."""
        if sequence.whole:
            offset, (key, value) = 0, fresh
        else:
            offset, kept = sequence.context(self.cache.layers[how.layer], how.window)
            key, value = self.cache.key_and_value(how.layer, kept)
        k, v, heads = key.transpose(0, 1), value.transpose(0, 1), key.shape[1]
        if how.softcap is not None:
            return _capped(query, k, v, sequence.mask(how.window, offset), how)
        if sequence.count > 1:
            return _several(query, k, v, sequence, how, offset)
        # The query heads that share a KV head stand where queries do: one product for all of them.
        folded = query.view(1, heads, -1, query.shape[-1])
        attended = F.scaled_dot_product_attention(folded, k[None], v[None], scale=how.scaling)
        return attended.view(1, query.shape[1], -1)


class _Sequence:
    """One sequence's view of the cache, prepared once a step and used by every layer."""

    __slots__ = ("_block_size", "_device", "_gathered", "_masks", "_span", "count", "end", "first")

    def __init__(self, span: SequenceSpan, block_size: int, device: torch.device) -> None:
        self._span = span
        self._block_size = block_size
        self._device = device
        self._gathered: dict[int | None, tuple[int, slice | torch.Tensor]] = {}
        self._masks: dict[int | None, torch.Tensor | None] = {}
        self.first, self.count = span.first, span.count
        self.end = span.start + span.count

    @property
    def whole(self) -> bool:
        """Whether there is nothing before the queries: their own K and V are all they see."""
        return self._span.start == 0

    def context(self, cached: torch.Tensor, window: int | None) -> tuple[int, torch.Tensor]:
        """Return the position of the first key, and what is kept of each up to the end: [keys, kv_heads, elements]."""
        found = self._gathered.get(window)
        if found is None:
            found = self._gathered[window] = self._blocks(window)
        first, blocks = found
        rows = cached.view(cached.shape[0], -1)
        used = rows[blocks] if isinstance(blocks, slice) else rows.index_select(0, blocks)
        offset = 0 if window is None else max(0, self._span.start - window + 1)
        flat = used.view(-1, cached.shape[2], cached.shape[3])
        return offset, flat[offset - first : self.end - first]

    def mask(self, window: int | None, offset: int) -> torch.Tensor | None:
        """Return which keys each query sees, [queries, keys] of bool, or None where one query sees them all."""
        if window not in self._masks:
            mask = None
            if self.count > 1:
                at = torch.arange(self._span.start, self.end, device=self._device)[:, None]
                keys = torch.arange(offset, self.end, device=self._device)
                mask = keys <= at
                if window is not None:
                    mask &= keys > at - window
            self._masks[window] = mask
        return self._masks[window]

    def causal(self, window: int | None) -> bool:
        """Say whether the queries are all there is, so that the plain triangle is right."""
        return self._span.start == 0 and (window is None or window >= self.count)

    def _blocks(self, window: int | None) -> tuple[int, slice | torch.Tensor]:
        """Return the position of the first gathered token, and the blocks: neighbours are read where they lie."""
        lowest = 0 if window is None else max(0, self._span.start - window + 1)
        skipped = lowest // self._block_size
        blocks = self._span.blocks[skipped : -(-self.end // self._block_size)]
        first = blocks[0]
        if all(block == first + at for at, block in enumerate(blocks)):
            return skipped * self._block_size, slice(first, first + len(blocks))
        return skipped * self._block_size, torch.tensor(blocks, dtype=torch.long, device=self._device)


def _several(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequence: _Sequence, how: Attending, offset: int
) -> torch.Tensor:
    """Attend with several queries of one sequence."""
    triangle = sequence.causal(how.window)
    attended = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k[None],
        v[None],
        attn_mask=None if triangle else sequence.mask(how.window, offset),
        is_causal=triangle,
        scale=how.scaling,
        enable_gqa=q.shape[1] != k.shape[0],
    )
    return attended[0].transpose(0, 1)


def _capped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, how: Attending
) -> torch.Tensor:
    """Attend with scores capped by tanh, which the fused operator cannot do; in fp32."""
    assert how.softcap is not None
    count, heads, dim = q.shape
    folded = q.transpose(0, 1).reshape(k.shape[0], -1, count, dim).float()
    scores = torch.matmul(folded, k.float()[:, None].transpose(2, 3)) * how.scaling
    scores = torch.tanh(scores / how.softcap) * how.softcap
    if mask is not None:
        scores.masked_fill_(~mask, float("-inf"))
    attended = torch.matmul(torch.softmax(scores, dim=-1), v.float()[:, None])
    return attended.reshape(heads, count, -1).transpose(0, 1).to(q.dtype)
