"""ArenaTable: the arenas of backend processes as regions that other backend processes may read.

A tensor that one member of an ensemble has written is read by the next where it lies, without a copy. Knows nothing of
ensembles, nor of who allocates in an arena.
"""

from __future__ import annotations

import itertools
import os

import numpy as np

from headrace.instances.regions import Region, Slice
from headrace_protocol.arena import Arena
from headrace_protocol.datatype import Buffer


class _Entry:
    __slots__ = ("address", "arena", "region")

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.address = _address(arena.view)
        self.region: Region | None = None
        """Made when it is first asked for; held here until the arena goes."""


class ArenaTable:
    """One a server; an arena is in it from `add` to `remove`, which its process calls."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        """By the id() of the mapping, which the views of an arena know."""
        self._numbers = itertools.count(1)

    def add(self, arena: Arena) -> None:
        """Make an arena known."""
        self._entries[id(arena.view.obj)] = _Entry(arena)

    def remove(self, arena: Arena) -> None:
        """Forget an arena; those that read in it go on. Call it before the arena is closed."""
        entry = self._entries.pop(id(arena.view.obj), None)
        if entry is not None and entry.region is not None:
            entry.region.drop()

    def place(self, data: Buffer) -> Slice | None:
        """Return where bytes of an arena lie for other processes; None where they do not lie in one.

        Whoever uses the place holds the region, and sees to it that the bytes are not freed meanwhile.
        """
        entry = self._entries.get(id(data.obj)) if isinstance(data, memoryview) else None
        if entry is None or not len(data):
            return None
        if entry.region is None:
            entry.region = self._share(entry.arena)
            if entry.region is None:
                return None
        return Slice(entry.region, _address(data) - entry.address, len(data))

    def _share(self, arena: Arena) -> Region | None:
        """Return an arena as a region; None where descriptors have run out, so that its bytes have to be copied."""
        try:
            fd = os.open(f"/proc/self/fd/{arena.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        number = -next(self._numbers)  # those of clients' regions are positive
        return Region(number, "of a backend process", arena.capacity, fd=fd, readonly=True)


def _address(data: Buffer) -> int:
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])
