"""Paged attention: what transformers' models call instead of their own attention, under the name of `IMPLEMENTATION`.

Inputs are flattened: the tokens of all requests of a step one after another, without padding. Each layer's call writes the
K and V of all of them before it attends, so that requests may share blocks that this very step fills. Each sequence is
attended to by itself: its numbers do not depend on its neighbours. Knows blocks and slots, not requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from transformers import AttentionInterface

from headrace_backends.llm.kv_cache import KvCache, LayerShape
from headrace_protocol.errors import unsupported

IMPLEMENTATION: Final = "headrace_paged"
STEP: Final = "headrace_step"
"""The keyword that carries an `AttentionStep` through a model's forward to its attention."""


@dataclass(frozen=True, slots=True)
class Attending:
    """What one layer asks of its attention."""

    layer: int
    scaling: float
    window: int | None = None
    """A query sees so many keys, its own included; None is all before it."""
    softcap: float | None = None
    """Scores are squeezed into -softcap..softcap by tanh."""


class AttentionStep(Protocol):
    """What stands behind the attention of one forward."""

    def attend(self, how: Attending, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Take query [T, heads, D], key [T, kv_heads, D], value [T, kv_heads, Dv]; return [T, heads, Dv]."""


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers asks: tensors are [1, heads, T, D], the answer [1, T, heads, Dv]."""
    step: AttentionStep | None = options.get(STEP)
    if step is None:
        raise RuntimeError(f"attention '{IMPLEMENTATION}' was called without {STEP}: the model does not pass it on")
    if options.get("s_aux") is not None:
        raise unsupported(f"{type(module).__name__} has attention sinks, which are not supported")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    how = Attending(module.layer_idx, scaling, sliding_window, softcap)
    out = step.attend(how, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    return out[None], None


AttentionInterface.register(IMPLEMENTATION, _attend)


@dataclass(slots=True)
class ShapeProbe:
    """Finds what a model's layers cache, by running one forward: answers it with zeros."""

    layers: dict[int, LayerShape] = field(default_factory=dict)

    def attend(self, how: Attending, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self.layers[how.layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2])
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """The tokens of one sequence in a step."""

    first: int
    """Its first row among the step's tokens."""
    count: int
    start: int
    """Position of the first token: so many keys lie before it in the cache."""
    blocks: Sequence[int]
    """Its block table; may be longer than what is used."""


class PagedStep:
    """Paged attention of one step, over the cache it is given. Borrows the cache until the forward is over."""

    def __init__(self, cache: KvCache, spans: Sequence[SequenceSpan], slots: Sequence[int]) -> None:
        """Attend over `spans`; token t of the step is cached in slot `slots[t]`."""
        self._cache: Final = cache
        self._slots: Final = torch.tensor(slots, dtype=torch.long, device=cache.device)
        self._sequences: Final = [_Sequence(span, cache.block_size, cache.device) for span in spans]

    def attend(self, how: Attending, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        cached = self._cache.layers[how.layer]
        heads, dim_k = key.shape[1], key.shape[2]
        flat = cached.view(-1, heads, cached.shape[-1])
        flat.index_copy_(0, self._slots, torch.cat((key, value), dim=-1))
        rows = cached.view(cached.shape[0], -1)
        out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        for sequence in self._sequences:
            first, count = sequence.first, sequence.count
            offset, keys_and_values = sequence.context(cached, rows, how.window)
            k, v = keys_and_values[..., :dim_k].transpose(0, 1), keys_and_values[..., dim_k:].transpose(0, 1)
            q = query[first : first + count]
            if how.softcap is not None:
                attended = _capped(q, k, v, sequence.mask(how.window, offset), how)
            elif count == 1:
                # The query heads that share a KV head stand where queries do: one product for all of them.
                folded = q.view(1, heads, -1, q.shape[-1])
                attended = F.scaled_dot_product_attention(folded, k[None], v[None], scale=how.scaling)
                attended = attended.view(1, q.shape[1], -1)
            else:
                attended = _several(q, k, v, sequence, how, offset)
            out[first : first + count] = attended
        return out


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

    def context(self, cached: torch.Tensor, rows: torch.Tensor, window: int | None) -> tuple[int, torch.Tensor]:
        """Return the position of the first key and K and V side by side: [keys, kv_heads, Dk + Dv], up to the end."""
        found = self._gathered.get(window)
        if found is None:
            found = self._gathered[window] = self._blocks(window)
        first, blocks = found
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


class ReferenceStep:
    """The same attention written plainly, token by token and head by head in fp32: what `PagedStep` is held to."""

    def __init__(self, cache: KvCache, spans: Sequence[SequenceSpan], slots: Sequence[int]) -> None:
        self._cache: Final = cache
        self._spans: Final = tuple(spans)
        self._slots: Final = tuple(slots)

    def attend(self, how: Attending, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        cached, size, dim_k = self._cache.layers[how.layer], self._cache.block_size, key.shape[2]
        for token, slot in enumerate(self._slots):
            cached[slot // size, slot % size] = torch.cat((key[token], value[token]), dim=-1)
        group = query.shape[1] // key.shape[1]
        out = query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
        for span in self._spans:
            for row in range(span.count):
                position = span.start + row
                lowest = 0 if how.window is None else max(0, position - how.window + 1)
                seen = torch.stack([cached[span.blocks[p // size], p % size] for p in range(lowest, position + 1)])
                for head in range(query.shape[1]):
                    k, v = seen[:, head // group, :dim_k].float(), seen[:, head // group, dim_k:].float()
                    scores = k @ query[span.first + row, head].float() * how.scaling
                    if how.softcap is not None:
                        scores = torch.tanh(scores / how.softcap) * how.softcap
                    out[span.first + row, head] = (torch.softmax(scores, 0) @ v).to(out.dtype)
        return out
