"""Statistics of a model, and the histograms and sketches under them."""

from __future__ import annotations

import random

import pytest

from headrace.observability.sketch import BINS, Histogram, LatencySketch, quantiles
from headrace.observability.statistics import DURATION_BOUNDS_NS, RESPONSE_KEYS, ModelStatistics
from headrace_protocol.errors import FailureReason

S = 1_000_000_000


def test_a_success_counts_once_for_the_request_and_by_rows_for_the_inferences():
    statistics = ModelStatistics()
    statistics.record_success(4, 100, 10, 20, 30, 5, 1234)
    statistics.record_success(1, 200, 20, 40, 60, 10, 1235)
    message = statistics.to_proto("m", "3")
    assert (message.name, message.version) == ("m", "3")
    assert message.inference_count == 5
    assert message.last_inference == 1235
    stats = message.inference_stats
    assert (stats.success.count, stats.success.ns) == (2, 300)
    assert (stats.queue.count, stats.queue.ns) == (2, 30)
    assert (stats.compute_input.count, stats.compute_input.ns) == (2, 60)
    assert (stats.compute_infer.count, stats.compute_infer.ns) == (2, 90)
    assert (stats.compute_output.count, stats.compute_output.ns) == (2, 15)
    assert (stats.fail.count, stats.cache_hit.count, stats.cache_miss.count) == (0, 0, 0)


def test_executions_are_told_by_batch_size_in_ascending_order():
    statistics = ModelStatistics()
    for rows in (4, 1, 4):
        statistics.record_execution(rows, 10, 20, 30)
    message = statistics.to_proto("m", "1")
    assert message.execution_count == 3
    assert [(b.batch_size, b.compute_infer.count, b.compute_infer.ns) for b in message.batch_stats] == [
        (1, 1, 20),
        (4, 2, 40),
    ]
    assert [(b.compute_input.ns, b.compute_output.ns) for b in message.batch_stats] == [(10, 30), (20, 60)]


def test_a_failure_counts_by_reason_and_is_no_inference():
    statistics = ModelStatistics()
    statistics.record_failure(FailureReason.REJECTED, 50)
    statistics.record_failure(FailureReason.BACKEND, 70)
    message = statistics.to_proto("m", "1")
    assert (message.inference_stats.fail.count, message.inference_stats.fail.ns) == (2, 120)
    assert message.inference_count == message.inference_stats.success.count == 0
    assert statistics.failures == {
        FailureReason.REJECTED: 1,
        FailureReason.CANCELED: 0,
        FailureReason.BACKEND: 1,
        FailureReason.OTHER: 0,
    }


def test_every_submessage_is_present_before_the_first_request():
    message = ModelStatistics().to_proto("m", "1")
    names = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
    assert all(message.inference_stats.HasField(name) for name in names)


def test_durations_fall_into_the_bucket_whose_bound_they_do_not_exceed():
    statistics = ModelStatistics()
    for duration in (DURATION_BOUNDS_NS[0], DURATION_BOUNDS_NS[0] + 1, 400 * S):
        statistics.record_success(1, duration, 0, 1, 2, 3, 0)
    histogram = statistics.request_durations
    assert histogram.counts[:2] == [1, 1]
    assert histogram.counts[-1] == 1
    assert histogram.sum == statistics.success_ns
    assert statistics.compute_durations.sum == 3 * 6
    assert statistics.queue_durations.count == 3


def test_the_first_response_of_a_plain_model_is_its_answer():
    statistics = ModelStatistics(first_response_bounds_ms=(10.0, 20.0))
    statistics.record_success(1, 15_000_000, 0, 0, 0, 0, 0)
    assert statistics.first_response.counts == [0, 1, 0]


def test_the_first_response_of_a_streamed_model_is_told_apart():
    statistics = ModelStatistics(streamed=True, first_response_bounds_ms=(10.0, 20.0))
    statistics.record_first_response(5_000_000)
    statistics.record_success(1, 15_000_000, 0, 0, 0, 0, 0)
    assert statistics.first_response.counts == [1, 0, 0]


def test_batch_sizes_add_up_to_rows_and_executions():
    statistics = ModelStatistics()
    for rows in (1, 3, 3, 5000):
        statistics.record_execution(rows, 0, 0, 0)
    histogram = statistics.batch_sizes()
    assert histogram.count == statistics.execution_count == 4
    assert histogram.sum == 5007
    assert histogram.counts[2] == 2
    assert histogram.counts[-1] == 1


def test_summaries_are_kept_only_when_asked_for():
    assert ModelStatistics().summaries is None
    statistics = ModelStatistics(summaries=True)
    statistics.record_success(1, 5_000_000, 1_000_000, 0, 4_000_000, 0, 0)
    assert statistics.summaries is not None
    assert statistics.summaries.request.sum == 5_000
    assert statistics.summaries.queue.sum == 1_000


def test_histogram_refuses_bounds_that_do_not_ascend():
    with pytest.raises(AssertionError):
        Histogram([2, 1])


@pytest.mark.parametrize("seed", range(3))
def test_a_sketch_finds_quantiles_within_a_sixteenth_of_the_value(seed):
    source = random.Random(seed)
    values = sorted(int(source.lognormvariate(8, 3)) for _ in range(3000))
    sketch = LatencySketch()
    for value in values:
        sketch.observe(value)
    at = (0.001, 0.5, 0.9, 0.99, 0.999)
    for quantile, found in zip(at, quantiles(sketch.counts, at), strict=True):
        exact = values[max(1, round(quantile * len(values))) - 1]
        assert abs(found - exact) <= exact / 16, (quantile, exact, found)


def test_a_sketch_takes_any_value_in_bounded_space():
    sketch = LatencySketch()
    for power in range(70):
        sketch.observe(1 << power)
    assert len(sketch.counts) == BINS
    assert sketch.count == 70


def test_an_empty_sketch_has_no_quantiles():
    (value,) = quantiles(LatencySketch().counts, [0.5])
    assert value != value


def test_recent_counts_leave_out_what_is_older_than_a_minute():
    sketch = LatencySketch()
    sketch.observe(100)
    assert sum(sketch.recent(0)) == 1
    sketch.observe(200)
    assert sum(sketch.recent(59 * S)) == 1
    sketch.observe(300)
    sketch.observe(400)
    assert sum(sketch.recent(119 * S)) == 2
    assert sketch.count == 4


def test_responses_are_told_by_their_index_and_each_by_what_became_of_it():
    statistics = ModelStatistics(streamed=True)
    statistics.record_response(0, 10, 1, empty=False)
    statistics.record_response(1, 20, 2, empty=False)
    statistics.record_response(2, 5, 0, empty=True)
    statistics.record_response(0, 30, 3, empty=False)
    statistics.record_response_failure(1, 7)
    statistics.record_response_cancel(1, 9)
    stats = statistics.to_proto("m", "1").response_stats
    assert set(stats) == {"0", "1", "2"}
    assert (stats["0"].success.count, stats["0"].success.ns) == (2, 44)
    assert (stats["0"].compute_infer.ns, stats["0"].compute_output.ns) == (40, 4)
    assert (stats["1"].compute_infer.count, stats["1"].compute_infer.ns) == (2, 27), "a failed one was computed too"
    assert (stats["1"].compute_output.count, stats["1"].compute_output.ns) == (1, 2)
    assert (stats["1"].fail.count, stats["1"].fail.ns) == (1, 7)
    assert (stats["1"].cancel.count, stats["1"].cancel.ns) == (1, 9)
    assert (stats["2"].empty_response.count, stats["2"].empty_response.ns) == (1, 5)
    assert stats["2"].success.count == stats["2"].compute_infer.count == 0


def test_the_last_key_counts_every_response_that_comes_after_it():
    statistics = ModelStatistics(streamed=True)
    for index in (RESPONSE_KEYS - 2, RESPONSE_KEYS - 1, RESPONSE_KEYS, 10**9):
        statistics.record_response(index, 1, 1, empty=False)
    stats = statistics.to_proto("m", "1").response_stats
    assert len(stats) == RESPONSE_KEYS
    assert stats[str(RESPONSE_KEYS - 2)].success.count == 1
    assert stats[str(RESPONSE_KEYS - 1)].success.count == 3
