"""The sequence batcher by example: who runs when, and where."""

from __future__ import annotations

import pytest

from headrace.repository.model_config import SequenceBatching
from headrace.scheduling.sequence import SequenceBatcher
from headrace.scheduling.sequence_parts import SequenceItem
from headrace.types import SEQUENCE_END, SEQUENCE_START
from headrace_protocol.datatype import BYTES, UINT32
from headrace_protocol.errors import ErrorCode, FailureReason, InferError

START, END = SEQUENCE_START, SEQUENCE_END
US = 1000


class Bench:
    """A batcher whose instances are up, and a clock in microseconds."""

    def __init__(self, max_batch_size: int = 4, instances: int = 1, **settings) -> None:
        self.now = 0
        self.batcher = SequenceBatcher(SequenceBatching(**settings), max_batch_size, instances, "m")
        for instance in range(instances):
            self.batcher.instance_up(instance, 0)

    def send(self, name, sequence, flags=0, *, kind=None, timeout_us=0, rows=1):
        item = SequenceItem(name, rows, kind, sequence, flags, timeout_us)
        self.batcher.enqueue(item, self.now * US)
        self.batcher.check_integrity()
        return item

    def run(self, instance=0):
        """Return the owners of the next batch, each with its slot; [] if there is none."""
        batch = self.batcher.next_batch(instance, self.now * US)
        self.batcher.check_integrity()
        self.running = batch or []
        return [(item.owner, item.sequence.line.slot.number) for item in self.running]

    def done(self, *keys):
        for item, key in zip(self.running, keys or [None] * len(self.running), strict=True):
            self.batcher.done(item, self.now * US, state_key=key)
        self.batcher.check_integrity()


def refused(call, code=ErrorCode.INVALID_ARG):
    with pytest.raises(InferError) as caught:
        call()
    assert caught.value.code is code
    return caught.value


def test_sequences_fill_the_lowest_slots_of_all_instances_first():
    bench = Bench(max_batch_size=2, instances=2)
    for sequence in (1, 2, 3, 4, 5):
        bench.send(f"s{sequence}", sequence, START)
    assert (bench.batcher.active, bench.batcher.backlog) == (4, 1)
    assert bench.run(0) == [("s1", 0), ("s3", 1)]
    bench.done()
    assert bench.run(1) == [("s2", 0), ("s4", 1)]
    bench.done()
    bench.send("end", 4, END)
    assert bench.run(1) == [("end", 1)]
    bench.done()
    assert bench.run(1) == [("s5", 1)], "the backlog gets the slot that is free"


def test_a_direct_batch_waits_until_enough_slots_have_requests_but_no_longer_than_the_delay():
    bench = Bench(minimum_slot_utilization=0.5, max_queue_delay_us=100)
    bench.send("a", 1, START)
    assert bench.run() == []
    assert bench.batcher.ripe_at_ns(0) == 100 * US
    bench.send("b", 2, START)
    assert bench.batcher.ripe_at_ns(0) == 0
    assert bench.run() == [("a", 0), ("b", 1)]
    bench.done()
    bench.now = 50
    bench.send("c", 2)
    bench.now = 149
    assert bench.run() == []
    bench.now = 150
    assert bench.run() == [("c", 1)]


def test_a_direct_batch_leaves_rows_of_another_shape_for_the_next():
    bench = Bench()
    bench.send("a", 1, START, kind="x")
    bench.send("b", 2, START, kind="y")
    bench.send("c", 3, START, kind="x")
    assert bench.run() == [("a", 0), ("c", 2)]
    bench.done()
    assert bench.run() == [("b", 1)]


def test_the_oldest_strategy_forms_preferred_sizes_over_any_slots():
    bench = Bench(oldest=True, max_candidate_sequences=8, preferred_batch_sizes=(3,), max_queue_delay_us=100)
    for sequence in (1, 2):
        bench.send(f"s{sequence}", sequence, START)
    assert bench.run() == []
    for sequence in (3, 4):
        bench.send(f"s{sequence}", sequence, START)
    assert [owner for owner, _ in bench.run()] == ["s1", "s2", "s3"]
    bench.done()
    bench.now = 99
    assert bench.run() == []
    bench.now = 100
    assert bench.run() == [("s4", 3)]


@pytest.mark.parametrize("oldest", [True, False])
def test_states_of_unlike_shape_never_share_a_batch(oldest):
    bench = Bench(oldest=oldest)
    for sequence in (1, 2):
        bench.send(f"s{sequence}", sequence, START)
    assert len(bench.run()) == 2
    bench.done(5, 6)
    for sequence in (1, 2):
        bench.send(f"t{sequence}", sequence)
    assert bench.run() == [("t1", 0)]
    bench.done(6)
    bench.send("u1", 1)
    assert len(bench.run()) == 2, "they are alike now"


def test_a_start_on_a_running_sequence_waits_for_what_came_before_in_the_same_slot():
    bench = Bench()
    bench.send("a", 1, START)
    bench.send("b", 1)
    bench.send("c", 1, START)
    bench.send("d", 1)
    assert bench.batcher.restarts == 1
    numbers = []
    for owner in "abcd":
        assert bench.run() == [(owner, 0)]
        numbers.append(bench.running[0].sequence.number)
        bench.done()
    assert numbers[0] == numbers[1] != numbers[2] == numbers[3]
    assert bench.batcher.take_ended() == [(0, numbers[0])]


def test_a_new_sequence_of_the_same_name_may_follow_an_end_that_has_not_run_yet():
    bench = Bench()
    bench.send("a", 1, START | END)
    bench.send("b", 1, START)
    assert bench.batcher.restarts == 0
    assert bench.run() == [("a", 0)]
    assert bench.batcher.next_batch(0, 0) is None
    bench.done()
    assert bench.run() == [("b", 0)]
    assert bench.batcher.take_ended() == [], "the process has seen the end of the first"


def test_idle_time_counts_from_the_end_of_the_last_request():
    bench = Bench(max_idle_us=100)
    bench.send("a", 1, START)
    bench.run()
    bench.now = 500
    assert bench.batcher.next_expiry_ns() is None
    bench.done()
    assert bench.batcher.next_expiry_ns() == 600 * US
    bench.now = 599
    bench.send("b", 1)
    bench.run()
    bench.done()
    bench.now = 700
    error = refused(lambda: bench.send("c", 1))
    assert "start flag" in error.message
    assert bench.batcher.active == 0


def test_a_timeout_counts_in_the_backlog_alone():
    bench = Bench(max_batch_size=1)
    bench.send("a", 1, START, timeout_us=10)
    first = bench.send("b", 2, START)
    second = bench.send("c", 2, timeout_us=50)
    bench.now = 49
    assert bench.batcher.expire(bench.now * US) == []
    bench.now = 50
    assert bench.batcher.expire(bench.now * US) == [first, second]
    bench.run()
    bench.done()
    assert bench.batcher.waiting == 0


def test_the_queue_has_an_exact_bound_and_a_timed_out_request_makes_room():
    bench = Bench(max_batch_size=1, max_queue_size=2)
    bench.send("a", 1, START)
    late = bench.send("b", 2, START, timeout_us=10)
    error = refused(lambda: bench.send("c", 3, START), ErrorCode.UNAVAILABLE)
    assert error.reason is FailureReason.REJECTED
    assert "sequence_max_queue_size is 2" in error.message
    bench.now = 10
    bench.send("d", 3, START)
    refused(lambda: bench.send("e", 2))
    assert bench.batcher.expire(bench.now * US) == [late]


def test_cancelling_in_the_backlog_leaves_the_others_in_their_places():
    bench = Bench(max_batch_size=1)
    bench.send("a", 1, START | END)
    gone = bench.send("b", 2, START)
    also = bench.send("c", 2)
    bench.send("d", 2, START)
    bench.send("e", 3, START)
    assert bench.batcher.cancel(also, 0) == [gone, also]
    assert bench.batcher.cancel(gone, 0) == []
    order = []
    for _ in range(2):
        order += [owner for owner, _ in bench.run()]
        bench.done()
    assert order == ["a", "d"], "the name's next sequence has the place of the one before"
    assert bench.batcher.backlog == 1


def test_a_lost_instance_ends_what_it_held_and_its_slots_wait_for_its_return():
    bench = Bench(max_batch_size=1, instances=2)
    bench.send("a", 1, START)
    bench.send("b", 2, START)
    waiting = bench.send("c", 1)
    bench.run(0)
    bench.done()
    bench.send("d", 3, START | END)
    assert bench.batcher.instance_lost(0, 0) == [waiting]
    bench.batcher.check_integrity()
    refused(lambda: bench.send("e", 1))
    assert (bench.batcher.active, bench.batcher.backlog) == (1, 1)
    assert bench.batcher.next_batch(0, 0) is None
    bench.batcher.instance_up(0, 0)
    assert bench.run(0) == [("d", 0)]
    assert bench.batcher.take_ended() == [], "there is no process that could be told"


@pytest.mark.parametrize(
    ("settings", "sequence", "text"),
    [
        ({"correlation": BYTES}, 5, "is a number, model 'm' takes it as BYTES"),
        ({"correlation": UINT32, "largest_id": 2**32 - 1}, "a", "is a string, model 'm' takes it as UINT32"),
        ({"correlation": UINT32, "largest_id": 2**32 - 1}, 2**32, "too large"),
        ({}, 0, "sequence_id that is not 0"),
        ({}, "", "sequence_id that is not 0"),
    ],
)
def test_a_name_that_names_no_sequence_of_the_model_is_refused(settings, sequence, text):
    bench = Bench(**settings)
    assert text in refused(lambda: bench.send("a", sequence, START)).message
    assert bench.batcher.active == 0


@pytest.mark.parametrize("correlation", [None, BYTES, UINT32])
def test_requests_of_an_iterative_model_get_names_of_their_own_that_its_control_can_hold(correlation):
    bench = Bench(iterative=True, correlation=correlation, largest_id=2**32 - 1 if correlation is UINT32 else 2**64 - 1)
    items = [bench.send(n, 0) for n in range(3)]
    names = [item.correlation_id for item in items]
    assert len(set(names)) == 3
    assert all(isinstance(name, str) is (correlation is BYTES) for name in names)
    assert all(name <= 2**32 - 1 for name in names if correlation is UINT32)


def test_a_rescheduled_request_takes_its_turn_behind_those_that_are_ready():
    bench = Bench(max_batch_size=1, iterative=True, oldest=True, max_candidate_sequences=2)
    bench.send("a", 0)
    bench.send("b", 0)
    assert bench.run() == [("a", 0)]
    (first,) = bench.running
    bench.batcher.reschedule(first, 0)
    assert bench.run() == [("b", 1)]
    assert first.flags == 0
    bench.done()
    assert bench.run() == [("a", 0)]
    bench.done()
    assert bench.batcher.active == 0
