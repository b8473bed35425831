"""Models with known statistics, and what a scrape tells of them, for tests of the metrics."""

from __future__ import annotations

from prometheus_client.exposition import choose_encoder

from headrace.clock import SystemClock
from headrace.config import MetricsSettings, load_config
from headrace.observability.metrics import MetricsCollector, ModelMetrics
from headrace.observability.statistics import ModelStatistics
from headrace_protocol.errors import FailureReason

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def settings(*metrics_config: str, argv: tuple[str, ...] = ()) -> MetricsSettings:
    options = ["--model-repository=.", "--metrics-address=127.0.0.1", "--metrics-port=0", "--http-port=0", *argv]
    return load_config([*options, *(f"--metrics-config={item}" for item in metrics_config)], {}).metrics


def busy_statistics() -> ModelStatistics:
    statistics = ModelStatistics(summaries=True)
    statistics.record_success(4, 5_000_000, 1_000_000, 20_000, 3_900_000, 80_000, 1)
    statistics.record_execution(4, 20_000, 3_900_000, 80_000)
    statistics.record_failure(FailureReason.REJECTED, 7)
    statistics.pending = 3
    return statistics


def model(name: str = "m", **changes: object) -> ModelMetrics:
    values: dict[str, object] = {
        "name": name,
        "version": 2,
        "statistics": busy_statistics(),
        "ready": True,
        "load_seconds": 1.5,
        "queue_depth": 2,
        "restarts": 1,
    }
    return ModelMetrics(**(values | changes))  # type: ignore[arg-type]


class Models:
    def __init__(self, *models: ModelMetrics) -> None:
        self.loaded = list(models)

    def models(self) -> list[ModelMetrics]:
        return self.loaded


def samples(text: str) -> dict[str, float]:
    """Return the samples as they stand in the text, by name and labels; parsers would rename counters."""
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    found = {name: float(value) for name, value in lines}
    assert len(found) == len(lines), "a series is told twice"
    return found


async def text_of(collector: MetricsCollector, *, openmetrics: bool = False) -> str:
    encode, _ = choose_encoder(OPENMETRICS if openmetrics else "")
    return encode(await collector.collect(openmetrics=openmetrics)).decode()


async def scrape(*models: ModelMetrics, config: tuple[str, ...] = (), openmetrics: bool = False) -> str:
    return await text_of(MetricsCollector(Models(*models), settings(*config), SystemClock()), openmetrics=openmetrics)
