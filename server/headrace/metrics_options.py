"""The option --metrics-config: which latencies are told, and how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.flags import boolean


def _quantiles(text: str) -> tuple[float, ...]:
    found: set[float] = set()
    for item in text.split(","):
        # The error after the colon belongs to Triton's algorithm; ours is within 1/16 of the value at each quantile.
        quantile, _, error = item.partition(":")
        try:
            value, _ = float(quantile), float(error or "0")
        except ValueError:
            value = -1.0
        if not 0.0 < value < 1.0:
            raise ValueError(f"expected <quantile>:<error>,... with quantiles between 0 and 1, got {text!r}")
        found.add(value)
    return tuple(sorted(found))


def metrics_config(settings: Sequence[tuple[str, str]], problems: list[str]) -> dict[str, Any]:
    """Return the settings of --metrics-config, defaults included; adds what is wrong."""
    parsers = {
        "counter_latencies": boolean,
        "histogram_latencies": boolean,
        "summary_latencies": boolean,
        "summary_quantiles": _quantiles,
    }
    values: dict[str, Any] = {
        "counter_latencies": True,
        "histogram_latencies": False,
        "summary_latencies": False,
        "summary_quantiles": (0.5, 0.9, 0.95, 0.99, 0.999),
    }
    for key, text in settings:
        parse = parsers.get(key)
        if parse is None:
            problems.append(f"--metrics-config: unknown setting {key!r}; there are {', '.join(parsers)}")
            continue
        try:
            values[key] = parse(text)
        except ValueError as error:
            problems.append(f"--metrics-config: {key}: {error}")
    return values
