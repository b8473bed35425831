"""The schedulers against a brute-force model: after every step both hold the same and would do the same, when."""

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.repository.model_config import DynamicBatching, QueuePolicy, TimeoutAction
from headrace.scheduling.default import DefaultScheduler
from headrace.scheduling.dynamic import DynamicBatcher
from headrace.scheduling.scheduler import QueuedRequest
from headrace_protocol.errors import ErrorCode, FailureReason, InferError

policies = st.builds(
    QueuePolicy,
    timeout_action=st.sampled_from(TimeoutAction),
    default_timeout_us=st.sampled_from([0, 2, 5, 5]),
    allow_timeout_override=st.booleans(),
    max_queue_size=st.sampled_from([0, 0, 0, 1, 3]),
)

requests = st.tuples(
    st.sampled_from([1, 1, 1, 1, 2, 5]),  # rows
    st.integers(0, 2),  # shape
    st.sampled_from([0, 0, 1, 2, 3, 4]),  # priority
    st.sampled_from([0, 1, 3, 100]),  # timeout
)


@st.composite
def batchings(draw, max_batch_size):
    levels = draw(st.sampled_from([0, 0, 1, 3]))
    return DynamicBatching(
        preferred_batch_sizes=tuple(
            draw(st.sets(st.sampled_from([1, 3, 4, 6, 8]), max_size=3)) & set(range(max_batch_size + 1))
        ),
        max_queue_delay_us=draw(st.sampled_from([0, 1, 8, 50])),
        priority_levels=levels,
        default_priority_level=draw(st.integers(1, levels)) if levels else 0,
        default_queue_policy=draw(policies),
        priority_queue_policies=draw(st.dictionaries(st.integers(1, levels), policies)) if levels else {},
    )


@dataclass(eq=False)
class Waiting:
    """A waiting request as the model knows it."""

    item: QueuedRequest
    level: int
    arrival: int
    enqueued: int
    expires: int | None
    reject: bool
    delayed: bool = False

    def place(self):
        """Order of service."""
        return (self.level, self.delayed, self.expires if self.delayed else 0, self.arrival)

    def lane(self):
        return (self.level, self.delayed)


class Model:
    """What the documentation of the schedulers says, computed from a plain list each time."""

    def __init__(self, max_rows, batching, dynamic):
        self.max_rows, self.batching, self.dynamic = max_rows, batching, dynamic
        self.delay = batching.max_queue_delay_us * 1000
        self.preferred = batching.preferred_batch_sizes or (max_rows,)
        self.waiting: list[Waiting] = []
        self.rejected: list[Waiting] = []
        self.arrivals = 0

    def level_of(self, priority):
        levels = self.batching.priority_levels
        return priority if 1 <= priority <= levels else self.batching.default_priority_level if levels else 0

    def policy_of(self, level):
        return self.batching.priority_queue_policies.get(level, self.batching.default_queue_policy)

    def enqueue(self, item, now):
        level = self.level_of(item.priority)
        policy = self.policy_of(level)
        if policy.max_queue_size and self.count(level) >= policy.max_queue_size:
            self.sweep(now)
            if self.count(level) >= policy.max_queue_size:
                return False
        timeout = policy.default_timeout_us
        if timeout and policy.allow_timeout_override and item.timeout_us:
            timeout = min(timeout, item.timeout_us)
        self.arrivals += 1
        reject = policy.timeout_action is TimeoutAction.REJECT
        expires = now + timeout * 1000 if timeout else None
        self.waiting.append(Waiting(item, level, self.arrivals, now, expires, reject))
        return True

    def count(self, level):
        return sum(entry.level == level for entry in self.waiting)

    def running_timeouts(self):
        return [entry.expires for entry in self.waiting if entry.expires is not None and not entry.delayed]

    def sweep(self, now):
        over = [e for e in self.waiting if e.expires is not None and e.expires <= now and not e.delayed]
        for entry in sorted(over, key=lambda e: (e.expires, e.arrival)):
            if entry.reject:
                self.waiting.remove(entry)
                self.rejected.append(entry)
            else:
                entry.delayed = True

    def in_order(self):
        return sorted(self.waiting, key=Waiting.place)

    def choose(self, now):
        """The batch that would run at `now`, with what waits as it is."""
        order = self.in_order()
        if not order:
            return None
        if not self.dynamic:
            return order[:1]
        batch, leads = [], []
        for lane in sorted({entry.lane() for entry in order}):
            members = [entry for entry in order if entry.lane() == lane]
            alike = [entry for entry in members if entry.item.shape_key == order[0].item.shape_key]
            taken = []
            for entry in alike:
                if sum(e.item.rows for e in [*batch, *taken, entry]) > self.max_rows:
                    break
                taken.append(entry)
            batch += taken
            leads += taken[:1]
            if taken != members:
                break
        if self.delay and any(entry.enqueued + self.delay <= now for entry in leads):
            return batch
        sums = [sum(e.item.rows for e in batch[: n + 1]) for n in range(len(batch))]
        preferred = [n + 1 for n, rows in enumerate(sums) if rows in self.preferred]
        if preferred:
            return batch[: preferred[-1]]
        cannot_grow = len(batch) < len(order) or sums[-1] >= max(self.preferred)
        return batch if cannot_grow or not self.delay else None

    def ripe_at(self, now):
        """Earliest time from `now` on at which there is a batch, if nothing happens; None if nothing waits."""
        times = {now, *(entry.enqueued + self.delay for entry in self.waiting)}
        return min((t for t in times if t >= now and self.choose(t)), default=None)


class BatcherMachine(RuleBasedStateMachine):
    @initialize(
        data=st.data(),
        max_rows=st.sampled_from([1, 6, 8]),
        dynamic=st.sampled_from([True, True, True, False]),
        shapes=st.sampled_from([1, 1, 2, 3]),
    )
    def start(self, data, max_rows, dynamic, shapes):
        batching = data.draw(batchings(max_rows))
        self.max_rows, self.shapes = max_rows, shapes
        self.batcher = DynamicBatcher(max_rows, batching) if dynamic else DefaultScheduler(batching)
        self.model = Model(max_rows, batching, dynamic)
        self.now = 1_000_000
        self.accepted: list[QueuedRequest] = []
        self.out: list[QueuedRequest] = []

    @rule(requests=st.lists(requests, min_size=2, max_size=6))
    def enqueue_many(self, requests):
        for request in requests:
            self.enqueue(*request)

    @rule(request=requests, ns=st.integers(0, 1000))
    def advance_and_enqueue(self, request, ns):
        self.now += ns
        self.enqueue(*request)

    def enqueue(self, rows, shape, priority, timeout_us):
        item = QueuedRequest(object(), min(rows, self.max_rows), f"shape {shape % self.shapes}", priority, timeout_us)
        if self.model.enqueue(item, self.now):
            self.batcher.enqueue(item, self.now)
            self.accepted.append(item)
            assert item.enqueued_ns == self.now
        else:
            with pytest.raises(InferError, match="full") as caught:
                self.batcher.enqueue(item, self.now)
            assert (caught.value.code, caught.value.reason) == (ErrorCode.UNAVAILABLE, FailureReason.REJECTED)

    @rule(ns=st.sampled_from([1, 500, 999, 1000, 2000, 5000]))
    def advance(self, ns):
        self.now += ns

    @rule(early=st.booleans())
    def advance_to_the_wake_time(self, early):
        wake = self.batcher.wake_at_ns()
        if wake is not None and wake > self.now:
            self.now = wake - early
            self.model.sweep(self.now)
            found = self.batcher.expire(self.now)
            assert found == [entry.item for entry in self.model.rejected]
            assert not (early and found), "a timeout fired before its time"
            if early:
                assert self.batcher.next_batch(self.now) is None, "a batch was ripe before the wake time"
            self.out += found
            self.model.rejected.clear()

    @rule()
    @precondition(lambda self: self.model.waiting)
    def next_batch(self):
        self.model.sweep(self.now)
        expected = self.model.choose(self.now)
        batch = self.batcher.next_batch(self.now)
        assert batch == (expected and [entry.item for entry in expected])
        if batch:
            assert sum(item.rows for item in batch) <= self.max_rows
            assert len({item.shape_key for item in batch}) == 1
            assert batch[0] is self.model.in_order()[0].item, "the request that is due was passed over"
            self.leave(batch)

    @rule(data=st.data())
    @precondition(lambda self: self.model.waiting)
    def cancel(self, data):
        item = data.draw(st.sampled_from(self.accepted))
        waits = any(entry.item is item for entry in self.model.waiting)
        assert self.batcher.cancel(item) is waits
        if waits:
            self.leave([item])

    @rule()
    def expire(self):
        self.model.sweep(self.now)
        found = self.batcher.expire(self.now)
        assert found == [entry.item for entry in self.model.rejected]
        assert all(item.expires_ns <= self.now for item in found)
        self.out += found
        self.model.rejected.clear()

    @rule()
    @precondition(lambda self: len(self.model.waiting) > 4)
    def drain(self):
        expected = [entry.item for entry in self.model.rejected + self.model.in_order()]
        assert self.batcher.drain() == expected
        self.model.rejected.clear()
        self.model.waiting.clear()
        self.out += expected

    @rule()
    @precondition(lambda self: len(self.model.waiting) > 5)
    def serve_all(self):
        """With no arrivals every request comes out, one batch or timeout at least at each wake time."""
        for _ in range(3 * len(self.model.waiting)):
            wake = self.batcher.wake_at_ns()
            if wake is None:
                break
            self.now = max(self.now, wake)
            self.expire()
            self.next_batch()
            self.holds_the_same()
        assert self.batcher.waiting == 0

    def leave(self, items):
        self.model.waiting = [entry for entry in self.model.waiting if entry.item not in items]
        self.out += items

    @invariant()
    def holds_the_same(self):
        self.batcher.check_integrity()
        assert self.batcher.waiting == len(self.model.waiting)
        held = [entry.item for entry in self.model.waiting + self.model.rejected]
        assert len(self.out) == len(set(self.out)), "a request came out twice"
        assert {*held, *self.out} == set(self.accepted), "a request was lost"
        assert len(held) + len(self.out) == len(self.accepted)

    @invariant()
    def wakes_at_the_right_time(self):
        ripe, expected = self.batcher.ripe_at_ns(), self.model.ripe_at(self.now)
        assert (ripe and max(ripe, self.now)) == expected
        expiry = self.batcher.next_expiry_ns()
        assert expiry == min(
            self.model.running_timeouts() + [entry.expires for entry in self.model.rejected], default=None
        )
        assert self.batcher.wake_at_ns() == min((t for t in (ripe, expiry) if t is not None), default=None)


BatcherMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
# A failure takes minutes to be reduced to its smallest form, which is worth the wait.
TestBatcherMachine = pytest.mark.timeout(900)(BatcherMachine.TestCase)
