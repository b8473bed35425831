"""What models that serve do now: requests and sequences in them, and the memory that their processes take."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping

from headrace.instances.loaded_model import LoadedModel
from headrace.observability.processes import process_usage
from headrace.repository.registry import ModelRegistry
from headrace.residency.decisions import Activity


class Readings:
    """Borrows the registry."""

    def __init__(self, registry: ModelRegistry[LoadedModel]) -> None:
        self._registry = registry

    def activity(self, names: Iterable[str], used_ns: Mapping[str, int]) -> dict[str, Activity]:
        """Return what requests do to models; `used_ns` says when the last one came."""
        found = {}
        for name in names:
            models = self._registry.models_of(name)
            busy = any(self._registry.leases(model) for model in models)
            bound = any(model.sequences is not None and model.sequences.active > 0 for model in models)
            found[name] = Activity(used_ns.get(name, 0), busy, bound)
        return found

    async def memory(self, names: Iterable[str]) -> dict[str, int]:
        """Return the bytes that models take, but of those whose processes are others when that is known."""
        pids = {name: self._pids(name) for name in names}
        found = await asyncio.to_thread(_memory, pids)
        return {name: nbytes for name, nbytes in found.items() if pids[name] == self._pids(name)}

    def _pids(self, name: str) -> list[int]:
        return [pid for model in self._registry.models_of(name) for pid in model.pids()]


def _memory(pids: Mapping[str, Collection[int]]) -> dict[str, int]:
    """Return the bytes of each model's processes; pages shared with others count in part. Linux walks page tables."""
    found = {}
    for name, numbers in pids.items():
        usages = [usage for pid in numbers if (usage := process_usage(pid)) is not None]
        found[name] = sum(usage.rss_bytes if usage.pss_bytes is None else usage.pss_bytes for usage in usages)
    return found
