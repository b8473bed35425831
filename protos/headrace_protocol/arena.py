"""Arena: anonymous memory shared by a server and one backend process, with an allocator on the server's side.

One sparse memfd of a large capacity (docs/adr/0001): pages exist once they are touched, so growing needs no second
mapping, and `trim` gives idle pages back to the system while both mappings stay valid. Nothing has a name: no client
can open it, and it vanishes with the last process that maps it.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import mmap
import os
from typing import Final

ALIGNMENT: Final = 64
"""Bytes. Slices start at cache lines, which is what SIMD kernels like."""
PAGE: Final = mmap.PAGESIZE
_FALLOC_PUNCH_HOLE_KEEP_SIZE: Final = 0x02 | 0x01


class ArenaFullError(Exception):
    """No free range is large enough just now."""


class FreeList:
    """Which byte ranges of [0, capacity) are free: first fit, lowest offset first, neighbours merged. Pure."""

    def __init__(self, capacity: int) -> None:
        self.capacity: Final = capacity
        self._starts: list[int] = [0]
        self._ends: list[int] = [capacity]
        self._allocated: dict[int, int] = {}
        self.allocated_bytes = 0

    def allocate(self, nbytes: int) -> int:
        """Return the offset of a free range of `nbytes` (rounded up to ALIGNMENT). Raises ArenaFullError."""
        size = max(ALIGNMENT, (nbytes + ALIGNMENT - 1) & -ALIGNMENT)
        starts, ends = self._starts, self._ends
        for index, start in enumerate(starts):
            end = ends[index]
            if end - start >= size:
                if end - start == size:
                    del starts[index], ends[index]
                else:
                    starts[index] = start + size
                self._allocated[start] = size
                self.allocated_bytes += size
                return start
        raise ArenaFullError(
            f"{nbytes} bytes asked for, {self.capacity - self.allocated_bytes} of {self.capacity} free"
        )

    def free(self, offset: int) -> None:
        """Return the range that allocate() gave at `offset`."""
        size = self._allocated.pop(offset)
        self.allocated_bytes -= size
        end = offset + size
        starts, ends = self._starts, self._ends
        index = bisect.bisect_left(starts, offset)
        joins_next = index < len(starts) and starts[index] == end
        joins_previous = index > 0 and ends[index - 1] == offset
        if joins_previous and joins_next:
            ends[index - 1] = ends[index]
            del starts[index], ends[index]
        elif joins_previous:
            ends[index - 1] = end
        elif joins_next:
            starts[index] = offset
        else:
            starts.insert(index, offset)
            ends.insert(index, end)

    def free_ranges(self) -> list[tuple[int, int]]:
        """Return the free ranges as (start, end), in order."""
        return list(zip(self._starts, self._ends, strict=True))

    def check_integrity(self) -> None:
        """Assert that free and allocated ranges tile [0, capacity) and that no two free ranges touch."""
        ranges = [(start, end, True) for start, end in self.free_ranges()]
        ranges += [(start, start + size, False) for start, size in self._allocated.items()]
        position, was_free = 0, False
        for start, end, is_free in sorted(ranges):
            assert start == position < end, (start, position, end)
            assert not (is_free and was_free)
            position, was_free = end, is_free
        assert position == self.capacity
        assert self.allocated_bytes == sum(self._allocated.values())


class Arena:
    """A mapping of the shared memory. The server creates and allocates; a backend attaches and borrows views.

    Owned by whoever constructed it until `close`; views handed out keep the memory alive beyond that.
    """

    def __init__(self, fd: int, capacity: int) -> None:
        self.fd = fd
        self.capacity: Final = capacity
        self._map: mmap.mmap | None = mmap.mmap(
            fd, capacity, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
        self.view: Final = memoryview(self._map)
        self.ranges: Final = FreeList(capacity)
        self._touched = 0

    @classmethod
    def create(cls, capacity: int) -> Arena:
        """Create an anonymous arena of `capacity` bytes (rounded up to pages)."""
        capacity = max(PAGE, (capacity + PAGE - 1) // PAGE * PAGE)
        fd = os.memfd_create("headrace-arena", os.MFD_CLOEXEC)
        os.ftruncate(fd, capacity)
        return cls(fd, capacity)

    @classmethod
    def attach(cls, fd: int) -> Arena:
        """Map an arena that another process created; `fd` is owned by the result."""
        return cls(fd, os.fstat(fd).st_size)

    def allocate(self, nbytes: int) -> int:
        """Return the offset of `nbytes` of memory. Raises ArenaFullError. Contents are whatever was there."""
        offset = self.ranges.allocate(nbytes)
        self._touched = max(self._touched, offset + nbytes)
        return offset

    def free(self, offset: int) -> None:
        """Return what allocate() gave at `offset`."""
        self.ranges.free(offset)

    def slice(self, offset: int, nbytes: int) -> memoryview:
        """Return a checked view. Raises ValueError where the range leaves the arena."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.capacity:
            raise ValueError(f"bytes {offset}+{nbytes} are outside an arena of {self.capacity}")
        return self.view[offset : offset + nbytes]

    def trim(self, keep: int = 1 << 20) -> int:
        """Give the pages of free ranges above `keep` bytes back to the system; return how many bytes that spans."""
        given = 0
        for start, end in self.ranges.free_ranges():
            low = (max(start, keep) + PAGE - 1) // PAGE * PAGE
            high = min(end, self._touched + PAGE - 1) // PAGE * PAGE
            if high > low:
                _punch_hole(self.fd, low, high - low)
                given += high - low
        if not self.ranges.allocated_bytes:
            self._touched = min(self._touched, keep)
        return given

    def close(self) -> None:
        """Unmap as soon as no view is left, and close the descriptor. Idempotent."""
        mapping, self._map = self._map, None
        if mapping is None:
            return
        os.close(self.fd)
        self.fd = -1
        self.view.release()
        with contextlib.suppress(BufferError):  # a response holds a view still: the mapping goes with the last of them
            mapping.close()


_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def _punch_hole(fd: int, offset: int, nbytes: int) -> None:
    if _LIBC.fallocate(fd, _FALLOC_PUNCH_HOLE_KEEP_SIZE, offset, nbytes):
        raise OSError(ctypes.get_errno(), "fallocate")
