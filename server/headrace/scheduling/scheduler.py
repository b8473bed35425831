"""What a scheduler is to its driver: requests in, batches out, and the times at which to look again.

Schedulers are plain objects. They hold no clock, no lock and no task: `now_ns` is an argument and never goes back,
and every call returns at once.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from headrace.scheduling.queue import Lane


class QueuedRequest:
    """A request as a scheduler sees it. `owner` is whatever the driver wants back; the scheduler never looks at it.

    The first five fields are the driver's, set before `enqueue`; the others are the scheduler's. A scheduler drops
    every reference to a request the moment it hands it out, so that the memory of its tensors is not kept.
    """

    __slots__ = ("enqueued_ns", "expires_ns", "lane", "owner", "priority", "rows", "shape_key", "ticket", "timeout_us")

    def __init__(
        self,
        owner: Any,
        rows: int,
        shape_key: Hashable,
        priority: int = 0,
        timeout_us: int = 0,
        enqueued_ns: int = 0,
    ) -> None:
        self.owner = owner
        self.rows = rows
        """Rows it adds to a batch, >= 1 and at most the model's max_batch_size."""
        self.shape_key = shape_key
        """Requests share a batch only if their keys are equal: shapes without the batch dimension, and which inputs."""
        self.priority = priority
        """As the client gave it; 0 = the default level."""
        self.timeout_us = timeout_us
        """As the client gave it; 0 = none. The queue policy says whether it counts."""
        self.enqueued_ns = enqueued_ns
        """Set by `enqueue`."""
        self.expires_ns = 0
        """When its time in the queue is over; 0 = never."""
        self.lane: Lane | None = None
        """Where it waits; None = it does not wait."""
        self.ticket = 0
        """Its number among the requests with a running timeout; 0 = none runs."""


class Scheduler(Protocol):
    """Decides which requests run together, and when. A request that waits leaves in one of four ways, once.

    The driver's loop: on an arrival `enqueue`; on a timer `expire`; then, for as long as it has a free slot,
    `next_batch` until that gives None. It keeps one timer for `next_expiry_ns`, and another for `ripe_at_ns` while it
    has a free slot.
    """

    def enqueue(self, item: QueuedRequest, now_ns: int) -> None:
        """Let a request wait. Raises UNAVAILABLE, reason REJECTED, if the queue of its level is full."""
        ...

    def cancel(self, item: QueuedRequest) -> bool:
        """Remove a request at once; True if it was still waiting, and so will not come out elsewhere."""
        ...

    def expire(self, now_ns: int) -> list[QueuedRequest]:
        """Remove and return the requests whose timeout is over and whose policy is to reject them.

        Those whose policy is DELAY go behind the others of their level; that may make a batch ripe.
        """
        ...

    def next_batch(self, now_ns: int) -> list[QueuedRequest] | None:
        """Remove and return the batch that a slot free now should run; None if nothing is ripe.

        Never returns a request whose time to be rejected has come: the next `expire` does.
        """
        ...

    def next_expiry_ns(self) -> int | None:
        """Earliest time at which `expire` has work to do, for which the driver needs no free slot; None if never."""
        ...

    def ripe_at_ns(self) -> int | None:
        """Time at which `next_batch` gives a batch if no event comes before; past if it would now, None if empty."""
        ...

    def wake_at_ns(self) -> int | None:
        """Return the earlier of `next_expiry_ns` and `ripe_at_ns`: nothing changes by itself before it."""
        ...

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        ...

    def drain(self) -> list[QueuedRequest]:
        """Remove and return every request that is still held, in the order of service."""
        ...

    def check_integrity(self) -> None:
        """Assert the invariants of the structure; slow, for tests."""
        ...
