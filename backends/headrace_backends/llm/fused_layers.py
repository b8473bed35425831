"""A decoder layer as operations of a program: four products, attention, and compiled loops for all between them.

Equal to transformers' layers in what is rounded where; built from one by `fusing.py`. Knows rows of hidden states, not
requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import torch

from headrace_backends.llm.attention import STEP, Attending
from headrace_backends.llm.attention_compiled import CompiledStep, numbers_of
from headrace_backends.llm.attention_paged import PagedStep
from headrace_backends.llm.kernels.attending import attention
from headrace_backends.llm.kernels.pool import bits
from headrace_backends.llm.kernels.prefilling import prefilling
from headrace_backends.llm.kernels.rows import gating, keeping, norming, turning
from headrace_backends.llm.kv_cache import KvCache
from headrace_backends.llm.packed_linears import Linear
from headrace_backends.llm.panel_linears import record
from headrace_backends.llm.program import Program, Rows, Variable

_WORTH_THREADS: Final = 1 << 15
"""Elements of hidden states that one thread is done with sooner than others are woken."""

Turns = Mapping[str | None, tuple[torch.Tensor, torch.Tensor]]
"""Cosines and sines [T, turned] of the tokens' positions, for each kind of layer."""


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
    width: int
    """Of hidden states."""
    turned: Mapping[str | None, int]
    """For each kind of layer, how many elements of a head are turned by their position."""

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states."""
        return torch.bfloat16 if self.narrow else torch.float32


@dataclass(frozen=True, slots=True)
class Parts:
    """The weights of a layer. Norms that an architecture does not have are None."""

    query_key_value: Linear
    attention_output: Linear
    gate_up: Linear
    down: Linear
    gates: int
    """Width between `gate_up` and `down`."""
    input_norm: torch.Tensor
    mlp_norm: torch.Tensor
    """Of the residual before the feed-forward part."""
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    attention_output_norm: torch.Tensor | None = None
    """Of what attention adds to the residual."""
    mlp_output_norm: torch.Tensor | None = None


@dataclass(slots=True)
class _Now:
    """What a forward is run with."""

    step: PagedStep
    positions: torch.Tensor
    turns: Turns


@dataclass(slots=True)
class _Addend:
    """What a layer's part adds, which the next norm does on the way."""

    rows: Rows
    norm: torch.Tensor | None


@dataclass(slots=True)
class _Turning:
    cosines: Variable = field(default_factory=Variable)
    sines: Variable = field(default_factory=Variable)


class Forward:
    """Layers recorded as a program, over one cache. Hidden states come in as they are embedded and go out normed."""

    def __init__(self, form: Form, cache: KvCache, layers: list[Any], norm: torch.Tensor, *, few: bool) -> None:
        """`few`: for steps of few rows (`kernels.panels.FEW_ROWS`), of whose products some have a way of their own."""
        self.form: Final = form
        self.cache: Final = cache
        self.few: Final = few
        self.program: Final = Program()
        self.residual: Final = self.program.rows("residual", form.width, form.dtype)
        self.turning: Final = {kind: _Turning() for kind in form.turned}
        self.slots: Final = Variable()
        self.queries: Final = (Variable(), Variable())
        """Where single queries are, and how many."""
        self.blocks: Final = Variable()
        self.tiles: Final[dict[int, tuple[Variable, Variable]]] = {}
        """By the query heads of a KV head, where tiles of long spans are, and how many."""
        self.now: _Now | None = None
        self._addend: _Addend | None = None
        for layer in layers:
            layer.record(self)
        self._normed: Final = self.settle(norm)

    def __call__(self, embedded: torch.Tensor, positions: torch.Tensor, step: PagedStep, turns: Turns) -> torch.Tensor:
        """Take hidden states [T, width] and positions [T]; return [T, width], which the next call writes over."""
        count, compiled = len(embedded), step.compiled
        assert compiled is not None
        assert step.cache is self.cache
        program = self.program
        program.make_room(count)
        self.residual.tensor[:count].copy_(embedded)
        for kind, (cosines, sines) in turns.items():
            program.put(self.turning[kind].cosines, cosines.data_ptr())
            program.put(self.turning[kind].sines, sines.data_ptr())
        self._put_attention(compiled)
        self.now = _Now(step, positions, turns)
        program.execute(count, torch.get_num_threads(), _WORTH_THREADS // self.form.width)
        self.now = None
        return self._normed.tensor[:count]

    def settle(self, norm: torch.Tensor) -> Rows:
        """Add to the residual what waits for it, and return it normed."""
        form, addend = self.form, self._addend
        normed = self.program.rows("normed", form.width, form.dtype)
        weights = 0 if addend is None or addend.norm is None else addend.norm.data_ptr()
        self.program.run(
            norming(form.narrow, form.one_more), self.program.count, form.width, self.residual,
            0 if addend is None else addend.rows, weights, norm.data_ptr(), normed, bits(form.epsilon),
        )  # fmt: skip
        self._addend = None
        return normed

    def add(self, rows: Rows, norm: torch.Tensor | None) -> None:
        """Have `rows` added to the residual at the next `settle`, normed by `norm` if there is one."""
        self._addend = _Addend(rows, norm)

    def _put_attention(self, step: CompiledStep) -> None:
        put = self.program.put
        put(self.slots, step.slots.ctypes.data)
        put(self.blocks, step.blocks.ctypes.data)
        for (place, count), tasks in [
            (self.queries, step.rows),
            *((self.tiles[group], step.tiles(group)) for group in self.tiles),
        ]:
            put(place, tasks.ctypes.data)
            put(count, len(tasks))


class FusedLayer:
    """One layer, from its parts."""

    fused: ClassVar = True
    __slots__ = ("_dim_k", "_dim_v", "_heads", "_how", "_kind", "_kv_heads", "_parts")

    def __init__(
        self, parts: Parts, how: Attending, heads: tuple[int, int], dims: tuple[int, int], kind: str | None
    ) -> None:
        """Take query and KV heads, their widths for keys and for values, and the kind of layer that turns alike."""
        self._parts: Final = parts
        self._how: Final = how
        self._heads, self._kv_heads = heads
        self._dim_k, self._dim_v = dims
        self._kind: Final = kind

    def record(self, forward: Forward) -> None:
        """Add the layer's operations to a program."""
        parts, form, program = self._parts, forward.form, forward.program
        attended = self._attended(forward, forward.settle(parts.input_norm))
        added = record(parts.attention_output, program, attended, "attended part", form.width, few=forward.few)
        forward.add(added, parts.attention_output_norm)
        normed = forward.settle(parts.mlp_norm)
        gates = record(parts.gate_up, program, normed, "gates", 2 * parts.gates, few=forward.few)
        gated = program.rows("gated", parts.gates, form.dtype)
        program.run(gating(form.narrow, form.by_tangent), program.count, parts.gates, gates, gated)
        added = record(parts.down, program, gated, "gated part", form.width, few=forward.few)
        forward.add(added, parts.mlp_output_norm)

    def _attended(self, forward: Forward, normed: Rows) -> Rows:
        form, program = forward.form, forward.program
        heads, kv_heads, dim = self._heads, self._kv_heads, self._dim_k
        width = (heads + kv_heads) * dim + kv_heads * self._dim_v
        together = record(self._parts.query_key_value, program, normed, "queries, keys, values", width, few=forward.few)
        turns, element = forward.turning[self._kind], form.dtype.itemsize
        query_norm, key_norm = self._parts.query_norm, self._parts.key_norm
        program.run(
            turning(form.narrow, dim, form.turned[self._kind], form.one_more), together, program.count, width,
            heads, kv_heads, turns.cosines, turns.sines, 0 if query_norm is None else query_norm.data_ptr(),
            0 if key_norm is None else key_norm.data_ptr(), bits(form.epsilon),
        )  # fmt: skip
        cached, numbers = forward.cache.layers[self._how.layer], numbers_of(forward.cache)
        token = cached.stride(2) * cached.itemsize
        key, value = together.plus(heads * dim * element), together.plus((heads + kv_heads) * dim * element)
        program.run(
            keeping(numbers, form.narrow, dim, self._dim_v), key, width, value, width, forward.slots, program.count,
            cached.data_ptr(), kv_heads, token,
        )  # fmt: skip
        out = program.rows("attended", heads * self._dim_v, form.dtype)
        group = heads // kv_heads
        kind = (numbers, form.narrow, dim, self._dim_v, group)
        tiles = forward.tiles.setdefault(group, (Variable(), Variable()))
        for kernel, (tasks, count) in ((attention(*kind), forward.queries), (prefilling(*kind), tiles)):
            program.run(
                kernel, together, width, out, out.width, cached.data_ptr(), kv_heads, token, tasks, count,
                forward.blocks, self._how.window or 0, bits(self._how.scaling), bits(self._how.softcap or 0.0),
                forward.cache.block_size, wide=True,
            )  # fmt: skip
        return out


class OriginalLayer:
    """A layer of transformers' own, among fused ones."""

    fused: ClassVar = False
    __slots__ = ("_kind", "_layer", "_norm")

    def __init__(self, layer: Any, kind: str | None, norm: torch.Tensor) -> None:
        """Take any weights of a norm: its result is not used."""
        self._layer: Final = layer
        self._kind: Final = kind
        self._norm: Final = norm

    def record(self, forward: Forward) -> None:
        """Add the layer as a call."""
        forward.settle(self._norm)
        forward.program.call(lambda _, count: self._run(forward, count))

    def _run(self, forward: Forward, count: int) -> None:
        now, residual = forward.now, forward.residual.tensor[:count]
        assert now is not None
        cosines, sines = now.turns[self._kind]
        given = self._layer(
            residual[None],
            attention_mask=None,
            position_ids=now.positions[None],
            position_embeddings=(cosines[None], sines[None]),
            **{STEP: now.step},
        )
        residual.copy_(given[0])
