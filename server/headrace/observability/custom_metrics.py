"""CustomMetrics: what backends make known of themselves at /metrics, under names of their own.

A family and its series are shared by all who define them alike: counters and histograms add up, a gauge is what it was set
to last. They are there for as long as a model that defined them is loaded. Knows no processes.
"""

from __future__ import annotations

import asyncio
import bisect
import math
import re
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Final

from headrace.observability.snapshot import Snapshot
from headrace_protocol.errors import ErrorCode, FailureReason, InferError, invalid
from headrace_protocol.messages import MAX_FAMILIES, MAX_SERIES, MetricSeries, MetricValue

REFRESH_S: Final = 0.1
"""Seconds that a scrape waits for backends to tell what has changed."""
_MOST_TEXT: Final = 4096
_FAMILY_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL_NAME: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_OURS: Final = (
    "headrace_",
    "process_",
    "nv_inference_",
    "nv_model_",
    "nv_cache_",
    "nv_gpu_",
    "nv_energy_",
    "nv_cpu_",
    "nv_pinned_",
)
"""Beginnings of the names that the server shows itself."""
LANGUAGE_MODELS: Final = "headrace_llm_"
"""The beginning of the names that language models have for their figures: theirs, not the server's."""
VLLM: Final = "vllm:"
"""The beginning under which vLLM shows the same."""
_SUFFIXES: Final = {"counter": ("",), "gauge": ("",), "histogram": ("", "_bucket", "_count", "_sum")}

_Labels = tuple[tuple[str, str], ...]


class Series:
    """One metric, shared by all who defined it."""

    __slots__ = ("bounds", "counts", "labels", "scopes", "value")

    def __init__(self, labels: _Labels, bounds: tuple[float, ...], buckets: int) -> None:
        self.labels: Final = dict(labels)
        self.bounds: Final = bounds
        self.value = 0.0
        """The sum of a histogram."""
        self.counts: Final = [0] * buckets
        self.scopes: Final[set[MetricScope]] = set()


class Family:
    """A name, what it means, and its series."""

    __slots__ = ("description", "kind", "name", "scopes", "series")

    def __init__(self, name: str, description: str, kind: str) -> None:
        self.name: Final = name
        self.description: Final = description
        self.kind: Final = kind
        self.series: Final[dict[_Labels, Series]] = {}
        self.scopes: Final[set[MetricScope]] = set()


class CustomMetrics:
    """Owns all families. Used on the event loop."""

    def __init__(self) -> None:
        self._families: Final[dict[str, Family]] = {}
        self._samples: Final[dict[str, str]] = {}
        """Names of lines at /metrics, and the families that write them."""
        self.as_vllm = False
        """Whether language models' figures are shown under vLLM's names too (--metrics-compat)."""
        self.tellers: Final[set[Callable[[], Awaitable[None]]]] = set()
        """Whom a scrape asks for what has changed."""

    async def refresh(self) -> None:
        """Have everybody tell what has changed, REFRESH_S at most."""
        if self.tellers:
            asked = [asyncio.ensure_future(ask()) for ask in tuple(self.tellers)]
            _, late = await asyncio.wait(asked, timeout=REFRESH_S)
            for answer in late:
                answer.cancel()

    def add(self, snapshot: Snapshot) -> None:
        """Add every series to a scrape."""
        for family in self._families.values():
            for series in family.series.values():
                _add(snapshot, family, family.name, series, series.labels)
                if self.as_vllm and family.name.startswith(LANGUAGE_MODELS):
                    name = VLLM + family.name.removeprefix(LANGUAGE_MODELS)
                    if name not in self._families:
                        labels = {
                            ("model_name" if key == "model" else key): text for key, text in series.labels.items()
                        }
                        _add(snapshot, family, name, series, labels)

    def define(self, scope: MetricScope, name: str, description: str, kind: str) -> Family:
        """See MetricScope.define."""
        found = self._families.get(name)
        if found is not None:
            if found.kind != kind:
                raise InferError(
                    ErrorCode.ALREADY_EXISTS, f"metrics '{name}' exist already, as a {found.kind}, not as a {kind}"
                )
        else:
            _check_name(name, description)
            lines = [name + suffix for suffix in _SUFFIXES[kind]]
            for line in lines:
                if line in self._samples:
                    raise InferError(
                        ErrorCode.ALREADY_EXISTS, f"metrics '{name}' would be mixed up with '{self._samples[line]}'"
                    )
            self._samples.update(dict.fromkeys(lines, name))
            found = self._families[name] = Family(name, description, kind)
        found.scopes.add(scope)
        return found

    def forget(self, family: Family, scope: MetricScope) -> None:
        """Take the scope's part in a family away, and what nobody has a part in."""
        family.scopes.discard(scope)
        for labels, series in list(family.series.items()):
            series.scopes.discard(scope)
            if not series.scopes:
                del family.series[labels]
        if not family.scopes:
            del self._families[family.name]
            for suffix in _SUFFIXES[family.kind]:
                del self._samples[family.name + suffix]


class MetricScope:
    """The metrics that one loaded model version defined, whichever of its processes did."""

    def __init__(self, metrics: CustomMetrics) -> None:
        self._metrics: Final = metrics
        self._families: Final[dict[str, Family]] = {}

    def define(self, name: str, description: str, kind: str) -> Family:
        """Return the family of this name, new or shared.

        Raises INVALID_ARG for a name that is none or is the server's own, ALREADY_EXISTS for one of another kind.
        """
        family = self._families[name] = self._metrics.define(self, name, description, kind)
        return family

    def series(self, family: Family, message: MetricSeries) -> Series:
        """Return a family's series with these labels, new or shared. Raises INTERNAL for nonsense."""
        labels = tuple(sorted(message.labels))
        _check_labels(labels, family.kind)
        found = family.series.get(labels)
        if found is None:
            buckets = len(message.buckets) + 1 if family.kind == "histogram" else 0
            found = family.series[labels] = Series(labels, message.buckets, buckets)
        found.scopes.add(self)
        return found

    def close(self) -> None:
        """Take the metrics of the model away, which is gone. Idempotent."""
        while self._families:
            self._metrics.forget(self._families.popitem()[1], self)


class ProcessMetrics:
    """What one process calls its families and series. Ends with the process; the values stay."""

    def __init__(self, scope: MetricScope) -> None:
        self._scope: Final = scope
        self._families: Final[dict[int, Family]] = {}
        self._series: Final[dict[int, tuple[Family, Series, tuple[int, ...]]]] = {}
        """And where, in the series, the process's own buckets are: who came first decided which there are."""

    def define(self, number: int, name: str, description: str, kind: str) -> None:
        """Make a family known under a number. Raises as MetricScope.define, and INTERNAL for nonsense."""
        if number in self._families or len(self._families) >= MAX_FAMILIES:
            raise _nonsense(f"a family of metrics of number {number}, after {len(self._families)} others")
        self._families[number] = self._scope.define(name, description, kind)

    def add_series(self, message: MetricSeries) -> None:
        """Make a series known under a number. Raises INTERNAL for nonsense."""
        family = self._families.get(message.family)
        if family is None or message.number in self._series or len(self._series) >= MAX_SERIES:
            raise _nonsense(f"metric {message.number} of family {message.family}, after {len(self._series)} others")
        _check_buckets(message.buckets, family.kind)
        series = self._scope.series(family, message)
        places = [bisect.bisect_left(series.bounds, bound) for bound in message.buckets]
        if series.counts:
            places.append(len(series.bounds))
        self._series[message.number] = (family, series, tuple(places))

    def change(self, message: MetricValue) -> None:
        """Apply what was done to a series. Raises INTERNAL for nonsense."""
        known = self._series.get(message.series)
        if known is None:
            raise _nonsense(f"a value of the unknown metric {message.series}")
        family, series, places = known
        if family.kind == "counter" and not message.change >= 0:
            raise _nonsense(f"counter '{family.name}' was changed by {message.change}")
        if message.base is not None and family.kind != "gauge":
            raise _nonsense(f"{family.kind} '{family.name}' was set")
        if len(message.counts) != len(places) or any(count < 0 for count in message.counts):
            raise _nonsense(f"{family.kind} '{family.name}' with {len(message.counts)} buckets")
        for place, count in zip(places, message.counts, strict=True):
            series.counts[place] += count
        if message.base is not None:
            series.value = message.base
        series.value += message.change

    def value(self, number: int) -> float:
        """Return the value of a series, as a scrape would show it. Raises INTERNAL for an unknown one."""
        known = self._series.get(number)
        if known is None:
            raise _nonsense(f"the value of the unknown metric {number}")
        return known[1].value


def _add(snapshot: Snapshot, family: Family, name: str, series: Series, labels: dict[str, str]) -> None:
    """Add a series to a scrape, as one of the family `name`."""
    if family.kind == "histogram":
        counts = tuple(series.counts)
        snapshot.buckets(name, family.description, labels, series.bounds, counts, series.value)
    elif family.kind == "counter":
        snapshot.counter(name, family.description, labels, series.value)
    else:
        snapshot.gauge(name, family.description, labels, series.value)


def _check_name(name: str, description: str) -> None:
    if not _FAMILY_NAME.fullmatch(name) or len(name) > _MOST_TEXT:
        raise invalid(f"'{name[:80]}' is no name of metrics: letters, digits, _ and :, no digit first")
    if name.startswith(_OURS) and not name.startswith(LANGUAGE_MODELS):
        raise invalid(f"metrics cannot be named '{name}': the server's own begin like that")
    if len(description) > _MOST_TEXT:
        raise invalid(f"the description of metrics '{name}' is longer than {_MOST_TEXT} characters")


def _check_labels(labels: _Labels, kind: str) -> None:
    names = [name for name, _ in labels]
    good = all(_LABEL_NAME.fullmatch(name) and not name.startswith("__") for name in names)
    if not good or len(set(names)) != len(names) or (kind == "histogram" and "le" in names):
        raise _nonsense(f"a metric with the labels {names}")


def _check_buckets(bounds: tuple[float, ...], kind: str) -> None:
    ascending = all(low < high for low, high in pairwise(bounds)) and all(map(math.isfinite, bounds))
    if not ascending or bool(bounds) != (kind == "histogram"):
        raise _nonsense(f"a {kind} with the buckets {bounds}")


def _nonsense(what: str) -> InferError:
    return InferError(ErrorCode.INTERNAL, what, FailureReason.BACKEND)
