"""Metrics as a backend makes them: what is told to the server, and what is refused before."""

from __future__ import annotations

import math
import queue
from collections.abc import Callable
from typing import Any

import pytest

from headrace_backends.metrics import Metric, MetricFamily, MetricKind, MetricRegistry
from headrace_protocol.errors import ErrorCode, InferError, invalid
from headrace_protocol.messages import MAX_FAMILIES, MAX_SERIES, MetricSeries, MetricValue, MetricValues


class Server:
    """What a registry talks to."""

    def __init__(self) -> None:
        self.defined: list[tuple[str, str, str]] = []
        self.told: queue.Queue[MetricValues] = queue.Queue()
        self.registry = MetricRegistry(self.define, lambda _: 42.0, self.send)

    def define(self, name: str, description: str, kind: MetricKind) -> int:
        if name == "taken":
            raise invalid("taken")
        self.defined.append((name, description, kind))
        return len(self.defined)

    def send(self, messages: Any, _: Any) -> None:
        (message,) = messages
        self.told.put(message)

    def values(self) -> tuple[MetricValue, ...]:
        """Return what has changed since it was last asked."""
        self.registry.tell(1)
        while not (message := self.told.get(timeout=5)).answers:
            self.earlier = message
        return message.values


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr("headrace_backends.metrics.PERIOD_S", 1e6)  # nothing is told but what is asked for
    return Server()


def family(server: Server, kind: MetricKind) -> MetricFamily:
    return server.registry.family(f"my_{kind}", "help", kind)


def metric(server: Server, kind: MetricKind) -> Metric:
    return family(server, kind).metric({"a": "1"}, [1, 10] if kind == "histogram" else None)


def refused(act: Callable[..., object], *arguments: object) -> ErrorCode:
    with pytest.raises(InferError) as raised:
        act(*arguments)
    return raised.value.code


def test_a_new_metric_is_told_before_any_value(server: Server) -> None:
    metric(server, "histogram")
    server.registry.tell()
    told = server.told.get(timeout=5)
    assert told.series == (MetricSeries(1, 1, (("a", "1"),), (1.0, 10.0)),)
    assert told.values == ()


def test_a_counter_tells_what_was_added_since_the_last_time(server: Server) -> None:
    counter = metric(server, "counter")
    for _ in range(1000):
        counter.increment(0.5)
    assert server.values() == (MetricValue(1, 500.0),)
    assert server.values() == ()
    counter.increment()
    assert server.values() == (MetricValue(1, 1.0),)


def test_a_gauge_tells_what_it_was_set_to_and_what_was_added_since(server: Server) -> None:
    gauge = metric(server, "gauge")
    gauge.increment(5)
    gauge.set(3)
    gauge.increment(-1)
    assert server.values() == (MetricValue(1, -1.0, 3.0),)
    gauge.increment(2)
    assert server.values() == (MetricValue(1, 2.0),)


def test_a_histogram_tells_counts_by_bucket_bounds_included(server: Server) -> None:
    histogram = metric(server, "histogram")
    for value in (0, 1, 1.5, 10, 10.5):
        histogram.observe(value)
    assert server.values() == (MetricValue(1, 23.0, None, (2, 2, 1)),)


def test_the_same_labels_are_the_same_metric(server: Server) -> None:
    counters = family(server, "counter")
    assert counters.metric({"a": "1", "b": "2"}) is counters.metric({"b": "2", "a": "1"})
    assert family(server, "counter") is counters
    assert len(server.defined) == 1


def test_a_value_is_read_from_the_server_after_it_was_told_of_changes(server: Server) -> None:
    counter = metric(server, "counter")
    counter.increment()
    assert counter.value() == 42
    assert server.told.get(timeout=5).values == (MetricValue(1, 1.0),)


def test_changes_are_told_by_themselves_within_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_backends.metrics.PERIOD_S", 0.001)
    server = Server()
    counter = metric(server, "counter")
    counter.increment()
    told: list[MetricValue] = []
    while not told:
        told += server.told.get(timeout=5).values
    assert told == [MetricValue(1, 1.0)]
    server.registry.close()


@pytest.mark.parametrize(
    ("kind", "act", "value", "code"),
    [
        ("counter", "increment", -1, ErrorCode.INVALID_ARG),
        ("counter", "increment", math.nan, ErrorCode.INVALID_ARG),
        ("counter", "increment", math.inf, ErrorCode.INVALID_ARG),
        ("counter", "increment", "1", ErrorCode.INVALID_ARG),
        ("counter", "set", 1, ErrorCode.UNSUPPORTED),
        ("counter", "observe", 1, ErrorCode.UNSUPPORTED),
        ("gauge", "observe", 1, ErrorCode.UNSUPPORTED),
        ("gauge", "set", None, ErrorCode.INVALID_ARG),
        ("histogram", "increment", 1, ErrorCode.UNSUPPORTED),
        ("histogram", "set", 1, ErrorCode.UNSUPPORTED),
        ("histogram", "observe", math.nan, ErrorCode.INVALID_ARG),
    ],
)
def test_what_a_metric_cannot_take_is_refused(
    server: Server, kind: MetricKind, act: str, value: object, code: ErrorCode
) -> None:
    assert refused(getattr(metric(server, kind), act), value) is code
    assert server.values() == ()


def test_a_histogram_has_no_single_value(server: Server) -> None:
    assert refused(metric(server, "histogram").value) is ErrorCode.UNSUPPORTED


@pytest.mark.parametrize(
    "labels",
    [{"": "x"}, {"1a": "x"}, {"a-b": "x"}, {"__a": "x"}, {"a": 1}, {"a": "x" * 2000}, {f"l{n}": "" for n in range(33)}],
)
def test_labels_that_are_none_are_refused(server: Server, labels: dict[str, str]) -> None:
    assert refused(family(server, "counter").metric, labels) is ErrorCode.INVALID_ARG


@pytest.mark.parametrize("buckets", [None, [], [2, 1], [1, 1], [math.inf], [math.nan], ["x"], list(range(300))])
def test_buckets_that_are_none_are_refused(server: Server, buckets: Any) -> None:
    assert refused(family(server, "histogram").metric, {}, buckets) is ErrorCode.INVALID_ARG


def test_only_histograms_have_buckets_and_the_label_of_those(server: Server) -> None:
    assert refused(family(server, "gauge").metric, {}, [1.0]) is ErrorCode.INVALID_ARG
    assert refused(family(server, "histogram").metric, {"le": "1"}, [1.0]) is ErrorCode.INVALID_ARG
    family(server, "gauge").metric({"le": "1"})


def test_an_infinite_last_bucket_may_be_named(server: Server) -> None:
    family(server, "histogram").metric({}, [1.0, math.inf])
    server.registry.tell()
    assert server.told.get(timeout=5).series[0].buckets == (1.0,)


def test_other_buckets_under_the_same_labels_are_refused(server: Server) -> None:
    family(server, "histogram").metric({}, [1.0])
    assert refused(family(server, "histogram").metric, {}, [2.0]) is ErrorCode.INVALID_ARG


def test_a_family_that_the_server_refuses_may_be_tried_again_under_another_name(server: Server) -> None:
    assert refused(server.registry.family, "taken", "", "counter") is ErrorCode.INVALID_ARG
    assert server.registry.family("free", "", "counter").name == "free"


def test_families_and_metrics_have_a_bound(server: Server) -> None:
    for number in range(MAX_FAMILIES):
        last = server.registry.family(f"family_{number}", "", "counter")
    assert refused(server.registry.family, "one_more", "", "counter") is ErrorCode.UNAVAILABLE
    for number in range(MAX_SERIES):
        last.metric({"n": str(number)})
    assert refused(last.metric, {"n": "one more"}) is ErrorCode.UNAVAILABLE
    last.metric({"n": "0"}).increment()
