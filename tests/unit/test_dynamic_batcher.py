"""DynamicBatcher: which requests run together, when, and what the queue policy does to those that wait."""

from dataclasses import replace

import pytest

from headrace.repository.model_config import DynamicBatching, QueuePolicy, TimeoutAction
from headrace.scheduling.dynamic import DynamicBatcher
from headrace.scheduling.scheduler import QueuedRequest
from headrace_protocol.errors import ErrorCode, FailureReason, InferError

MS = 1_000_000


def request(name="r", rows=1, shape="a", priority=0, timeout_us=0):
    return QueuedRequest(name, rows, shape, priority, timeout_us)


def fill(batcher, *items, now=0):
    for item in items:
        batcher.enqueue(item, now)
    return items


def names(batch):
    return batch and [item.owner for item in batch]


class TestSize:
    def test_an_empty_queue_gives_no_batch_and_no_wake_time(self):
        batcher = DynamicBatcher(8, DynamicBatching())
        assert batcher.next_batch(0) is None
        assert (batcher.ripe_at_ns(), batcher.next_expiry_ns(), batcher.wake_at_ns()) == (None, None, None)

    def test_without_a_delay_whatever_waits_goes_at_once(self):
        batcher = DynamicBatcher(8, DynamicBatching())
        fill(batcher, request("x"), request("y"))
        assert batcher.ripe_at_ns() <= 5
        assert names(batcher.next_batch(5)) == ["x", "y"]
        assert batcher.waiting == 0

    def test_a_request_that_does_not_fit_is_not_split_and_keeps_its_turn(self):
        batcher = DynamicBatcher(4, DynamicBatching())
        fill(batcher, request("x", rows=3), request("y", rows=2), request("z", rows=1))
        assert names(batcher.next_batch(0)) == ["x"], "z must not overtake y"
        assert names(batcher.next_batch(0)) == ["y", "z"]

    def test_the_largest_preferred_size_that_can_be_reached_is_taken(self):
        batcher = DynamicBatcher(8, DynamicBatching(preferred_batch_sizes=(2, 4)))
        fill(batcher, *(request(i) for i in range(7)))
        assert names(batcher.next_batch(0)) == [0, 1, 2, 3]
        assert names(batcher.next_batch(0)) == [4, 5]
        assert names(batcher.next_batch(0)) == [6]

    def test_a_full_batch_beats_a_smaller_preferred_size(self):
        batcher = DynamicBatcher(8, DynamicBatching(preferred_batch_sizes=(4, 8)))
        fill(batcher, *(request(i) for i in range(9)))
        assert len(batcher.next_batch(0)) == 8

    def test_a_preferred_size_counts_rows_not_requests(self):
        batcher = DynamicBatcher(8, DynamicBatching(preferred_batch_sizes=(4,), max_queue_delay_us=1000))
        fill(batcher, request("x", rows=2), request("y", rows=2), request("z", rows=2))
        assert names(batcher.next_batch(0)) == ["x", "y"]

    def test_a_preferred_size_that_no_sum_of_requests_meets_is_not_forced(self):
        batcher = DynamicBatcher(8, DynamicBatching(preferred_batch_sizes=(4,)))
        fill(batcher, request("x", rows=3), request("y", rows=3))
        assert names(batcher.next_batch(0)) == ["x", "y"]


class TestDelay:
    settings = DynamicBatching(preferred_batch_sizes=(4,), max_queue_delay_us=1000)

    def test_a_batch_that_may_grow_is_held_until_exactly_the_delay_of_the_oldest(self):
        batcher = DynamicBatcher(8, self.settings)
        fill(batcher, request("x"), now=MS)
        fill(batcher, request("y"), now=MS + 500)
        assert batcher.ripe_at_ns() == batcher.wake_at_ns() == 2 * MS
        assert batcher.next_batch(2 * MS - 1) is None
        assert names(batcher.next_batch(2 * MS)) == ["x", "y"]

    def test_a_preferred_size_ends_the_wait(self):
        batcher = DynamicBatcher(8, self.settings)
        fill(batcher, *(request(i) for i in range(3)))
        assert batcher.next_batch(0) is None
        fill(batcher, request(3), now=10)
        assert batcher.ripe_at_ns() <= 10
        assert len(batcher.next_batch(10)) == 4

    def test_a_smaller_preferred_size_ends_the_wait_too(self):
        batcher = DynamicBatcher(8, replace(self.settings, preferred_batch_sizes=(2, 8)))
        fill(batcher, *(request(i) for i in range(3)))
        assert names(batcher.next_batch(0)) == [0, 1]
        assert batcher.next_batch(0) is None

    def test_once_the_delay_is_over_the_batch_is_not_cut_to_a_preferred_size(self):
        batcher = DynamicBatcher(8, self.settings)
        fill(batcher, *(request(i) for i in range(6)))
        assert len(batcher.next_batch(MS)) == 6

    def test_before_the_delay_is_over_it_is_cut(self):
        batcher = DynamicBatcher(8, self.settings)
        fill(batcher, *(request(i) for i in range(6)))
        assert len(batcher.next_batch(MS - 1)) == 4

    def test_a_batch_that_has_passed_the_largest_preferred_size_is_not_held(self):
        batcher = DynamicBatcher(8, self.settings)
        fill(batcher, request("x", rows=3), request("y", rows=2))
        assert names(batcher.next_batch(0)) == ["x", "y"]

    def test_a_full_batch_is_not_held(self):
        batcher = DynamicBatcher(4, DynamicBatching(max_queue_delay_us=1000))
        fill(batcher, *(request(i) for i in range(3)))
        assert batcher.next_batch(0) is None
        fill(batcher, request(3))
        assert len(batcher.next_batch(0)) == 4

    def test_a_cancel_can_make_a_batch_wait_again(self):
        batcher = DynamicBatcher(8, self.settings)
        items = fill(batcher, *(request(i) for i in range(4)))
        assert batcher.cancel(items[0])
        assert batcher.next_batch(1) is None
        assert batcher.ripe_at_ns() == MS


class TestShapes:
    settings = DynamicBatching(max_queue_delay_us=300_000)

    def test_eight_clients_of_eight_shapes_do_not_hold_one_another(self):
        """A shape that others wait behind is served at once; only the last may still hope for company."""
        batcher = DynamicBatcher(16, self.settings)
        fill(batcher, *(request(i, shape=i) for i in range(8)))
        assert [names(batcher.next_batch(0)) for _ in range(8)] == [[0], [1], [2], [3], [4], [5], [6], None]
        assert names(batcher.next_batch(300 * MS)) == [7]

    def test_requests_of_one_shape_are_gathered_past_those_of_another(self):
        batcher = DynamicBatcher(16, self.settings)
        fill(batcher, *(request(f"{shape}{i}", shape=shape) for i in range(3) for shape in "ab"))
        assert names(batcher.next_batch(0)) == ["a0", "a1", "a2"]
        assert batcher.next_batch(0) is None, "what is left may still grow"
        fill(batcher, request("c", shape="c"))
        assert names(batcher.next_batch(0)) == ["b0", "b1", "b2"]

    def test_another_shape_at_a_lower_level_does_not_hold_the_higher(self):
        batcher = DynamicBatcher(16, replace(self.settings, priority_levels=2, default_priority_level=2))
        fill(batcher, request("low", shape="a"))
        assert batcher.next_batch(0) is None
        fill(batcher, request("high", shape="b", priority=1))
        assert names(batcher.next_batch(0)) == ["high"]
        assert batcher.next_batch(0) is None

    def test_a_set_of_inputs_is_part_of_the_shape(self):
        batcher = DynamicBatcher(16, DynamicBatching())
        fill(batcher, request("both", shape=((4,), (4,))), request("one", shape=((4,), None)))
        assert names(batcher.next_batch(0)) == ["both"]
        assert names(batcher.next_batch(0)) == ["one"]

    def test_a_rare_shape_does_not_starve_under_a_flood_of_another(self):
        batcher = DynamicBatcher(4, DynamicBatching())
        fill(batcher, *(request(shape="flood") for _ in range(8)))
        fill(batcher, request("rare", shape="rare"), now=1)
        batches = 0
        while True:
            batches += 1
            fill(batcher, *(request(shape="flood") for _ in range(4)), now=batches + 1)
            if names(batcher.next_batch(batches + 1)) == ["rare"]:
                break
            assert batches < 10
        assert batches == 3, "it waits for the two batches that were due before it, and for no more"

    def test_every_one_of_many_shapes_is_led_by_the_oldest_request(self):
        batcher = DynamicBatcher(4, DynamicBatching())
        fill(batcher, *(request(i, shape=i % 7) for i in range(70)))
        left = set(range(70))
        while batch := batcher.next_batch(0):
            assert batch[0].owner == min(left)
            left -= set(names(batch))
        assert not left


class TestPriority:
    settings = DynamicBatching(priority_levels=3, default_priority_level=2)

    def test_a_higher_level_goes_first_and_order_holds_within_a_level(self):
        batcher = DynamicBatcher(2, self.settings)
        fill(batcher, *(request(f"{p}{i}", priority=p) for i in range(2) for p in (3, 2, 1)))
        assert [names(batcher.next_batch(0)) for _ in range(3)] == [["10", "11"], ["20", "21"], ["30", "31"]]

    def test_zero_and_levels_out_of_range_mean_the_default(self):
        batcher = DynamicBatcher(1, self.settings)
        fill(batcher, *(request(p, priority=p) for p in (3, 4, 0, 2**64 - 1, 2, 1)))
        assert [batcher.next_batch(0)[0].owner for _ in range(6)] == [1, 4, 0, 2**64 - 1, 2, 3]

    def test_without_levels_priorities_are_ignored(self):
        batcher = DynamicBatcher(1, DynamicBatching())
        fill(batcher, request("x", priority=9), request("y", priority=1))
        assert names(batcher.next_batch(0)) == ["x"]

    def test_lower_levels_fill_a_batch_that_takes_all_of_the_higher(self):
        batcher = DynamicBatcher(4, self.settings)
        fill(batcher, request("low", priority=3), request("high", priority=1))
        assert names(batcher.next_batch(0)) == ["high", "low"]

    def test_lower_levels_do_not_join_while_a_higher_one_waits(self):
        batcher = DynamicBatcher(4, self.settings)
        fill(batcher, request("low", priority=3), request("a", priority=1), request("b", priority=1, shape="b"))
        assert names(batcher.next_batch(0)) == ["a"]
        assert names(batcher.next_batch(0)) == ["b"]
        assert names(batcher.next_batch(0)) == ["low"]

    def test_the_delay_of_a_low_request_is_kept_though_younger_high_ones_lead(self):
        batcher = DynamicBatcher(8, replace(self.settings, max_queue_delay_us=1000))
        fill(batcher, request("low", priority=3), now=0)
        fill(batcher, request("high", priority=1), now=400)
        assert batcher.ripe_at_ns() == MS
        assert names(batcher.next_batch(MS)) == ["high", "low"]

    def test_a_level_has_its_own_policy(self):
        batcher = DynamicBatcher(8, replace(self.settings, priority_queue_policies={1: QueuePolicy(max_queue_size=1)}))
        fill(batcher, request(priority=1), request(priority=2), request(priority=2))
        with pytest.raises(InferError, match="priority level 1 is full: 1 requests wait, max_queue_size is 1"):
            batcher.enqueue(request(priority=1), 0)

    def test_levels_that_clients_name_leave_nothing_behind(self):
        batcher = DynamicBatcher(4, replace(self.settings, priority_levels=2**64 - 1))
        for priority in range(1, 1000):
            fill(batcher, request(priority=priority))
            assert len(batcher.next_batch(0)) == 1
        assert len(batcher._levels) == 1


class TestQueueSize:
    def test_the_bound_counts_waiting_requests_alone_and_is_exact(self):
        batcher = DynamicBatcher(1, DynamicBatching(default_queue_policy=QueuePolicy(max_queue_size=2)))
        fill(batcher, request("a"))
        assert names(batcher.next_batch(0)) == ["a"]
        b, _ = fill(batcher, request("b"), request("c"))
        for _ in range(3):
            with pytest.raises(InferError, match="queue is full") as caught:
                batcher.enqueue(request("d"), 0)
            assert caught.value.code is ErrorCode.UNAVAILABLE
            assert caught.value.reason is FailureReason.REJECTED
        assert batcher.cancel(b)
        fill(batcher, request("e"))
        with pytest.raises(InferError):
            batcher.enqueue(request("f"), 0)
        assert names(batcher.drain()) == ["c", "e"]

    def test_a_request_whose_time_is_over_takes_no_place(self):
        policy = QueuePolicy(max_queue_size=1, default_timeout_us=1000)
        batcher = DynamicBatcher(1, DynamicBatching(default_queue_policy=policy))
        fill(batcher, request("late"), now=0)
        fill(batcher, request("next"), now=MS)
        assert names(batcher.expire(MS)) == ["late"]
        assert names(batcher.next_batch(MS)) == ["next"]

    def test_a_level_emptied_to_make_room_is_still_the_one_that_counts(self):
        policy = QueuePolicy(max_queue_size=1, default_timeout_us=1000)
        batcher = DynamicBatcher(
            1, DynamicBatching(priority_levels=2, default_priority_level=2, default_queue_policy=policy)
        )
        fill(batcher, request("late", priority=1), now=0)
        fill(batcher, request("next", priority=1), now=MS)
        batcher.check_integrity()
        with pytest.raises(InferError):
            batcher.enqueue(request(priority=1), MS)

    def test_a_refused_request_may_be_offered_again(self):
        batcher = DynamicBatcher(1, DynamicBatching(default_queue_policy=QueuePolicy(max_queue_size=1)))
        fill(batcher, request("x"))
        refused = request("y")
        with pytest.raises(InferError):
            batcher.enqueue(refused, 0)
        assert not batcher.cancel(refused)
        batcher.next_batch(0)
        fill(batcher, refused)
        assert names(batcher.next_batch(0)) == ["y"]


def batcher_with(policy, max_batch_size=1, **settings):
    return DynamicBatcher(max_batch_size, DynamicBatching(default_queue_policy=policy, **settings))


class TestTimeout:
    def test_a_timeout_fires_at_its_time_with_no_slot_free(self):
        batcher = batcher_with(QueuePolicy(default_timeout_us=500_000, max_queue_size=2))
        fill(batcher, request("b"), now=100 * MS)
        fill(batcher, request("c"), now=200 * MS)
        assert batcher.next_expiry_ns() == 600 * MS
        assert batcher.expire(600 * MS - 1) == []
        assert names(batcher.expire(600 * MS)) == ["b"]
        assert batcher.next_expiry_ns() == 700 * MS
        assert batcher.waiting == 1

    def test_a_batch_never_holds_a_request_whose_time_is_over(self):
        batcher = batcher_with(QueuePolicy(default_timeout_us=1000), max_batch_size=4)
        fill(batcher, request("late"), now=0)
        fill(batcher, request("good"), now=500)
        assert names(batcher.next_batch(MS)) == ["good"]
        assert batcher.next_expiry_ns() <= MS, "the driver must be told to fetch the late one"
        assert names(batcher.expire(MS)) == ["late"]
        assert batcher.next_expiry_ns() is None

    @pytest.mark.parametrize(
        ("default_us", "allow", "asked_us", "expected_us"),
        [
            (1000, True, 200, 200),
            (1000, True, 5000, 1000),
            (1000, True, 0, 1000),
            (1000, False, 200, 1000),
            (0, True, 200, None),
        ],
    )
    def test_a_request_may_shorten_its_timeout_where_the_policy_allows(self, default_us, allow, asked_us, expected_us):
        batcher = batcher_with(QueuePolicy(default_timeout_us=default_us, allow_timeout_override=allow))
        fill(batcher, request(timeout_us=asked_us))
        assert batcher.next_expiry_ns() == (expected_us and expected_us * 1000)

    def test_timeouts_out_of_order_of_arrival_fire_in_order_of_time(self):
        batcher = batcher_with(QueuePolicy(default_timeout_us=1000, allow_timeout_override=True))
        fill(batcher, *(request(us, timeout_us=us) for us in (900, 100, 500)))
        assert names(batcher.expire(500_000)) == [100, 500]
        assert names(batcher.expire(MS)) == [900]

    def test_a_request_that_left_has_no_timeout(self):
        batcher = batcher_with(QueuePolicy(default_timeout_us=1000), max_batch_size=1)
        _, other = fill(batcher, request("x"), request("y"))
        assert names(batcher.next_batch(0)) == ["x"]
        assert batcher.cancel(other)
        assert batcher.next_expiry_ns() is None
        assert batcher.expire(10 * MS) == []

    def test_deadlines_of_requests_that_left_do_not_pile_up(self):
        batcher = batcher_with(QueuePolicy(default_timeout_us=10**9))
        stays = request("stays")
        fill(batcher, stays)
        for _ in range(5000):
            (item,) = fill(batcher, request())
            assert batcher.cancel(item)
        assert len(batcher._deadlines) < 100
        batcher.check_integrity()
        assert batcher.next_expiry_ns() == stays.expires_ns

    def test_a_delayed_request_goes_behind_those_within_their_time_but_stays(self):
        policy = QueuePolicy(
            timeout_action=TimeoutAction.DELAY, default_timeout_us=1000, allow_timeout_override=True, max_queue_size=3
        )
        batcher = batcher_with(policy)
        fill(batcher, request("late", timeout_us=10), request("x"), now=0)
        assert batcher.next_expiry_ns() == 10_000
        assert batcher.expire(10_000) == []
        assert batcher.next_expiry_ns() == MS
        fill(batcher, request("y"), now=20_000)
        with pytest.raises(InferError):
            batcher.enqueue(request("a delayed request counts"), 20_000)
        assert [names(batcher.next_batch(20_000)) for _ in range(4)] == [["x"], ["y"], ["late"], None]

    def test_a_delayed_request_still_goes_before_lower_levels(self):
        policy = QueuePolicy(timeout_action=TimeoutAction.DELAY, default_timeout_us=1000)
        batcher = batcher_with(policy, priority_levels=2, default_priority_level=2)
        fill(batcher, request("high", priority=1), now=0)
        fill(batcher, request("low", priority=2), now=MS)
        assert names(batcher.next_batch(MS)) == ["high"]

    def test_a_request_moved_behind_can_make_a_preferred_size_and_wakes_the_driver(self):
        policy = QueuePolicy(timeout_action=TimeoutAction.DELAY, default_timeout_us=1000, allow_timeout_override=True)
        batcher = batcher_with(policy, max_batch_size=8, preferred_batch_sizes=(4, 8), max_queue_delay_us=5000)
        fill(batcher, request("x", timeout_us=100), request("y", rows=4), now=0)
        assert batcher.next_batch(0) is None
        assert batcher.wake_at_ns() == 100_000
        assert names(batcher.next_batch(100_000)) == ["y"]


class TestLeaving:
    def test_cancel_tells_whether_the_request_was_still_waiting(self):
        batcher = DynamicBatcher(1, DynamicBatching())
        x, y = fill(batcher, request("x"), request("y"))
        batcher.next_batch(0)
        assert not batcher.cancel(x)
        assert batcher.cancel(y)
        assert not batcher.cancel(y)
        assert batcher.waiting == 0

    def test_a_request_that_was_cancelled_is_in_no_batch(self):
        batcher = DynamicBatcher(8, DynamicBatching())
        items = fill(batcher, *(request(i) for i in range(4)))
        batcher.cancel(items[1])
        assert names(batcher.next_batch(0)) == [0, 2, 3]

    def test_drain_gives_back_all_that_waits_and_what_timed_out_unseen(self):
        batcher = batcher_with(QueuePolicy(default_timeout_us=1000), priority_levels=2, default_priority_level=2)
        fill(batcher, request("late"), now=0)
        fill(batcher, request("low"), request("high", priority=1), now=500)
        assert names(batcher.next_batch(MS)) == ["high"]
        assert names(batcher.drain()) == ["late", "low"]
        assert (batcher.waiting, batcher.wake_at_ns()) == (0, None)
        batcher.check_integrity()
