"""Snapshot: the values of one scrape, read on the event loop and turned into prometheus_client's families elsewhere.

Reading them is cheap and rendering them is not, so the loop takes plain values and a thread does the rest. The families
are plain `Metric`s: the library's own families fix the names of labels, which a model's tags add to, and have no
quantiles. Knows no models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import ClassVar, TypeVar

from prometheus_client.core import Metric, Sample
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar as MetricExemplar
from prometheus_client.utils import floatToGoString

from headrace.observability.sketch import Exemplar, Histogram, LatencySketch, quantiles

_Labels = dict[str, str]
_HistogramRow = tuple[_Labels, Sequence[float], Sequence[int], float, Mapping[int, Exemplar]]
_Item = TypeVar("_Item")

_TURN_S = 500e-6
_PAUSE_S = 50e-6


def _with_pauses(items: Iterable[_Item]) -> Iterator[_Item]:
    """Yield the items with a pause after each turn of half a millisecond.

    A busy thread gives up the interpreter's lock every 5 ms only, and the event loop needs it anew for each event.
    """
    end = time.monotonic() + _TURN_S
    for item in items:
        yield item
        if time.monotonic() >= end:
            time.sleep(_PAUSE_S)
            end = time.monotonic() + _TURN_S


class _Samples(list[Sample]):
    """The samples of a family; who reads them, which is the library's renderer, makes way for the event loop."""

    def __iter__(self) -> Iterator[Sample]:
        return _with_pauses(super().__iter__())


@dataclass(slots=True)
class _Numbers:
    """A family of counters or gauges."""

    kind: str
    help: str
    rows: list[tuple[_Labels, float]] = field(default_factory=list)

    def samples(self, name: str) -> Iterator[Sample]:
        for labels, value in self.rows:
            yield Sample(name, labels, value)


@dataclass(slots=True)
class _Histograms:
    """A family of histograms: bounds, counts up to each bound and above all, and sum, in units of 1/scale."""

    kind: ClassVar = "histogram"
    help: str
    scale: int
    bound: Callable[[float], str]
    rows: list[_HistogramRow] = field(default_factory=list)

    def samples(self, name: str) -> Iterator[Sample]:
        texts: dict[Sequence[float], list[str]] = {}
        for labels, bounds, counts, total, exemplars in self.rows:
            if bounds not in texts:
                texts[bounds] = [*(self.bound(bound / self.scale) for bound in bounds), "+Inf"]
            for index, (text, count) in enumerate(zip(texts[bounds], accumulate(counts), strict=True)):
                found = exemplars.get(index)
                exemplar = None if found is None else self._told(found)
                yield Sample(f"{name}_bucket", {**labels, "le": text}, count, None, exemplar)
            yield Sample(f"{name}_count", labels, sum(counts))
            yield Sample(f"{name}_sum", labels, total / self.scale)

    def _told(self, exemplar: Exemplar) -> MetricExemplar:
        labels = {"trace_id": f"{exemplar.trace_id:032x}"}
        return MetricExemplar(labels, exemplar.value / self.scale, exemplar.wall_ms / 1000)


@dataclass(slots=True)
class _Summaries:
    """A family of summaries: the counts of the sketch that quantiles are of, the sum and the number of values."""

    kind: ClassVar = "summary"
    help: str
    at: Sequence[float]
    bound: Callable[[float], str]
    rows: list[tuple[_Labels, Sequence[int], int, int]] = field(default_factory=list)

    def samples(self, name: str) -> Iterator[Sample]:
        texts = [self.bound(quantile) for quantile in self.at]
        for labels, recent, total, count in self.rows:
            for text, value in zip(texts, quantiles(recent, self.at), strict=True):
                yield Sample(name, {**labels, "quantile": text}, value)
            yield Sample(f"{name}_count", labels, count)
            yield Sample(f"{name}_sum", labels, total)


class Snapshot(Collector):
    """The families of one scrape. The event loop adds to it; once complete, any thread may collect it."""

    def __init__(self, *, openmetrics: bool = False) -> None:
        # OpenMetrics wants le="100.0"; the text format's other writers, Triton among them, say le="100".
        self._bound = _canonical if openmetrics else _short
        self._exemplars = openmetrics  # the text format knows none
        self._numbers: dict[str, _Numbers] = {}
        self._histograms: dict[str, _Histograms] = {}
        self._summaries: dict[str, _Summaries] = {}

    def counter(self, name: str, help_text: str, labels: _Labels, value: float) -> None:
        """Add a counter. Without `_total` it is told as of unknown type: as a counter the library would rename it."""
        self._number("counter" if name.endswith("_total") else "unknown", name, help_text, labels, value)

    def gauge(self, name: str, help_text: str, labels: _Labels, value: float) -> None:
        """Add a gauge."""
        self._number("gauge", name, help_text, labels, value)

    def _number(self, kind: str, name: str, help_text: str, labels: _Labels, value: float) -> None:
        family = self._numbers.get(name)
        if family is None:
            family = self._numbers[name] = _Numbers(kind, help_text)
        family.rows.append((labels, value))

    def histogram(self, name: str, help_text: str, labels: _Labels, histogram: Histogram, scale: int) -> None:
        """Add a histogram; its bounds and sum are divided by `scale` (1e9 turns nanoseconds into seconds)."""
        exemplars = dict(histogram.exemplars) if self._exemplars and histogram.exemplars else {}
        self._histogram(name, help_text, scale).append(
            (labels, histogram.bounds, tuple(histogram.counts), histogram.sum, exemplars)
        )

    def buckets(
        self,
        name: str,
        help_text: str,
        labels: _Labels,
        bounds: tuple[float, ...],
        counts: tuple[int, ...],
        total: float,
    ) -> None:
        """Add a histogram that counts `total` as the sum of its values, one count a bound and one above all."""
        self._histogram(name, help_text, 1).append((labels, bounds, counts, total, {}))

    def _histogram(self, name: str, help_text: str, scale: int) -> list[_HistogramRow]:
        family = self._histograms.get(name)
        if family is None:
            family = self._histograms[name] = _Histograms(help_text, scale, self._bound)
        return family.rows

    def summary(
        self, name: str, help_text: str, labels: _Labels, sketch: LatencySketch, at: Sequence[float], now_ns: int
    ) -> None:
        """Add a summary: the quantiles `at` of the last minute, the sum and the number of all values."""
        family = self._summaries.get(name)
        if family is None:
            family = self._summaries[name] = _Summaries(help_text, at, self._bound)
        family.rows.append((labels, sketch.recent(now_ns), sketch.sum, sketch.count))

    def collect(self) -> Iterator[Metric]:
        """Yield the families one by one, so that not all samples exist at once."""
        families: Iterable[tuple[str, _Numbers | _Histograms | _Summaries]] = chain(
            self._numbers.items(), self._histograms.items(), self._summaries.items()
        )
        for name, family in families:
            metric = Metric(name.removesuffix("_total"), family.help, family.kind)
            metric.samples = _Samples(_with_pauses(family.samples(name)))
            yield metric


def _canonical(bound: float) -> str:
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]


def _short(bound: float) -> str:
    return _canonical(bound).removesuffix(".0")
