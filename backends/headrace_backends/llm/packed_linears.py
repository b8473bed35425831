"""Products with weights that lie as the processor wants them: packed once, when a model is loaded.

In bf16 oneDNN's own layout makes single rows twice as fast as PyTorch's linear operator, which reorders weights at each call or
does without. Other dtypes stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812

Linear = Callable[[torch.Tensor], torch.Tensor]
"""Takes rows [T, in] and returns rows [T, out]."""
Maker = Callable[[torch.Tensor, torch.Tensor | None], Linear]
"""Takes a weight [out, in], and a bias [out] or None."""

_PACKED_FOR: Final = 32
"""Rows that the layout is chosen for; it turned out the same for 1, 32 and 512."""


def packed(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Return the product with `weight` [out, in] as fast as it can be had."""
    if weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and _onednn_multiplies_bf16():
        return _OneDnnLinear(weight, bias)
    return _PlainLinear(weight, bias)


def _onednn_multiplies_bf16() -> bool:
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class _OneDnnLinear:
    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight: Final[torch.Tensor] = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR)
        self._bias: Final = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _POINTWISE(rows, self._weight, self._bias, "none", _NO_SCALARS, "")
        return out


class _PlainLinear:
    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight: Final = weight
        self._bias: Final = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self._weight, self._bias)


_POINTWISE: Final = torch.ops.mkldnn._linear_pointwise.default
_NO_SCALARS: Final[list[float]] = []
