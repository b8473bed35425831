"""The backlog of the sequence batcher: sequences without a slot, first come first served, and how long they will wait."""

from __future__ import annotations

import heapq
from typing import Final

from headrace.scheduling.sequence_parts import Line, SequenceItem

_STALE_DEADLINES: Final = 64
"""Deadlines of requests that have left may outnumber the live ones by so many before they are swept out."""


class Backlog:
    """Lines in order of arrival. Of their requests, those that have a timeout are watched."""

    def __init__(self) -> None:
        self._lines: dict[int, Line] = {}
        self._numbers = 0
        self._watched: dict[int, SequenceItem] = {}
        """By number, requests whose time runs."""
        self._deadlines: list[tuple[int, int]] = []
        """A heap of (time, number); a number that is not in _watched belongs to a request that has left."""

    def __len__(self) -> int:
        return len(self._lines)

    def append(self, line: Line) -> None:
        """Let a line wait behind the others."""
        self._numbers += 1
        line.place = self._numbers
        self._lines[line.place] = line
        for sequence in line.sequences:
            for item in sequence.items:
                self.watch(item)

    def remove(self, line: Line) -> None:
        """Take a line out. Its requests are not watched any more."""
        del self._lines[line.place]
        line.place = 0
        for sequence in line.sequences:
            for item in sequence.items:
                self.unwatch(item)

    def first(self) -> Line:
        """Return the line that came first; there must be one."""
        return next(iter(self._lines.values()))

    def watch(self, item: SequenceItem) -> None:
        """Let the time of a request run, if it has a timeout."""
        if not item.timeout_us:
            return
        self._numbers += 1
        item.ticket = self._numbers
        item.expires_ns = item.arrived_ns + item.timeout_us * 1000
        self._watched[item.ticket] = item
        heapq.heappush(self._deadlines, (item.expires_ns, item.ticket))
        if len(self._deadlines) > 2 * len(self._watched) + _STALE_DEADLINES:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._watched]
            heapq.heapify(self._deadlines)

    def unwatch(self, item: SequenceItem) -> None:
        """Stop the time of a request, if it runs."""
        if item.ticket:
            del self._watched[item.ticket]
            item.ticket = 0

    def next_deadline_ns(self) -> int | None:
        """Return when the time of the next request is over; None where none runs."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][1] not in self._watched:
            heapq.heappop(deadlines)
        return deadlines[0][0] if deadlines else None

    def overdue(self, now_ns: int) -> SequenceItem | None:
        """Return a request whose time is over, for the caller to take out; None where there is none."""
        due = self.next_deadline_ns()
        return None if due is None or due > now_ns else self._watched[self._deadlines[0][1]]

    def check_integrity(self) -> None:
        """Assert the invariants; slow, for tests."""
        assert all(line.place == place and line.slot is None for place, line in self._lines.items())
        timed = {
            item.ticket: item
            for line in self._lines.values()
            for sequence in line.sequences
            for item in sequence.items
            if item.timeout_us
        }
        assert timed == self._watched, "the time of others runs"
        live = {number: at for at, number in self._deadlines if number in self._watched}
        assert live == {number: item.expires_ns for number, item in timed.items()}, "a deadline is missing"
