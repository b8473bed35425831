"""A decoder layer in nine calls: four products, attention, and compiled loops for all between them.

Equal to transformers' layers in what is rounded where; built from one by `fusing.py`. Knows rows of hidden states, not
requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch

from headrace_backends.llm.attention import STEP, Attending, AttentionStep
from headrace_backends.llm.kernels.pool import Arguments, bits
from headrace_backends.llm.kernels.rows import gating, norming, turning
from headrace_backends.llm.packed_linears import Linear

_WORTH_THREADS: Final = 1 << 15
"""Elements that one thread is done with sooner than others are woken."""
_WORTH_THREADS_TO_GATE: Final = 1 << 13
"""The same where each takes an exponential."""


@dataclass(frozen=True, slots=True)
class Form:
    """What the layers of an architecture have in common."""

    narrow: bool
    """Hidden states are bf16, not fp32."""
    one_more: bool
    """Norms multiply by one more than their weights."""
    by_tangent: bool
    """The activation is GELU by its tangent's formula, not SiLU."""
    epsilon: float


@dataclass(frozen=True, slots=True)
class Parts:
    """The weights of a layer. Norms that an architecture does not have are None."""

    query_key_value: Linear
    attention_output: Linear
    gate_up: Linear
    down: Linear
    input_norm: torch.Tensor
    mlp_norm: torch.Tensor
    """Of the residual before the feed-forward part."""
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    attention_output_norm: torch.Tensor | None = None
    """Of what attention adds to the residual."""
    mlp_output_norm: torch.Tensor | None = None


@dataclass(slots=True)
class Stream:
    """The hidden states of a forward on their way through the layers."""

    residual: torch.Tensor
    """[T, width]; changed in place."""
    step: AttentionStep
    cosines: dict[str | None, tuple[torch.Tensor, torch.Tensor]]
    """Cosines and sines [T, turned] of the tokens' positions, for each kind of layer."""
    positions: torch.Tensor
    threads: int
    addend: torch.Tensor | None = None
    """What the last layer adds, which the next one's first norm does on the way; [T, width]."""
    addend_norm: torch.Tensor | None = None


def settle(form: Form, stream: Stream, norm: torch.Tensor) -> torch.Tensor:
    """Add to the residual what waits for it, and return it normed, [T, width]."""
    residual, addend, addend_norm = stream.residual, stream.addend, stream.addend_norm
    out = torch.empty_like(residual)
    arguments = Arguments(
        residual.shape[0], residual.shape[1], residual.data_ptr(), 0 if addend is None else addend.data_ptr(),
        0 if addend_norm is None else addend_norm.data_ptr(), norm.data_ptr(), out.data_ptr(), bits(form.epsilon),
    )  # fmt: skip
    threads = stream.threads if residual.numel() > _WORTH_THREADS else 1
    norming(form.narrow, form.one_more)(arguments, threads)
    stream.addend = stream.addend_norm = None
    return out


class FusedLayer:
    """One layer, from its parts."""

    fused: ClassVar = True
    __slots__ = ("_dim_k", "_dim_v", "_form", "_heads", "_how", "_kind", "_kv_heads", "_parts")

    def __init__(
        self, form: Form, parts: Parts, how: Attending, heads: tuple[int, int], dims: tuple[int, int], kind: str | None
    ) -> None:
        """Take query and KV heads, their widths for keys and for values, and the kind of layer that turns alike."""
        self._form: Final = form
        self._parts: Final = parts
        self._how: Final = how
        self._heads, self._kv_heads = heads
        self._dim_k, self._dim_v = dims
        self._kind: Final = kind

    def __call__(self, stream: Stream) -> None:
        parts, form = self._parts, self._form
        attended = self._attended(stream, settle(form, stream, parts.input_norm))
        stream.addend = parts.attention_output(attended)
        stream.addend_norm = parts.attention_output_norm
        rows = settle(form, stream, parts.mlp_norm)
        stream.addend = parts.down(self._gated(parts.gate_up(rows), stream.threads))
        stream.addend_norm = parts.mlp_output_norm

    def _attended(self, stream: Stream, rows: torch.Tensor) -> torch.Tensor:
        count, heads, kv_heads, dim = rows.shape[0], self._heads, self._kv_heads, self._dim_k
        together = self._parts.query_key_value(rows)
        cosines, sines = stream.cosines[self._kind]
        query_norm, key_norm = self._parts.query_norm, self._parts.key_norm
        turned = cosines.shape[1]
        arguments = Arguments(
            together.data_ptr(), count, together.shape[1], heads, kv_heads, cosines.data_ptr(), sines.data_ptr(),
            0 if query_norm is None else query_norm.data_ptr(), 0 if key_norm is None else key_norm.data_ptr(),
            bits(self._form.epsilon),
        )  # fmt: skip
        threads = stream.threads if together.numel() > _WORTH_THREADS else 1
        turning(self._form.narrow, dim, turned, self._form.one_more)(arguments, threads)
        keys, values = heads * dim, (heads + kv_heads) * dim
        out = stream.step.attend(
            self._how,
            together[:, :keys].view(count, heads, dim),
            together[:, keys:values].view(count, kv_heads, dim),
            together[:, values:].view(count, kv_heads, self._dim_v),
        )
        return out.view(count, -1)

    def _gated(self, rows: torch.Tensor, threads: int) -> torch.Tensor:
        width = rows.shape[1] // 2
        out = rows.new_empty(rows.shape[0], width)
        arguments = Arguments(rows.shape[0], width, rows.data_ptr(), out.data_ptr())
        worth = out.numel() > _WORTH_THREADS_TO_GATE
        gating(self._form.narrow, self._form.by_tangent)(arguments, threads if worth else 1)
        return out


class OriginalLayer:
    """A layer of transformers' own, among fused ones."""

    fused: ClassVar = False
    __slots__ = ("_form", "_kind", "_layer", "_norm")

    def __init__(self, form: Form, layer: Any, kind: str | None, norm: torch.Tensor) -> None:
        """Take any weights of a norm: its result is not used."""
        self._form: Final = form
        self._layer: Final = layer
        self._kind: Final = kind
        self._norm: Final = norm

    def __call__(self, stream: Stream) -> None:
        settle(self._form, stream, self._norm)
        cosines, sines = stream.cosines[self._kind]
        stream.residual = self._layer(
            stream.residual[None],
            attention_mask=None,
            position_ids=stream.positions[None],
            position_embeddings=(cosines[None], sines[None]),
            **{STEP: stream.step},
        )[0].contiguous()
