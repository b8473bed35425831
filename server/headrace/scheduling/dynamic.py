"""The dynamic batcher: puts requests of one shape together, up to max_batch_size rows.

Which requests: the oldest of the highest level that has any leads. Those of its shape key join it in order of arrival,
past older requests of other shapes (they lose nothing: one of them leads the next batch). Requests of a lower lane
join only if the batch takes all of the lanes above. A request is never split, and none overtakes another of its lane
and shape, so the first that does not fit ends the batch.

When, and how many of them:

- the queue delay is over for its leader, or for the first that joins it from a lower lane: at once, all that fit;
- a preferred size can be reached exactly: at once, the largest such;
- no queue delay is set: at once, all that fit;
- the batch cannot grow, for it has the rows of the largest preferred size or something waits that cannot join it
  (another shape, no room): at once, all that fit. So a change of shape never holds anyone;
- otherwise when the queue delay is over.
"""

from __future__ import annotations

from headrace.repository.model_config import DynamicBatching
from headrace.scheduling.queue import PolicyQueue
from headrace.scheduling.scheduler import QueuedRequest


class DynamicBatcher(PolicyQueue):
    """Scheduler of a model with dynamic_batching and max_batch_size > 0."""

    def __init__(self, max_batch_size: int, settings: DynamicBatching) -> None:
        super().__init__(settings)
        assert max_batch_size > 0, "a model that does not batch has the default scheduler"
        self._max_rows = max_batch_size
        self._delay_ns = settings.max_queue_delay_us * 1000
        preferred = settings.preferred_batch_sizes or (max_batch_size,)
        self._least_preferred = min(preferred)
        self._most_preferred = min(max(preferred), max_batch_size)
        self._cuts = frozenset(preferred) if self._least_preferred < max_batch_size else frozenset()
        """Rows at which a batch may have to be cut."""

    def next_batch(self, now_ns: int) -> list[QueuedRequest] | None:
        deadlines = self._deadlines
        if deadlines and deadlines[0][0] <= now_ns:
            self._sweep(now_ns)
        if not self._lanes:
            return None
        if self._delay_ns and now_ns < self._delay_over_ns() and self._may_grow():
            return None
        batch = self._gather(now_ns)
        self._take(batch)
        return batch

    def ripe_at_ns(self) -> int | None:
        if not self._lanes:
            return None
        if self._delay_ns and self._may_grow():
            return self._delay_over_ns()
        return self._lanes[0].head().enqueued_ns

    def _delay_over_ns(self) -> int:
        """Return when the queue delay is over for the first lane whose head has waited that long."""
        lanes = self._lanes
        if len(lanes) == 1:
            return lanes[0].head().enqueued_ns + self._delay_ns
        return min(lane.head().enqueued_ns for lane in lanes) + self._delay_ns

    def _may_grow(self) -> bool:
        """Tell whether all that waits is one batch, of no preferred size and smaller than the largest."""
        if self._rows >= self._most_preferred:
            return False
        lanes = self._lanes
        shape_key = lanes[0].head().shape_key
        for lane in lanes:
            if len(lane.groups) > 1 or shape_key not in lane.groups:
                return False
        return self._rows < self._least_preferred or not self._reaches_preferred()

    def _reaches_preferred(self) -> bool:
        """Tell whether some first requests, of all in order of service, add up to a preferred size."""
        rows = 0
        for lane in self._lanes:
            for item in lane.order:
                rows += item.rows
                if rows in self._cuts:
                    return True
        return False

    def _gather(self, now_ns: int) -> list[QueuedRequest]:
        """Choose the requests of the batch that would run now; they stay in the queue."""
        max_rows, cuts, delay_ns = self._max_rows, self._cuts, self._delay_ns
        batch: list[QueuedRequest] = []
        rows = cut = 0
        overdue = False
        shape_key = self._lanes[0].head().shape_key
        for lane in self._lanes:
            first = len(batch)
            for item in lane.groups.get(shape_key, ()):
                rows += item.rows
                if rows > max_rows:
                    break
                batch.append(item)
                if rows in cuts:
                    cut = len(batch)
            if delay_ns and first < len(batch) and batch[first].enqueued_ns + delay_ns <= now_ns:
                overdue = True
            if len(batch) - first < len(lane.order):
                break
        if cut and not overdue:
            del batch[cut:]
        return batch
