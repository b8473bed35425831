"""Attention over the paged cache written plainly, in fp32: what the one that is used is held to by tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from headrace_backends.llm.attention import Attending, SequenceSpan
from headrace_backends.llm.kv_cache import KvCache


class ReferenceStep:
    """Attends token by token and head by head. Of caches that keep the model's own numbers."""

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
