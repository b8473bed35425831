"""The masks of a step's constrained rows, written by a thread of their own while the model computes the logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace_backends.llm.grammar import GrammarState

_BITS: Final = 32


class RowMask(NamedTuple):
    """Which tokens a row may choose."""

    words: NDArray[np.uint32]
    """[ceil(vocabulary / 32)]; token t's bit is t % 32 of word t // 32. Borrowed until the next step."""
    problem: str | None = None
    """Why there is no mask: the row's request has to end."""


class MaskFiller:
    """Fills masks beside the forward. One step at a time: `begin`, then `masks`."""

    def __init__(self, vocab_size: int) -> None:
        self._words: Final = -(-vocab_size // _BITS)
        self._memory: NDArray[np.uint32] = np.empty((0, self._words), np.uint32)
        self._thread: ThreadPoolExecutor | None = None
        self._filling: Future[list[str | None]] | None = None
        self._wanted: Mapping[str, tuple[GrammarState, Sequence[int]]] = {}

    def begin(self, wanted: Mapping[str, tuple[GrammarState, Sequence[int]]]) -> None:
        """Begin with these generations' masks, by their requests' ids: one for the next token and one behind each draft."""
        self._wanted = wanted
        if not wanted:
            return
        count = sum(1 + len(drafts) for _, drafts in wanted.values())
        if len(self._memory) < count:
            self._memory = np.empty((count, self._words), np.uint32)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "grammar-masks")
        self._filling = self._thread.submit(self._fill)

    def masks(self) -> dict[str, list[RowMask]]:
        """Return the masks that were begun."""
        if self._filling is None:
            return {}
        problems = self._filling.result()
        self._filling = None
        told: dict[str, list[RowMask]] = {}
        first = 0
        for (name, (_, drafts)), problem in zip(self._wanted.items(), problems, strict=True):
            after = first + 1 + len(drafts)
            told[name] = [RowMask(words, problem) for words in self._memory[first:after]]
            first = after
        self._wanted = {}
        return told

    def _fill(self) -> list[str | None]:
        problems, first = [], 0
        for state, drafts in self._wanted.values():
            rows = self._memory[first : first + 1 + len(drafts)]
            rows.fill(np.uint32(0xFFFFFFFF))
            problems.append(state.fill(rows, drafts))
            first += len(rows)
        return problems
