"""Bytes of one backend process's arena can be found, and read, by another."""

from __future__ import annotations

import mmap
import os

import pytest

from headrace.instances.arenas import ArenaTable
from headrace_protocol.arena import Arena


@pytest.fixture
def arena():
    made = Arena.create(1 << 16)
    yield made
    made.close()


def test_a_view_of_an_arena_is_found_at_its_offset_by_the_same_region_each_time(arena):
    table = ArenaTable()
    table.add(arena)
    first, second = table.place(arena.slice(128, 64)), table.place(arena.slice(4096, 8)[2:6])
    assert first is not None
    assert second is not None
    assert (first.offset, first.nbytes) == (128, 64)
    assert (second.offset, second.nbytes) == (4098, 4)
    assert first.region is second.region
    assert (first.region.start, first.region.nbytes) == (0, 1 << 16)


def test_the_region_reads_what_was_written_and_its_descriptor_cannot_write(arena):
    table = ArenaTable()
    table.add(arena)
    arena.view[100:104] = b"word"
    place = table.place(arena.slice(100, 4))
    assert place is not None
    assert place.region.read(place.offset, 4) == b"word"
    with pytest.raises(OSError, match="Bad file"):
        os.write(place.region.fd, b"x")
    with pytest.raises(PermissionError):
        mmap.mmap(place.region.fd, mmap.PAGESIZE)
    assert not place.region.number > 0, "clients' regions have those numbers"


def test_what_lies_in_no_arena_has_no_place(arena):
    table = ArenaTable()
    table.add(arena)
    assert table.place(b"bytes") is None
    assert table.place(memoryview(b"bytes")) is None
    assert table.place(memoryview(mmap.mmap(-1, 4096))) is None
    assert table.place(arena.slice(0, 0)) is None


def test_an_arena_that_was_removed_is_closed_once_nobody_holds_it(arena):
    table = ArenaTable()
    table.add(arena)
    view = arena.slice(0, 8)
    place = table.place(view)
    assert place is not None
    place.region.hold()
    closed = []
    place.region.watch("test", closed.append)
    table.remove(arena)
    assert table.place(view) is None
    assert not closed
    place.region.drop()
    assert closed == [place.region]


def test_without_descriptors_there_is_no_place(arena, monkeypatch):
    table = ArenaTable()
    table.add(arena)

    def refuse(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("headrace.instances.arenas.os.open", refuse)
    assert table.place(arena.slice(0, 8)) is None
