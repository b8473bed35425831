"""Where outputs go: the slice of the arena that the server lent, the message itself, or else memory of our own."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Mapping
from typing import Final

import numpy as np

from headrace_protocol.arena import ALIGNMENT, PAGE, Arena
from headrace_protocol.datatype import BF16, BYTES, Array, Buffer, DataType, from_numpy, of_numpy
from headrace_protocol.errors import InferError, internal, unavailable
from headrace_protocol.tensor import ARENA, INLINE, Tensor, TensorRef

INLINE_BYTES: Final = 32 << 10
"""Bytes of the largest output of a stream that travels in the message."""
FRAME_BYTES: Final = 1 << 20
"""Bytes of all such outputs of one frame; what is beyond goes into a SpillFile."""


def wire_type(name: str, array: Array, declared: Mapping[str, DataType]) -> DataType:
    """Return the datatype as which `array` is sent as output `name`. Raises INTERNAL where it is no tensor.

    `declared` tells outputs of BF16, whose elements are uint16 here, from those of UINT16.
    """
    if not isinstance(array, np.ndarray):
        raise internal(f"output '{name}' is of type {type(array).__name__}, expected a numpy array")
    datatype = of_numpy(array.dtype)
    if datatype is None:
        raise internal(f"output '{name}' has numpy type {array.dtype}, which is no tensor datatype")
    if array.dtype == BF16.numpy and declared.get(name) is BF16:
        return BF16
    return datatype


def exhausted(error: OSError | MemoryError) -> InferError:
    """Return UNAVAILABLE, naming what the system has nothing left of for a response: descriptors, memory."""
    cause = (isinstance(error, OSError) and error.strerror) or "Cannot allocate memory"
    return unavailable(f"the response cannot be sent: {cause}")


class SpillFile:
    """A memfd for outputs that do not fit into the lent slice. Owned by the batch until its frame was sent.

    Making it and `reserve` raise UNAVAILABLE where the system has no descriptor or no memory left.
    """

    def __init__(self) -> None:
        try:
            self.fd = os.memfd_create("headrace-spill", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise exhausted(error) from error
        self._size = 0

    def reserve(self, nbytes: int) -> tuple[mmap.mmap, int]:
        """Return a mapping of `nbytes` more and its offset in the file.

        Each piece is a mapping of its own, so that earlier ones stay where they are when the file grows.
        """
        start = self._size
        self._size = start + (nbytes + PAGE - 1) // PAGE * PAGE
        try:
            os.ftruncate(self.fd, self._size)
            return mmap.mmap(self.fd, nbytes, offset=start), start
        except OSError as error:
            raise exhausted(error) from error

    def seal(self) -> int:
        """Forbid every change of size (the reader's mapping can then never fault) and return the descriptor."""
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return self.fd


class OutputSpace:
    """Hands out memory for outputs: first the borrowed slice `space` of the arena, then a SpillFile."""

    def __init__(self, arena: Arena, space: TensorRef) -> None:
        self._arena = arena
        self._position = space.offset
        self._end = space.offset + space.nbytes
        self._spill: SpillFile | None = None

    def reserve(self, nbytes: int) -> tuple[memoryview | mmap.mmap, int, TensorRef]:
        """Return (buffer, offset in the buffer, the same place as a reference that the server understands)."""
        start = (self._position + ALIGNMENT - 1) & -ALIGNMENT
        if not nbytes:
            return self._arena.view, 0, TensorRef(0, 0)
        if start + nbytes <= self._end:
            self._position = start + nbytes
            return self._arena.view, start, TensorRef(start, nbytes, ARENA)
        if self._spill is None:
            self._spill = SpillFile()
        mapping, offset = self._spill.reserve(nbytes)
        return mapping, 0, TensorRef(offset, nbytes, 0)

    def take_descriptors(self) -> list[int]:
        """Return the descriptors that must travel with the references given so far; the caller closes them."""
        spill, self._spill = self._spill, None
        return [] if spill is None else [spill.seal()]


def _one_string(array: Array) -> bytes | None:
    """Return the wire form of a tensor of one string, which each step of a stream of text has; None of others."""
    element = array.item() if array.size == 1 else None
    return len(element).to_bytes(4, "little") + element if type(element) is bytes else None


class FrameSpace:
    """Takes the outputs of one frame of a stream: small ones into the message, others into a SpillFile.

    A context manager: at its end the descriptor is closed, sent or not.
    """

    def __init__(self) -> None:
        self._inline = 0
        self._spill: SpillFile | None = None

    def place(self, name: str, array: Array, declared: Mapping[str, DataType]) -> Tensor:
        """Return the output as the server is told it; copies its elements. Raises as wire_type and SpillFile do."""
        datatype = wire_type(name, array, declared)
        data: Buffer | None = None
        if datatype is BYTES:
            data = _one_string(array) or from_numpy(array, BYTES)
        nbytes = array.nbytes if data is None else len(data)
        if nbytes <= INLINE_BYTES and self._inline + nbytes <= FRAME_BYTES:
            self._inline += nbytes
            inline = array.tobytes() if data is None else bytes(data)
            return Tensor(name, datatype.name, array.shape, TensorRef(0, nbytes, INLINE), None, inline)
        if self._spill is None:
            self._spill = SpillFile()
        mapping, offset = self._spill.reserve(nbytes)
        if data is None:
            np.ndarray(array.shape, datatype.numpy, mapping)[...] = array
        else:
            mapping[:] = data
        return Tensor(name, datatype.name, array.shape, TensorRef(offset, nbytes, 0))

    def descriptors(self) -> list[int]:
        """Return the descriptors that must travel with the frame. Nothing can be placed afterwards."""
        return [] if self._spill is None else [self._spill.seal()]

    def __enter__(self) -> FrameSpace:
        return self

    def __exit__(self, *_: object) -> None:
        if self._spill is not None:
            os.close(self._spill.fd)
