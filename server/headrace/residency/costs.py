"""What a model is expected to take before it was ever measured. Pure.

A guess errs on the high side, and gets better with each model of its backend that is measured: what one takes beyond its
files (the framework, its threads, its arena) is much the same for all.
"""

from __future__ import annotations

from typing import Final

FILES_FACTOR: Final = 1.5
"""Bytes of memory for a byte of a model's files: frameworks keep weights in forms of their own, and room to work in."""
FIRST_GUESS: Final = 64 << 20
"""Bytes of a process beyond its files, while no model of its backend was measured."""
_DECAY: Final = 0.9


class Costs:
    """Learns, by backend, what processes take beyond their models' files."""

    def __init__(self, budget: int) -> None:
        """`budget` in bytes: a first guess takes a quarter of it at most, so that it alone keeps no model away."""
        self._first_guess = min(FIRST_GUESS, budget // 4)
        self._beyond: dict[str, float] = {}

    def guess(self, backend: str, file_bytes: int, instances: int = 1) -> int:
        """Return the bytes that a model with such files is expected to take in `instances` processes."""
        beyond = self._beyond.get(backend, self._first_guess)
        return int(max(1, instances) * (FILES_FACTOR * file_bytes + beyond))

    def learn(self, backend: str, file_bytes: int, measured: int) -> None:
        """Take note of what a model took: the most counts, and fades as others take less."""
        beyond = max(0.0, measured - FILES_FACTOR * file_bytes)
        before = self._beyond.get(backend)
        self._beyond[backend] = beyond if before is None else max(beyond, _DECAY * before)
