"""Statistics of one model version: plain integers, fed by the path of a request, read by the API and the metrics.

The event loop is the only writer and the only reader, so there are no locks. Times are nanoseconds. A request in a
batch is charged the whole batch's compute time, as Triton does: sums over requests tell what clients waited, and
`batch_stats` what the model worked.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from headrace.observability.sketch import Exemplar, Histogram, LatencySketch
from headrace_protocol._generated import grpc_service_pb2 as pb
from headrace_protocol.errors import FailureReason

_MICROSECOND = 1_000
_MILLISECOND = 1_000_000
_BOUNDS_US = (
    *(100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000),
    *(1_000_000, 2_500_000, 5_000_000, 10_000_000, 30_000_000, 60_000_000, 300_000_000),
)
DURATION_BOUNDS_NS: Final = tuple(bound * _MICROSECOND for bound in _BOUNDS_US)
"""100 us to 5 minutes, the same for every model, so that histograms add up over models and replicas."""
BATCH_SIZE_BOUNDS: Final = tuple(1 << power for power in range(11))
FIRST_RESPONSE_FAMILY: Final = "nv_inference_first_response_histogram_ms"
"""The histogram whose bounds a model's `model_metrics` may set."""
FIRST_RESPONSE_BOUNDS_MS: Final = (100.0, 500.0, 2000.0, 5000.0)
RESPONSE_KEYS: Final = 1024
"""Responses of a stream told apart by their index; the last key also counts all that come after it."""


class Summaries:
    """Sketches in microseconds behind the nv_*_summary_us metrics; kept only where those are switched on."""

    __slots__ = ("cache_hit", "cache_miss", "compute_infer", "compute_input", "compute_output", "queue", "request")

    def __init__(self) -> None:
        self.request = LatencySketch()
        self.queue = LatencySketch()
        self.compute_input = LatencySketch()
        self.compute_infer = LatencySketch()
        self.compute_output = LatencySketch()
        self.cache_hit = LatencySketch()
        """Lookups that found an answer."""
        self.cache_miss = LatencySketch()
        """Lookups that found none, and the insertions that followed."""

    def observe(self, request_ns: int, queue_ns: int, input_ns: int, infer_ns: int, output_ns: int) -> None:
        """Count one successful request."""
        self.request.observe(request_ns // _MICROSECOND)
        self.queue.observe(queue_ns // _MICROSECOND)
        self.compute_input.observe(input_ns // _MICROSECOND)
        self.compute_infer.observe(infer_ns // _MICROSECOND)
        self.compute_output.observe(output_ns // _MICROSECOND)


class BatchStatistics:
    """Executions of one batch size and their compute times."""

    __slots__ = ("count", "infer_ns", "input_ns", "output_ns")

    def __init__(self) -> None:
        self.count = 0
        self.input_ns = 0
        self.infer_ns = 0
        self.output_ns = 0


class ResponseStatistics:
    """What became of the responses of one index, each timed from the one before it or from the start of computing."""

    __slots__ = (
        "cancel_count",
        "cancel_ns",
        "empty_count",
        "empty_ns",
        "fail_count",
        "fail_ns",
        "infer_ns",
        "output_ns",
        "success_count",
    )

    def __init__(self) -> None:
        self.success_count = 0
        self.infer_ns = 0
        """Of the successes, as output_ns is."""
        self.output_ns = 0
        self.fail_count = 0
        self.fail_ns = 0
        self.empty_count = 0
        self.empty_ns = 0
        self.cancel_count = 0
        self.cancel_ns = 0

    def to_proto(self) -> pb.InferResponseStatistics:
        """Return the message of the statistics extension; a failed response was computed, but has no outputs."""
        return pb.InferResponseStatistics(
            compute_infer=_duration(self.success_count + self.fail_count, self.infer_ns + self.fail_ns),
            compute_output=_duration(self.success_count, self.output_ns),
            success=_duration(self.success_count, self.infer_ns + self.output_ns),
            fail=_duration(self.fail_count, self.fail_ns),
            empty_response=_duration(self.empty_count, self.empty_ns),
            cancel=_duration(self.cancel_count, self.cancel_ns),
        )


class ModelStatistics:
    """Counts and durations of one loaded model version since its load.

    Others write `pending`, `copied_in` and `copied_out`, and no other field. A `streamed` model (decoupled) tells each
    response by record_response and its like, and its first ones by record_first_response as well; any other model's first
    response is its answer.
    """

    __slots__ = (
        "batches",
        "cache_hit_ns",
        "cache_hits",
        "cache_miss_ns",
        "cache_misses",
        "compute_durations",
        "copied_in",
        "copied_out",
        "execution_count",
        "fail_count",
        "fail_ns",
        "failures",
        "first_response",
        "infer_ns",
        "inference_count",
        "input_ns",
        "last_inference_ms",
        "output_ns",
        "pending",
        "queue_durations",
        "queue_ns",
        "request_durations",
        "responses",
        "streamed",
        "success_count",
        "success_ns",
        "summaries",
    )

    def __init__(
        self,
        *,
        streamed: bool = False,
        summaries: bool = False,
        first_response_bounds_ms: Sequence[float] = FIRST_RESPONSE_BOUNDS_MS,
    ) -> None:
        self.streamed = streamed
        """Whether any number of responses may come of a request; an ensemble's members may change that."""
        self.pending = 0
        """+1 when a request is accepted, -1 right before it executes or when it fails first."""
        self.copied_in = 0
        """Bytes of inputs that the server put into memory of its own, shared with the backend."""
        self.copied_out = 0
        """Bytes of outputs that it took out of such memory."""
        self.last_inference_ms = 0
        self.inference_count = 0
        """Rows answered: a request of batch n counts n."""
        self.execution_count = 0
        self.success_count = 0
        self.success_ns = 0
        self.queue_ns = 0
        self.input_ns = 0
        self.infer_ns = 0
        self.output_ns = 0
        self.fail_count = 0
        self.fail_ns = 0
        self.failures = dict.fromkeys(FailureReason, 0)
        self.cache_hits = 0
        """Requests that were answered from the response cache: successes without an execution."""
        self.cache_hit_ns = 0
        self.cache_misses = 0
        """Requests that were looked for there, and had to be executed."""
        self.cache_miss_ns = 0
        """What the lookups of those, and the insertions of their answers, took."""
        self.batches: dict[int, BatchStatistics] = {}
        """By rows of the executed batch; the model's max_batch_size bounds its length."""
        self.responses: list[ResponseStatistics] = []
        """By index; of a streamed model only, and at most RESPONSE_KEYS long."""
        self.request_durations = Histogram(DURATION_BOUNDS_NS)
        self.queue_durations = Histogram(DURATION_BOUNDS_NS)
        self.compute_durations = Histogram(DURATION_BOUNDS_NS)
        self.first_response = Histogram([round(bound * _MILLISECOND) for bound in first_response_bounds_ms])
        self.summaries = Summaries() if summaries else None

    def keep_summaries(self) -> Summaries:
        """Return the sketches of durations, which are kept from now on where they were not."""
        if self.summaries is None:
            self.summaries = Summaries()
        return self.summaries

    def record_success(
        self, rows: int, request_ns: int, queue_ns: int, input_ns: int, infer_ns: int, output_ns: int, wall_ms: int
    ) -> None:
        """Count a request that was answered. `wall_ms`: milliseconds since the epoch at the answer."""
        self.success_count += 1
        self.inference_count += rows
        self.last_inference_ms = wall_ms
        self.success_ns += request_ns
        self.queue_ns += queue_ns
        self.input_ns += input_ns
        self.infer_ns += infer_ns
        self.output_ns += output_ns
        compute_ns = input_ns + infer_ns + output_ns
        # Histogram.observe, written out: three calls would double the cost of this method.
        histogram = self.request_durations
        histogram.counts[bisect_left(DURATION_BOUNDS_NS, request_ns)] += 1
        histogram.sum += request_ns
        histogram = self.queue_durations
        histogram.counts[bisect_left(DURATION_BOUNDS_NS, queue_ns)] += 1
        histogram.sum += queue_ns
        histogram = self.compute_durations
        histogram.counts[bisect_left(DURATION_BOUNDS_NS, compute_ns)] += 1
        histogram.sum += compute_ns
        if not self.streamed:
            self.first_response.observe(request_ns)
        if self.summaries is not None:
            self.summaries.observe(request_ns, queue_ns, input_ns, infer_ns, output_ns)

    def record_exemplar(self, trace_id: int, request_ns: int, queue_ns: int, compute_ns: int, wall_ms: int) -> None:
        """Remember a request that was counted as a success, and the trace that tells more of it."""
        self.request_durations.exemplify(Exemplar(request_ns, trace_id, wall_ms))
        self.queue_durations.exemplify(Exemplar(queue_ns, trace_id, wall_ms))
        self.compute_durations.exemplify(Exemplar(compute_ns, trace_id, wall_ms))

    def record_cache_hit(self, request_ns: int, lookup_ns: int, wall_ms: int) -> None:
        """Count a request that the response cache answered. `lookup_ns`: what finding the answer took."""
        self.success_count += 1
        self.success_ns += request_ns
        self.last_inference_ms = wall_ms
        self.cache_hits += 1
        self.cache_hit_ns += lookup_ns
        self.request_durations.observe(request_ns)
        self.first_response.observe(request_ns)
        if self.summaries is not None:
            self.summaries.cache_hit.observe(lookup_ns // _MICROSECOND)

    def record_cache_miss(self, lookup_ns: int) -> None:
        """Count a request that the response cache had no answer for."""
        self.cache_misses += 1
        self.cache_miss_ns += lookup_ns

    def record_cache_insertion(self, lookup_ns: int, insertion_ns: int) -> None:
        """Count the time in which the answer of such a request was kept."""
        self.cache_miss_ns += insertion_ns
        if self.summaries is not None:
            self.summaries.cache_miss.observe((lookup_ns + insertion_ns) // _MICROSECOND)

    def record_first_response(self, since_request_ns: int) -> None:
        """Count the first response of a request to a streamed model."""
        self.first_response.observe(since_request_ns)

    def record_response(self, index: int, infer_ns: int, output_ns: int, *, empty: bool) -> None:
        """Count response number `index`, from 0, of a request to a streamed model.

        `infer_ns`: since the request began computing, or since its response before. `empty`: it is the end, no answer.
        """
        response = self._response(index)
        if empty:
            response.empty_count += 1
            response.empty_ns += infer_ns
            return
        response.success_count += 1
        response.infer_ns += infer_ns
        response.output_ns += output_ns

    def record_response_failure(self, index: int, infer_ns: int) -> None:
        """Count an error in the place of response number `index`; times as in record_response."""
        response = self._response(index)
        response.fail_count += 1
        response.fail_ns += infer_ns

    def record_response_cancel(self, index: int, infer_ns: int) -> None:
        """Count a request that was cancelled when response number `index` was due; times as in record_response."""
        response = self._response(index)
        response.cancel_count += 1
        response.cancel_ns += infer_ns

    def _response(self, index: int) -> ResponseStatistics:
        responses = self.responses
        index = min(index, RESPONSE_KEYS - 1)
        while len(responses) <= index:
            responses.append(ResponseStatistics())
        return responses[index]

    def record_execution(self, rows: int, input_ns: int, infer_ns: int, output_ns: int) -> None:
        """Count one execution of the model over a batch of `rows` rows in total."""
        self.execution_count += 1
        batch = self.batches.get(rows)
        if batch is None:
            batch = self.batches[rows] = BatchStatistics()
        batch.count += 1
        batch.input_ns += input_ns
        batch.infer_ns += infer_ns
        batch.output_ns += output_ns

    def record_failure(self, reason: FailureReason, request_ns: int) -> None:
        """Count an accepted request that failed."""
        self.fail_count += 1
        self.fail_ns += request_ns
        self.failures[reason] += 1

    def batch_sizes(self) -> Histogram:
        """Return the executed batch sizes as a histogram."""
        histogram = Histogram(BATCH_SIZE_BOUNDS)
        for rows, batch in self.batches.items():
            histogram.observe_many(rows, batch.count)
        return histogram

    def to_proto(self, name: str, version: str) -> pb.ModelStatistics:
        """Return the message of the statistics extension."""
        answered = self.success_count
        computed = answered - self.cache_hits
        message = pb.ModelStatistics(
            name=name,
            version=version,
            last_inference=self.last_inference_ms,
            inference_count=self.inference_count,
            execution_count=self.execution_count,
            inference_stats=pb.InferStatistics(
                success=_duration(answered, self.success_ns),
                fail=_duration(self.fail_count, self.fail_ns),
                queue=_duration(answered, self.queue_ns),
                compute_input=_duration(computed, self.input_ns),
                compute_infer=_duration(computed, self.infer_ns),
                compute_output=_duration(computed, self.output_ns),
                cache_hit=_duration(self.cache_hits, self.cache_hit_ns),
                cache_miss=_duration(self.cache_misses, self.cache_miss_ns),
            ),
        )
        for rows, batch in sorted(self.batches.items()):
            message.batch_stats.add(
                batch_size=rows,
                compute_input=_duration(batch.count, batch.input_ns),
                compute_infer=_duration(batch.count, batch.infer_ns),
                compute_output=_duration(batch.count, batch.output_ns),
            )
        for index, response in enumerate(self.responses):
            message.response_stats[str(index)].CopyFrom(response.to_proto())
        return message


def _duration(count: int, ns: int) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=count, ns=ns)
