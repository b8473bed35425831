"""The metrics service: Triton's nv_* series and our own, read from what is loaded at the moment of the scrape.

A model's series exist while its source lists it. Values are read on the event loop in slices, so that a scrape never
holds up requests for longer than about a millisecond; the rest, slow, is done in threads: what the kernel tells of
processes, and rendering, which prometheus_client does.
"""

from __future__ import annotations

import asyncio
import gzip
import platform
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry, Info, ProcessCollector
from prometheus_client.exposition import choose_encoder, gzip_accepted

from headrace import __version__
from headrace.clock import Clock
from headrace.config import MetricsSettings
from headrace.gateway.gatekeeper import METRICS
from headrace.gateway.http.http_error import STATUS_OF_DETAIL, headers_of
from headrace.gateway.tls import Certificates
from headrace.observability.custom_metrics import CustomMetrics
from headrace.observability.machine_metrics import MachineMetrics
from headrace.observability.processes import ProcessUsage
from headrace.observability.snapshot import Snapshot
from headrace.observability.statistics import FIRST_RESPONSE_FAMILY, ModelStatistics
from headrace.response_cache import LocalCache, ResponseCache
from headrace.scheduling.rate_limiter import GLOBAL, RateLimiter
from headrace_protocol.errors import InferError, unavailable

_SLICE_NS = 1_000_000
_NS_PER_US = 1_000
_NS_PER_MS = 1_000_000
_NS_PER_S = 1_000_000_000
_SCRAPES_AT_ONCE = 4
_OPENMETRICS = "application/openmetrics-text"
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
    sequences: tuple[int, int] | None = None
    """Sequences that have a slot, and that wait for one; None where the model takes none."""
    cached: bool = False
    """Whether its answers are kept in the response cache."""


class MetricsSource(Protocol):
    """Where the metrics come from: the registry, as app.py joins them."""

    def models(self) -> Iterable[ModelMetrics]:
        """Return every loaded model version, as it is now."""
        ...


class TraceCounts(Protocol):
    """What the metrics tell of traces. All of it only grows."""

    @property
    def picked(self) -> int:
        """Requests traced."""
        ...

    @property
    def skipped(self) -> int:
        """Requests that were to be traced, but for which there was no room."""
        ...

    @property
    def lost(self) -> int:
        """Traces that could not be written."""
        ...


def model_labels(model: ModelMetrics) -> dict[str, str]:
    """Return the labels of a model's series. A tag whose label is taken already is left out."""
    values = {"model": model.name, "version": str(model.version)}
    for key, value in model.tags.items():
        values.setdefault(f"_{_NOT_IN_A_LABEL.sub('_', key)}", value)
    return values


class ModelSeries:
    """Adds the series of models to a snapshot, as the settings want them."""

    def __init__(self, snapshot: Snapshot, settings: MetricsSettings, now_ns: int) -> None:
        self._snapshot = snapshot
        self._settings = settings
        self._now_ns = now_ns

    def add(self, model: ModelMetrics, usage: Mapping[int, ProcessUsage]) -> None:
        """Add one model's series; `usage` is by process id."""
        labels = model_labels(model)
        self._counters(labels, model.statistics)
        self._gauges(labels, model)
        self._histograms(labels, model.statistics)
        if model.cached:
            self._cache(labels, model.statistics)
        if self._settings.summary_latencies:
            self._summaries(labels, model.statistics, cached=model.cached)
        for process in model.processes:
            if process.pid in usage:
                self._process({**labels, "process": process.name}, usage[process.pid])

    def _counters(self, labels: dict[str, str], statistics: ModelStatistics) -> None:
        counter = self._snapshot.counter
        counter("nv_inference_request_success", "Requests answered", labels, statistics.success_count)
        for reason, count in statistics.failures.items():
            of_reason = {**labels, "reason": reason.value}
            counter("nv_inference_request_failure", "Accepted requests that failed", of_reason, count)
        counter("nv_inference_count", "Rows inferred", labels, statistics.inference_count)
        help_text = "Executions of the model, each over a batch"
        counter("nv_inference_exec_count", help_text, labels, statistics.execution_count)
        for direction, nbytes in (("in", statistics.copied_in), ("out", statistics.copied_out)):
            help_text = "Bytes of tensors that the server copied; those in clients' shared memory need not be"
            of_direction = {**labels, "direction": direction}
            counter("headrace_tensor_bytes_copied_total", help_text, of_direction, nbytes)
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
            counter(f"nv_inference_{name}_duration_us", help_text, labels, total_ns // _NS_PER_US)

    def _gauges(self, labels: dict[str, str], model: ModelMetrics) -> None:
        for name, help_text, value in (
            ("nv_inference_pending_request_count", "Requests accepted and not yet executing", model.statistics.pending),
            ("nv_model_load_duration_secs", "Time the model took to load", model.load_seconds),
            ("headrace_model_ready", "Whether a request to the model would be served now", model.ready),
            ("headrace_queue_depth", "Requests waiting in the model's queue", model.queue_depth),
        ):
            self._snapshot.gauge(name, help_text, labels, value)
        if model.sequences is not None:
            active, backlog = model.sequences
            self._snapshot.gauge("headrace_sequences_active", "Sequences that have a slot of the model", labels, active)
            help_text = "Sequences that wait for a slot of the model"
            self._snapshot.gauge("headrace_sequences_backlog", help_text, labels, backlog)
        help_text = "Restarts of the model's backend processes since its load"
        self._snapshot.counter("headrace_backend_restarts_total", help_text, labels, model.restarts)

    def _histograms(self, labels: dict[str, str], statistics: ModelStatistics) -> None:
        add = self._snapshot.histogram
        for name, what, histogram in (
            ("request", "from arrival to answer", statistics.request_durations),
            ("queue", "in the queue", statistics.queue_durations),
            ("compute", "in the backend, inputs and outputs included", statistics.compute_durations),
        ):
            help_text = f"Time of answered requests {what}"
            add(f"headrace_{name}_duration_seconds", help_text, labels, histogram, _NS_PER_S)
        add("headrace_batch_size", "Rows of the executed batches", labels, statistics.batch_sizes(), 1)
        if self._settings.histogram_latencies:
            help_text = "Time from arrival to the first response, in milliseconds"
            add(FIRST_RESPONSE_FAMILY, help_text, labels, statistics.first_response, _NS_PER_MS)

    def _cache(self, labels: dict[str, str], statistics: ModelStatistics) -> None:
        counter = self._snapshot.counter
        counter("nv_cache_num_hits_per_model", "Requests answered from the cache", labels, statistics.cache_hits)
        help_text = "Requests that the cache had no answer for"
        counter("nv_cache_num_misses_per_model", help_text, labels, statistics.cache_misses)
        help_text = "Time to find answers in the cache, summed, in microseconds"
        hit_us, miss_us = statistics.cache_hit_ns // _NS_PER_US, statistics.cache_miss_ns // _NS_PER_US
        counter("nv_cache_hit_duration_per_model", help_text, labels, hit_us)
        help_text = "Time to look for answers in vain, and to keep new ones, summed, in microseconds"
        counter("nv_cache_miss_duration_per_model", help_text, labels, miss_us)

    def _summaries(self, labels: dict[str, str], statistics: ModelStatistics, *, cached: bool) -> None:
        summaries = statistics.summaries
        if summaries is None:
            return
        at = self._settings.summary_quantiles
        help_text = "Time of the last minute's requests in microseconds, each quantile within 1/16 of its value"
        add = self._snapshot.summary
        if cached:
            add("nv_cache_hit_summary_per_model", help_text, labels, summaries.cache_hit, at, self._now_ns)
            add("nv_cache_miss_summary_per_model", help_text, labels, summaries.cache_miss, at, self._now_ns)
        else:
            add("nv_inference_request_summary_us", help_text, labels, summaries.request, at, self._now_ns)
        for name, sketch in (
            ("queue", summaries.queue),
            ("compute_input", summaries.compute_input),
            ("compute_infer", summaries.compute_infer),
            ("compute_output", summaries.compute_output),
        ):
            add(f"nv_inference_{name}_summary_us", help_text, labels, sketch, at, self._now_ns)

    def _process(self, labels: dict[str, str], usage: ProcessUsage) -> None:
        help_text = "CPU time of a backend process"
        self._snapshot.counter("headrace_backend_cpu_seconds_total", help_text, labels, usage.cpu_seconds)
        help_text = "Memory of a backend process: rss counts shared pages in full, pss by share"
        for kind, value in (("rss", usage.rss_bytes), ("pss", usage.pss_bytes)):
            if value is not None:
                self._snapshot.gauge("headrace_backend_memory_bytes", help_text, {**labels, "kind": kind}, value)


class MetricsCollector:
    """Reads what a scrape tells."""

    def __init__(
        self,
        source: MetricsSource,
        settings: MetricsSettings,
        clock: Clock,
        traces: TraceCounts | None = None,
        custom: CustomMetrics | None = None,
        cache: ResponseCache | None = None,
        limiter: RateLimiter | None = None,
        add_rollout: Callable[[Snapshot], None] | None = None,
    ) -> None:
        """`traces`, `custom` (what backends show of themselves), `cache`, `limiter`: None where there can be none.

        `add_rollout` adds what is told of shares, shadows and versions that were rolled back.
        """
        self._source = source
        self._traces = traces
        self._custom = custom
        self._cache = cache
        self._limiter = limiter
        self._add_rollout = add_rollout
        self._settings = settings
        self._clock = clock
        self._machine = MachineMetrics(settings)
        self._process = ProcessCollector(registry=None)
        self._build = Info("headrace_build", "The server's version; the value is always 1", registry=None)
        self._build.info({"version": __version__, "python": platform.python_version()})

    async def collect(self, *, openmetrics: bool = False) -> CollectorRegistry:
        """Return all series as they are now, having yielded to the event loop on the way. Any thread may render them."""
        if self._custom is not None:
            await self._custom.refresh()
        models = list(self._source.models())
        pids = [process.pid for model in models for process in model.processes]
        now_ns = self._clock.now_ns()
        sample = await asyncio.to_thread(self._machine.sample, pids, now_ns)
        snapshot = Snapshot(openmetrics=openmetrics)
        series = ModelSeries(snapshot, self._settings, now_ns)
        since = time.monotonic_ns()
        for model in models:
            series.add(model, sample.usage)
            if time.monotonic_ns() - since > _SLICE_NS:
                await asyncio.sleep(0)
                since = time.monotonic_ns()
        if self._traces is not None:
            _add_traces(snapshot, self._traces)
        if self._custom is not None:
            self._custom.add(snapshot)
        if self._cache is not None:
            _add_cache(snapshot, self._cache)
        if self._limiter is not None:
            _add_resources(snapshot, self._limiter)
        if self._add_rollout is not None:
            self._add_rollout(snapshot)
        self._machine.add(snapshot, sample)
        registry = CollectorRegistry()
        for collector in (snapshot, self._process, self._build):
            registry.register(collector)
        return registry


def _add_traces(snapshot: Snapshot, traces: TraceCounts) -> None:
    snapshot.counter("headrace_traces_total", "Requests traced", {}, traces.picked)
    for reason, count in (("full", traces.skipped), ("write", traces.lost)):
        help_text = "Traces that are not in the file: too many were waiting, or it could not be written"
        snapshot.counter("headrace_traces_lost_total", help_text, {"reason": reason}, count)


def _add_cache(snapshot: Snapshot, cache: ResponseCache) -> None:
    gauge, counts = snapshot.gauge, cache.counts
    if isinstance(cache, LocalCache):
        gauge("nv_cache_util", "Part of the response cache that is taken, 0 to 1", {}, cache.used / cache.capacity)
        gauge("nv_cache_num_entries", "Answers in the response cache", {}, cache.entries)
    for name, help_text, value in (
        ("num_lookups", "Lookups in the response cache", counts.lookups),
        ("num_hits", "Lookups that found an answer", counts.hits),
        ("num_misses", "Lookups that found none", counts.misses),
        ("num_evictions", "Answers that made room for newer ones", counts.evictions),
        ("lookup_duration", "Time spent in lookups, in microseconds", counts.lookup_ns // _NS_PER_US),
        ("insertion_duration", "Time spent in insertions, in microseconds", counts.insertion_ns // _NS_PER_US),
    ):
        gauge(f"nv_cache_{name}", help_text, {}, value)
    help_text = "Answers that were not kept: too large, or too many at once"
    snapshot.counter("headrace_cache_skipped_total", help_text, {}, counts.skipped)
    help_text = "Times that a response cache elsewhere could not be reached, or did not answer in time"
    snapshot.counter("headrace_cache_errors_total", help_text, {}, counts.errors)


def _add_resources(snapshot: Snapshot, limiter: RateLimiter) -> None:
    for (name, device), used, limit in limiter.usage():
        labels = {"resource": name, "device": "global" if device == GLOBAL else str(device)}
        snapshot.gauge("headrace_resource_used", "Of a resource, what running executions take", labels, used)
        snapshot.gauge("headrace_resource_limit", "How much there is of a resource", labels, limit)


class MetricsServer:
    """GET /metrics on its own port, served by the event loop it is started on."""

    PATH: Final = "/metrics"

    def __init__(self, settings: MetricsSettings, collector: MetricsCollector) -> None:
        self._settings = settings
        self._collector = collector
        self._runner: web.ServerRunner | None = None
        self._scrapes = 0
        self.certificates: Certificates | None = None
        """Once it is started, and serves TLS."""

    async def start(self) -> int:
        """Listen, and return the port; raises InferError UNAVAILABLE where it cannot be had."""
        address, port = self._settings.address, self._settings.port
        runner = web.ServerRunner(web.Server(self._handle, access_log=None))
        await runner.setup()
        reuse = self._settings.reuse_port or None
        try:
            if self._settings.tls is not None:
                self.certificates = Certificates(self._settings.tls)
            context = None if self.certificates is None else self.certificates.context
            await web.TCPSite(runner, address, port, reuse_port=reuse, ssl_context=context).start()
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
        refused = self._refused(request)
        if refused is not None:
            return refused
        if self._scrapes >= _SCRAPES_AT_ONCE:
            return web.Response(status=503, text="too many scrapes at once\n", headers={"Retry-After": "1"})
        self._scrapes += 1
        try:
            return await self._answer(request)
        finally:
            self._scrapes -= 1

    def _refused(self, request: web.BaseRequest) -> web.Response | None:
        """Return the answer to who may not see metrics."""
        gatekeeper, roles = self._settings.gatekeeper, METRICS
        if gatekeeper is None or roles is None:
            return None
        headers = request.headers
        try:
            gatekeeper.check(gatekeeper.caller(headers.get("Authorization"), headers.get("X-API-Key")), roles)
        except InferError as error:
            status = STATUS_OF_DETAIL.get(error.detail, 403)
            return web.Response(status=status, text=f"{error.message}\n", headers=headers_of(error))
        return None

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        encode, content_type = _encoder(request.headers.get("Accept", ""))
        registry = await self._collector.collect(openmetrics=content_type.startswith(_OPENMETRICS))
        zipped = gzip_accepted(request.headers.get("Accept-Encoding", ""))
        body = await asyncio.to_thread(_body, encode, registry, zipped=zipped)
        headers = {"Content-Type": content_type}
        if zipped:
            headers["Content-Encoding"] = "gzip"
        return web.Response(body=body, headers=headers)


def _encoder(accept: str) -> tuple[Callable[[CollectorRegistry], bytes], str]:
    """Return what renders the format that an Accept header asks for, and its Content-Type."""
    try:
        return choose_encoder(accept)
    except TypeError:  # over a version that is no number
        return choose_encoder("")


def _body(encode: Callable[[CollectorRegistry], bytes], registry: CollectorRegistry, *, zipped: bool) -> bytes:
    body = encode(registry)
    return gzip.compress(body, compresslevel=5) if zipped else body


def _cannot_listen(address: str, port: int, error: OSError) -> InferError:
    return unavailable(f"the metrics service cannot listen on {address}:{port}: {error.strerror or error}")
