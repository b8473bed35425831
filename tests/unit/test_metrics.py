"""The metrics: names, labels and values as a scraper reads them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from prometheus_client import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from headrace.clock import SystemClock
from headrace.observability.metrics import BackendProcess, MetricsCollector, ModelSeries
from headrace.observability.processes import process_usage
from headrace.observability.snapshot import Snapshot
from metrics_scrapes import Models, busy_statistics, model, samples, scrape, settings, text_of

COUNTERS = (
    "nv_inference_request_success",
    "nv_inference_request_failure",
    "nv_inference_count",
    "nv_inference_exec_count",
)
PARTS = ("request", "queue", "compute_input", "compute_infer", "compute_output")
EVERYTHING = ("histogram_latencies=true", "summary_latencies=true")


async def test_tritons_counters_have_exactly_tritons_names():
    text = await scrape(model())
    found = samples(text)
    of_model = 'model="m",version="2"'
    expected = {
        f"nv_inference_request_success{{{of_model}}}": 1,
        'nv_inference_request_failure{model="m",reason="REJECTED",version="2"}': 1,
        'nv_inference_request_failure{model="m",reason="CANCELED",version="2"}': 0,
        'nv_inference_request_failure{model="m",reason="BACKEND",version="2"}': 0,
        'nv_inference_request_failure{model="m",reason="OTHER",version="2"}': 0,
        f"nv_inference_count{{{of_model}}}": 4,
        f"nv_inference_exec_count{{{of_model}}}": 1,
        f"nv_inference_request_duration_us{{{of_model}}}": 5000,
        f"nv_inference_queue_duration_us{{{of_model}}}": 1000,
        f"nv_inference_compute_input_duration_us{{{of_model}}}": 20,
        f"nv_inference_compute_infer_duration_us{{{of_model}}}": 3900,
        f"nv_inference_compute_output_duration_us{{{of_model}}}": 80,
        f"nv_inference_pending_request_count{{{of_model}}}": 3,
        f"nv_model_load_duration_secs{{{of_model}}}": 1.5,
        f"headrace_model_ready{{{of_model}}}": 1,
        f"headrace_queue_depth{{{of_model}}}": 2,
        f"headrace_backend_restarts_total{{{of_model}}}": 1,
    }
    assert {name: found.get(name) for name in expected} == expected
    assert "# TYPE nv_inference_count untyped" in text
    assert "nv_inference_count_total" not in text


async def test_the_text_parses_and_every_sample_belongs_to_a_declared_family():
    text = await scrape(model(), model("n", tags={"team": 'a"b\\c\n'}), config=EVERYTHING)
    families = list(parse_text(text))
    untyped = {sample.name for family in families if family.type == "unknown" for sample in family.samples}
    assert untyped == {*COUNTERS, *(f"nv_inference_{part}_duration_us" for part in PARTS)}
    kinds = {family.name: family.type for family in families}
    assert kinds["headrace_request_duration_seconds"] == "histogram"
    assert kinds["nv_inference_request_summary_us"] == "summary"
    assert len(kinds) == len(families), "the samples of a family do not stand together"


async def test_each_bucket_names_the_last_request_that_can_be_looked_up():
    loaded = model()
    for trace_id, request_ns in ((1, 4_000_000), (2, 4_500_000), (3, 40_000_000)):
        loaded.statistics.record_success(1, request_ns, 0, 0, request_ns, 0, 0)
        loaded.statistics.record_exemplar(trace_id, request_ns, 0, request_ns, 5_500)
    text = await scrape(loaded, openmetrics=True)
    (family,) = (family for family in parse_openmetrics(text) if family.name == "headrace_request_duration_seconds")
    told = {sample.labels["le"]: sample.exemplar for sample in family.samples if sample.exemplar is not None}
    assert told.keys() == {"0.005", "0.05"}
    assert told["0.005"].labels == {"trace_id": f"{2:032x}"}
    assert (told["0.005"].value, float(told["0.005"].timestamp)) == (0.0045, 5.5)
    assert told["0.05"].labels == {"trace_id": f"{3:032x}"}
    assert " # {" not in await scrape(loaded)


async def test_without_traces_nothing_is_kept_for_exemplars():
    loaded = model()
    assert loaded.statistics.request_durations.exemplars is None
    assert " # {" not in await scrape(loaded, openmetrics=True)


async def test_openmetrics_parses_and_keeps_the_names():
    text = await scrape(model(tags={"team": "a"}), config=EVERYTHING, openmetrics=True)
    names = {sample.name for family in parse_openmetrics(text) for sample in family.samples}
    assert "nv_inference_count" in names
    assert "headrace_backend_restarts_total" in names
    assert 'nv_inference_first_response_histogram_ms_bucket{_team="a",le="100.0",' in text
    assert text.endswith("# EOF\n")


async def test_histograms_are_cumulative_and_in_seconds():
    found = samples(await scrape(model()))
    of_model = 'model="m",version="2"'
    name = "headrace_request_duration_seconds"
    assert found[f'{name}_bucket{{le="0.0025",{of_model}}}'] == 0
    assert found[f'{name}_bucket{{le="0.005",{of_model}}}'] == 1
    assert found[f'{name}_bucket{{le="+Inf",{of_model}}}'] == 1
    assert found[f"{name}_sum{{{of_model}}}"] == 0.005
    assert found[f"{name}_count{{{of_model}}}"] == 1
    assert found[f'headrace_batch_size_bucket{{le="4",{of_model}}}'] == 1
    assert found[f"headrace_queue_duration_seconds_sum{{{of_model}}}"] == 0.001
    assert found[f"headrace_compute_duration_seconds_sum{{{of_model}}}"] == 0.004


async def test_tags_become_labels_with_legal_names_and_never_twice():
    found = samples(await scrape(model(tags={"team": "a", "cost-centre": "7", "cost.centre": "8"})))
    assert found['nv_inference_count{_cost_centre="7",_team="a",model="m",version="2"}'] == 4


async def test_latency_counters_can_be_switched_off_while_counts_go_on():
    text = await scrape(model(), config=("counter_latencies=false",))
    assert "duration_us" not in text
    assert "nv_inference_count{" in text


async def test_the_first_response_histogram_is_there_when_asked_for():
    assert "nv_inference_first_response" not in await scrape(model())
    found = samples(await scrape(model(), config=("histogram_latencies=true",)))
    of_model = 'model="m",version="2"'
    bounds = [key for key in found if key.startswith("nv_inference_first_response_histogram_ms_bucket")]
    name = "nv_inference_first_response_histogram_ms_bucket"
    assert bounds == [f'{name}{{le="{bound}",{of_model}}}' for bound in ("100", "500", "2000", "5000", "+Inf")]


async def test_summaries_are_there_when_asked_for():
    assert "summary" not in await scrape(model())
    found = samples(await scrape(model(), config=("summary_latencies=true", "summary_quantiles=0.5:0.05")))
    of_model = 'model="m",version="2"'
    for name, value in {
        "request": 5000,
        "queue": 1000,
        "compute_input": 20,
        "compute_infer": 3900,
        "compute_output": 80,
    }.items():
        metric = f"nv_inference_{name}_summary_us"
        assert found[f'{metric}{{model="m",quantile="0.5",version="2"}}'] == pytest.approx(value, rel=1 / 16)
        assert found[f"{metric}_sum{{{of_model}}}"] == value
        assert found[f"{metric}_count{{{of_model}}}"] == 1


async def test_a_models_series_vanish_with_the_model():
    source = Models(model("a"), model("b"))
    collector = MetricsCollector(source, settings(), SystemClock())
    assert 'model="a"' in await text_of(collector)
    del source.loaded[0]
    text = await text_of(collector)
    assert 'model="a"' not in text
    assert 'model="b"' in text


async def test_a_backend_process_is_told_by_its_name_and_a_dead_one_not_at_all():
    processes = [BackendProcess("m_0", os.getpid()), BackendProcess("m_1", 2**22 + 1)]
    found = samples(await scrape(model(processes=processes)))
    of_process = 'model="m",process="m_0",version="2"'
    assert found[f'headrace_backend_memory_bytes{{kind="rss",{of_process}}}'] > 1 << 20
    assert found[f'headrace_backend_memory_bytes{{kind="pss",{of_process}}}'] > 1 << 20
    assert found[f"headrace_backend_cpu_seconds_total{{{of_process}}}"] > 0
    assert not [name for name in found if "m_1" in name]


async def test_the_server_and_the_machine_are_told_without_models():
    found = samples(await scrape())
    for name in (
        "process_cpu_seconds_total",
        "process_resident_memory_bytes",
        "process_virtual_memory_bytes",
        "process_start_time_seconds",
        "process_open_fds",
        "process_max_fds",
        "nv_cpu_memory_total_bytes",
        "nv_cpu_memory_used_bytes",
    ):
        assert found[name] > 0, name
    assert 0 <= found["nv_cpu_utilization"] <= 1
    assert [value for name, value in found.items() if name.startswith("headrace_build_info{")] == [1]


async def test_cpu_metrics_can_be_switched_off():
    collector = MetricsCollector(Models(), settings(argv=("--allow-cpu-metrics=false",)), SystemClock())
    assert "nv_cpu" not in await text_of(collector)


async def test_processes_are_sampled_once_an_interval():
    class Still:
        now = 10**12

        def now_ns(self) -> int:
            return self.now

        def wall_ns(self) -> int:
            return self.now

    async def cpu_seconds() -> float:
        (told,) = [
            value
            for name, value in samples(await text_of(collector)).items()
            if name.startswith("headrace_backend_cpu_seconds_total")
        ]
        return told

    clock = Still()
    own = model(processes=[BackendProcess("m_0", os.getpid())])
    collector = MetricsCollector(Models(own), settings(), clock)
    first = await cpu_seconds()
    while process_usage(os.getpid()).cpu_seconds < first + 0.03:  # type: ignore[union-attr]
        pass
    clock.now += 1_999_000_000
    assert await cpu_seconds() == first
    clock.now += 1_000_000
    assert await cpu_seconds() > first


def test_a_scrape_of_one_model_is_short_enough_for_the_event_loop():
    import timeit

    series = ModelSeries(Snapshot(), settings(), 0)
    one = model()
    assert min(timeit.repeat(lambda: series.add(one, {}), number=1, repeat=20)) < 0.005


async def test_label_values_are_read_back_as_they_were():
    value = 'x"y\\z\n'
    families = parse_text(await scrape(model(tags={"a": value})))
    (count,) = [sample for family in families for sample in family.samples if sample.name == "nv_inference_count"]
    assert count.labels["_a"] == value


async def test_what_happens_after_the_values_were_read_is_not_told():
    statistics = busy_statistics()
    collector = MetricsCollector(Models(model(statistics=statistics)), settings(*EVERYTHING), SystemClock())
    registry = await collector.collect()
    statistics.record_success(4, 5_000_000, 1_000_000, 20_000, 3_900_000, 80_000, 1)
    statistics.record_execution(4, 20_000, 3_900_000, 80_000)
    found = samples(choose_encoder("")[0](registry).decode())
    of_model = 'model="m",version="2"'
    assert found[f"nv_inference_request_success{{{of_model}}}"] == 1
    for name in ("headrace_request_duration_seconds", "headrace_batch_size", "nv_inference_request_summary_us"):
        assert found[f"{name}_count{{{of_model}}}"] == 1


async def test_the_event_loop_gets_its_turns_while_a_thread_renders():
    async def turns_during(work: Callable[[], object]) -> int:
        working = asyncio.create_task(asyncio.to_thread(work))
        turns = 0
        while not working.done():
            await asyncio.sleep(0.001)
            turns += 1
        return turns

    class Collected:
        def collect(self) -> list[Metric]:
            return metrics

    metrics: list[Metric] = []
    models = Models(*(model(f"m{number}") for number in range(250)))
    registry = await MetricsCollector(models, settings(), SystemClock()).collect()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # from now on no thread is made to give way: a turn is one that it leaves of itself
    try:
        assert await turns_during(lambda: metrics.extend(registry.collect())) > 5
        assert await turns_during(lambda: choose_encoder("")[0](Collected())) > 10
    finally:
        sys.setswitchinterval(interval)


async def test_traces_are_counted_where_there_can_be_some():
    counts = SimpleNamespace(picked=5, skipped=2, lost=1)
    text = await text_of(MetricsCollector(Models(), settings(), SystemClock(), counts))
    assert (
        samples(text).items()
        >= {
            "headrace_traces_total": 5,
            'headrace_traces_lost_total{reason="full"}': 2,
            'headrace_traces_lost_total{reason="write"}': 1,
        }.items()
    )
    assert "headrace_traces" not in await scrape()
