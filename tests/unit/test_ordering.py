"""OrderedRelease: answers leave in the order in which their requests arrived."""

import random

import pytest

from headrace.scheduling.ordering import OrderedRelease
from headrace.scheduling.scheduler import QueuedRequest


def admitted(count):
    ordering = OrderedRelease()
    items = [QueuedRequest(i, 1, "a") for i in range(count)]
    for item in items:
        ordering.admit(item)
    return ordering, items


def test_what_is_done_in_order_leaves_at_once():
    ordering, items = admitted(2)
    assert ordering.complete(items[0]) == [items[0]]
    assert ordering.complete(items[1]) == [items[1]]


def test_what_is_done_early_waits_for_all_before_it():
    ordering, (a, b, c) = admitted(3)
    assert ordering.complete(c) == []
    assert ordering.complete(b) == []
    assert ordering.complete(a) == [a, b, c]
    assert len(ordering) == 0


def test_a_later_arrival_is_not_released_with_those_before_it():
    ordering, (a, b, c) = admitted(3)
    assert ordering.complete(b) == []
    assert ordering.complete(a) == [a, b]
    assert len(ordering) == 1
    assert ordering.complete(c) == [c]


def test_any_order_of_completion_gives_the_order_of_arrival():
    random_ = random.Random(7)
    for _ in range(50):
        ordering, items = admitted(20)
        released = []
        for item in random_.sample(items, 20):
            released += ordering.complete(item)
            ordering.check_integrity()
        assert released == items


def test_completing_twice_is_our_own_bug():
    ordering, items = admitted(2)
    ordering.complete(items[1])
    with pytest.raises(AssertionError, match="completed before"):
        ordering.complete(items[1])


def test_admitting_twice_is_our_own_bug():
    ordering, items = admitted(1)
    with pytest.raises(AssertionError, match="admitted before"):
        ordering.admit(items[0])
