"""MetricFamily and Metric as models see them, over the metrics that any backend may have."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

from headrace_backends import metrics
from headrace_backends.python.errors import TritonModelException
from headrace_backends.python.process import PROCESS
from headrace_protocol.errors import InferError

T = TypeVar("T")


class MetricKind(enum.IntEnum):
    """What a family counts, with Triton's numbers."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


_KINDS: Final[dict[MetricKind, metrics.MetricKind]] = {
    MetricKind.COUNTER: "counter",
    MetricKind.GAUGE: "gauge",
    MetricKind.HISTOGRAM: "histogram",
}


class Metric:
    """One metric of a family. Its value is shared by all instances of the model."""

    __slots__ = ("_family", "_metric")

    def __init__(self, family: MetricFamily, metric: metrics.Metric) -> None:
        self._family = family
        self._metric = metric

    def increment(self, value: float) -> None:
        """Add to a counter (0 or more) or a gauge. Raises TritonModelException otherwise."""
        _asked(lambda: self._metric.increment(value))

    def set(self, value: float) -> None:
        """Set a gauge. Raises TritonModelException for other kinds."""
        _asked(lambda: self._metric.set(value))

    def observe(self, value: float) -> None:
        """Add a value to a histogram. Raises TritonModelException for other kinds."""
        _asked(lambda: self._metric.observe(value))

    def value(self) -> float:
        """Return the value of a counter or gauge. Raises TritonModelException for a histogram."""
        return _asked(self._metric.value)


class MetricFamily:
    """Metrics of one name and kind. Shared by all of the server's models that make it."""

    COUNTER: Final = MetricKind.COUNTER
    GAUGE: Final = MetricKind.GAUGE
    HISTOGRAM: Final = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: int) -> None:
        """Raise TritonModelException for a name that is none, is taken by the server, or is of another kind."""
        server = PROCESS.require_server()
        try:
            known = _KINDS[MetricKind(kind)]
        except ValueError:
            raise TypeError(f"MetricFamily: expected one of its kinds, got {kind!r}") from None
        self._family = _asked(lambda: server.metric_family(name, description, known))

    def Metric(  # noqa: N802 - the name is Triton's
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        """Return the family's metric with these labels. `buckets`: upper bounds, for a histogram."""
        return Metric(self, _asked(lambda: self._family.metric(labels, buckets)))


def _asked(ask: Callable[[], T]) -> T:
    try:
        return ask()
    except InferError as error:
        raise TritonModelException(error.message) from error
