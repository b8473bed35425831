"""The sequence batcher: requests of one correlation id run one after the other, in a slot that is theirs until the end.

A sequence begins with a request that has the start flag and gets a slot of an instance: the lowest number that is free
in any, of the first such instance. Where none is free it waits in the backlog, whole, first come first served. It ends

- when its request with the end flag is over;
- when nothing has waited or run for the idle time;
- when one of its requests is cancelled, or has waited too long in the backlog: those that wait go with it;
- when its instance's process ends: those that wait fail.

A start on a correlation id that is in use ends the older sequence once its requests have run; the new one waits in line
for the same slot, so that a model which tells sequences by correlation id never runs two of a name. A slot is given on
only once nothing of the sequence before it runs.

An *iterative* model's every request is a sequence of its own, which the model may have run again and again.
"""

from __future__ import annotations

from collections import OrderedDict

from headrace.repository.model_config import SequenceBatching
from headrace.scheduling.ordering import OrderedRelease
from headrace.scheduling.sequence_admission import SequenceAdmission
from headrace.scheduling.sequence_backlog import Backlog
from headrace.scheduling.sequence_parts import Line, Sequence, SequenceItem
from headrace.scheduling.sequence_ready import DirectReady, OldestReady, ReadyRequests
from headrace.scheduling.sequence_slots import SlotTable
from headrace.types import SEQUENCE_END, SEQUENCE_START
from headrace_protocol.errors import FailureReason, InferError, unavailable


class SequenceBatcher:
    """Scheduler of a model with sequence_batching. Instances are numbered from 0, and are down until `instance_up`."""

    def __init__(
        self,
        settings: SequenceBatching,
        max_batch_size: int,
        instances: int,
        model_name: str,
        ordering: OrderedRelease | None = None,
    ) -> None:
        """`ordering` is told of each request once it could run; whoever completes requests releases them by it."""
        self._settings = settings
        self._admission = SequenceAdmission(settings, model_name)
        self._ordering = ordering
        self._idle_ns = settings.max_idle_us * 1000
        rows = max(1, max_batch_size)
        per_instance = (settings.max_candidate_sequences or rows) if settings.oldest else rows
        self._slots = SlotTable(instances, per_instance)
        self._ready = [_ready_requests(settings, max_batch_size) for _ in range(instances)]
        self._lines: dict[int | str, Line] = {}
        self._backlog = Backlog()
        self._idle: OrderedDict[Sequence, None] = OrderedDict()
        """Sequences that wait for their clients, the longest first."""
        self._rejected: list[SequenceItem] = []
        """Removed because their time was over, not yet returned by expire."""
        self._ended: list[tuple[int, int]] = []
        self._numbers = 0
        self._waiting = 0
        self.restarts = 0
        """Sequences that were ended by a start on their correlation id."""

    # --- what it tells ---------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return self._waiting

    @property
    def active(self) -> int:
        """Slots in use."""
        return len(self._lines) - len(self._backlog)

    @property
    def backlog(self) -> int:
        """Sequences that wait for a slot; of those of one correlation id the first alone counts."""
        return len(self._backlog)

    def holds(self, correlation_id: int | str) -> bool:
        """Return whether a request without the start flag would find its sequence here."""
        line = self._lines.get(correlation_id)
        return line is not None and not line.last.closed

    def next_expiry_ns(self) -> int | None:
        """Earliest time at which `expire` has work to do; None if never."""
        if self._rejected:
            return self._rejected[0].arrived_ns
        idle = next(iter(self._idle)).idle_since_ns + self._idle_ns if self._idle else None
        due = self._backlog.next_deadline_ns()
        return idle if due is None or (idle is not None and idle < due) else due

    def ripe_at_ns(self, instance: int) -> int | None:
        """Time at which `next_batch` of a free instance gives a batch if nothing happens before; None if never."""
        return self._ready[instance].ripe_at_ns()

    def take_ended(self) -> list[tuple[int, int]]:
        """Return (instance, number) of the sequences that ended, once each, where the process cannot know it."""
        ended, self._ended = self._ended, []
        return ended

    # --- what happens ------------------------------------------------------------------------------------------------

    def enqueue(self, item: SequenceItem, now_ns: int) -> None:
        """Let a request wait for its turn in its sequence.

        Raises INVALID_ARG where it cannot be of a sequence, UNAVAILABLE, reason REJECTED, where too many wait.
        """
        assert item.sequence is None, "the request waits already"
        self._reap(now_ns)
        self._admission.admit(item, self._lines)
        line = self._lines.get(item.correlation_id)
        if not item.flags & SEQUENCE_START and (line is None or line.last.closed):
            raise self._admission.no_start(item)
        if self._waiting >= self._settings.max_queue_size:
            self._sweep(now_ns)
            if self._waiting >= self._settings.max_queue_size:
                raise self._full()
            line = self._lines.get(item.correlation_id)
            if not item.flags & SEQUENCE_START and (line is None or line.last.closed):
                raise self._admission.no_start(item)
        if item.flags & SEQUENCE_START:
            sequence = self._begin(line, item.correlation_id, now_ns)
        else:
            assert line is not None
            sequence = line.last
        if item.flags & SEQUENCE_END or self._settings.iterative:
            sequence.closed = True
        item.sequence = sequence
        item.arrived_ns = item.enqueued_ns = now_ns
        sequence.items.append(item)
        self._waiting += 1
        self._idle.pop(sequence, None)
        if sequence.line.slot is None:
            self._backlog.watch(item)
        self._offer(sequence, now_ns)

    def next_batch(self, instance: int, now_ns: int) -> list[SequenceItem] | None:
        """Remove and return the requests that a free instance should run now, at most one a sequence; None if none.

        `done` or `reschedule` must follow for each. Of a direct strategy they are in the order of their slots.
        """
        batch = self._ready[instance].next_batch(now_ns)
        for item in batch or ():
            sequence = item.sequence
            assert sequence is not None
            first = sequence.items.popleft()
            assert first is item, "a request overtook another of its sequence"
            sequence.running = item
            sequence.began = True
            item.enqueued_ns = item.arrived_ns
        self._waiting -= len(batch or ())
        return batch

    def done(self, item: SequenceItem, now_ns: int, *, reached: bool = True, state_key: int | None = None) -> None:
        """Note that a request which was handed out is over, well or not.

        `reached`: whether the instance's process was given it. `state_key`: a new one, of its sequence's state.
        """
        sequence = self._over(item)
        if reached and item.flags & SEQUENCE_END:
            sequence.end_seen = True
        if state_key is not None:
            sequence.state_key = state_key
        if sequence.items:
            self._offer(sequence, now_ns)
        elif sequence.closed:
            self._finish(sequence, now_ns)
        else:
            sequence.idle_since_ns = now_ns
            self._idle[sequence] = None

    def reschedule(self, item: SequenceItem, now_ns: int, state_key: int | None = None) -> None:
        """Let a request of an iterative model that was handed out run once more, behind those that are ready now."""
        sequence = self._over(item)
        item.sequence = sequence
        item.flags = 0
        item.arrived_ns = now_ns
        if state_key is not None:
            sequence.state_key = state_key
        sequence.items.appendleft(item)
        self._waiting += 1
        self._offer(sequence, now_ns)

    def cancel(self, item: SequenceItem, now_ns: int) -> list[SequenceItem]:
        """End the sequence of a request that nobody waits for; return the requests that will not run.

        One that was handed out is not among them. Returns nothing for a request that is over.
        """
        sequence = item.sequence
        return [] if sequence is None else self._end(sequence, now_ns)

    def expire(self, now_ns: int) -> list[SequenceItem]:
        """End idle sequences, and those of the backlog with a request whose time is over; return their requests."""
        self._reap(now_ns)
        self._sweep(now_ns)
        rejected, self._rejected = self._rejected, []
        return rejected

    def instance_up(self, instance: int, now_ns: int) -> None:
        """Give out the slots of an instance: it has a process."""
        self._slots.up(instance)
        self._fill(now_ns)

    def instance_lost(self, instance: int, now_ns: int) -> list[SequenceItem]:
        """End the sequences of an instance whose process has gone, and return their requests that waited."""
        self._slots.down(instance)
        lost: list[SequenceItem] = []
        for slot in self._slots.of(instance):
            if slot.line is not None:
                lost += self._end(slot.line.first, now_ns, process_gone=True)
        self._fill(now_ns)
        return lost

    def drain(self, now_ns: int) -> list[SequenceItem]:
        """End every sequence and return every request that is still held, but for those that were handed out."""
        drained, self._rejected = self._rejected, []
        for line in tuple(self._lines.values()):
            for sequence in tuple(reversed(line.sequences)):
                drained += self._end(sequence, now_ns)
        return drained

    def check_integrity(self) -> None:
        """Assert the invariants of the structure; slow, for tests."""
        self._backlog.check_integrity()
        self._slots.check_integrity()
        seated = [slot.line for slot in self._slots if slot.line is not None]
        assert len(set(seated)) == len(seated) == self.active, "a line has two slots, or the count is wrong"
        assert not (self._slots.free and self._backlog), "a sequence waits though a slot is free"
        sequences = [sequence for line in self._lines.values() for sequence in line.sequences]
        assert sum(len(sequence.items) for sequence in sequences) == self._waiting, "the count of requests is wrong"
        idle = [sequence.idle_since_ns for sequence in self._idle]
        assert idle == sorted(idle), "idle sequences are out of order"
        for key, line in self._lines.items():
            assert line.correlation_id == key, "a line is under another name"
            assert line.sequences, "a line is empty"
            for sequence in line.sequences:
                self._check_sequence(sequence)

    def _check_sequence(self, sequence: Sequence) -> None:
        line, slot = sequence.line, sequence.line.slot
        first = line.first is sequence
        assert all(item.sequence is sequence for item in sequence.items), "a request is of another sequence"
        assert sequence.closed or line.last is sequence, "a sequence takes requests though a newer one is there"
        assert sequence.running is None or (first and slot is not None), "a sequence runs out of turn"
        ready = [item for item in sequence.items if slot is not None and self._ready[slot.instance].holds(item)]
        turn = first and slot is not None and sequence.running is None
        assert ready == list(sequence.items)[: 1 if turn else 0], "ready is not the one whose turn it is"
        waits = not sequence.items and sequence.running is None
        assert waits == (sequence in self._idle), "idle is not what waits for its client"
        assert not waits or not sequence.closed, "a sequence that is over is kept"

    # --- how -------------------------------------------------------------------------------------------------------

    def _begin(self, line: Line | None, correlation_id: int | str, now_ns: int) -> Sequence:
        self._numbers += 1
        if line is None:
            line = self._lines[correlation_id] = Line(correlation_id)
            sequence = Sequence(self._numbers, line)
            line.sequences[sequence] = None
            self._seat(line, now_ns)
            return sequence
        older = line.last
        sequence = Sequence(self._numbers, line)
        line.sequences[sequence] = None
        if not older.closed:
            self.restarts += 1
            older.closed = True
            if older in self._idle:
                self._finish(older, now_ns)
        return sequence

    def _seat(self, line: Line, now_ns: int) -> None:
        """Give a line a slot, or the last place in the backlog."""
        self._backlog.append(line)
        self._fill(now_ns)

    def _fill(self, now_ns: int) -> None:
        """Give free slots to the backlog."""
        while self._slots.free and self._backlog:
            line = self._backlog.first()
            self._backlog.remove(line)
            line.slot = self._slots.take()
            line.slot.line = line
            self._offer(line.first, now_ns)

    def _unseat(self, line: Line) -> None:
        """Put a line whose instance is down at the end of the backlog; what it holds has not begun."""
        assert line.slot is not None
        first = line.first
        if first.items and self._ready[line.slot.instance].holds(first.items[0]):
            self._ready[line.slot.instance].remove(first.items[0])
        line.slot.line = None
        line.slot = None
        self._backlog.append(line)

    def _offer(self, sequence: Sequence, now_ns: int) -> None:
        """Make the next request of a sequence ready if it is its turn."""
        slot = sequence.line.slot
        if slot is None or sequence.running is not None or not sequence.items or sequence.line.first is not sequence:
            return
        item, ready = sequence.items[0], self._ready[slot.instance]
        if ready.holds(item):
            return
        item.shape_key = (item.kind, sequence.state_key) if sequence.state_key else item.kind
        ready.add(item, now_ns)
        if self._ordering is not None and item not in self._ordering:
            self._ordering.admit(item)

    def _over(self, item: SequenceItem) -> Sequence:
        sequence = item.sequence
        assert sequence is not None, "the request is over already"
        assert sequence.running is item, "the request does not run"
        sequence.running = item.sequence = None
        return sequence

    def _end(self, sequence: Sequence, now_ns: int, *, process_gone: bool = False) -> list[SequenceItem]:
        """Let a sequence take and run nothing more; return what waited. It is over once nothing of it runs."""
        removed = self._clear(sequence)
        sequence.closed = True
        if process_gone:
            sequence.began = False
        if sequence.running is None:
            self._finish(sequence, now_ns)
        return removed

    def _clear(self, sequence: Sequence) -> list[SequenceItem]:
        """Take out every request of a sequence that waits."""
        removed = list(sequence.items)
        sequence.items.clear()
        slot = sequence.line.slot
        if removed and slot is not None and self._ready[slot.instance].holds(removed[0]):
            self._ready[slot.instance].remove(removed[0])
        for item in removed:
            item.sequence = None
            item.enqueued_ns = item.arrived_ns
            self._backlog.unwatch(item)
        self._waiting -= len(removed)
        return removed

    def _finish(self, sequence: Sequence, now_ns: int) -> None:
        """Forget a sequence of which nothing waits or runs, and give its slot on."""
        line, slot = sequence.line, sequence.line.slot
        self._idle.pop(sequence, None)
        was_first = line.first is sequence
        del line.sequences[sequence]
        if was_first and slot is not None and sequence.began and not sequence.end_seen:
            self._ended.append((slot.instance, sequence.number))
        if line.sequences:
            if slot is not None and not self._slots.is_up(slot.instance):
                self._unseat(line)
                self._fill(now_ns)
            else:
                self._offer(line.first, now_ns)
            return
        del self._lines[line.correlation_id]
        if slot is None:
            self._backlog.remove(line)
            return
        slot.line = None
        self._slots.release(slot)
        self._fill(now_ns)

    def _reap(self, now_ns: int) -> None:
        """End the sequences that were idle for too long."""
        while self._idle:
            sequence = next(iter(self._idle))
            if sequence.idle_since_ns + self._idle_ns > now_ns:
                return
            self._end(sequence, now_ns)

    def _sweep(self, now_ns: int) -> None:
        """Take out the sequences of the backlog with a request whose time is over."""
        while (item := self._backlog.overdue(now_ns)) is not None:
            assert item.sequence is not None, "the time of a request that is over runs"
            self._rejected += self._end(item.sequence, now_ns)

    def _full(self) -> InferError:
        return unavailable(
            f"the queue is full: {self._waiting} requests of sequences wait, "
            f"sequence_max_queue_size is {self._settings.max_queue_size}",
            FailureReason.REJECTED,
        )


def _ready_requests(settings: SequenceBatching, max_batch_size: int) -> ReadyRequests:
    if settings.oldest:
        return OldestReady(max_batch_size, settings.preferred_batch_sizes, settings.max_queue_delay_us)
    least = settings.minimum_slot_utilization * max(1, max_batch_size)
    return DirectReady(least, settings.max_queue_delay_us)
