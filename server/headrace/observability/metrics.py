"""The metrics service: Triton's nv_* series and our own, read from what is loaded at the moment of the scrape.

A model's series exist while its source lists it. A scrape is made in slices, so that it never holds up requests for
longer than about a millisecond, and what the kernel tells (slowly) of processes is read in a thread.
"""

from __future__ import annotations

import asyncio
import gzip
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from aiohttp import web

from headrace.clock import Clock
from headrace.config import MetricsSettings
from headrace.observability.exposition import Exposition, Kind, labels, wants_openmetrics
from headrace.observability.machine_metrics import MachineMetrics
from headrace.observability.processes import ProcessUsage
from headrace.observability.sketch import quantiles
from headrace.observability.statistics import ModelStatistics
from headrace_protocol.errors import InferError, unavailable

_SLICE_NS = 1_000_000
_NS_PER_US = 1_000
_NS_PER_MS = 1_000_000
_NS_PER_S = 1_000_000_000
_SCRAPES_AT_ONCE = 4
_NOT_IN_A_LABEL = re.compile(r"[^a-zA-Z0-9_]")


@dataclass(frozen=True, slots=True)
class BackendProcess:
    """A process that runs instances of a model. `name` is stable over restarts, `pid` is not."""

    name: str
    pid: int


@dataclass(frozen=True, slots=True)
class ModelMetrics:
    """What the metrics tell of one loaded model version."""

    name: str
    version: int
    statistics: ModelStatistics
    ready: bool
    load_seconds: float
    queue_depth: int
    """Requests that wait in the scheduler now."""
    restarts: int
    """Times that a backend process of it was restarted since the load."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """metric_tags of its configuration; label `_<key>` each."""
    processes: Sequence[BackendProcess] = ()


class MetricsSource(Protocol):
    """Where the metrics come from: the registry, as app.py joins them."""

    def models(self) -> Iterable[ModelMetrics]:
        """Return every loaded model version, as it is now."""
        ...


def model_labels(model: ModelMetrics) -> dict[str, str]:
    """Return the labels of a model's series. A tag whose label is taken already is left out."""
    values = {"model": model.name, "version": str(model.version)}
    for key, value in model.tags.items():
        values.setdefault(f"_{_NOT_IN_A_LABEL.sub('_', key)}", value)
    return values


class ModelSeries:
    """Adds the series of models to an exposition, as the settings want them."""

    def __init__(self, exposition: Exposition, settings: MetricsSettings, now_ns: int) -> None:
        self._exposition = exposition
        self._settings = settings
        self._now_ns = now_ns

    def add(self, model: ModelMetrics, usage: Mapping[int, ProcessUsage]) -> None:
        """Add one model's series; `usage` is by process id."""
        values = model_labels(model)
        text = labels(values)
        self._counters(text, model.statistics)
        self._gauges(text, model)
        self._histograms(text, model.statistics)
        if self._settings.summary_latencies:
            self._summaries(text, model.statistics)
        for process in model.processes:
            if process.pid in usage:
                self._process(labels({**values, "process": process.name}), usage[process.pid])

    def _counter(self, name: str, help_text: str, label_text: str, value: float) -> None:
        self._exposition.family(name, Kind.COUNTER, help_text).add(label_text, value)

    def _gauge(self, name: str, help_text: str, label_text: str, value: float) -> None:
        self._exposition.family(name, Kind.GAUGE, help_text).add(label_text, value)

    def _counters(self, text: str, statistics: ModelStatistics) -> None:
        self._counter("nv_inference_request_success", "Requests answered", text, statistics.success_count)
        for reason, count in statistics.failures.items():
            label_text = f'{text},reason="{reason.value}"'
            self._counter("nv_inference_request_failure", "Accepted requests that failed", label_text, count)
        self._counter("nv_inference_count", "Rows inferred", text, statistics.inference_count)
        self._counter(
            "nv_inference_exec_count", "Executions of the model, each over a batch", text, statistics.execution_count
        )
        if not self._settings.counter_latencies:
            return
        for name, what, total_ns in (
            ("request", "from arrival to answer", statistics.success_ns),
            ("queue", "in the queue", statistics.queue_ns),
            ("compute_input", "preparing inputs", statistics.input_ns),
            ("compute_infer", "executing the model", statistics.infer_ns),
            ("compute_output", "collecting outputs", statistics.output_ns),
        ):
            help_text = f"Time of answered requests {what}, summed, in microseconds"
            self._counter(f"nv_inference_{name}_duration_us", help_text, text, total_ns // _NS_PER_US)

    def _gauges(self, text: str, model: ModelMetrics) -> None:
        pending = model.statistics.pending
        self._gauge("nv_inference_pending_request_count", "Requests accepted and not yet executing", text, pending)
        self._gauge("nv_model_load_duration_secs", "Time the model took to load", text, model.load_seconds)
        self._gauge(
            "headrace_model_ready", "Whether a request to the model would be served now", text, int(model.ready)
        )
        self._gauge("headrace_queue_depth", "Requests waiting in the model's queue", text, model.queue_depth)
        help_text = "Restarts of the model's backend processes since its load"
        self._counter("headrace_backend_restarts_total", help_text, text, model.restarts)

    def _histograms(self, text: str, statistics: ModelStatistics) -> None:
        family = self._exposition.family
        for name, what, histogram in (
            ("request", "from arrival to answer", statistics.request_durations),
            ("queue", "in the queue", statistics.queue_durations),
            ("compute", "in the backend, inputs and outputs included", statistics.compute_durations),
        ):
            help_text = f"Time of answered requests {what}"
            family(f"headrace_{name}_duration_seconds", Kind.HISTOGRAM, help_text).add_histogram(
                text, histogram, _NS_PER_S
            )
        sizes = statistics.batch_sizes()
        family("headrace_batch_size", Kind.HISTOGRAM, "Rows of the executed batches").add_histogram(text, sizes, 1)
        if self._settings.histogram_latencies:
            family(
                "nv_inference_first_response_histogram_ms",
                Kind.HISTOGRAM,
                "Time from arrival to the first response, in milliseconds",
            ).add_histogram(text, statistics.first_response, _NS_PER_MS)

    def _summaries(self, text: str, statistics: ModelStatistics) -> None:
        summaries = statistics.summaries
        if summaries is None:
            return
        at = self._settings.summary_quantiles
        for name, sketch in (
            ("request", summaries.request),
            ("queue", summaries.queue),
            ("compute_input", summaries.compute_input),
            ("compute_infer", summaries.compute_infer),
            ("compute_output", summaries.compute_output),
        ):
            values = dict(zip(at, quantiles(sketch.recent(self._now_ns), at), strict=True))
            help_text = "Time of the last minute's requests in microseconds, each quantile within 1/16 of its value"
            family = self._exposition.family(f"nv_inference_{name}_summary_us", Kind.SUMMARY, help_text)
            family.add_summary(text, values, sketch.sum, sketch.count)

    def _process(self, text: str, usage: ProcessUsage) -> None:
        self._counter("headrace_backend_cpu_seconds_total", "CPU time of a backend process", text, usage.cpu_seconds)
        help_text = "Memory of a backend process: rss counts shared pages in full, pss by share"
        self._gauge("headrace_backend_memory_bytes", help_text, f'{text},kind="rss"', usage.rss_bytes)
        if usage.pss_bytes is not None:
            self._gauge("headrace_backend_memory_bytes", help_text, f'{text},kind="pss"', usage.pss_bytes)


class MetricsCollector:
    """Makes the body of a scrape."""

    def __init__(self, source: MetricsSource, settings: MetricsSettings, clock: Clock) -> None:
        self._source = source
        self._settings = settings
        self._clock = clock
        self._machine = MachineMetrics(settings)

    async def collect(self, *, openmetrics: bool = False) -> Exposition:
        """Return all series as they are now, having yielded to the event loop on the way."""
        models = list(self._source.models())
        pids = [process.pid for model in models for process in model.processes]
        now_ns = self._clock.now_ns()
        sample = await asyncio.to_thread(self._machine.sample, pids, now_ns)
        exposition = Exposition(openmetrics=openmetrics)
        series = ModelSeries(exposition, self._settings, now_ns)
        since = time.monotonic_ns()
        for model in models:
            series.add(model, sample.usage)
            if time.monotonic_ns() - since > _SLICE_NS:
                await asyncio.sleep(0)
                since = time.monotonic_ns()
        self._machine.add(exposition, sample)
        return exposition


class MetricsServer:
    """GET /metrics on its own port, served by the event loop it is started on."""

    PATH: Final = "/metrics"

    def __init__(self, settings: MetricsSettings, collector: MetricsCollector) -> None:
        self._settings = settings
        self._collector = collector
        self._runner: web.ServerRunner | None = None
        self._scrapes = 0

    async def start(self) -> int:
        """Listen, and return the port; raises InferError UNAVAILABLE where it cannot be had."""
        address, port = self._settings.address, self._settings.port
        runner = web.ServerRunner(web.Server(self._handle, access_log=None))
        await runner.setup()
        reuse = self._settings.reuse_port or None
        try:
            await web.TCPSite(runner, address, port, reuse_port=reuse).start()
        except OSError as error:
            await runner.cleanup()
            raise _cannot_listen(address, port, error) from error
        self._runner = runner
        return int(runner.addresses[0][1])

    async def stop(self) -> None:
        """Stop listening. Does nothing where it was not started."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.Response:
        if request.path != self.PATH:
            return web.Response(status=404, text=f"no such path; metrics are at {self.PATH}\n")
        if request.method != "GET":
            return web.Response(status=405, text="only GET is served here\n", headers={"Allow": "GET"})
        if self._scrapes >= _SCRAPES_AT_ONCE:
            return web.Response(status=503, text="too many scrapes at once\n", headers={"Retry-After": "1"})
        self._scrapes += 1
        try:
            return await self._answer(request)
        finally:
            self._scrapes -= 1

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        exposition = await self._collector.collect(openmetrics=wants_openmetrics(request.headers.get("Accept", "")))
        zipped = "gzip" in request.headers.get("Accept-Encoding", "")
        body = await asyncio.to_thread(_body, exposition, zipped=zipped)
        headers = {"Content-Type": exposition.content_type}
        if zipped:
            headers["Content-Encoding"] = "gzip"
        return web.Response(body=body, headers=headers)


def _body(exposition: Exposition, *, zipped: bool) -> bytes:
    body = exposition.render()
    return gzip.compress(body, compresslevel=5) if zipped else body


def _cannot_listen(address: str, port: int, error: OSError) -> InferError:
    return unavailable(f"the metrics service cannot listen on {address}:{port}: {error.strerror or error}")
