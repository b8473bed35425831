"""Which of llama.cpp's sequences holds which blocks: paging over a memory that has sequences, and no blocks. Pure.

llama.cpp tags each cell of its KV memory with the sequences that it belongs to, and a sequence takes over a part of another
by tagging its cells, without a copy. So a request is a sequence; one that has ended is kept (parked) for as long as its
blocks hold what they held, so that the next that begins alike can take them over. The block manager counts blocks, not
cells: a block's cells are removed from whoever was parked with it before another request writes that block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from headrace_backends.llm.step import ScheduledRequest


class SequenceMemory(Protocol):
    """What is asked of llama.cpp. Positions are from `start` to below `end`; -1 is no end."""

    def remove(self, sequence: int, start: int, end: int) -> None:
        """Take cells from a sequence; those that belong to no other are free."""

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Let cells of one sequence belong to another too."""


@dataclass(slots=True, eq=False)
class _Sequence:
    id: int
    length: int = 0
    """Tokens in memory, while it runs."""
    blocks: dict[int, int] = field(default_factory=dict)
    """Of each block that it holds, its place in the table."""


class SequenceBook:
    """Gives requests their sequences. Follows the steps in order: `begin`, then `place` for each entry."""

    def __init__(self, memory: SequenceMemory, num_sequences: int, block_size: int, *, keep: bool) -> None:
        """`num_sequences` is more than can run at once; without `keep` nothing is parked."""
        self._memory = memory
        self._size = block_size
        self._keep = keep
        self._free = list(range(num_sequences - 1, -1, -1))
        self._running: dict[str, _Sequence] = {}
        self._parked: OrderedDict[int, _Sequence] = OrderedDict()
        self._holders: dict[int, dict[int, _Sequence]] = {}
        """Of each block the sequences that hold it, by their ids."""

    def begin(self, ended_ids: Iterable[str]) -> None:
        """Take note of requests that ended or lost their blocks since the last step."""
        for request_id in ended_ids:
            sequence = self._running.pop(request_id, None)
            if sequence is not None:
                self._park(sequence)

    def is_new(self, entry: ScheduledRequest) -> bool:
        """Say whether the entry's request has no sequence yet."""
        return entry.request.id not in self._running

    def place(self, entry: ScheduledRequest) -> tuple[int, int]:
        """Return an entry's sequence, and from which position on its tokens have to be computed.

        That is the entry's start, or before it where what the block manager takes for cached is not there any more. The
        tokens up to the entry's end count as computed then.
        """
        sequence = self._running.get(entry.request.id)
        if sequence is None:
            sequence = self._running[entry.request.id] = self._new()
            self._take_over(sequence, entry)
        elif sequence.length > entry.start:  # guesses that were wrong
            self._memory.remove(sequence.id, entry.start, -1)
            sequence.length = entry.start
        first = sequence.length
        for at in range(first // self._size, -(-entry.end // self._size)):
            block = entry.block_table[at]
            if at >= entry.start // self._size:
                self._claim(block, sequence)
            self._hold(block, sequence, at)
        sequence.length = entry.end
        return sequence.id, first

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop requests with all that is in memory of them: a step with them failed."""
        for request_id in request_ids:
            sequence = self._running.pop(request_id, None)
            if sequence is not None:
                self._drop(sequence)

    def _take_over(self, sequence: _Sequence, entry: ScheduledRequest) -> None:
        """Give a new sequence what is there of the blocks that the block manager found; neighbours in one piece."""
        source, start = -1, 0
        for at in range(entry.start // self._size):
            holder = self._holder(entry.block_table[at], at)
            if holder is None:
                break
            if holder.id != source:
                self._copy(source, sequence, start, at)
                source, start = holder.id, at
            self._hold(entry.block_table[at], sequence, at)
            sequence.length = (at + 1) * self._size
        self._copy(source, sequence, start, sequence.length // self._size)

    def _copy(self, source: int, sequence: _Sequence, start: int, end: int) -> None:
        if source >= 0 and end > start:
            self._memory.copy(source, sequence.id, start * self._size, end * self._size)

    def _holder(self, block: int, at: int) -> _Sequence | None:
        return next((each for each in self._holders.get(block, {}).values() if each.blocks[block] == at), None)

    def _hold(self, block: int, sequence: _Sequence, at: int) -> None:
        sequence.blocks[block] = at
        self._holders.setdefault(block, {})[sequence.id] = sequence

    def _claim(self, block: int, owner: _Sequence) -> None:
        """Take a block's cells from all but the one that writes it now."""
        for holder in list(self._holders.get(block, {}).values()):
            if holder is not owner:
                at = holder.blocks[block]
                self._memory.remove(holder.id, at * self._size, (at + 1) * self._size)
                self._release(block, holder)
                if not holder.blocks and holder.id in self._parked:
                    self._drop(holder)

    def _release(self, block: int, sequence: _Sequence) -> None:
        del sequence.blocks[block]
        holders = self._holders[block]
        del holders[sequence.id]
        if not holders:
            del self._holders[block]

    def _park(self, sequence: _Sequence) -> None:
        """Keep what is in whole blocks."""
        full = sequence.length // self._size
        if not self._keep or not full:
            self._drop(sequence)
            return
        self._memory.remove(sequence.id, full * self._size, -1)
        for block in [block for block, at in sequence.blocks.items() if at >= full]:
            self._release(block, sequence)
        self._parked[sequence.id] = sequence

    def _drop(self, sequence: _Sequence) -> None:
        self._memory.remove(sequence.id, 0, -1)
        for block in list(sequence.blocks):
            self._release(block, sequence)
        self._parked.pop(sequence.id, None)
        self._free.append(sequence.id)

    def _new(self) -> _Sequence:
        if not self._free:
            self._drop(next(iter(self._parked.values())))
        return _Sequence(self._free.pop())
