"""The Prometheus text format and OpenMetrics, written: families of samples in, bytes out. Knows no models.

prometheus_client is not used for it: it adds `_total` to every counter, which Triton's names lack, and it renders a
registry in one go, which would stop the event loop for tens of milliseconds where there are many models.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence

from headrace.observability.sketch import Histogram

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Kind(enum.Enum):
    """The type of a metric family."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    SUMMARY = "summary"


def labels(values: Mapping[str, str]) -> str:
    """Return `a="1",b="2"`, values escaped; names must be legal already."""
    return ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in values.items())


def number(value: float) -> str:
    """Return a sample's value as text."""
    if isinstance(value, int):
        return str(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


class Family:
    """One metric: its name, type, help text and the lines of its samples."""

    __slots__ = ("_bounds", "_openmetrics", "help", "kind", "lines", "name")

    def __init__(self, name: str, kind: Kind, help_text: str, *, openmetrics: bool) -> None:
        self.name = name
        self.kind = kind
        self.help = help_text
        self.lines: list[str] = []
        self._openmetrics = openmetrics
        self._bounds: dict[tuple[int, ...], list[str]] = {}

    def add(self, label_text: str, value: float) -> None:
        """Add a sample of a counter or gauge."""
        self.lines.append(
            f"{self.name}{{{label_text}}} {number(value)}" if label_text else f"{self.name} {number(value)}"
        )

    def add_histogram(self, label_text: str, histogram: Histogram, scale: int) -> None:
        """Add a histogram; its bounds and sum are divided by `scale` (1e9 turns nanoseconds into seconds)."""
        name, comma = self.name, "," if label_text else ""
        total = 0
        texts = self._bounds.get(histogram.bounds)
        if texts is None:
            texts = self._bounds[histogram.bounds] = [*(self._bound(b / scale) for b in histogram.bounds), "+Inf"]
        for bound, count in zip(texts, histogram.counts, strict=True):
            total += count
            self.lines.append(f'{name}_bucket{{{label_text}{comma}le="{bound}"}} {total}')
        self._add_totals(label_text, histogram.sum / scale, total)

    def add_summary(self, label_text: str, quantiles: Mapping[float, float], total: float, count: int) -> None:
        """Add a summary: the value at each quantile, the sum and the number of the values."""
        comma = "," if label_text else ""
        for quantile, value in quantiles.items():
            text = self._bound(quantile)
            self.lines.append(f'{self.name}{{{label_text}{comma}quantile="{text}"}} {number(value)}')
        self._add_totals(label_text, total, count)

    def _add_totals(self, label_text: str, total: float, count: int) -> None:
        braces = f"{{{label_text}}}" if label_text else ""
        self.lines.append(f"{self.name}_sum{braces} {number(total)}")
        self.lines.append(f"{self.name}_count{braces} {count}")

    def _bound(self, bound: float) -> str:
        # OpenMetrics wants 100.0; the text format's other writers, Triton's among them, say 100.
        return repr(float(bound)) if self._openmetrics else number(bound)

    def header(self) -> str:
        """Return the HELP and TYPE lines."""
        name, kind = self.name, self.kind.value
        if self._openmetrics and self.kind is Kind.COUNTER:
            if name.endswith("_total"):
                name = name.removesuffix("_total")
            else:
                kind = "unknown"  # OpenMetrics forbids a counter without _total, and the name must not change.
        text = self.help.replace("\\", r"\\").replace("\n", r"\n")
        return f"# HELP {name} {text}\n# TYPE {name} {kind}"


class Exposition:
    """The families of one scrape, in the order of their first use."""

    def __init__(self, *, openmetrics: bool = False) -> None:
        self._openmetrics = openmetrics
        self._families: dict[str, Family] = {}

    @property
    def content_type(self) -> str:
        """The Content-Type of `render`."""
        return OPENMETRICS_TYPE if self._openmetrics else TEXT_TYPE

    def family(self, name: str, kind: Kind, help_text: str) -> Family:
        """Return the family of this name, new or known."""
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = Family(name, kind, help_text, openmetrics=self._openmetrics)
        return family

    def render(self) -> bytes:
        """Return the scrape's body. Families without samples are left out."""
        parts: list[str] = []
        for family in self._families.values():
            if family.lines:
                parts.append(family.header())
                parts.extend(family.lines)
        parts.append("# EOF\n" if self._openmetrics else "")
        return "\n".join(parts).encode()


def wants_openmetrics(accept: str) -> bool:
    """Return whether an Accept header prefers OpenMetrics to text/plain."""
    best = {"openmetrics": 0.0, "text": 0.0}
    for item in accept.split(","):
        media, *parameters = (part.strip() for part in item.split(";"))
        kind = "openmetrics" if media == "application/openmetrics-text" else "text"
        if kind == "text" and media not in {"text/plain", "text/*", "*/*"}:
            continue
        best[kind] = max(best[kind], _weight(parameters))
    return best["openmetrics"] > best["text"]


def _weight(parameters: Sequence[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0
