"""The composition root: builds every object of a server, owns their lifetimes, and stops them in order.

Ports open first, so that probes are answered while models load. On SIGTERM readiness goes off, everything is served for the
grace time, then what runs is finished within the exit timeout, and the models are unloaded; a second signal ends the
process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import uvloop

from headrace import __version__, memory
from headrace.clock import SystemClock
from headrace.config import ControlMode, ServerConfig
from headrace.controlplane import RegistryControlPlane
from headrace.dataplane import EXTENSIONS, RegistryDataPlane
from headrace.ensembles.access import MemberAccess
from headrace.ensembles.loader import EnsembleLoader
from headrace.gateway.address import where
from headrace.gateway.gatekeeper import Gatekeeper
from headrace.gateway.grpc.transport import GrpcGateway
from headrace.gateway.http.app import HttpGateway
from headrace.gateway.tls import refreshing
from headrace.instances.arenas import ArenaTable
from headrace.instances.gpus import gpu_count
from headrace.instances.loaded_model import LoadedModel
from headrace.instances.services import BackendServices
from headrace.observability import logging as log_setup
from headrace.observability.metrics import MetricsCollector, MetricsServer
from headrace.observability.otel import OtelError, SpanSink
from headrace.observability.snapshot import Snapshot
from headrace.observability.tables import models_table
from headrace.observability.tracing import Tracer
from headrace.parts import (
    RegistryMetrics,
    StartError,
    completion_of,
    look,
    make_access_log,
    make_access_table,
    make_cache,
    make_keeper,
    make_limiter,
    make_loader,
    mirrored,
    region_table,
    statistics_maker,
)
from headrace.planes import ControlPlane
from headrace.repository.addresses import is_remote
from headrace.repository.registry import ModelRegistry
from headrace.repository.remote import RemoteError
from headrace.repository.uploads import UploadStore
from headrace.repository.watcher import RepositoryWatcher
from headrace.residency.metrics import add_residency
from headrace.residency.planes import ResidentControlPlane, ResidentDataPlane
from headrace.rollout.control import TrafficControl
from headrace.rollout.rollouts import Rollouts
from headrace.rollout.service import RolloutService
from headrace.types import ServerMetadata
from headrace_protocol.errors import InferError

_log = logging.getLogger("headrace")


def serve(config: ServerConfig) -> int:
    """Run a server until it is told to stop; return the process's exit status."""
    memory.keep_large_buffers()
    try:
        log_setup.configure(config.log)
    except OSError as error:
        sys.stderr.write(f"--log-file: cannot be opened: {error}\n")
        return 1
    for warning in config.warnings:
        _log.warning("%s", warning)
    try:
        status: int = uvloop.run(Server(config).run())
        return status
    except StartError as error:
        _log.error("%s", error)
        return 1


async def _within(event: Awaitable[object], seconds: float) -> bool:
    """Return whether something happens within so many seconds."""
    try:
        await asyncio.wait_for(event, seconds)
    except TimeoutError:
        return False
    return True


class Server:
    """One server process: `run` is its whole life."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        clock = SystemClock()
        self._services = BackendServices(clock)
        self._services.metrics.as_vllm = config.metrics.as_vllm
        self._cache = make_cache(config, clock)
        arenas = ArenaTable()
        limiter = make_limiter(config)
        self._loader = EnsembleLoader(
            make_loader(config, clock, self._services, self._cache, arenas, limiter),
            completion_of(config),
            statistics_maker(config),
            arenas,
            clock,
            self._cache,
        )
        self._mirrors, repositories = mirrored(config)
        rollouts = Rollouts(clock.wall_ns)
        self._registry: ModelRegistry[LoadedModel] = ModelRegistry(
            self._loader,
            repositories,
            config_name=config.model_config_name or None,
            load_concurrency=config.model_load_thread_count,
            load_retries=config.model_load_retry_count,
            overlay=config.model_overlay,
            traffic=rollouts,
        )
        gpus = gpu_count(config.gpu_count, config.visible_gpus)
        metadata = ServerMetadata(config.id, __version__, (*EXTENSIONS, *(["cuda_shared_memory"] if gpus else [])))
        self._memory = region_table(config, gpus)
        spans = None if config.trace.otel is None else SpanSink(config.trace.otel)
        self._tracer = Tracer(config.trace.values, config.trace.file, self._registry.get, clock, spans)
        self._data = RegistryDataPlane(
            self._registry,
            metadata,
            self._memory,
            self._tracer,
            make_access_log(config, clock),
            strict_readiness=config.strict_readiness,
        )
        self._rollout = RolloutService(rollouts, self._registry, self._data, clock)
        self._uploads = UploadStore(config.model_upload_byte_size)
        self._control = RegistryControlPlane(
            self._registry,
            config.control_mode,
            memory=self._memory,
            trace=self._tracer,
            log=log_setup.LogControl(config.log),
            uploads=self._uploads if config.allow_model_upload else None,
            mirrors=self._mirrors,
            traffic=TrafficControl(rollouts, self._registry, self._rollout.shadows, config.control_mode),
        )
        self._keeper = make_keeper(config, self._registry, clock)
        data: RegistryDataPlane | ResidentDataPlane = self._data
        control: ControlPlane = self._control
        if self._keeper is not None:
            data = ResidentDataPlane(self._data, self._keeper, clock)
            control = ResidentControlPlane(self._control, self._keeper)
        self._services.connect(data, control)
        self._index = control.index
        self._loader.connect(MemberAccess(self._registry, self._tracer, self._data))
        self._access = make_access_table(config, clock)
        gatekeeper = None if self._access is None else Gatekeeper(self._access)
        http, grpc = replace(config.http, gatekeeper=gatekeeper), replace(config.grpc, gatekeeper=gatekeeper)
        self._http = HttpGateway(data, control, http, clock)
        self._grpc = GrpcGateway(data, control, grpc, clock)
        traces = self._tracer if config.trace.file or config.trace.otel is not None else None
        collector = MetricsCollector(
            RegistryMetrics(self._registry),
            config.metrics,
            clock,
            traces,
            self._services.metrics,
            self._cache,
            limiter,
            self._add_to,
        )
        self._metrics = MetricsServer(replace(config.metrics, gatekeeper=gatekeeper), collector)
        self._watcher = RepositoryWatcher(
            self._registry, repositories, config.repository_poll_secs, look=partial(look, self._mirrors)
        )
        self._stop = asyncio.Event()
        self._stopping = False

    def _add_to(self, snapshot: Snapshot) -> None:
        self._rollout.add_to(snapshot)
        if self._config.allow_http:
            open_now, most, refused = self._http.connections
            snapshot.gauge("headrace_http_connections", "HTTP connections that are open", {}, open_now)
            snapshot.gauge("headrace_http_connections_limit", "HTTP connections that may be open", {}, most)
            help_text = "HTTP connections that were one too many"
            snapshot.counter("headrace_http_connections_refused_total", help_text, {}, refused)
        if self._keeper is not None:
            add_residency(snapshot, self._keeper)

    async def run(self) -> int:
        """Serve until a signal; return the exit status. Raises StartError where it cannot start."""
        self._check_repositories()
        self._listen_for_signals()
        await asyncio.to_thread(self._uploads.remove_leftovers)
        async with memory.giving_back_when_idle(lambda: self._data.requests), self._tracing(), self._doors():
            try:
                await self._load()
                if not self._stop.is_set():
                    await self._serve()
            finally:
                drained = await self._drain()
                await self._services.close()
                await self._registry.close(0)
                self._memory.close()
                self._loader.close()
                if self._cache is not None:
                    await self._cache.close()
                await asyncio.to_thread(self._uploads.close)
            return 0 if drained else 1

    def _check_repositories(self) -> None:
        for path in self._config.model_repositories:
            if not is_remote(path) and not Path(path).is_dir():
                raise StartError(f"the model repository {path} is not a folder")

    @contextlib.asynccontextmanager
    async def _tracing(self) -> AsyncIterator[None]:
        try:
            self._tracer.start()
        except OtelError as error:
            raise StartError(str(error)) from None
        try:
            yield
        finally:
            await asyncio.to_thread(self._tracer.close)

    @contextlib.asynccontextmanager
    async def _doors(self) -> AsyncIterator[None]:
        config = self._config
        async with contextlib.AsyncExitStack() as stack:
            try:
                if config.allow_grpc:
                    port = await self._grpc.start()
                    stack.push_async_callback(self._grpc.stop, 1.0)
                    _log.info("Started GRPCInferenceService at %s", where(config.grpc.address, port))
                if config.allow_http:
                    port = await self._http.start()
                    stack.push_async_callback(self._http.stop, 1.0)
                    _log.info("Started HTTPService at %s", where(config.http.address, port))
                if config.metrics.allow:
                    port = await self._metrics.start()
                    stack.push_async_callback(self._metrics.stop)
                    _log.info("Started Metrics at %s", where(config.metrics.address, port))
            except OSError as error:
                raise StartError(error.strerror or str(error)) from error
            except InferError as error:
                raise StartError(error.message) from error
            doors = (self._http.certificates, self._grpc.certificates, self._metrics.certificates)
            await stack.enter_async_context(refreshing(door for door in doors if door is not None))
            await stack.enter_async_context(self._callers_up_to_date())
            yield

    @contextlib.asynccontextmanager
    async def _callers_up_to_date(self) -> AsyncIterator[None]:
        """Look at the access file every second while this is open."""
        table = self._access
        if table is None:
            yield
            return

        async def look() -> None:
            while True:
                await asyncio.sleep(1)
                table.refresh()

        task = asyncio.ensure_future(look())
        try:
            yield
        finally:
            task.cancel()

    async def _fetch(self, only: Collection[str] | None) -> None:
        """Mirror what is in stores, before the first load."""
        loop = asyncio.get_running_loop()

        def wait(seconds: float) -> bool:
            stopped = asyncio.run_coroutine_threadsafe(_within(self._stop.wait(), seconds), loop).result()
            return not stopped

        try:
            await asyncio.to_thread(self._mirrors.first, only, wait)
        except RemoteError as error:
            raise StartError(str(error)) from None

    async def _load(self) -> None:
        config = self._config
        named = config.load_models if config.control_mode is ControlMode.EXPLICIT else None
        await self._fetch(None if named is None or "*" in named or self._keeper is not None else named)
        loading = asyncio.ensure_future(self._load_first(named))
        stopped = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait([loading, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not loading.done():
            loading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await loading
            return
        failed = loading.result()
        for line in models_table(self._index(ready_only=False)).splitlines():
            _log.info("%s", line)
        if failed and config.exit_on_error:
            raise StartError(
                f"{len(failed)} of the models could not be loaded and --exit-on-error is true: "
                + "; ".join(f"{name}: {reason}" for name, reason in failed.items())
            )
        memory.settle()

    async def _load_first(self, named: Sequence[str] | None) -> dict[str, str]:
        """Load what is to serve from the start; return those that failed, with the reasons."""
        if self._keeper is None:
            return await self._registry.start(named)
        failed = await self._registry.start(None if named is None else ())
        return failed | await self._keeper.start(named or ())

    async def _serve(self) -> None:
        if self._config.control_mode is ControlMode.POLL:
            async with self._watcher.watching():
                await self._stop.wait()
        else:
            await self._stop.wait()

    async def _drain(self) -> bool:
        """Finish what runs; return whether all of it ended within the exit timeout."""
        await self._leave()
        self._rollout.close()
        timeout = self._config.exit_timeout_secs
        _log.info("stopping: no new requests, up to %d s for those that run", timeout)
        if self._keeper is not None:
            self._keeper.close()
        drained = await self._data.drain(timeout)
        if not drained:
            _log.error("the exit timeout of %d s is over, requests are cut off", timeout)
        return drained

    async def _leave(self) -> None:
        """Serve on for the grace time while load balancers see that this server is not ready."""
        grace = self._config.drain_grace_secs
        if not grace or not self._stopping:
            return
        _log.info("leaving: not ready any more, serving for %d s", grace)
        self._data.leave()
        self._http.leave()
        await asyncio.sleep(grace)
        self._http.refuse()

    def _listen_for_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)

    def _signalled(self, number: signal.Signals) -> None:
        if self._stopping:
            sys.stderr.write("second signal, ending at once\n")
            os._exit(1)
        _log.info("%s received", number.name)
        self._stopping = True
        self._stop.set()
