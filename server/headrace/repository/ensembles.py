"""Which models are members of which ensemble, what an ensemble waits for, and which members end with it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Generic

from headrace.repository.sources import M, ModelSource
from headrace.repository.tracked import TrackedModel
from headrace_protocol.errors import invalid


class Ensembles(Generic[M]):
    """Reads the registry's models, which it borrows, and notes in them who needs whom."""

    def __init__(self, models: Mapping[str, TrackedModel[M]]) -> None:
        self._models = models

    def adopt(self, source: ModelSource) -> None:
        """Note the members of a model that is about to be loaded. Raises INVALID_ARG for one that holds itself."""
        for member in source.members:
            if member == source.name or self._reaches(member, source.name):
                raise invalid(f"ensemble {source.name!r} holds itself, by way of its member {member!r}")
        self._models[source.name].members = source.members

    def absent(self, source: ModelSource) -> list[str]:
        """Return the members that neither serve nor are under way."""
        found = []
        for member in sorted(source.members):
            tracked = self._models.get(member)
            if tracked is None or not (tracked.serving or tracked.pending):
                found.append(member)
        return found

    def failed_dependents(self, member: TrackedModel[M]) -> list[str]:
        """Return the ensembles with this member whose last load failed, where the member serves."""
        if not member.serving:
            return []
        return [
            name
            for name, tracked in self._models.items()
            if member.name in tracked.members and tracked.lifecycle.failure and not (tracked.pending or tracked.gone)
        ]

    def leave(self, name: str, members: Collection[str]) -> list[str]:
        """Note that an ensemble needs its members no more; return those that were loaded for it alone."""
        alone = []
        for member in sorted(members):
            tracked = self._models.get(member)
            if tracked is None:
                continue
            tracked.loaded_for.discard(name)
            if not tracked.asked_for and not tracked.loaded_for:
                alone.append(member)
        return alone

    async def wait(self, source: ModelSource) -> None:
        """Wait until the operations on the members are over. Raises INVALID_ARG for a member that does not serve."""
        operations = [
            tracked.latest_operation
            for member in source.members
            if (tracked := self._models.get(member)) is not None and tracked.latest_operation is not None
        ]
        if operations:
            await asyncio.wait(operations)
        for member in sorted(source.members):
            tracked = self._models.get(member)
            if tracked is None or not tracked.serving:
                raise invalid(f"ensemble {source.name!r} needs model {member!r}, which serves no version")

    def _reaches(self, name: str, target: str) -> bool:
        """Return whether a model is a member, of whatever depth, of another."""
        seen: set[str] = set()
        todo = [name]
        while todo:
            tracked = self._models.get(todo.pop())
            if tracked is None or tracked.name in seen:
                continue
            if target in tracked.members:
                return True
            seen.add(tracked.name)
            todo.extend(tracked.members)
        return False
