"""The sequence batcher against a simple model: no request is lost, none meets the slot of another sequence."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.repository.model_config import SequenceBatching
from headrace.scheduling.ordering import OrderedRelease
from headrace.scheduling.sequence import SequenceBatcher
from headrace.scheduling.sequence_parts import SequenceItem
from headrace.types import SEQUENCE_END, SEQUENCE_START
from headrace_protocol.errors import ErrorCode, FailureReason, InferError

IDLE_US = 20
_ORDER = itertools.count()
IDLE_NS = IDLE_US * 1000

batchings = st.builds(
    SequenceBatching,
    oldest=st.booleans(),
    max_idle_us=st.just(IDLE_US),
    max_queue_delay_us=st.sampled_from([0, 0, 3]),
    minimum_slot_utilization=st.sampled_from([0.0, 0.5, 1.0]),
    max_candidate_sequences=st.sampled_from([0, 1, 3]),
    preferred_batch_sizes=st.sampled_from([(), (1,), (2,)]),
    iterative=st.booleans(),
    max_queue_size=st.sampled_from([3, 1000, 1000]),
)


@dataclass(eq=False)
class Told:
    """A sequence as the documentation tells it."""

    name: int
    items: list[SequenceItem] = field(default_factory=list)
    running: SequenceItem | None = None
    closed: bool = False
    began: bool = False
    end_seen: bool = False
    idle_since: int | None = None
    idle_order: int = 0
    """Which of those that became idle at the same time was the first."""
    number: int | None = None


class Model:
    """Lists, searched from the front each time."""

    def __init__(self, batching: SequenceBatching, rows: int, instances: int) -> None:
        self.batching = batching
        per_instance = (batching.max_candidate_sequences or rows) if batching.oldest else rows
        self.places = [(slot, instance) for slot in range(per_instance) for instance in range(instances)]
        self.up: set[int] = set()
        self.seats: dict[tuple[int, int], int] = {}
        self.backlog: list[int] = []
        self.lines: dict[int, list[Told]] = {}
        self.untold: list[tuple[int, int]] = []

    def items(self) -> list[SequenceItem]:
        return [item for line in self.lines.values() for told in line for item in told.items]

    def place_of(self, name: int) -> tuple[int, int] | None:
        return next((place for place, seated in self.seats.items() if seated == name), None)

    def fill(self) -> None:
        for place in self.places:
            if self.backlog and place[1] in self.up and place not in self.seats:
                self.seats[place] = self.backlog.pop(0)

    def finish(self, told: Told) -> None:
        line, place = self.lines[told.name], self.place_of(told.name)
        first = line[0] is told
        line.remove(told)
        if first and place is not None and told.began and not told.end_seen:
            self.untold.append((place[1], told.number))
        if not line:
            del self.lines[told.name]
            if place is None:
                self.backlog.remove(told.name)
            else:
                del self.seats[place]
        elif first and place is not None and place[1] not in self.up:
            del self.seats[place]
            self.backlog.append(told.name)
        self.fill()

    def end(self, told: Told, *, gone: bool = False) -> list[SequenceItem]:
        removed, told.items, told.closed = told.items, [], True
        if gone:
            told.began = False
        if told.running is None:
            self.finish(told)
        return removed

    def reap(self, now: int) -> None:
        while True:
            idle = [t for line in self.lines.values() for t in line if t.idle_since is not None]
            over = [told for told in idle if told.idle_since + IDLE_NS <= now]
            if not over:
                return
            self.end(min(over, key=lambda told: (told.idle_since, told.idle_order)))

    def overdue(self, now: int) -> list[SequenceItem]:
        """End what has waited too long in the backlog."""
        removed: list[SequenceItem] = []
        while True:
            late = [
                (item.arrived_ns + item.timeout_us * 1000, told)
                for name in self.backlog
                for told in self.lines[name]
                for item in told.items
                if item.timeout_us and item.arrived_ns + item.timeout_us * 1000 <= now
            ]
            if not late:
                return removed
            removed += self.end(min(late, key=lambda entry: entry[0])[1])

    def heads(self, instance: int) -> dict[SequenceItem, Told]:
        """What could run in a free instance."""
        firsts = [self.lines[name][0] for place, name in self.seats.items() if place[1] == instance]
        return {told.items[0]: told for told in firsts if told.items and told.running is None}


class SequenceMachine(RuleBasedStateMachine):
    """Clients, processes and time, in any order."""

    @initialize(batching=batchings, rows=st.sampled_from([1, 2, 3]), instances=st.integers(1, 3), ordered=st.booleans())
    def start(self, batching, rows, instances, ordered):
        self.now = 1000
        self.rows, self.instances, self.batching = rows, instances, batching
        self.ordering = OrderedRelease() if ordered and batching.oldest else None
        self.batcher = SequenceBatcher(batching, rows, instances, "m", self.ordering)
        self.model = Model(batching, rows, instances)
        self.running: dict[int, list[SequenceItem]] = {}
        self.told: dict[SequenceItem, Told] = {}
        self.over: set[SequenceItem] = set()
        self.pending_late: list[SequenceItem] = []
        self.given: list[SequenceItem] = []
        for instance in range(instances):
            self.up(instance)

    def up(self, instance):
        self.batcher.instance_up(instance, self.now)
        self.model.up.add(instance)
        self.model.fill()

    def end_of(self, items):
        """Note the one end of each request."""
        for item in items:
            assert item not in self.over, "a request ended twice"
            self.over.add(item)
            if self.ordering is not None and item in self.ordering:
                self.ordering.complete(item)

    @rule(
        name=st.integers(1, 4),
        flags=st.sampled_from([SEQUENCE_START, 0, 0, 0]),
        timeout=st.sampled_from([0, 5]),
    )
    def arrive_well(self, name, flags, timeout):
        """Most clients keep to the rules."""
        line = self.model.lines.get(name)
        self.arrive_any(name, flags if line and not line[-1].closed else SEQUENCE_START, timeout, None, 1)

    @rule(
        name=st.sampled_from([1, 1, 2, 2, 3, 4, 0]),
        flags=st.sampled_from([SEQUENCE_START, 0, 0, SEQUENCE_END, SEQUENCE_START, SEQUENCE_START | SEQUENCE_END]),
        timeout=st.sampled_from([0, 0, 1, 5]),
        kind=st.sampled_from([None, None, None, "other"]),
        rows=st.sampled_from([1] * 19 + [2]),
    )
    def arrive(self, name, flags, timeout, kind, rows):
        self.arrive_any(name, flags, timeout, kind, rows)

    def arrive_any(self, name, flags, timeout, kind, rows):
        item = SequenceItem(object(), rows, kind, name, flags, timeout)
        self.model.reap(self.now)
        iterative = self.batching.iterative
        line = self.model.lines.get(name)
        begins = bool(flags & SEQUENCE_START) or iterative
        bad = rows != 1 or (not name and not iterative) or (not begins and (line is None or line[-1].closed))
        late = []
        if not bad and len(self.model.items()) >= self.batching.max_queue_size:
            late = self.model.overdue(self.now)
            line = self.model.lines.get(name)
            bad = not begins and (line is None or line[-1].closed)
        full = len(self.model.items()) >= self.batching.max_queue_size
        try:
            self.batcher.enqueue(item, self.now)
        except InferError as error:
            assert error.code is (ErrorCode.INVALID_ARG if bad else ErrorCode.UNAVAILABLE)
            assert error.reason is (FailureReason.OTHER if bad else FailureReason.REJECTED)
            assert bad or full
            self.late(late)
            return
        assert not bad
        assert not full
        self.late(late)
        self.given.append(item)
        if begins:
            name = item.correlation_id
            line = self.model.lines.setdefault(name, [])
            told = Told(name)
            line.append(told)
            if len(line) == 1:
                self.model.backlog.append(name)
                self.model.fill()
            else:
                line[-2].closed = True
                if line[-2].idle_since is not None:
                    self.model.end(line[-2])
        else:
            told = line[-1]
        told.number = item.sequence.number
        told.idle_since = None
        told.closed = bool(flags & SEQUENCE_END) or iterative
        told.items.append(item)
        self.told[item] = told

    def late(self, late):
        """What was swept out for the sake of others comes with the next `expire`."""
        self.pending_late = self.pending_late + late

    @rule()
    def run(self):
        for instance in sorted(self.model.up - self.running.keys()):
            self.run_in(instance)

    def run_in(self, instance):
        heads = self.model.heads(instance)
        ripe = self.batcher.ripe_at_ns(instance)
        batch = self.batcher.next_batch(instance, self.now)
        assert (ripe is None) == (not heads), "ripe without a request, or the other way round"
        if batch is None:
            assert not heads or (self.batching.max_queue_delay_us and ripe > self.now)
            return
        assert ripe <= self.now
        assert 1 <= len(batch) <= self.rows
        assert set(batch) <= set(heads), "a request ran out of turn"
        assert len({item.kind for item in batch}) == 1
        slots = [item.sequence.line.slot.number for item in batch]
        assert len(set(slots)) == len(slots)
        assert self.batching.oldest or slots == sorted(slots)
        for item in batch:
            told = heads[item]
            told.items.pop(0)
            told.running, told.began = item, True
        self.running[instance] = batch

    @rule()
    def serve(self):
        """Most requests run at once, and end well."""
        self.run()
        for instance, batch in sorted(self.running.items()):
            for item in list(batch):
                self.end_one(instance, item, reached=True, key=None)

    @precondition(lambda self: self.running)
    @rule(
        data=st.data(),
        key=st.sampled_from([None, None, 7]),
        reached=st.sampled_from([True, True, False]),
        again=st.booleans(),
    )
    def finish_one(self, data, key, reached, again):
        instance = data.draw(st.sampled_from(sorted(self.running)))
        item = data.draw(st.sampled_from(self.running[instance]))
        told = self.told[item]
        if self.batching.iterative and again:
            self.leave(instance, item)
            self.batcher.reschedule(item, self.now, key)
            told.items.insert(0, item)
        else:
            self.end_one(instance, item, reached=reached, key=key)

    def leave(self, instance, item):
        self.running[instance].remove(item)
        if not self.running[instance]:
            del self.running[instance]
        self.told[item].running = None

    def end_one(self, instance, item, *, reached, key):
        self.leave(instance, item)
        told = self.told[item]
        told.end_seen = reached and bool(item.flags & SEQUENCE_END)
        self.batcher.done(item, self.now, reached=reached, state_key=key)
        self.end_of([item])
        if told.closed and not told.items:
            self.model.finish(told)
        elif not told.items:
            told.idle_since = self.now
            told.idle_order = next(_ORDER)

    @precondition(lambda self: self.given)
    @rule(data=st.data(), really=st.sampled_from([False, True]))
    def cancel(self, data, really):
        if not really:
            return
        item = data.draw(st.sampled_from(self.given))
        got = self.batcher.cancel(item, self.now)
        if item in self.over or item in self.pending_late:
            assert not got
            return
        assert got == self.model.end(self.told[item])
        self.told[item].idle_since = None
        self.end_of(got)

    @rule(instance=st.integers(0, 2), really=st.sampled_from([False, False, True]))
    def die(self, instance, really):
        if instance >= self.instances or instance not in self.model.up or not really:
            return
        for item in list(self.running.get(instance, ())):
            self.end_one(instance, item, reached=True, key=None)
        got = self.batcher.instance_lost(instance, self.now)
        self.model.up.remove(instance)
        expected = []
        for place in self.model.places:
            if place[1] == instance and place in self.model.seats:
                told = self.model.lines[self.model.seats[place]][0]
                told.idle_since = None
                expected += self.model.end(told, gone=True)
        self.model.fill()
        assert got == expected
        self.end_of(got)

    @rule(instance=st.integers(0, 2))
    def come_back(self, instance):
        if instance < self.instances and instance not in self.model.up:
            self.up(instance)

    @rule(step=st.sampled_from([0, 500, 1000, 3000, 25_000]))
    def wait(self, step):
        self.now += step

    @rule()
    def expire(self):
        self.model.reap(self.now)
        expected = self.pending_late + self.model.overdue(self.now)
        self.pending_late = []
        due = self.batcher.next_expiry_ns()
        got = self.batcher.expire(self.now)
        assert sorted(map(id, got)) == sorted(map(id, expected))
        assert not got or due <= self.now, "something was due that the timer would have missed"
        self.end_of(got)

    @invariant()
    def same(self):
        if not hasattr(self, "batcher"):
            return
        self.batcher.check_integrity()
        untold, self.model.untold = self.model.untold, []
        assert sorted(self.batcher.take_ended()) == sorted(untold), "a process is not told of an end, or told twice"
        if self.ordering is not None:
            self.ordering.check_integrity()
        model = self.model
        assert self.batcher.waiting == len(model.items())
        assert self.batcher.active == len(model.seats)
        assert self.batcher.backlog == len(model.backlog)
        for name in range(6):
            line = model.lines.get(name)
            assert self.batcher.holds(name) == (line is not None and not line[-1].closed)
        for (slot, instance), name in model.seats.items():
            line = self.batcher._slots.of(instance)[slot].line
            assert line is not None
            assert line.correlation_id == name
        expiry = self.batcher.next_expiry_ns()
        idle = [t.idle_since + IDLE_NS for line in model.lines.values() for t in line if t.idle_since is not None]
        assert not idle or (expiry is not None and expiry <= min(idle))

    def teardown(self):
        if not hasattr(self, "batcher"):
            return
        self.end_of(self.batcher.drain(self.now))
        for item in [item for batch in self.running.values() for item in batch]:
            self.batcher.done(item, self.now)
            self.end_of([item])
        self.batcher.check_integrity()
        assert self.over == set(self.given), "a request was lost"
        assert (self.batcher.waiting, self.batcher.active, self.batcher.backlog) == (0, 0, 0)


SequenceMachine.TestCase.settings = settings(max_examples=250, stateful_step_count=50, deadline=None)


# A failure takes minutes to be reduced to its smallest form, which is worth the wait.
TestSequenceMachine = pytest.mark.timeout(900)(SequenceMachine.TestCase)
