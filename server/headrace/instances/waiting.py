"""WaitGraph: which batches wait, in their execution, for an answer of which model; pure.

A model that calls a model that calls it back waits for ever once every instance that could answer waits itself. Whoever is
about to add the wait that closes such a circle asks first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final


class WaitGraph:
    """Models are any objects that stand for a set of instances; batches are any names that are unique in their model."""

    def __init__(self) -> None:
        self._waits: Final[dict[Hashable, dict[Hashable, list[Hashable]]]] = {}
        """Model -> its batches that wait -> the models they wait for, each as often as it is waited for."""

    def add(self, model: Hashable, batch: Hashable, target: Hashable) -> None:
        """Note that `batch` of `model` waits for `target`. `remove` follows."""
        self._waits.setdefault(model, {}).setdefault(batch, []).append(target)

    def remove(self, model: Hashable, batch: Hashable, target: Hashable) -> None:
        """Take one `add` back."""
        batches = self._waits[model]
        batches[batch].remove(target)
        if not batches[batch]:
            del batches[batch]
            if not batches:
                del self._waits[model]

    def closes_circle(
        self, model: Hashable, batch: Hashable, target: Hashable, instances: Callable[[Hashable], int]
    ) -> bool:
        """Return whether nothing could end the wait of `batch` of `model` for `target`.

        It could while a model that it depends on has an instance that does not wait; `instances` counts those of a model.
        """
        if target is not model and target not in self._waits:
            return False
        self.add(model, batch, target)
        try:
            stuck = {found for found, batches in self._waits.items() if len(batches) >= instances(found)}
            while True:
                moving = {found for found in stuck if self._moves(found, stuck)}
                if not moving:
                    return model in stuck and target in stuck
                stuck -= moving
        finally:
            self.remove(model, batch, target)

    def _moves(self, model: Hashable, stuck: set[Hashable]) -> bool:
        return any(not stuck.intersection(targets) for targets in self._waits[model].values())
