"""Which sequences of one instance run together, and when: the two strategies of the sequence batcher."""

from __future__ import annotations

from typing import Protocol

from headrace.repository.model_config import DynamicBatching
from headrace.scheduling.dynamic import DynamicBatcher
from headrace.scheduling.scheduler import QueuedRequest
from headrace.scheduling.sequence_parts import SequenceItem


class ReadyRequests(Protocol):
    """Requests of one instance that could run now, one of each sequence; `enqueued_ns` is since when."""

    def add(self, item: SequenceItem, now_ns: int) -> None:
        """Take a request up."""
        ...

    def remove(self, item: SequenceItem) -> None:
        """Drop a request that is among them."""
        ...

    def next_batch(self, now_ns: int) -> list[SequenceItem] | None:
        """Remove and return those that run together now; None if nothing is ripe."""
        ...

    def ripe_at_ns(self) -> int | None:
        """Time at which `next_batch` gives a batch if nothing happens before; None if empty."""
        ...

    def holds(self, item: SequenceItem) -> bool:
        """Return whether the request is among them."""
        ...


class DirectReady:
    """The direct strategy: a slot is a row, and an execution takes every slot that has a request of the same kind.

    It waits for others until `least` of the slots have one, but no longer than the queue delay.
    """

    def __init__(self, least: float, delay_us: int) -> None:
        """`least` counts slots, and may be a fraction of one."""
        self._least = least
        self._delay_ns = delay_us * 1000
        self._ready: dict[SequenceItem, None] = {}
        """In the order in which they became ready."""

    def add(self, item: SequenceItem, now_ns: int) -> None:
        item.enqueued_ns = now_ns
        self._ready[item] = None

    def remove(self, item: SequenceItem) -> None:
        del self._ready[item]

    def next_batch(self, now_ns: int) -> list[SequenceItem] | None:
        ripe_ns = self.ripe_at_ns()
        if ripe_ns is None or ripe_ns > now_ns:
            return None
        batch = self._together()
        for item in batch:
            del self._ready[item]
        return sorted(batch, key=_slot_number)

    def ripe_at_ns(self) -> int | None:
        if not self._ready:
            return None
        first = next(iter(self._ready))
        if self._delay_ns and len(self._together()) < self._least:
            return first.enqueued_ns + self._delay_ns
        return first.enqueued_ns

    def holds(self, item: SequenceItem) -> bool:
        return item in self._ready

    def _together(self) -> list[SequenceItem]:
        kind = next(iter(self._ready)).shape_key
        return [item for item in self._ready if item.shape_key == kind]


class OldestReady:
    """The oldest strategy: a dynamic batcher over the sequences of the instance, whichever slots they have."""

    def __init__(self, max_batch_size: int, preferred: tuple[int, ...], delay_us: int) -> None:
        settings = DynamicBatching(preferred_batch_sizes=preferred, max_queue_delay_us=delay_us)
        self._batcher = DynamicBatcher(max(1, max_batch_size), settings)

    def add(self, item: SequenceItem, now_ns: int) -> None:
        self._batcher.enqueue(item, now_ns)

    def remove(self, item: SequenceItem) -> None:
        removed = self._batcher.cancel(item)
        assert removed, "the request was not ready"

    def next_batch(self, now_ns: int) -> list[SequenceItem] | None:
        batch: list[QueuedRequest] | None = self._batcher.next_batch(now_ns)
        return None if batch is None else [item for item in batch if isinstance(item, SequenceItem)]

    def ripe_at_ns(self) -> int | None:
        return self._batcher.ripe_at_ns()

    def holds(self, item: SequenceItem) -> bool:
        return item.lane is not None


def _slot_number(item: SequenceItem) -> int:
    assert item.sequence is not None, "a request that is over is ready"
    slot = item.sequence.line.slot
    assert slot is not None, "a request is ready without a slot"
    return slot.number
