"""Paged attention: what transformers' models call instead of their own attention, under the name of `IMPLEMENTATION`.

Inputs are flattened: the tokens of all requests of a step one after another, without padding. What attends is an
`AttentionStep`: `attention_paged.py`, and written plainly `attention_reference.py`. Knows blocks and slots, not requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from transformers import AttentionInterface

from headrace_backends.llm.kv_cache import LayerShape
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
    """Finds what a model's layers cache and ask, by running one forward: answers it with zeros."""

    layers: dict[int, LayerShape] = field(default_factory=dict)
    how: dict[int, Attending] = field(default_factory=dict)

    def attend(self, how: Attending, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self.how[how.layer] = how
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
