"""The models that there are, in memory or not, and what each is expected to take. Folders are looked at in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from headrace.repository import layout as layouts
from headrace.repository.layout import ModelLayout, RepositorySnapshot
from headrace.repository.overlay import Overlay
from headrace.residency.catalogue import Entry, Known, study
from headrace.residency.costs import Costs
from headrace.residency.decisions import Traits
from headrace.residency.options import ResidencyOptions


class Shelf:
    """Owned by the keeper, who puts into `entries` what it was told is new."""

    def __init__(
        self,
        repositories: Sequence[Path],
        config_name: str | None,
        overlay: Overlay | None,
        options: ResidencyOptions,
    ) -> None:
        self.entries: Final[dict[str, Entry]] = {}
        self.known: Final[dict[str, Known]] = {}
        """Of models that were in memory, what they told of themselves."""
        self._repositories = repositories
        self._study = partial(study, config_name=config_name, overlay=overlay, pins=options.pins)
        self._costs = Costs(options.budget)

    async def scan(self) -> RepositorySnapshot:
        """Return what lies in the repositories now."""
        return await asyncio.to_thread(layouts.scan, self._repositories)

    async def news(self, snapshot: RepositorySnapshot) -> list[Entry]:
        """Return what is told by the folders that are new, or others than before."""
        new = [found for name, found in snapshot.models.items() if self._is_new(name, found)]
        return await asyncio.to_thread(lambda: [self._study(found) for found in new])

    async def news_of(self, name: str) -> Entry | None:
        """Look at one model again; None where there is nothing new, or no folder."""
        found = await asyncio.to_thread(layouts.scan_model, self._repositories, name)
        if found is None or not self._is_new(name, found):
            return None
        return await asyncio.to_thread(self._study, found)

    def traits(self, entry: Entry) -> Traits:
        """Return what the policy needs to know of a model."""
        if entry.members:
            estimate = 0
        elif entry.memory_bytes is not None:
            estimate = entry.memory_bytes
        else:
            estimate = self._costs.guess(entry.backend, entry.file_bytes)
        return Traits(estimate, entry.pinned, entry.members)

    def stranger(self) -> Traits:
        """Return the traits of a model without a folder: a call brings it."""
        return Traits(self._costs.guess("", 0))

    def measured(self, name: str, nbytes: int) -> list[Entry]:
        """Learn from what a model took; return those of which something else is expected now."""
        entry = self.entries.get(name)
        if entry is None or not entry.backend:
            return []
        self._costs.learn(entry.backend, entry.file_bytes, nbytes)
        return [other for other in self.entries.values() if other.backend == entry.backend]

    def _is_new(self, name: str, found: ModelLayout) -> bool:
        entry = self.entries.get(name)
        return entry is None or entry.layout != found
