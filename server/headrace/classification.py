"""The classification extension: the top k classes of an output instead of its tensor.

A class is the text "value:index" or "value:index:label", highest value first, ties by the lower index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from headrace.repository.model_config import TensorConfig
from headrace.types import OutputTensor
from headrace_protocol.datatype import BF16, BOOL, BYTES, FP16, encode_bytes, to_numpy
from headrace_protocol.errors import invalid

MAX_CLASSES: Final = 1_000_000
_REFUSED: Final = (BYTES, BOOL, FP16, BF16)


def check(output: TensorConfig) -> None:
    """Raise INVALID_ARG where classes cannot be made of this output."""
    if output.datatype in _REFUSED:
        raise invalid(f"output '{output.name}' of datatype {output.datatype.name} cannot be classified")


def top_classes(output: OutputTensor, count: int, labels: Sequence[str], batches: bool) -> OutputTensor:
    """Return the `count` highest classes of each row as a BYTES tensor of shape [rows, k] ([k] without batching)."""
    values = to_numpy(output.datatype, output.shape, output.data)
    rows = values.reshape(values.shape[0], -1) if batches else values.reshape(1, -1)
    count = min(count, rows.shape[1])
    if rows.shape[0] * count > MAX_CLASSES:
        raise invalid(f"{rows.shape[0] * count} classes of output '{output.name}' are more than {MAX_CLASSES}")
    is_float = values.dtype.kind == "f"
    elements: list[bytes] = []
    for row in rows:
        keys = np.where(np.isnan(row), -np.inf, row) if is_float else row
        order = np.argsort(keys[::-1], kind="stable")[::-1][:count]
        for position in order:
            index = row.size - 1 - int(position)
            value = f"{row[index]:.6f}" if is_float else str(row[index])
            label = f":{labels[index]}" if index < len(labels) and labels[index] else ""
            elements.append(f"{value}:{index}{label}".encode())
    shape = (rows.shape[0], count) if batches else (count,)
    return OutputTensor(output.name, BYTES, shape, encode_bytes(elements))
