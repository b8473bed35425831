"""Tensors made for each batch (`batch_input`): how many elements, or which shape, each request has of an input. Pure.

They tell a model where one request's part of a flat, ragged input ends and the next begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np

from headrace_protocol.datatype import FP32, INT32, Array, DataType, element_count

Shape = tuple[int, ...]


class BatchInput(NamedTuple):
    """One entry of a model's `batch_input`."""

    make: Callable[[Sequence[Shape], DataType], Array]
    """From the shapes that the requests gave, batch dimension included."""
    datatype: DataType
    source: str
    """The input that is described."""
    targets: tuple[str, ...]
    """Inputs of the model that receive it."""


def batch_inputs(config: Mapping[str, Any]) -> tuple[BatchInput, ...]:
    """Return the entries of a configuration that the server has checked."""
    return tuple(
        BatchInput(
            _MAKERS[made.get("kind", "BATCH_ELEMENT_COUNT")],
            FP32 if made["data_type"] == FP32.config_name else INT32,
            made["source_input"][0],
            tuple(made["target_name"]),
        )
        for made in config.get("batch_input", ())
    )


def scattered_outputs(config: Mapping[str, Any]) -> frozenset[str]:
    """Return the outputs that the server shares out among the requests, whatever shape they have."""
    return frozenset(name for scattered in config.get("batch_output", ()) for name in scattered["target_name"])


def item_shapes(shape: Shape, rows: Sequence[int]) -> tuple[Shape, ...]:
    """Return the shape of each request's part of an input of which all requests have equal shapes."""
    return tuple((count, *shape[1:]) for count in rows)


def _counts(shapes: Sequence[Shape], datatype: DataType) -> Array:
    return np.array([element_count(shape) for shape in shapes], datatype.numpy)


def _accumulated(shapes: Sequence[Shape], datatype: DataType) -> Array:
    return np.array(list(accumulate(map(element_count, shapes))), datatype.numpy)


def _accumulated_with_zero(shapes: Sequence[Shape], datatype: DataType) -> Array:
    return np.array(list(accumulate(map(element_count, shapes), initial=0)), datatype.numpy)


def _largest_count_as_shape(shapes: Sequence[Shape], datatype: DataType) -> Array:
    return np.zeros(max(map(element_count, shapes)), datatype.numpy)


def _row_shapes(shapes: Sequence[Shape], datatype: DataType) -> Array:
    rank = len(shapes[0]) - 1
    rows = [shape[1:] for shape in shapes for _ in range(shape[0])]
    return np.array(rows, datatype.numpy).reshape(len(rows), rank)


def _row_shapes_flat(shapes: Sequence[Shape], datatype: DataType) -> Array:
    return _row_shapes(shapes, datatype).reshape(-1)


_MAKERS: Final[Mapping[str, Callable[[Sequence[Shape], DataType], Array]]] = {
    "BATCH_ELEMENT_COUNT": _counts,
    "BATCH_ACCUMULATED_ELEMENT_COUNT": _accumulated,
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": _accumulated_with_zero,
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": _largest_count_as_shape,
    "BATCH_ITEM_SHAPE": _row_shapes,
    "BATCH_ITEM_SHAPE_FLATTEN": _row_shapes_flat,
}
