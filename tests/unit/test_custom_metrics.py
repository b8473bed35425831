"""Metrics that backends make, as the server keeps them: what is merged, what is refused, what goes."""

from __future__ import annotations

import asyncio
import math

import pytest

from headrace.observability import custom_metrics
from headrace.observability.custom_metrics import CustomMetrics, MetricScope, ProcessMetrics
from headrace.observability.snapshot import Snapshot
from headrace_protocol.errors import ErrorCode, InferError
from headrace_protocol.messages import MAX_FAMILIES, MAX_SERIES, MetricSeries, MetricValue


@pytest.fixture
def metrics() -> CustomMetrics:
    return CustomMetrics()


@pytest.fixture
def process(metrics: CustomMetrics) -> ProcessMetrics:
    """A process with a counter (1), a gauge (2) and a histogram (3), each with one series of the same number."""
    return defined(MetricScope(metrics))


def defined(scope: MetricScope, bounds: tuple[float, ...] = (1.0, 10.0)) -> ProcessMetrics:
    process = ProcessMetrics(scope)
    for number, kind in enumerate(("counter", "gauge", "histogram"), 1):
        process.define(number, f"my_{kind}", "help", kind)
        process.add_series(MetricSeries(number, number, (("b", "2"), ("a", "1")), bounds if number == 3 else ()))
    return process


def shown(metrics: CustomMetrics) -> dict[str, float]:
    snapshot = Snapshot()
    metrics.add(snapshot)
    return {
        sample.name + sample.labels.get("le", ""): sample.value
        for family in snapshot.collect()
        for sample in family.samples
    }


def nonsense(act: object, *arguments: object) -> str:
    with pytest.raises(InferError) as raised:
        act(*arguments)  # type: ignore[operator]
    assert raised.value.code is ErrorCode.INTERNAL
    return raised.value.message


def test_what_two_processes_count_adds_up(metrics: CustomMetrics, process: ProcessMetrics) -> None:
    other = defined(MetricScope(metrics))
    process.change(MetricValue(1, 2))
    other.change(MetricValue(1, 0.5))
    process.change(MetricValue(3, 7, None, (1, 0, 1)))
    other.change(MetricValue(3, 20, None, (0, 0, 2)))
    assert shown(metrics) == {
        "my_counter": 2.5,
        "my_gauge": 0,
        "my_histogram_bucket1": 1,
        "my_histogram_bucket10": 1,
        "my_histogram_bucket+Inf": 4,
        "my_histogram_count": 4,
        "my_histogram_sum": 27,
    }


def test_a_gauge_is_what_it_was_set_to_last_and_what_was_added_since(
    metrics: CustomMetrics, process: ProcessMetrics
) -> None:
    other = defined(MetricScope(metrics))
    process.change(MetricValue(2, 5))
    other.change(MetricValue(2, 1))
    assert process.value(2) == 6
    other.change(MetricValue(2, -1, 10))
    process.change(MetricValue(2, 3))
    assert other.value(2) == 12


def test_buckets_that_another_made_otherwise_are_put_where_they_lie(
    metrics: CustomMetrics, process: ProcessMetrics
) -> None:
    other = defined(MetricScope(metrics), (0.5, 1.0, 5.0, 50.0))
    other.change(MetricValue(3, 0, None, (1, 1, 1, 1, 1)))
    assert [shown(metrics)[f"my_histogram_bucket{bound}"] for bound in ("1", "10", "+Inf")] == [2, 3, 5]


def test_what_nobody_defines_any_more_is_gone_and_its_name_free(metrics: CustomMetrics) -> None:
    scopes = [MetricScope(metrics) for _ in range(2)]
    for scope in scopes:
        defined(scope).change(MetricValue(1, 1))
    scopes[0].close()
    scopes[0].close()
    assert shown(metrics)["my_counter"] == 2
    scopes[1].close()
    assert shown(metrics) == {}
    MetricScope(metrics).define("my_counter", "", "gauge")


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("", ErrorCode.INVALID_ARG),
        ("a-b", ErrorCode.INVALID_ARG),
        ("x" * 5000, ErrorCode.INVALID_ARG),
        ("headrace_queue_depth", ErrorCode.INVALID_ARG),
        ("nv_cache_util", ErrorCode.INVALID_ARG),
        ("my_counter", ErrorCode.ALREADY_EXISTS),
        ("my_histogram_count", ErrorCode.ALREADY_EXISTS),
    ],
)
def test_a_name_is_refused(metrics: CustomMetrics, process: ProcessMetrics, name: str, code: ErrorCode) -> None:
    with pytest.raises(InferError) as raised:
        process.define(9, name, "", "gauge")
    assert raised.value.code is code
    MetricScope(metrics).define("my_histogram", "", "histogram")


@pytest.mark.parametrize(
    "series",
    [
        MetricSeries(9, 77, ()),
        MetricSeries(1, 1, ()),
        MetricSeries(9, 1, (("1st", ""),)),
        MetricSeries(9, 1, (("__name__", ""),)),
        MetricSeries(9, 1, (("a", ""), ("a", ""))),
        MetricSeries(9, 1, (), (1.0,)),
        MetricSeries(9, 3, (("le", "1"),), (1.0,)),
        MetricSeries(9, 3, ()),
        MetricSeries(9, 3, (), (2.0, 1.0)),
        MetricSeries(9, 3, (), (1.0, math.inf)),
    ],
)
def test_a_series_that_cannot_be_is_nonsense(process: ProcessMetrics, series: MetricSeries) -> None:
    assert nonsense(process.add_series, series)


@pytest.mark.parametrize(
    "value",
    [
        MetricValue(77, 1),
        MetricValue(1, -1),
        MetricValue(1, math.nan),
        MetricValue(1, 1, 5),
        MetricValue(1, 1, None, (1,)),
        MetricValue(2, 1, None, (1,)),
        MetricValue(3, 1, None, (1, 1)),
        MetricValue(3, 1, None, (1, -1, 1)),
        MetricValue(3, 1, 1, (1, 1, 1)),
    ],
)
def test_a_value_that_cannot_be_is_nonsense_and_changes_nothing(
    metrics: CustomMetrics, process: ProcessMetrics, value: MetricValue
) -> None:
    before = shown(metrics)
    assert nonsense(process.change, value)
    assert shown(metrics) == before


def test_a_process_has_so_many_families_and_series_and_no_more(metrics: CustomMetrics) -> None:
    process = ProcessMetrics(MetricScope(metrics))
    for number in range(MAX_FAMILIES):
        process.define(number, f"family_{number}", "", "counter")
    nonsense(process.define, MAX_FAMILIES, "one_more", "", "counter")
    for number in range(MAX_SERIES):
        process.add_series(MetricSeries(number, 0, (("n", str(number)),)))
    nonsense(process.add_series, MetricSeries(MAX_SERIES, 0, ()))


async def test_a_scrape_waits_for_who_is_asked_but_not_for_long(
    metrics: CustomMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(custom_metrics, "REFRESH_S", 0.01)
    told: list[str] = []

    async def prompt() -> None:
        await asyncio.sleep(0)
        told.append("prompt")

    async def silent() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            told.append("given up")
            raise

    metrics.tellers.update({prompt, silent})
    await metrics.refresh()
    assert told == ["prompt"]
    await asyncio.sleep(0)
    assert told == ["prompt", "given up"]


def test_language_models_figures_are_shown_under_vllms_names_too_where_that_is_asked(metrics: CustomMetrics) -> None:
    process = ProcessMetrics(MetricScope(metrics))
    for number, (name, kind) in enumerate((("x_total", "counter"), ("y", "gauge"), ("z_seconds", "histogram")), 1):
        process.define(number, f"headrace_llm_{name}", "help", kind)
        labels = (("model", "m"), ("version", "1"), ("engine", "0"))
        process.add_series(MetricSeries(number, number, labels, (1.0,) if kind == "histogram" else ()))
    process.change(MetricValue(1, 7))
    assert "vllm:x_total" not in shown(metrics)
    metrics.as_vllm = True
    ours = shown(metrics)
    assert ours["headrace_llm_x_total"] == ours["vllm:x_total"] == 7
    assert {"vllm:y", "vllm:z_seconds_bucket1", "vllm:z_seconds_count"} <= set(ours)
    snapshot = Snapshot()
    metrics.add(snapshot)
    labels_of = {sample.name: sample.labels for family in snapshot.collect() for sample in family.samples}
    assert labels_of["vllm:x_total"] == {"model_name": "m", "version": "1", "engine": "0"}


def test_what_a_model_shows_under_vllms_names_itself_stays_its_own(metrics: CustomMetrics) -> None:
    process = ProcessMetrics(MetricScope(metrics))
    for number, name in enumerate(("headrace_llm_x_total", "vllm:x_total"), 1):
        process.define(number, name, "help", "counter")
        process.add_series(MetricSeries(number, number, ()))
        process.change(MetricValue(number, number))
    metrics.as_vllm = True
    assert shown(metrics) == {"headrace_llm_x_total": 1, "vllm:x_total": 2}
