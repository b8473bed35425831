"""Where the tensors of one execution lie in an instance's buffers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from headrace_backends.tensorrt.signature import EngineSignature, Given, Shape

ALIGNMENT: Final = 256
"""Bytes to which TensorRT wants tensors aligned."""
HOST_BYTES: Final = 512
"""Bytes of a shape tensor: TensorRT's most are 64 elements of 8."""


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor in a buffer."""

    offset: int
    nbytes: int
    shape: Shape


@dataclass(frozen=True, slots=True)
class Layout:
    """All tensors of one execution."""

    inputs: Mapping[str, Place]
    """Of those in GPU memory."""
    input_bytes: int
    outputs: Mapping[str, Place]
    """Of those in GPU memory whose shapes are known before it runs."""
    output_bytes: int
    varying: tuple[str, ...]
    """Outputs in GPU memory whose shapes depend on the data."""


def lay_out(signature: EngineSignature, given: Given, output_shapes: Mapping[str, Shape]) -> Layout:
    """Return the places of all tensors. A shape with a -1 in it is one that depends on the data."""
    inputs: dict[str, Place] = {}
    position = 0
    for tensor, shape in zip(signature.inputs, given.shapes, strict=True):
        if tensor.on_device:
            inputs[tensor.name] = Place(position, tensor.nbytes(shape), shape)
            position = _aligned(position + tensor.nbytes(shape))
    input_bytes, position = position, 0
    outputs: dict[str, Place] = {}
    varying: list[str] = []
    for tensor in signature.outputs.values():
        shape = output_shapes[tensor.name]
        if not tensor.on_device:
            continue
        if -1 in shape:
            varying.append(tensor.name)
            continue
        outputs[tensor.name] = Place(position, tensor.nbytes(shape), shape)
        position = _aligned(position + tensor.nbytes(shape))
    return Layout(inputs, input_bytes, outputs, position, tuple(varying))


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT
