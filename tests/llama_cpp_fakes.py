"""llama.cpp's memory without llama.cpp: cells with sequences, and logits that say what was found in them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

VOCAB = 29
WIDTH = 3


def next_token(tokens: Sequence[int], adapter: str | None = None) -> int:
    """The token that this model finds likeliest after `tokens`."""
    return zlib.crc32(bytes(tokens), 0 if adapter is None else zlib.crc32(adapter.encode())) % VOCAB


@dataclass(eq=False)
class Cell:
    position: int
    token: int
    sequences: set[int] = field(default_factory=set)


class CellMemory:
    """A context whose tokens are read back through the cells of their sequence. Implements llama_cpp_runner.Context."""

    def __init__(self, capacity: int, batch: int = 32) -> None:
        self.capacity = capacity
        self.batch = batch
        self.cells: list[Cell] = []
        self.adapter: str | None = None
        self.decoded = 0
        self.batches = 0
        self.fail_next = False
        self._rows: list[np.ndarray] = []
        self._states: list[np.ndarray] = []
        self._hidden = False

    def remove(self, sequence: int, start: int, end: int) -> None:
        for cell in self.cells:
            if sequence in cell.sequences and cell.position >= start and (end < 0 or cell.position < end):
                cell.sequences.discard(sequence)
        self.cells = [cell for cell in self.cells if cell.sequences]

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        for cell in self.cells:
            if source in cell.sequences and start <= cell.position < end:
                cell.sequences.add(target)

    def decode(self, tokens, positions, sequences, outputs) -> int:
        assert len(tokens) <= self.batch
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("no room")
        self._rows, self._states = [], []
        for token, position, sequence, output in zip(tokens, positions, sequences, outputs, strict=True):
            assert position == len(self.tokens(sequence)), "a sequence has a hole, or two tokens at one position"
            self.cells.append(Cell(position, token, {sequence}))
            if output:
                known = self.tokens(sequence)
                self._rows.append(np.eye(VOCAB, dtype=np.float32)[next_token(known, self.adapter)] * 9)
                self._states.append(np.array([len(known), token, sum(known)], np.float32))
        assert len(self.cells) <= self.capacity, "more cells than there are blocks"
        self.decoded += len(tokens)
        self.batches += 1
        return len(self._rows)

    def tokens(self, sequence: int) -> list[int]:
        """What lies in a sequence, in order."""
        mine = sorted((cell for cell in self.cells if sequence in cell.sequences), key=lambda cell: cell.position)
        assert [cell.position for cell in mine] == list(range(len(mine))), f"sequence {sequence} is in parts"
        return [cell.token for cell in mine]

    def logits(self, rows: int) -> np.ndarray:
        assert not self._hidden
        return np.array(self._rows[:rows])

    def hidden(self, rows: int) -> np.ndarray:
        assert self._hidden
        return np.array(self._states[:rows])

    def want_hidden(self, *, wanted: bool) -> None:
        self._hidden = wanted

    def use_adapter(self, adapter) -> None:
        self.adapter = adapter
