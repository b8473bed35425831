"""Products with weights of 8 or 4 bits, for steps of few rows: those are bound by reading weights, others by multiplying.

Both ways of a product have the same weights: for more rows those of few bits, as bf16 numbers, lie packed beside. So a token
does not depend on how many rows its step had, but for rounding; and memory is what bf16 takes and half or a quarter more.
"""

from __future__ import annotations

from typing import Final

import torch

from headrace_backends.llm.kernels.linears import MOST_ROWS, eight_bit_product
from headrace_backends.llm.kernels.pool import Arguments
from headrace_backends.llm.packed_linears import Linear, Maker, packed
from headrace_protocol.errors import invalid

_MANY_WEIGHTS: Final = 1 << 24
"""Reading more takes longer than other threads should wait for."""
_GROUP: Final = 32
"""Weights of 4 bits that share a scale and a zero, as in llama.cpp's Q4_1."""


def maker(quantization: str | None) -> Maker:
    """Return what makes products of weights. Raises INVALID_ARG for a quantisation that is not known."""
    if quantization is None:
        return packed
    makers: dict[str, Maker] = {"int8": _eight_bits, "int4": _four_bits}
    if quantization not in makers:
        raise invalid(f"quantization: expected {' or '.join(makers)}, got '{quantization}'")
    return makers[quantization]


def _eight_bits(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Round each output's weights to 255 steps between the largest and its negative."""
    if weight.shape[0] % 4 or weight.shape[1] % 16:
        return packed(weight, bias)
    wide = weight.float()
    factors = wide.abs().amax(dim=1).div_(127).clamp_min_(torch.finfo(torch.float32).tiny)
    integers = (wide / factors[:, None]).round_().to(torch.int8)
    again = (integers * factors[:, None]).to(weight.dtype)
    return _ByRows(_EightBits(integers, factors, bias), packed(again, bias))


def _four_bits(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Round each 32 weights of an output to 16 steps between the least and the largest."""
    outputs, depth = weight.shape
    if outputs % 16 or depth % _GROUP:
        return _eight_bits(weight, bias)
    groups = weight.float().view(outputs, depth // _GROUP, _GROUP)
    least = groups.amin(dim=2)
    scale = ((groups.amax(dim=2) - least) / 15).clamp_min(torch.finfo(torch.float32).tiny).to(weight.dtype)
    zero = (least + 8 * scale.float()).to(weight.dtype)
    steps = (groups - zero[..., None].float()) / scale[..., None].float() + 8
    integers = steps.round_().clamp_(0, 15).to(torch.int32)
    again = ((integers - 8) * scale[..., None].float() + zero[..., None].float()).to(weight.dtype)
    few = _FourBits(integers.view(outputs, depth), torch.stack((scale, zero), dim=2), bias)
    return _ByRows(few, packed(again.view(outputs, depth), bias))


class _ByRows:
    """One of two ways of the same product, by the number of rows."""

    __slots__ = ("_few", "_many")

    def __init__(self, few: Linear, many: Linear) -> None:
        self._few: Final = few
        self._many: Final = many

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return (self._few if rows.shape[0] <= MOST_ROWS else self._many)(rows)


class _EightBits:
    __slots__ = ("_bias", "_factors", "_weight")

    def __init__(self, weight: torch.Tensor, factors: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight: Final = weight
        self._factors: Final = factors
        self._bias: Final = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.contiguous()
        outputs, depth = self._weight.shape
        out = rows.new_empty(rows.shape[0], outputs)
        arguments = Arguments(
            rows.data_ptr(), depth, self._weight.data_ptr(), self._factors.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(), outputs, out.data_ptr(),
        )  # fmt: skip
        run = eight_bit_product(rows.dtype == torch.bfloat16, rows.shape[0])
        run(arguments, torch.get_num_threads(), long=outputs * depth > _MANY_WEIGHTS)
        return out


class _FourBits:
    __slots__ = ("_bias", "_scales", "_weight")

    def __init__(self, integers: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Take integers from 0 to 15 [outputs, depth], and scale and zero of each group [outputs, groups, 2]."""
        self._weight: Final[torch.Tensor] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers, 1)
        self._scales: Final = scales.transpose(0, 1).contiguous()
        self._bias: Final = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _FOUR_BITS(rows, self._weight, _GROUP, self._scales)
        return out if self._bias is None else out.add_(self._bias)


_FOUR_BITS: Final = torch.ops.aten._weight_int4pack_mm_for_cpu.default
