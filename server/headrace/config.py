"""ServerConfig: everything a user can set, parsed once from argv, environment and YAML, complete and frozen.

The only reader of environment variables. argv goes before the environment, that before the YAML file, that before the
defaults of the table in flags.py.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cache_options import CacheSettings, cache_settings
from headrace.flags import ANY_USER, FLAGS, Flag, Status
from headrace.gateway.address import unix_path
from headrace.gateway.grpc.settings import GrpcSettings
from headrace.gateway.http.settings import HttpSettings
from headrace.gateway.restricted import Group, by_kind
from headrace.gateway.tls_settings import TlsSettings
from headrace.instances.variables import VariablePolicy
from headrace.metrics_options import metrics_config
from headrace.options import UsageError, gather
from headrace.placement_options import HostPolicies, Limits, host_policies, rate_limits
from headrace.repository.addresses import is_remote, parse_address
from headrace.residency.options import ResidencyOptions, residency_options
from headrace.trace_options import TraceSettings, trace_settings

if TYPE_CHECKING:  # it brings what reads files, which a mistake in an option should not wait for
    from headrace.gateway.gatekeeper import Gatekeeper
    from headrace.repository.overlay import Overlay


class ControlMode(enum.Enum):
    """Who decides which models are loaded."""

    NONE = "none"
    """All of the repository, once, at start-up."""
    POLL = "poll"
    """All of the repository; changes are found by looking every few seconds."""
    EXPLICIT = "explicit"
    """Those named at start-up, then what the repository API is told."""


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """The metrics service and what it tells."""

    allow: bool
    address: str
    port: int
    reuse_port: bool
    interval_ms: int
    cpu_metrics: bool
    gpu_metrics: bool
    counter_latencies: bool
    histogram_latencies: bool
    summary_latencies: bool
    summary_quantiles: tuple[float, ...]
    as_vllm: bool
    """Whether language models' figures are shown under vLLM's names too."""
    tls: TlsSettings | None = None
    """None = plain text."""
    gatekeeper: Gatekeeper | None = None
    """Who knows callers by their keys; None = everybody may scrape."""


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What is logged, how and where."""

    verbose: int
    info: bool
    warning: bool
    error: bool
    format: str
    """default, ISO8601 or json."""
    file: str
    """"" = stdout and stderr."""
    access: str = "off"
    """Which inference requests have a line: off, failures or all."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Everything the server is told at start-up."""

    id: str
    access_file: str
    """Who may call; "" = everybody may do everything."""
    model_repositories: tuple[str, ...]
    """Folders, and addresses of stores."""
    model_repository_settle_secs: float
    model_repository_cache: str
    """The folder where what is in stores is mirrored."""
    control_mode: ControlMode
    load_models: tuple[str, ...]
    repository_poll_secs: int
    exit_on_error: bool
    strict_readiness: bool
    auto_complete_config: bool
    model_overlay: Overlay | None
    """What is laid over the models' configurations; None = nothing."""
    residency: ResidencyOptions | None
    """How much memory models may take; None = all of them stay in it."""
    model_config_name: str
    """"" = config.pbtxt."""
    model_load_thread_count: int
    model_load_retry_count: int
    model_load_timeout_secs: float
    allow_model_upload: bool
    model_upload_byte_size: int
    allow_client_shm: bool
    client_shm_users: frozenset[int] | None
    """Numbers of the users whose shared memory objects may be registered; None = everybody's."""
    drain_grace_secs: int
    exit_timeout_secs: int
    arena_byte_size: int
    backend_restart_limit: int
    backend_restart_window_secs: float
    backend_environment: VariablePolicy
    backend_memory_limit: int
    """Bytes of private memory; 0 = no limit."""
    gpu_count: int | None
    """GPUs that instances may be placed on; None = as many as there are."""
    visible_gpus: str | None
    """What CUDA_VISIBLE_DEVICES says, which backend processes inherit; None = nothing."""
    backend_config: Mapping[str, Mapping[str, str]]
    """Settings by backend; under "" those of every backend, which a backend's own go before."""
    rate_limits: Limits | None
    """How many of which resource there are; None = executions are limited by instances alone."""
    host_policies: HostPolicies
    cache: CacheSettings | None
    """Where answers are kept; None = nowhere."""
    allow_http: bool
    http: HttpSettings
    allow_grpc: bool
    grpc: GrpcSettings
    metrics: MetricsSettings
    log: LogSettings
    trace: TraceSettings
    warnings: tuple[str, ...]
    """What to tell the user once logging works: options without effect and the like."""

    def backend_settings(self, backend: str) -> dict[str, str]:
        """Return the settings of one backend, those for every backend included."""
        return {**self.backend_config.get("", {}), **self.backend_config.get(backend, {})}


def load_config(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> ServerConfig:
    """Return the configuration that argv, environment (os.environ) and YAML file make.

    Raises UsageError with every problem found.
    """
    environ = os.environ if environ is None else environ
    given, warnings, problems = gather(argv, environ)
    values: dict[str, Any] = {}
    for flag in FLAGS.values():
        if flag.status is Status.SERVED:
            source, texts = given.get(flag.name, (f"--{flag.name}", [] if flag.default is None else [flag.default]))
            values[flag.name] = _parse(flag, source, texts, problems)
    metrics = metrics_config(values["metrics-config"], problems)
    trace = trace_settings(values, problems, warnings)
    cache = cache_settings(values, environ, problems, warnings)
    limits = rate_limits(values, problems, warnings)
    policies = host_policies(values["host-policy"], problems)
    overlay = _overlay(values["model-overlay"], problems)
    problems += _conflicts(values)
    if problems:
        raise UsageError(problems)
    return _build(
        values, overlay, metrics, trace, cache, limits, policies, environ.get("CUDA_VISIBLE_DEVICES"), warnings
    )


def _parse(flag: Flag, source: str, texts: Sequence[str], problems: list[str]) -> object:
    """Return the option's value, a tuple where it is repeatable; None where it is not given or wrong."""
    parsed: list[object] = []
    for text in texts:
        try:
            parsed.append(flag.parse(text))
        except ValueError as error:
            problems.append(f"{source}: {error}")
    if flag.repeatable:
        return tuple(parsed)
    return parsed[-1] if parsed else None


def _build(
    values: Mapping[str, Any],
    overlay: Overlay | None,
    metrics: Mapping[str, Any],
    trace: TraceSettings,
    cache: CacheSettings | None,
    limits: Limits | None,
    policies: HostPolicies,
    visible_gpus: str | None,
    warnings: list[str],
) -> ServerConfig:
    backend_config: dict[str, dict[str, str]] = {}
    for backend, key, value in values["backend-config"]:
        backend_config.setdefault(backend, {})[key] = value
    return ServerConfig(
        id=values["id"],
        access_file=values["access-file"],
        model_repositories=values["model-repository"],
        model_repository_settle_secs=values["model-repository-settle-secs"],
        model_repository_cache=values["model-repository-cache"] or str(Path.home() / ".cache/headrace/repositories"),
        control_mode=ControlMode(values["model-control-mode"]),
        load_models=values["load-model"],
        repository_poll_secs=values["repository-poll-secs"],
        exit_on_error=values["exit-on-error"],
        strict_readiness=values["strict-readiness"],
        auto_complete_config=not values["disable-auto-complete-config"],
        model_overlay=overlay,
        residency=residency_options(values),
        model_config_name=values["model-config-name"] or "",
        model_load_thread_count=values["model-load-thread-count"],
        model_load_retry_count=values["model-load-retry-count"],
        model_load_timeout_secs=values["model-load-timeout-secs"],
        allow_model_upload=values["allow-model-upload"],
        model_upload_byte_size=values["model-upload-byte-size"],
        allow_client_shm=values["allow-client-shm"],
        client_shm_users=_users(values["client-shm-user"]),
        drain_grace_secs=values["drain-grace-secs"],
        exit_timeout_secs=values["exit-timeout-secs"],
        arena_byte_size=values["arena-byte-size"],
        backend_restart_limit=values["backend-restart-limit"],
        backend_restart_window_secs=values["backend-restart-window-secs"],
        backend_environment=VariablePolicy(values["backend-environment"], values["backend-env"]),
        backend_memory_limit=values["backend-memory-limit"],
        gpu_count=values["gpu-count"],
        visible_gpus=visible_gpus,
        backend_config=backend_config,
        cache=cache,
        rate_limits=limits,
        host_policies=policies,
        allow_http=values["allow-http"],
        http=HttpSettings(
            address=values["http-address"],
            port=values["http-port"],
            reuse_port=values["reuse-http-port"],
            max_input_size=values["http-max-input-size"],
            max_body_size=values["http-max-body-size"],
            max_connections=values["http-max-connections"],
            header_forward_pattern=values["http-header-forward-pattern"],
            sticky_header=values["sticky-header"],
            restricted=by_kind(values["http-restricted-api"]),
            tls=_tls(values, "http"),
        ),
        allow_grpc=values["allow-grpc"],
        grpc=_grpc(values),
        metrics=MetricsSettings(
            allow=values["allow-metrics"],
            address=_metrics_address(values),
            port=values["metrics-port"],
            reuse_port=values["reuse-metrics-port"],
            interval_ms=values["metrics-interval-ms"],
            cpu_metrics=values["allow-cpu-metrics"],
            gpu_metrics=values["allow-gpu-metrics"],
            counter_latencies=metrics["counter_latencies"],
            histogram_latencies=metrics["histogram_latencies"],
            summary_latencies=metrics["summary_latencies"],
            summary_quantiles=metrics["summary_quantiles"],
            as_vllm=values["metrics-compat"] == "vllm",
            tls=_tls(values, "metrics"),
        ),
        log=LogSettings(
            verbose=values["log-verbose"],
            info=values["log-info"],
            warning=values["log-warning"],
            error=values["log-error"],
            format=values["log-format"],
            file=values["log-file"],
            access=values["log-access"],
        ),
        trace=trace,
        warnings=tuple(warnings),
    )


def _overlay(path: str, problems: list[str]) -> Overlay | None:
    if not path:
        return None
    from headrace.repository.model_config import ConfigError
    from headrace.repository.overlay import read_overlay

    try:
        return read_overlay(Path(path))
    except ConfigError as error:
        problems += [f"--model-overlay: {problem}" for problem in error.problems]
        return None


def _users(named: Sequence[int]) -> frozenset[int] | None:
    return None if ANY_USER in named else frozenset({os.geteuid(), *named})


def _grpc(values: Mapping[str, Any]) -> GrpcSettings:
    return GrpcSettings(
        address=values["grpc-address"],
        port=values["grpc-port"],
        reuse_port=values["reuse-grpc-port"],
        transport=values["grpc-transport"],
        max_message_size=values["grpc-max-message-size"],
        compression=values["grpc-infer-response-compression-level"],
        keepalive_time_ms=values["grpc-keepalive-time"],
        keepalive_timeout_ms=values["grpc-keepalive-timeout"],
        keepalive_permit_without_calls=values["grpc-keepalive-permit-without-calls"],
        max_pings_without_data=values["grpc-http2-max-pings-without-data"],
        min_ping_interval_without_data_ms=values["grpc-http2-min-recv-ping-interval-without-data"],
        max_ping_strikes=values["grpc-http2-max-ping-strikes"],
        max_connection_age_ms=values["grpc-max-connection-age"],
        max_connection_age_grace_ms=values["grpc-max-connection-age-grace"],
        header_forward_pattern=values["grpc-header-forward-pattern"],
        sticky_header=values["sticky-header"],
        restricted=by_kind(values["grpc-restricted-protocol"]),
        reflection=values["grpc-reflection"],
        tls=_tls(values, "grpc"),
    )


def _tls(values: Mapping[str, Any], door: str) -> TlsSettings | None:
    if not values[f"{door}-use-ssl"]:
        return None
    authority = values[f"{door}-root-cert"] if values[f"{door}-use-ssl-mutual"] else ""
    return TlsSettings(values[f"{door}-server-cert"], values[f"{door}-server-key"], authority)


def _tls_conflicts(values: Mapping[str, Any], door: str) -> list[str]:
    """Return what does not go together among a door's options of TLS; whether its files are good is seen at the start."""
    given = {name: values[f"{door}-{name}"] for name in ("server-cert", "server-key", "root-cert", "use-ssl-mutual")}
    if not values[f"{door}-use-ssl"]:
        return [f"--{door}-{name}: has no effect without --{door}-use-ssl" for name, value in given.items() if value]
    problems = [
        f"--{door}-{name}: --{door}-use-ssl needs it" for name in ("server-cert", "server-key") if not given[name]
    ]
    if given["use-ssl-mutual"] and not given["root-cert"]:
        problems.append(f"--{door}-root-cert: --{door}-use-ssl-mutual needs it")
    return problems


def _conflicts(values: Mapping[str, Any]) -> list[str]:
    problems: list[str] = []
    repositories = values["model-repository"]
    if not repositories:
        problems.append("--model-repository: give at least one directory of models")
    for repository in repositories:
        if not is_remote(repository):
            if not Path(repository).is_dir():
                problems.append(f"--model-repository: {repository!r} is no directory")
            continue
        try:
            parse_address(repository)
        except ValueError as error:
            problems.append(f"--model-repository: {repository!r}: {error}")
    places = {repository if is_remote(repository) else Path(repository).resolve() for repository in repositories}
    if len(places) < len(repositories):
        problems.append("--model-repository: the same directory is given twice")
    if values["load-model"] and values["model-control-mode"] in {"none", "poll"}:
        problems.append(
            f"--load-model: needs --model-control-mode=explicit; in mode {values['model-control-mode']} every model is loaded"
        )
    if "*" in values["load-model"] and len(values["load-model"]) > 1:
        problems.append("--load-model: * stands for all models; give no other beside it")
    problems += _port_conflicts(values)
    for door in ("http", "grpc", "metrics"):
        problems += _tls_conflicts(values, door)
    problems += _restricted_twice("http-restricted-api", values)
    problems += _restricted_twice("grpc-restricted-protocol", values)
    if values["allow-http"] is False and values["allow-grpc"] is False:
        problems.append("--allow-http, --allow-grpc: both are false, so that nobody could reach the server")
    return problems


def _restricted_twice(option: str, values: Mapping[str, Any]) -> list[str]:
    groups: Sequence[Group] = values[option]
    try:
        by_kind(groups)
    except ValueError as error:
        return [f"--{option}: {error}"]
    return []


def _metrics_address(values: Mapping[str, Any]) -> str:
    """Return where metrics are served: as HTTP, but never on a Unix socket."""
    if values["metrics-address"]:
        return str(values["metrics-address"])
    return "127.0.0.1" if unix_path(values["http-address"]) is not None else str(values["http-address"])


def _port_conflicts(values: Mapping[str, Any]) -> list[str]:
    doors = [
        (door, address, port)
        for door, address, port in (
            ("http", values["http-address"], values["http-port"]),
            ("grpc", values["grpc-address"], values["grpc-port"]),
            ("metrics", _metrics_address(values), values["metrics-port"]),
        )
        if values[f"allow-{door}"]
    ]
    problems = [
        f"--{door}-address: expected a host or unix:<path>, got {address!r}"
        for door, address, _ in doors
        if unix_path(address) == "" or (door == "metrics" and unix_path(address) is not None)
    ]
    everywhere = {"0.0.0.0", "::", "[::]", "*"}
    for index, (second, address, port) in enumerate(doors):
        for first, other_address, other_port in doors[:index]:
            if (path := unix_path(address)) is not None or unix_path(other_address) is not None:
                if path and path == unix_path(other_address):
                    problems.append(
                        f"--{second}-address: {second} cannot listen at {path}, which is --{first}-address already"
                    )
            elif port and port == other_port and (address == other_address or everywhere & {address, other_address}):
                problems.append(
                    f"--{second}-port: {second} cannot listen on port {port}, which is --{first}-port already"
                )
    return problems
