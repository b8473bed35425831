"""A queue with priority levels, and for each level a policy on how many requests may wait and how long.

Knows order and time alone; which requests make a batch is the schedulers' matter. All operations cost O(1) at any
length, but for the deadline of a request that has a timeout (a heap).

Order of service: a *lane* is a first-in first-out queue. Each level has two, one for requests within their time and
one behind it for those that the DELAY action has moved. Lanes are served in order: level 1, level 1 delayed, level 2,
and so on.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from bisect import insort
from collections import OrderedDict
from collections.abc import Hashable
from operator import attrgetter

from headrace.repository.model_config import DynamicBatching, QueuePolicy, TimeoutAction
from headrace.scheduling.scheduler import QueuedRequest
from headrace_protocol.errors import FailureReason, InferError, unavailable

_by_rank = attrgetter("rank")

_STALE_DEADLINES = 64
"""Deadlines of requests that have left may outnumber the live ones by so many before they are swept out."""


class Lane:
    """Requests of one level in order of arrival, and the same by shape key.

    Ordered dictionaries serve as queues from whose middle a request is removed in O(1), with nothing left behind.
    """

    __slots__ = ("groups", "level", "order", "rank")

    def __init__(self, level: Level, rank: int) -> None:
        self.level = level
        self.rank = rank
        self.order: OrderedDict[QueuedRequest, None] = OrderedDict()
        self.groups: dict[Hashable, OrderedDict[QueuedRequest, None]] = {}
        """No group is empty."""

    def head(self) -> QueuedRequest:
        """Return the request that came first; the lane must not be empty."""
        return next(iter(self.order))

    def append(self, item: QueuedRequest) -> None:
        self.order[item] = None
        group = self.groups.get(item.shape_key)
        if group is None:
            group = self.groups[item.shape_key] = OrderedDict()
        group[item] = None
        item.lane = self

    def remove(self, item: QueuedRequest) -> None:
        del self.order[item]
        group = self.groups[item.shape_key]
        del group[item]
        if not group:
            del self.groups[item.shape_key]
        item.lane = None


class Level:
    """A priority level: its policy, its two lanes, and how many requests wait in them."""

    __slots__ = ("delayed", "fresh", "max_size", "number", "override", "reject", "size", "timeout_us")

    def __init__(self, number: int, policy: QueuePolicy) -> None:
        self.number = number
        self.max_size = policy.max_queue_size
        self.timeout_us = policy.default_timeout_us
        self.override = policy.allow_timeout_override
        self.reject = policy.timeout_action is TimeoutAction.REJECT
        self.size = 0
        self.fresh = Lane(self, 2 * number)
        self.delayed = Lane(self, 2 * number + 1)


class PolicyQueue(ABC):
    """The part of a scheduler that lets requests wait; subclasses say what is a batch and when it is ripe."""

    def __init__(self, settings: DynamicBatching) -> None:
        self._settings = settings
        self._default = self._make_level(settings.default_priority_level if settings.priority_levels else 0)
        self._levels = {self._default.number: self._default}
        """The default level and those in which a request waits: a client may name any of 2^64."""
        self._lanes: list[Lane] = []
        """Lanes that are not empty, in order of service."""
        self._waiting = 0
        self._rows = 0
        self._timed: dict[int, QueuedRequest] = {}
        """By ticket, the waiting requests whose timeout runs."""
        self._deadlines: list[tuple[int, int]] = []
        """A heap of (time, ticket); a ticket that is not in _timed belongs to a request that has left."""
        self._tickets = 0
        self._rejected: list[QueuedRequest] = []
        """Removed because their time was over, not yet returned by expire."""

    @property
    def waiting(self) -> int:
        return self._waiting

    def enqueue(self, item: QueuedRequest, now_ns: int) -> None:
        assert item.lane is None, "the request waits already"
        level = self._level_of(item.priority) if item.priority else self._default
        if level.max_size and level.size >= level.max_size:
            self._sweep(now_ns)  # one whose time is over must not take the place of this one
            level = self._level_of(item.priority)  # the sweep forgets a level that it empties
            if level.size >= level.max_size:
                raise self._full(level)
        item.enqueued_ns = now_ns
        if level.timeout_us:
            self._start_timeout(item, level)
        else:
            item.expires_ns = 0
        lane = level.fresh
        if not lane.order:
            insort(self._lanes, lane, key=_by_rank)
        lane.append(item)
        level.size += 1
        self._waiting += 1
        self._rows += item.rows

    def cancel(self, item: QueuedRequest) -> bool:
        if item.lane is None:
            return False
        self._remove(item)
        return True

    def expire(self, now_ns: int) -> list[QueuedRequest]:
        self._sweep(now_ns)
        rejected, self._rejected = self._rejected, []
        return rejected

    def next_expiry_ns(self) -> int | None:
        if self._rejected:
            return self._rejected[0].expires_ns
        deadlines = self._deadlines
        while deadlines and deadlines[0][1] not in self._timed:
            heapq.heappop(deadlines)
        return deadlines[0][0] if deadlines else None

    @abstractmethod
    def next_batch(self, now_ns: int) -> list[QueuedRequest] | None: ...

    @abstractmethod
    def ripe_at_ns(self) -> int | None: ...

    def wake_at_ns(self) -> int | None:
        expiry, ripe = self.next_expiry_ns(), self.ripe_at_ns()
        if expiry is None or ripe is None:
            return ripe if expiry is None else expiry
        return min(expiry, ripe)

    def drain(self) -> list[QueuedRequest]:
        drained, self._rejected = self._rejected, []
        for lane in tuple(self._lanes):
            for item in tuple(lane.order):
                self._remove(item)
                drained.append(item)
        self._deadlines.clear()
        return drained

    def _remove(self, item: QueuedRequest) -> None:
        """Take a waiting request out, whatever the reason."""
        lane = item.lane
        assert lane is not None, "the request does not wait"
        lane.remove(item)
        level = lane.level
        level.size -= 1
        self._waiting -= 1
        self._rows -= item.rows
        if item.ticket:
            del self._timed[item.ticket]
            item.ticket = 0
        if not lane.order:
            self._lanes.remove(lane)
            if not level.size and level is not self._default:
                del self._levels[level.number]

    def _take(self, batch: list[QueuedRequest]) -> None:
        """Take out the requests of a batch."""
        for item in batch:
            self._remove(item)

    def _sweep(self, now_ns: int) -> None:
        """Take out or move behind the requests whose time is over."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now_ns:
            item = self._timed.get(heapq.heappop(deadlines)[1])
            if item is None:
                continue
            assert item.lane is not None, "a request with a running timeout does not wait"
            level = item.lane.level
            if level.reject:
                self._remove(item)
                self._rejected.append(item)
            else:
                self._delay(item, level)

    def _delay(self, item: QueuedRequest, level: Level) -> None:
        """Move a request behind those of its level that are within their time."""
        del self._timed[item.ticket]
        item.ticket = 0
        level.fresh.remove(item)
        if not level.fresh.order:
            self._lanes.remove(level.fresh)
        if not level.delayed.order:
            insort(self._lanes, level.delayed, key=_by_rank)
        level.delayed.append(item)

    def _start_timeout(self, item: QueuedRequest, level: Level) -> None:
        timeout_us = level.timeout_us
        if level.override and 0 < item.timeout_us < timeout_us:
            timeout_us = item.timeout_us
        item.expires_ns = item.enqueued_ns + timeout_us * 1000
        self._tickets += 1
        item.ticket = self._tickets
        self._timed[item.ticket] = item
        heapq.heappush(self._deadlines, (item.expires_ns, item.ticket))
        if len(self._deadlines) > 2 * len(self._timed) + _STALE_DEADLINES:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._timed]
            heapq.heapify(self._deadlines)

    def _level_of(self, priority: int) -> Level:
        if not 1 <= priority <= self._settings.priority_levels:
            return self._default
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = self._make_level(priority)
        return level

    def _make_level(self, number: int) -> Level:
        settings = self._settings
        return Level(number, settings.priority_queue_policies.get(number, settings.default_queue_policy))

    def _full(self, level: Level) -> InferError:
        where = f" of priority level {level.number}" if level.number else ""
        return unavailable(
            f"the queue{where} is full: {level.size} requests wait, max_queue_size is {level.max_size}",
            FailureReason.REJECTED,
        )

    def check_integrity(self) -> None:
        ranks = [lane.rank for lane in self._lanes]
        assert ranks == sorted(set(ranks)), "lanes are out of order"
        items = [item for lane in self._lanes for item in lane.order]
        assert len(set(items)) == len(items) == self._waiting, "the count of waiting requests is wrong"
        assert sum(item.rows for item in items) == self._rows, "the count of rows is wrong"
        for lane in self._lanes:
            self._check_lane(lane)
        sizes = dict.fromkeys(self._levels, 0)
        for item in items:
            assert item.lane is not None
            sizes[item.lane.level.number] += 1
        for number, level in self._levels.items():
            assert level.size == sizes[number], f"level {number} counts {level.size} of {sizes[number]} requests"
            assert level.size or level is self._default, f"level {number} is kept although it is empty"
            assert not level.max_size or level.size <= level.max_size, f"level {number} is over its bound"
        self._check_deadlines(items)

    def _check_lane(self, lane: Lane) -> None:
        assert lane.order, f"lane {lane.rank} is listed but empty"
        assert self._levels[lane.level.number] is lane.level, f"lane {lane.rank} is of a forgotten level"
        grouped = {key: [item for item in lane.order if item.shape_key == key] for key in lane.groups}
        assert grouped == {key: list(group) for key, group in lane.groups.items()}, "groups differ from the order"
        assert sum(map(len, grouped.values())) == len(lane.order), "a request is in no group"
        for item in lane.order:
            assert item.lane is lane, "a request believes to be elsewhere"
            assert item.ticket == 0 or lane is lane.level.fresh, "a timeout runs on after it was over"

    def _check_deadlines(self, items: list[QueuedRequest]) -> None:
        assert self._timed == {item.ticket: item for item in items if item.ticket}, "timeouts run for others"
        live = {ticket: at for at, ticket in self._deadlines if ticket in self._timed}
        assert live == {ticket: item.expires_ns for ticket, item in self._timed.items()}, "a deadline is missing"
        assert all(item.lane is None and item.ticket == 0 for item in self._rejected), "a rejected request waits"
