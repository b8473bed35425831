"""Releases answers in the order in which their requests arrived: preserve_ordering of the dynamic batcher."""

from __future__ import annotations

from collections import deque

from headrace.scheduling.scheduler import QueuedRequest


class OrderedRelease:
    """Holds back what is done until all that arrived before it is done too.

    Every admitted request must be completed exactly once, also if it fails, times out or is cancelled: one that never
    completes holds back all that came after it.
    """

    def __init__(self) -> None:
        self._order: deque[QueuedRequest] = deque()
        """Admitted and not released, in order of arrival."""
        self._done: dict[QueuedRequest, bool] = {}
        """The same requests: is it complete?"""

    def __len__(self) -> int:
        """Return how many requests are admitted and not released."""
        return len(self._order)

    def __contains__(self, item: object) -> bool:
        """Return whether a request is admitted and not released."""
        return item in self._done

    def admit(self, item: QueuedRequest) -> None:
        """Note that a request arrived."""
        assert item not in self._done, "the request was admitted before"
        self._order.append(item)
        self._done[item] = False

    def complete(self, item: QueuedRequest) -> list[QueuedRequest]:
        """Note that a request is done; return those that may go out now, in order of arrival."""
        assert self._done[item] is False, "the request was completed before"
        self._done[item] = True
        released: list[QueuedRequest] = []
        order, done = self._order, self._done
        while order and done[order[0]]:
            first = order.popleft()
            del done[first]
            released.append(first)
        return released

    def check_integrity(self) -> None:
        """Assert the invariants; for tests."""
        assert set(self._order) == set(self._done), "the two records hold different requests"
        assert len(self._order) == len(self._done), "a request is held twice"
        assert not self._order or not self._done[self._order[0]], "the oldest is done but held back"
