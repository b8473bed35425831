"""The default scheduler: no batching, each request runs alone, in order of arrival.

It serves models without dynamic_batching. A model that has dynamic_batching but max_batch_size 0 gets it too, with the
queue policies and priority levels of its settings.
"""

from __future__ import annotations

from headrace.repository.model_config import DynamicBatching
from headrace.scheduling.queue import PolicyQueue
from headrace.scheduling.scheduler import QueuedRequest


class DefaultScheduler(PolicyQueue):
    """First in, first out, one request a batch. Without settings no bound and no timeout apply."""

    def __init__(self, settings: DynamicBatching | None = None) -> None:
        super().__init__(settings or DynamicBatching())

    def next_batch(self, now_ns: int) -> list[QueuedRequest] | None:
        self._sweep(now_ns)
        if not self._lanes:
            return None
        item = self._lanes[0].head()
        self._remove(item)
        return [item]

    def ripe_at_ns(self) -> int | None:
        return self._lanes[0].head().enqueued_ns if self._lanes else None
