"""Frame: the tensors that came with one frame of a backend process, each checked before anybody reads it.

A backend is not trusted: what it says of a tensor may be nonsense, which is an error of the model's, never a fault here.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Sequence
from typing import Final

from headrace.instances.regions import IN_REGION, RequestRegions
from headrace_protocol.arena import Arena
from headrace_protocol.datatype import BY_NAME, BYTES, DataType, element_count
from headrace_protocol.errors import ErrorCode, FailureReason, InferError
from headrace_protocol.tensor import ARENA, INLINE, REGION, Tensor

_LENGTH: Final = struct.Struct("<I")


class Frame:
    """Where the tensors of one frame lie: in the arena, the frame's descriptors, the messages themselves, or regions."""

    __slots__ = ("_arena", "_descriptors", "_in_place", "_mapped")

    def __init__(self, arena: Arena | None, descriptors: Sequence[int], in_place: RequestRegions | None) -> None:
        self._arena = arena
        self._descriptors = descriptors
        self._in_place = in_place
        self._mapped: dict[int, memoryview] | None = None

    def bytes_of(self, tensor: Tensor) -> memoryview:
        """Return the bytes of a tensor, IN_REGION for one that is where the client wanted it.

        Raises INTERNAL where it does not fit its datatype, shape or memory.
        """
        datatype = BY_NAME.get(tensor.datatype)
        ref = tensor.ref
        if datatype is None:
            raise nonsense(f"output '{tensor.name}' has the unknown datatype '{tensor.datatype}'")
        if any(dim < 0 for dim in tensor.shape):
            raise nonsense(f"output '{tensor.name}' has the shape {list(tensor.shape)}")
        _check_size(tensor, datatype)
        try:
            if ref.source == ARENA:
                assert self._arena is not None
                return self._arena.slice(ref.offset, ref.nbytes)
            if ref.source == REGION:
                return self._in_region(tensor)
            whole = memoryview(tensor.data) if ref.source == INLINE else self._spilled(ref.source)
        except (IndexError, ValueError, OSError) as error:
            raise nonsense(f"output '{tensor.name}' lies outside the memory it was given") from error
        if ref.offset < 0 or ref.nbytes < 0 or ref.offset + ref.nbytes > len(whole):
            raise nonsense(f"output '{tensor.name}' lies outside the memory it was given")
        return whole[ref.offset : ref.offset + ref.nbytes]

    def _in_region(self, tensor: Tensor) -> memoryview:
        place = self._in_place.outputs.get(tensor.name) if self._in_place is not None else None
        ref = tensor.ref
        if place is None or (ref.region, ref.offset) != (place.region.number, place.offset):
            raise ValueError(tensor.name)
        if not 0 <= ref.nbytes <= place.nbytes:
            raise ValueError(tensor.name)
        return IN_REGION

    def _spilled(self, source: int) -> memoryview:
        if source < 0:
            raise IndexError(source)
        if self._mapped is None:
            self._mapped = {}
        whole = self._mapped.get(source)
        if whole is None:
            whole = self._mapped[source] = map_sealed(self._descriptors[source])
        return whole


def map_sealed(descriptor: int) -> memoryview:
    """Map what a backend sent whole, for as long as a view of it lives. Raises OSError, ValueError; INTERNAL if unsealed.

    One that its sender could still shorten would end this process when it is read.
    """
    if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise nonsense("the backend sent a descriptor that is not sealed")
    size = os.fstat(descriptor).st_size
    return memoryview(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)) if size else memoryview(b"")


def _check_size(tensor: Tensor, datatype: DataType) -> None:
    if datatype is BYTES:
        return
    expected = element_count(tensor.shape) * datatype.itemsize
    if tensor.ref.nbytes != expected:
        raise nonsense(
            f"output '{tensor.name}' of shape {list(tensor.shape)} has {tensor.ref.nbytes} bytes, expected {expected}"
        )


def string_row_ends(data: memoryview, rows: Sequence[int], elements_a_row: int, name: str) -> list[int]:
    """Return where each request's rows end in the wire form of a batched BYTES tensor."""
    ends = []
    at = 0
    total = len(data)
    unpack = _LENGTH.unpack_from
    for count in rows:
        for _ in range(count * elements_a_row):
            if at + 4 > total:
                raise nonsense(f"output '{name}' has fewer strings than its shape")
            at += 4 + unpack(data, at)[0]
        ends.append(at)
    if at != total:
        raise nonsense(f"the strings of output '{name}' do not fill its {total} bytes")
    return ends


def nonsense(message: str) -> InferError:
    """Return the error for what a backend must not say."""
    return InferError(ErrorCode.INTERNAL, message, FailureReason.BACKEND)
