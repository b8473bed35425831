"""The nouns of the sequence batcher: a request of a sequence, the sequence, its line and the slot that it occupies."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Any

from headrace.scheduling.scheduler import QueuedRequest


class SequenceItem(QueuedRequest):
    """A request as the sequence batcher sees it."""

    __slots__ = ("arrived_ns", "correlation_id", "flags", "kind", "sequence")

    def __init__(
        self,
        owner: Any,
        rows: int,
        kind: Hashable,
        correlation_id: int | str = 0,
        flags: int = 0,
        timeout_us: int = 0,
    ) -> None:
        super().__init__(owner, rows, kind, 0, timeout_us)
        self.kind = kind
        """As QueuedRequest.shape_key, but of the inputs alone: that holds the shapes of the sequence's state too."""
        self.correlation_id = correlation_id
        """The client's name for the sequence; 0 or "" = none."""
        self.flags = flags
        """SEQUENCE_START and SEQUENCE_END, as the model is to see them."""
        self.arrived_ns = 0
        """When it was enqueued: `enqueued_ns` is moved to when it could first have run, and back."""
        self.sequence: Sequence | None = None
        """From `enqueue` until it is over."""


class Sequence:
    """Requests that run one after the other, in one slot."""

    __slots__ = ("began", "closed", "end_seen", "idle_since_ns", "items", "line", "number", "running", "state_key")

    def __init__(self, number: int, line: Line) -> None:
        self.number = number
        """Never used again in this batcher."""
        self.line = line
        self.items: deque[SequenceItem] = deque()
        """Requests that wait, in the order in which they arrived."""
        self.running: SequenceItem | None = None
        """The request that was handed out."""
        self.closed = False
        """Whether it takes no further request: its last one has arrived, or it was cancelled, lost or restarted."""
        self.began = False
        """Whether a request of it may have reached its instance's process, which then holds something for it."""
        self.end_seen = False
        """Whether that process has seen its end flag, and so knows of the end."""
        self.idle_since_ns = 0
        self.state_key = 0
        """Sequences whose keys are equal have states of equal shapes."""


class Line:
    """The sequences of one correlation id, of which the first has the slot and the others wait for its end."""

    __slots__ = ("correlation_id", "place", "sequences", "slot")

    def __init__(self, correlation_id: int | str) -> None:
        self.correlation_id = correlation_id
        self.sequences: OrderedDict[Sequence, None] = OrderedDict()
        """In the order in which they were started; never empty."""
        self.slot: Slot | None = None
        """None while it waits in the backlog."""
        self.place = 0
        """Its key in the backlog; 0 = it has a slot."""

    @property
    def first(self) -> Sequence:
        """The sequence that runs, or is the next to."""
        return next(iter(self.sequences))

    @property
    def last(self) -> Sequence:
        """The sequence that further requests belong to."""
        return next(reversed(self.sequences))


class Slot:
    """Room for one sequence in an instance."""

    __slots__ = ("instance", "line", "number")

    def __init__(self, instance: int, number: int) -> None:
        self.instance = instance
        self.number = number
        """From 0 in each instance."""
        self.line: Line | None = None
