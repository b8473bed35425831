"""Products with weights that lie as the processor wants them: packed once, when a model is loaded.

In bf16 oneDNN's own layout makes single rows twice as fast as PyTorch's linear operator, which reorders weights at each call or
does without. Other dtypes stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812

_ROWS_TRIED: Final = 64
_OUTPUTS_TRIED: Final = 1024
"""Of a product that is tried for whether its bits depend on the number of rows: seven in 37,000 did."""

Linear = Callable[[torch.Tensor], torch.Tensor]
"""Takes rows [T, in] and returns rows [T, out]."""
Maker = Callable[[torch.Tensor, torch.Tensor | None], Linear]
"""Takes a weight [out, in], and a bias [out] or None."""

_PACKED_FOR: Final = 32
"""Rows that the layout is chosen for; it turned out the same for 1, 32 and 512."""


def packed(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Return the product with `weight` [out, in] as fast as it can be had."""
    if weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and multiplies_bf16():
        return _OneDnnLinear(weight, bias)
    return _PlainLinear(weight, bias)


def multiplies_bf16() -> bool:
    """Say whether the processor multiplies bf16 numbers, and PyTorch knows how."""
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class _OneDnnLinear:
    __slots__ = ("_bias", "_doubled", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight: Final = _packed(weight)
        self._bias: Final = bias
        self._doubled: Final = _sums_one_row_otherwise(min(weight.shape[0], _OUTPUTS_TRIED), weight.shape[1])

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if self._doubled and rows.shape[0] == 1:
            return _POINTWISE(rows.expand(2, -1).contiguous(), self._weight, self._bias, "none", _NO_SCALARS, "")[:1]
        out: torch.Tensor = _POINTWISE(rows, self._weight, self._bias, "none", _NO_SCALARS, "")
        return out


def _packed(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR)
    return packed


@cache
def _sums_one_row_otherwise(outputs: int, depth: int) -> bool:
    """Say whether a row alone gives other bits than among others, so that tokens could depend on what else runs.

    It was so with a depth of 1,536 and not of 576, where two rows or a thousand gave the same.
    """
    numbers = torch.Generator().manual_seed(0)
    weight = _packed(torch.randn(outputs, depth, generator=numbers).to(torch.bfloat16))
    rows = torch.randn(_ROWS_TRIED, depth, generator=numbers).to(torch.bfloat16)
    together = _POINTWISE(rows, weight, None, "none", _NO_SCALARS, "")
    alone = [_POINTWISE(row[None], weight, None, "none", _NO_SCALARS, "") for row in rows]
    return not torch.equal(torch.cat(alone), together)


class _PlainLinear:
    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight: Final = weight
        self._bias: Final = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self._weight, self._bias)


_POINTWISE: Final = torch.ops.mkldnn._linear_pointwise.default
_NO_SCALARS: Final[list[float]] = []
