"""Where the outputs of a batch go: the slice of the arena that the server lent, or else memory of our own."""

from __future__ import annotations

import fcntl
import mmap
import os

from headrace_protocol.arena import ALIGNMENT, PAGE, Arena
from headrace_protocol.tensor import ARENA, TensorRef


class SpillFile:
    """A memfd for outputs that do not fit into the lent slice. Owned by the batch until its frame was sent."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("headrace-spill", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._size = 0

    def reserve(self, nbytes: int) -> tuple[mmap.mmap, int]:
        """Return a mapping of `nbytes` more and its offset in the file.

        Each piece is a mapping of its own, so that earlier ones stay where they are when the file grows.
        """
        start = self._size
        self._size = start + (nbytes + PAGE - 1) // PAGE * PAGE
        os.ftruncate(self.fd, self._size)
        return mmap.mmap(self.fd, nbytes, offset=start), start

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
