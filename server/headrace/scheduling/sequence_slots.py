"""The slots of all instances: which are free, and which come first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from headrace.scheduling.sequence_parts import Slot


class SlotTable:
    """Slots of instances that are up and down. A slot is free where its instance is up and it has no line.

    A slot is made when it is taken for the first time, so that a large bound costs nothing.
    """

    def __init__(self, instances: int, per_instance: int) -> None:
        """Instances are down at first."""
        self._per_instance = per_instance
        self._slots: list[list[Slot]] = [[] for _ in range(instances)]
        self._up: set[int] = set()
        self._free: list[tuple[int, int]] = []
        """A heap of (slot number, instance), of the slots never taken the next of each instance alone."""

    def __iter__(self) -> Iterator[Slot]:
        """Yield every slot that was ever taken."""
        for slots in self._slots:
            yield from slots

    @property
    def free(self) -> bool:
        """Whether some slot is free."""
        return bool(self._free)

    def is_up(self, instance: int) -> bool:
        """Return whether the slots of an instance are given out."""
        return instance in self._up

    def of(self, instance: int) -> list[Slot]:
        """Return the slots of an instance that were ever taken, by number."""
        return self._slots[instance]

    def up(self, instance: int) -> None:
        """Give out the slots of an instance."""
        assert instance not in self._up, "the instance is up already"
        self._up.add(instance)
        for entry in self._free_of(instance):
            heapq.heappush(self._free, entry)

    def down(self, instance: int) -> None:
        """Give no slot of an instance out any more; those in use are the caller's to empty."""
        self._up.remove(instance)
        self._free = [entry for entry in self._free if entry[1] != instance]
        heapq.heapify(self._free)

    def take(self) -> Slot:
        """Return the free slot of the lowest number, for the caller to put a line in; there must be one."""
        number, instance = heapq.heappop(self._free)
        slots = self._slots[instance]
        if number == len(slots):
            slots.append(Slot(instance, number))
            if number + 1 < self._per_instance:
                heapq.heappush(self._free, (number + 1, instance))
        return slots[number]

    def release(self, slot: Slot) -> None:
        """Note that a slot has no line any more."""
        assert slot.line is None, "the slot is in use"
        if slot.instance in self._up:
            heapq.heappush(self._free, (slot.number, slot.instance))

    def check_integrity(self) -> None:
        """Assert the invariants; slow, for tests."""
        free = [entry for instance in self._up for entry in self._free_of(instance)]
        assert sorted(self._free) == sorted(free), "a free slot is not known, or known twice"
        assert all(slot.line is None or slot.line.slot is slot for slot in self), "a line believes to be elsewhere"

    def _free_of(self, instance: int) -> list[tuple[int, int]]:
        slots = self._slots[instance]
        free = [(slot.number, instance) for slot in slots if slot.line is None]
        return [*free, (len(slots), instance)] if len(slots) < self._per_instance else free
