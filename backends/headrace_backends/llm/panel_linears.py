"""Products with weights that are kept as narrow as they are known, and multiplied in fp32: `kernels.panels` over tensors.

What a step of few rows costs is reading the weights. So fp32 weights that came from bf16 are kept as bf16, and those that came
from a file of 8 or 4 bits (GGUF's Q8_0, Q4_0, Q4_1) as those; each weight stays exactly what it was. A row's products have the
same bits alone and among others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch

from headrace_backends.llm.kernels.panels import FEW_ROWS, GROUP, INT4, LANES, SHARED, product
from headrace_backends.llm.kernels.pool import Arguments
from headrace_backends.llm.kernels.products import BF16, FP32, INT8
from headrace_backends.llm.kernels.rows import widening
from headrace_backends.llm.packed_linears import Linear, Maker, multiplies_bf16, packed
from headrace_backends.llm.program import Program, Rows
from headrace_protocol.errors import invalid

_WORTH_THREADS: Final = 1 << 16
"""Multiplications that one thread is done with sooner than others are woken."""
_KINDS: Final = {"int8": INT8, "int4": INT4}


def maker(quantization: str | None) -> Maker:
    """Return what makes products of weights. Raises INVALID_ARG for a quantisation that is not known."""
    if quantization is None:
        return _exact
    if quantization not in _KINDS:
        raise invalid(f"quantization: expected {' or '.join(_KINDS)}, got '{quantization}'")
    return partial(_rounded, _KINDS[quantization])


def record(linear: Linear, program: Program, source: Rows, name: str, width: int, *, few: bool) -> Rows:
    """Add a product of `source` to a program; return where it is, by a name. `few`: its rows are `FEW_ROWS` at most."""
    if isinstance(linear, ByRows):
        linear = linear.few if few else linear.many
    if isinstance(linear, PanelLinear):
        target = program.rows(name, width, source.dtype)
        linear.record(program, source, target)
    else:
        target = program.foreign(name, width, source.dtype)
        program.call(partial(_bring, linear, source, target))
    return target


def _bring(linear: Linear, source: Rows, target: Rows, program: Program, count: int) -> None:
    program.replace(target, linear(source.tensor[:count]))


def _exact(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Return the product with the weights as they are."""
    if weight.shape[1] % SHARED or weight.dtype not in {torch.float32, torch.bfloat16} or _as_fast_packed(weight):
        return packed(weight, bias)
    weight = weight.contiguous()
    if weight.dtype == torch.bfloat16 or torch.equal(weight.to(torch.bfloat16).float(), weight):
        return PanelLinear(BF16, _lines_of_bf16(weight), None, weight, bias)
    for kind, in_steps in ((INT4, _like_q4_1), (INT4, _like_q4_0), (INT8, _like_q8_0)):
        integers, scales = in_steps(weight)
        if torch.equal(_from_steps(integers, scales), weight):
            return _of_steps(kind, integers, scales, weight, bias)
    return PanelLinear(FP32, _lines(weight).contiguous(), None, weight, bias)


def _rounded(kind: int, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Return the product with the weights rounded to integers; where the processor multiplies bf16, of many rows in that."""
    if weight.shape[1] % SHARED:
        return packed(weight, bias)
    integers, scales = _ROUNDED[kind](weight.float().contiguous())
    few = _of_steps(kind, integers, scales, weight, bias)
    if not _as_fast_packed(weight):
        return few
    return ByRows(few, packed(_from_steps(integers, scales).to(weight.dtype), bias))


def _as_fast_packed(weight: torch.Tensor) -> bool:
    return weight.dtype == torch.bfloat16 and multiplies_bf16()


class ByRows:
    """One of two ways of the same product, by the number of rows."""

    __slots__ = ("few", "many")

    def __init__(self, few: PanelLinear, many: Linear) -> None:
        self.few: Final = few
        self.many: Final = many

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return (self.few if rows.shape[0] <= FEW_ROWS else self.many)(rows)


class PanelLinear:
    """A product. Keeps its weights, and none of the tensor that they came from."""

    __slots__ = ("_bias", "_kernel", "_narrow", "_scales", "_weight", "depth", "kind", "outputs")

    def __init__(
        self,
        kind: int,
        weight: torch.Tensor,
        scales: torch.Tensor | None,
        like: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> None:
        """Take weights and scales as `kernels.panels` has them, and `like`, of their shape [outputs, depth] and the rows' dtype."""
        self.kind: Final = kind
        self.outputs, self.depth = like.shape
        self._narrow: Final = like.dtype == torch.bfloat16
        self._weight: Final = weight
        self._scales: Final = scales
        self._bias: Final = None if bias is None else bias.detach().float().contiguous()
        self._kernel: Final = product(kind)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Take rows [T, depth] and return rows [T, outputs] of the same dtype."""
        wide = rows.float().contiguous()
        out = rows.new_empty(rows.shape[0], self.outputs)
        work = rows.shape[0] * self.outputs * self.depth
        arguments = Arguments(*self._arguments(wide.data_ptr(), rows.shape[0], out.data_ptr(), self.outputs))
        self._kernel(arguments, torch.get_num_threads() if work > _WORTH_THREADS else 1, long=True)
        return out

    def record(self, program: Program, source: Rows, target: Rows) -> None:
        """Add the product to a program."""
        if source.dtype == torch.bfloat16:
            wide = program.rows("wide", self.depth, torch.float32)
            program.run(widening(), source, program.count, self.depth, wide)
            source = wide
        program.run(self._kernel, *self._arguments(source, program.count, target, target.width), wide=True)

    def _arguments(self, rows: Any, count: Any, out: Any, stride: int) -> Sequence[Any]:
        return (
            rows, self.depth, count, self.depth, self._weight.data_ptr(),
            0 if self._scales is None else self._scales.data_ptr(), 0 if self._bias is None else self._bias.data_ptr(),
            self.outputs, out, stride, self._narrow,
        )  # fmt: skip


def _lines(weight: torch.Tensor) -> torch.Tensor:
    """Return weights [outputs, depth] as [groups, depth, GROUP], with zeros for what is missing of the last group."""
    missing = -weight.shape[0] % GROUP
    if missing:
        weight = torch.cat([weight, weight.new_zeros(missing, weight.shape[1])])
    return weight.view(-1, GROUP, weight.shape[1]).transpose(1, 2)


def _lines_of_bf16(weight: torch.Tensor) -> torch.Tensor:
    """Return lines whose numbers n and n + LANES / 2 of a vector stand side by side: one shift and one mask widen them."""
    half = LANES // 2
    order = [at // 2 + half * (at % 2) for at in range(LANES)]
    lines = _lines(weight.to(torch.bfloat16))
    return lines.unflatten(2, (-1, LANES))[..., order].contiguous()


Steps = tuple[torch.Tensor, list[torch.Tensor]]
"""Integers [outputs, depth], and of fp16 [outputs, depth / SHARED] the factor and, where there is one, what is added."""


def _like_q8_0(weight: torch.Tensor) -> Steps:
    """Round to 255 steps between the largest of `SHARED` weights [outputs, depth] of fp32 and its negative."""
    shared = weight.view(weight.shape[0], -1, SHARED)
    factor = (shared.abs().amax(dim=2) / 127).to(torch.float16)
    steps = (shared / _divisor(factor)).round_().clamp_(-127, 127)
    return steps.to(torch.int8).view(weight.shape), [factor]


def _like_q4_1(weight: torch.Tensor) -> Steps:
    """Round to 16 steps between the least and the largest."""
    shared = weight.view(weight.shape[0], -1, SHARED)
    lowest = shared.amin(dim=2)
    return _four_bits(shared, ((shared.amax(dim=2) - lowest) / 15).to(torch.float16), lowest.to(torch.float16))


def _like_q4_0(weight: torch.Tensor) -> Steps:
    """Round to 16 steps, eight of them from the weight that is farthest from 0."""
    shared = weight.view(weight.shape[0], -1, SHARED)
    farthest = shared.gather(2, shared.abs().argmax(dim=2, keepdim=True))[..., 0]
    return _four_bits(shared, (farthest / -8).to(torch.float16), farthest.to(torch.float16))


def _four_bits(shared: torch.Tensor, factor: torch.Tensor, lowest: torch.Tensor) -> Steps:
    steps = ((shared - lowest.float()[..., None]) / _divisor(factor)).round_().clamp_(0, 15)
    return steps.to(torch.uint8).view(len(shared), -1), [factor, lowest]


def _divisor(factor: torch.Tensor) -> torch.Tensor:
    return factor.float().masked_fill_(factor == 0, 1.0)[..., None]


def _from_steps(integers: torch.Tensor, scales: list[torch.Tensor]) -> torch.Tensor:
    """Return the weights that integers stand for, in fp32."""
    factor, *lowest = (scale.float()[..., None] for scale in scales)
    weight = integers.view(*factor.shape[:2], SHARED).float() * factor
    return (weight + lowest[0] if lowest else weight).view(integers.shape)


def _of_steps(
    kind: int, integers: torch.Tensor, scales: list[torch.Tensor], like: torch.Tensor, bias: torch.Tensor | None
) -> PanelLinear:
    lines = _lines(integers)
    if kind == INT4:  # two inputs to a byte
        lines = lines[:, 0::2] | (lines[:, 1::2] << 4)
    kept = torch.stack([_lines(scale).unflatten(2, (-1, LANES)) for scale in scales], dim=3)
    return PanelLinear(kind, lines.contiguous(), kept.contiguous(), like, bias)


_ROUNDED: Final = {INT8: _like_q8_0, INT4: _like_q4_1}
