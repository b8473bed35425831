"""What a tensor is (TensorSpec) and where its bytes lie (TensorRef)."""

from __future__ import annotations

import msgspec

ARENA = -1
"""TensorRef.source of bytes in the arena that the two processes share."""
INLINE = -2
"""TensorRef.source of bytes that travel in the message itself (Tensor.data)."""
REGION = -3
"""TensorRef.source of bytes in a client's shared memory (TensorRef.region)."""


class TensorRef(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A range of bytes. `source` is ARENA, INLINE, REGION, or an index into the descriptors of the same frame."""

    offset: int
    nbytes: int
    source: int = ARENA
    region: int = 0
    """Number of an attached region; `offset` counts from the region's start."""


class TensorSpec(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A tensor as a model declares it: `shape` may hold -1 for a dimension that varies."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False
    is_shape_tensor: bool = False
    """Whether its values tell the shapes of other tensors; it has no batch dimension then."""


class Tensor(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A concrete tensor: `shape` is complete, `ref` says where the wire form of its elements lies."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    ref: TensorRef
    item_shapes: tuple[tuple[int, ...], ...] | None = None
    """The shape that each request gave: of a ragged input, whose elements lie one after another (`shape` has one
    dimension then), and of a padded one where the backend makes other inputs of it."""
    data: bytes = b""
    """The wire form itself where `ref.source` is INLINE: small outputs of a stream."""
