"""Metrics that a backend makes: values are gathered here and told to the server a few times a second, or as it asks.

What is told is changes, so that the processes of a model add up to one series in the server. Knows nothing of the
channel: functions that send are given.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

import msgspec

from headrace_protocol.errors import invalid, unavailable, unsupported
from headrace_protocol.messages import MAX_FAMILIES, MAX_SERIES, MetricSeries, MetricValue, MetricValues

MetricKind = Literal["counter", "gauge", "histogram"]

PERIOD_S: Final = 0.1
"""Seconds between two tellings, at least, where nobody asks."""
_MOST_LABELS: Final = 32
_MOST_BUCKETS: Final = 256
_MOST_TEXT: Final = 1024
_LABEL_NAME: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_Labels = tuple[tuple[str, str], ...]


class Metric:
    """One metric: a family's, with certain labels. Those with the same labels are the same metric. Thread-safe."""

    __slots__ = ("_base", "_bounds", "_change", "_counts", "_registry", "kind", "labels", "number")

    def __init__(
        self, registry: MetricRegistry, number: int, kind: MetricKind, labels: _Labels, bounds: tuple[float, ...]
    ) -> None:
        self.number: Final = number
        self.kind: Final = kind
        self.labels: Final = labels
        self._registry: Final = registry
        self._bounds: Final = bounds
        self._change = 0.0
        self._base: float | None = None
        self._counts = [0] * (len(bounds) + 1) if kind == "histogram" else []

    def increment(self, value: float = 1.0) -> None:
        """Add to a counter (not less than 0) or a gauge. INVALID_ARG otherwise, UNSUPPORTED for a histogram."""
        number = _number(value)
        if self.kind != "gauge" and not math.isfinite(number):
            raise invalid(f"a {self.kind} cannot be incremented by {number:g}")
        if self.kind == "histogram":
            raise unsupported("a histogram cannot be incremented: it takes values by observe")
        if self.kind == "counter" and number < 0:
            raise invalid(f"a counter grows only: it cannot be incremented by {number:g}")
        with self._registry.lock:
            self._change += number
            self._registry.touched(self)

    def set(self, value: float) -> None:
        """Set a gauge; UNSUPPORTED for other kinds."""
        number = _number(value)
        if self.kind != "gauge":
            raise unsupported(f"a {self.kind} cannot be set")
        with self._registry.lock:
            self._base, self._change = number, 0.0
            self._registry.touched(self)

    def observe(self, value: float, times: int = 1) -> None:
        """Add a value to a histogram, as often as `times` says; UNSUPPORTED for other kinds."""
        number = _number(value)
        if self.kind != "histogram":
            raise unsupported(f"a {self.kind} takes no observations")
        if math.isnan(number):
            raise invalid("a histogram cannot count what is not a number")
        with self._registry.lock:
            self._counts[bisect.bisect_left(self._bounds, number)] += times
            self._change += number * times
            self._registry.touched(self)

    def value(self) -> float:
        """Return the value that a scrape would show, over all processes of the model. Blocks.

        UNSUPPORTED for a histogram.
        """
        if self.kind == "histogram":
            raise unsupported("a histogram has no single value")
        return self._registry.read(self)

    def take(self) -> MetricValue:
        """Return what was done since the last time. For the registry, which holds its lock."""
        told = MetricValue(self.number, self._change, self._base, tuple(self._counts))
        self._change, self._base = 0.0, None
        if self._counts:
            self._counts = [0] * len(self._counts)
        return told


class MetricFamily:
    """Metrics of one name and kind."""

    def __init__(self, registry: MetricRegistry, number: int, name: str, kind: MetricKind) -> None:
        self.number: Final = number
        self.name: Final = name
        self.kind: Final[MetricKind] = kind
        self._registry: Final = registry
        self._metrics: Final[dict[_Labels, tuple[Metric, tuple[float, ...]]]] = {}

    def metric(self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None) -> Metric:
        """Return the metric with these labels; it is shown from now on, with 0.

        `buckets`: upper bounds of a histogram, ascending; needed there, and only there. Raises INVALID_ARG for labels
        or buckets that are none, UNAVAILABLE beyond MAX_SERIES.
        """
        key = _labels(labels or {}, self.kind)
        bounds = _bounds(buckets, self.kind)
        registry = self._registry
        with registry.lock:
            found = self._metrics.get(key)
            if found is not None:
                if found[1] != bounds:
                    raise invalid(f"metric '{self.name}' with these labels has other buckets: {list(found[1])}")
                return found[0]
            metric = registry.new_metric(self, key, bounds)
            self._metrics[key] = (metric, bounds)
            return metric


class MetricRegistry:
    """The metrics of a process. Tells of them from a thread of its own, and whenever `take` is called."""

    def __init__(
        self,
        define: Callable[[str, str, MetricKind], int],
        read: Callable[[int], float],
        send: Callable[[Sequence[msgspec.Struct], Sequence[int]], None],
    ) -> None:
        self.lock: Final = threading.Lock()
        """Guards the values, and what is to be told."""
        self._define: Final = define
        self._read: Final = read
        self._send: Final = send
        self._numbers: Final = itertools.count(1)
        self._families: Final[dict[str, MetricFamily]] = {}
        self._defining: Final = threading.Lock()
        self._new: list[MetricSeries] = []
        self._changed: dict[int, Metric] = {}
        self._series = 0
        self._telling: Final = threading.Lock()
        """Held from taking changes until they are sent, so that they arrive in their order."""
        self._woken: Final = threading.Event()
        self._closed: Final = threading.Event()
        self._readers: Final[list[Callable[[], None]]] = []

    def before_telling(self, read: Callable[[], None]) -> None:
        """See ServerCalls.before_metrics."""
        self._readers.append(read)

    def family(self, name: str, description: str, kind: MetricKind) -> MetricFamily:
        """See ServerCalls.metric_family."""
        if not isinstance(name, str) or not isinstance(description, str):
            raise invalid("the name and the description of metrics are strings")
        if kind not in {"counter", "gauge", "histogram"}:
            raise invalid(f"metric '{name}' is of the unknown kind '{kind}'")
        with self._defining:
            found = self._families.get(name)
            if found is not None and found.kind == kind:
                return found
            if len(self._families) >= MAX_FAMILIES:
                raise unavailable(f"{MAX_FAMILIES} families of metrics are defined already")
            number = self._define(name, description, kind)
            if not self._families:
                threading.Thread(target=self._tell_on, name="headrace-metrics", daemon=True).start()
            family = self._families[name] = MetricFamily(self, number, name, kind)
            return family

    def tell(self, answers: int = 0) -> None:
        """Send what changed; where somebody asked (`answers`), also if nothing did."""
        with self._telling:
            for read in self._readers:
                read()
            with self.lock:
                series, self._new = self._new, []
                changed, self._changed = self._changed, {}
                values = [metric.take() for metric in changed.values()]
            if series or values or answers:
                self._send([MetricValues(tuple(series), tuple(values), answers)], ())

    def close(self) -> None:
        """End the thread; nothing is told any more by itself."""
        self._closed.set()
        self._woken.set()

    # For the metrics, with the lock held unless they read.

    def new_metric(self, family: MetricFamily, labels: _Labels, bounds: tuple[float, ...]) -> Metric:
        if self._series >= MAX_SERIES:
            raise unavailable(f"{MAX_SERIES} metrics of this process exist already")
        self._series += 1
        metric = Metric(self, next(self._numbers), family.kind, labels, bounds)
        self._new.append(MetricSeries(metric.number, family.number, labels, bounds))
        self._woken.set()
        return metric

    def touched(self, metric: Metric) -> None:
        if metric.number not in self._changed:
            self._changed[metric.number] = metric
            self._woken.set()

    def read(self, metric: Metric) -> float:
        self.tell()
        return self._read(metric.number)

    def _tell_on(self) -> None:
        while not self._closed.wait(PERIOD_S):
            self._woken.wait()
            self._woken.clear()
            self.tell()


def _number(value: float) -> float:
    """Return a value as a float. Raises INVALID_ARG where it is none."""
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise invalid(f"a metric takes a number, not {value!r}")


def _labels(labels: Mapping[str, str], kind: MetricKind) -> _Labels:
    if len(labels) > _MOST_LABELS:
        raise invalid(f"a metric has {_MOST_LABELS} labels at most, not {len(labels)}")
    for name, value in labels.items():
        if not isinstance(name, str) or not _LABEL_NAME.fullmatch(name) or name.startswith("__"):
            raise invalid(f"'{name}' is no name of a label: letters, digits and _, no digit first, not __ first")
        if kind == "histogram" and name == "le":
            raise invalid("the label 'le' of a histogram is its buckets'")
        if not isinstance(value, str):
            raise invalid(f"label '{name}' is of type {type(value).__name__}, expected a string")
        if len(name) > _MOST_TEXT or len(value) > _MOST_TEXT:
            raise invalid(f"label '{name[:40]}' is longer than {_MOST_TEXT} characters")
    return tuple(sorted(labels.items()))


def _bounds(buckets: Sequence[float] | None, kind: MetricKind) -> tuple[float, ...]:
    if kind != "histogram":
        if buckets is not None:
            raise invalid(f"a {kind} has no buckets")
        return ()
    bounds = [_number(bound) for bound in buckets or ()]
    if bounds and bounds[-1] == math.inf:
        bounds.pop()
    if not bounds or len(bounds) > _MOST_BUCKETS:
        raise invalid(f"a histogram has 1 to {_MOST_BUCKETS} buckets, not {len(bounds)}")
    if any(not low < high for low, high in itertools.pairwise(bounds)) or not all(map(math.isfinite, bounds)):
        raise invalid(f"the bounds of a histogram's buckets ascend and are finite, unlike {bounds}")
    return tuple(bounds)
