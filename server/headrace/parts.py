"""Makes the parts of a server of what its configuration says; `app` puts them together. Starts nothing."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from headrace.access.table import AccessError, AccessTable
from headrace.cache_options import LocalCacheSettings, RedisSettings
from headrace.clock import SystemClock
from headrace.config import ControlMode, ServerConfig
from headrace.instances.arenas import ArenaTable
from headrace.instances.gpus import gpu_count, without_gpu
from headrace.instances.loaded_model import LoadedModel
from headrace.instances.loader import InstanceLoader, installed_backends
from headrace.instances.services import BackendServices
from headrace.instances.supervisor import ProcessSettings
from headrace.observability.access_log import AccessLog
from headrace.observability.metrics import BackendProcess, ModelMetrics
from headrace.observability.statistics import FIRST_RESPONSE_BOUNDS_MS, FIRST_RESPONSE_FAMILY, ModelStatistics
from headrace.redis_cache import RedisCache
from headrace.repository.addresses import is_remote
from headrace.repository.config_loading import Completion
from headrace.repository.layout import RepositorySnapshot, scan
from headrace.repository.model_config import ModelConfig
from headrace.repository.registry import ModelRegistry
from headrace.repository.remote import Mirrors, RemoteError, RemoteRepository
from headrace.residency.keeper import Keeper
from headrace.response_cache import LocalCache, ResponseCache
from headrace.scheduling.rate_limiter import RateLimiter
from headrace.shared_memory import MAX_REGIONS, RegionTable


class StartError(Exception):
    """The server cannot start; the message is for the person who started it."""


def make_cache(config: ServerConfig, clock: SystemClock) -> ResponseCache | None:
    """Return the response cache that a configuration describes. Raises StartError where it cannot be had."""
    match config.cache:
        case None:
            return None
        case LocalCacheSettings(size=size):
            return LocalCache(size)
        case RedisSettings() as settings:
            try:
                return RedisCache(settings, clock)
            except ImportError:
                raise StartError("--cache-config redis: the client is missing: pip install 'headrace[redis]'") from None


def make_loader(
    config: ServerConfig,
    clock: SystemClock,
    services: BackendServices | None = None,
    cache: ResponseCache | None = None,
    arenas: ArenaTable | None = None,
    limiter: RateLimiter | None = None,
) -> InstanceLoader:
    """Return the loader that a configuration describes, of models with processes of their own."""
    settings = ProcessSettings(
        arena_bytes=config.arena_byte_size,
        load_timeout_s=config.model_load_timeout_secs,
        restart_limit=config.backend_restart_limit,
        restart_window_s=config.backend_restart_window_secs,
        arenas=arenas,
        host_policies=config.host_policies,
        variables=config.backend_environment,
        memory_limit=config.backend_memory_limit,
        limiter=limiter,
    )
    return InstanceLoader(
        settings, completion_of(config), config.backend_settings, statistics_maker(config), clock, services, cache
    )


def make_limiter(config: ServerConfig) -> RateLimiter | None:
    """Return what limits executions by resources, where a configuration says that they are."""
    return RateLimiter(config.rate_limits) if config.rate_limits is not None else None


def completion_of(config: ServerConfig) -> Completion:
    """Return the settings that shape the models' configurations."""
    return Completion(
        auto_complete=config.auto_complete_config,
        gpu_count=gpu_count(config.gpu_count, config.visible_gpus),
        without_gpu=without_gpu(installed_backends()),
    )


def region_table(config: ServerConfig, gpus: int) -> RegionTable:
    # A region costs a descriptor here and in each backend process that uses it, and sockets need some too.
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_REGIONS if files == resource.RLIM_INFINITY else min(MAX_REGIONS, files // 4)
    return RegionTable(enabled=config.allow_client_shm, limit=limit, gpus=gpus, owners=config.client_shm_users)


def statistics_maker(config: ServerConfig) -> Callable[[ModelConfig], ModelStatistics]:
    def make(model: ModelConfig) -> ModelStatistics:
        bounds = [
            tuple(control.histogram_options.buckets)
            for control in model.proto.model_metrics.metric_control
            if control.metric_identifier.family == FIRST_RESPONSE_FAMILY
        ]
        return ModelStatistics(
            streamed=model.decoupled,
            summaries=config.metrics.summary_latencies,
            first_response_bounds_ms=bounds[0] if bounds else FIRST_RESPONSE_BOUNDS_MS,
        )

    return make


def mirrored(config: ServerConfig) -> tuple[Mirrors, list[Path]]:
    """Return the mirrors of what is in stores, and all repositories as folders. Raises StartError."""
    cache, mirrors, folders = Path(config.model_repository_cache), [], []
    try:
        for address in config.model_repositories:
            if is_remote(address):
                mirrors.append(RemoteRepository(address, cache, time.time, config.model_repository_settle_secs))
                folders.append(mirrors[-1].folder)
            else:
                folders.append(Path(address))
    except (RemoteError, OSError) as error:
        raise StartError(f"--model-repository: {error}") from None
    return Mirrors(mirrors), folders


def look(mirrors: Mirrors, repositories: Sequence[Path]) -> RepositorySnapshot:
    mirrors.sync()
    return scan(repositories)


def make_access_log(config: ServerConfig, clock: SystemClock) -> AccessLog | None:
    if config.log.access == "off":
        return None
    return AccessLog(clock.now_ns, failures_only=config.log.access == "failures")


def make_keeper(config: ServerConfig, registry: ModelRegistry[LoadedModel], clock: SystemClock) -> Keeper | None:
    if config.residency is None:
        return None
    return Keeper(
        config.residency,
        registry,
        clock,
        config_name=config.model_config_name or None,
        overlay=config.model_overlay,
        explicit=config.control_mode is ControlMode.EXPLICIT,
    )


def make_access_table(config: ServerConfig, clock: SystemClock) -> AccessTable | None:
    if not config.access_file:
        return None
    try:
        return AccessTable(config.access_file, clock.now_ns)
    except AccessError as error:
        raise StartError(f"--access-file: {error}") from None


class RegistryMetrics:
    """Joins the registry to the metrics."""

    def __init__(self, registry: ModelRegistry[LoadedModel]) -> None:
        self._registry = registry

    def models(self) -> Iterable[ModelMetrics]:
        for model in self._registry.served():
            yield ModelMetrics(
                name=model.name,
                version=model.version,
                statistics=model.statistics,
                ready=model.ready,
                load_seconds=model.load_seconds,
                queue_depth=model.driver.waiting,
                restarts=model.restarts,
                tags=model.config.metric_tags,
                cached=model.cached,
                sequences=None if model.sequences is None else (model.sequences.active, model.sequences.backlog),
                processes=[BackendProcess(str(number), pid) for number, pid in enumerate(model.pids())],
            )
