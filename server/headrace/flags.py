"""The table of server options: one line an option, which drives argv, environment, YAML and the help text.

Names, defaults and meaning follow tritonserver. An option of Triton's that this server does not serve stands here too,
so that it is refused (or passed over, where it changes no answer) in words, not as a typing error. The file is long
because the table is: it is read as one, in the order of the help text.
"""

from __future__ import annotations

import enum
import pwd
import re
from collections.abc import Callable
from dataclasses import dataclass

from headrace.gateway.header_forward import STICKY_HEADER, compile_pattern
from headrace.gateway.restricted import KINDS, header_name, parse_group
from headrace.instances.variables import NO_SECRETS, POLICIES
from headrace.residency.options import byte_size

ANY_USER = -1
MIB = 1 << 20
INT32_MAX = (1 << 31) - 1
LOG_FORMATS = ("default", "ISO8601", "json")
MOST_VERBOSE = 9


class Status(enum.Enum):
    """What becomes of an option."""

    SERVED = "served"
    IGNORED = "ignored"
    """Accepted with a warning: it tunes something that this server does not have."""
    REFUSED = "refused"
    """Not served: any value but the default is an error."""


Parser = Callable[[str], object]
"""Turns an option's text into its value; raises ValueError with `expected ..., got ...`."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One option. `default` is text, as a user would write it; None = nothing unless given."""

    name: str
    parse: Parser
    default: str | None
    help: str
    repeatable: bool = False
    status: Status = Status.SERVED
    kind: str = ""
    """What stands for the value in the help text."""

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return f"HEADRACE_{self.name.upper().replace('-', '_')}"

    @property
    def switch(self) -> bool:
        """Whether the option may stand alone, for true."""
        return self.default in {"true", "false"}

    def is_default(self, text: str) -> bool:
        """Whether `text` says no more than the default does."""
        value = text.strip().lower()
        return value == self.default or (value == "0" and self.default == "false")


def boolean(text: str) -> bool:
    """Parse true, false, 1 or 0 in any case."""
    value = {"true": True, "1": True, "false": False, "0": False}.get(text.strip().lower())
    if value is None:
        raise ValueError(f"expected true, false, 1 or 0, got {text!r}")
    return value


def integer(low: int, high: int | None = None) -> Parser:
    """Return a parser of integers from `low` to `high`."""
    wanted = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"

    def parse(text: str) -> int:
        try:
            value = int(text.strip(), 10)
        except ValueError:
            value = low - 1
        if value < low or (high is not None and value > high):
            raise ValueError(f"expected {wanted}, got {text!r}")
        return value

    return parse


def bytes_or_none(low: int) -> Parser:
    """Return a parser of sizes in bytes from `low`, and of 0, which stands for no limit."""
    parse = integer(0)

    def parse_bytes(text: str) -> object:
        value = parse(text)
        if value != 0:
            integer(low)(text)
        return value

    return parse_bytes


def seconds(low: float) -> Parser:
    """Return a parser of durations in seconds, fractions allowed."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value < float("inf"):
            raise ValueError(f"expected a number of seconds >= {low:g}, got {text!r}")
        return value

    return parse


def choice(*allowed: str) -> Parser:
    """Return a parser that takes one of `allowed`, in any case."""
    by_lower = {value.lower(): value for value in allowed}

    def parse(text: str) -> str:
        value = by_lower.get(text.strip().lower())
        if value is None:
            raise ValueError(f"expected {', '.join(allowed[:-1])} or {allowed[-1]}, got {text!r}")
        return value

    return parse


def text(value: str) -> str:
    """Take any text."""
    return value


def name(value: str) -> str:
    """Take a text that is not empty and holds no blanks."""
    if not value or value.split() != [value]:
        raise ValueError(f"expected a name without blanks, got {value!r}")
    return value


def pattern(value: str) -> str:
    """Take a regular expression."""
    try:
        compile_pattern(value)
    except re.error as error:
        raise ValueError(f"expected a regular expression, got {value!r}: {error}") from error
    return value


def user(value: str) -> int:
    """Return the number of a user, who may also be named; ANY_USER for *."""
    if value.strip() == "*":
        return ANY_USER
    if value.strip().isdecimal():
        return int(value)
    try:
        return pwd.getpwnam(value.strip()).pw_uid
    except (KeyError, ValueError):
        raise ValueError(f"expected a user of this machine, a number or *, got {value!r}") from None


def setting(value: str) -> tuple[str, str]:
    """Parse `key=value`."""
    key, equals, rest = value.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"expected <key>=<value>, got {value!r}")
    return key.strip(), rest.strip().strip('"')


def scoped_setting(scope: str) -> Callable[[str], tuple[str, str, str]]:
    """Return a parser of `<scope>,<key>=<value>`, or `<key>=<value>` for every scope (whose name is then "")."""

    def parse(value: str) -> tuple[str, str, str]:
        head, comma, rest = value.partition(",")
        if not comma or "=" in head:
            return ("", *setting(value))
        if not head.strip():
            raise ValueError(f"expected <{scope}>,<key>=<value>, got {value!r}")
        return (head.strip(), *setting(rest))

    return parse


def scoped_settings(scope: str) -> Callable[[str], tuple[str, dict[str, str]]]:
    """Return a parser of `<scope>,<key>=<value>[,<key>=<value>...]`; a part without = belongs to the value before it."""

    def parse(value: str) -> tuple[str, dict[str, str]]:
        head, _, rest = value.partition(",")
        values: dict[str, str] = {}
        last = ""
        for part in rest.split(","):
            key, equals, found = part.partition("=")
            if equals and key.strip():
                last = key.strip()
                values[last] = found.strip()
            elif last:
                values[last] += f",{part}"
            else:
                raise ValueError(f"expected <{scope}>,<key>=<value>, got {value!r}")
        if not head.strip() or "=" in head:
            raise ValueError(f"expected <{scope}>,<key>=<value>, got {value!r}")
        return head.strip(), values

    return parse


def resource_limit(value: str) -> tuple[str, int | None, int]:
    """Parse `<resource>:<count>[:<device>]`."""
    name, *numbers = value.split(":")
    if not name.strip() or not 1 <= len(numbers) <= 2:
        raise ValueError(f"expected <resource>:<count>[:<device>], got {value!r}")
    count, *device = (int(number) if number.strip().isdecimal() else -1 for number in numbers)
    if count < 1 or (device and not 0 <= device[0] < 1024):
        raise ValueError(f"expected <resource>:<count>[:<device>] with a count >= 1, got {value!r}")
    return name.strip().lower(), device[0] if device else None, count


_PORT = integer(0, 65535)
_MILLISECONDS = integer(1, INT32_MAX)


def _served(
    flag: str, parse: Parser, default: str | None, help_text: str, kind: str = "", *, many: bool = False
) -> Flag:
    return Flag(flag, parse, default, help_text, many, Status.SERVED, kind)


def _ignored(flag: str, why: str) -> Flag:
    return Flag(flag, text, None, why, repeatable=True, status=Status.IGNORED)


def _refused(flag: str, default: str, why: str) -> Flag:
    return Flag(flag, text, default, why, repeatable=True, status=Status.REFUSED)


def _tls(door: str, shown: str) -> tuple[Flag, ...]:
    """Return the options of a door's TLS: Triton's for gRPC, and alike for the others."""
    return (
        _served(f"{door}-use-ssl", boolean, "false", f"serve {shown} over TLS", "BOOL"),
        _served(f"{door}-use-ssl-mutual", boolean, "false", "and want a certificate of every client", "BOOL"),
        _served(f"{door}-server-cert", text, "", "PEM file of the certificate; read again when it changes", "FILE"),
        _served(f"{door}-server-key", text, "", "PEM file of its key", "FILE"),
        _served(f"{door}-root-cert", text, "", "PEM file of the authorities whose clients are let in", "FILE"),
    )


SERVED = (
    _served("config", text, None, "read options from this YAML file; argv and environment go before it", "FILE"),
    _served("id", name, "headrace", "the server's name in its metadata", "NAME"),
    _served(
        "model-repository",
        text,
        None,
        "directory of models, or an address in a store (s3://, gs://, as://); repeat for several",
        "DIR",
        many=True,
    ),
    _served(
        "model-repository-settle-secs",
        seconds(0),
        "5",
        "how long a model in a store must have stayed as it is before it is taken",
    ),
    _served(
        "model-repository-cache", text, "", "where models of stores are mirrored; default ~/.cache/headrace", "DIR"
    ),
    _served("model-control-mode", choice("none", "poll", "explicit"), "none", "who decides what is loaded", "MODE"),
    _served("load-model", name, None, "model to load at start-up (explicit mode); * = all", "MODEL", many=True),
    _served(
        "repository-poll-secs",
        integer(0, 86400),
        "15",
        "time between two looks at the repository (poll mode); 0 = never",
    ),
    _served("exit-on-error", boolean, "true", "stop where a model fails to load at start-up", "BOOL"),
    _served("strict-readiness", boolean, "true", "ready only while every model that should serve does", "BOOL"),
    _served(
        "disable-auto-complete-config", boolean, "false", "do not complete configurations out of model files", "BOOL"
    ),
    _served("model-config-name", name, None, "use configs/<name>.pbtxt of a model that has it", "NAME"),
    _served("model-load-thread-count", integer(1, 256), "4", "models loaded at once"),
    _served("model-load-retry-count", integer(0, 100), "0", "further tries where a load fails"),
    _served("model-load-timeout-secs", seconds(1), "600", "longest time a load may take", "SECONDS"),
    _served("allow-client-shm", boolean, "false", "let clients register shared memory for their tensors", "BOOL"),
    _served(
        "client-shm-user",
        user,
        None,
        "user (name or number) whose shared memory objects may be registered too; * = everybody's; without it: the "
        "server's own user's",
        "USER",
        many=True,
    ),
    _served("allow-model-upload", boolean, "false", "take model files in load calls (explicit mode)", "BOOL"),
    _served(
        "model-upload-byte-size", integer(1), str(4 << 30), "disk taken by uploaded model files, at most, in bytes"
    ),
    _served(
        "drain-grace-secs",
        integer(0, 86400),
        "0",
        "how long a stop goes on serving after readiness went off, so that load balancers see it",
    ),
    _served("exit-timeout-secs", integer(0, 86400), "30", "how long a stop waits for requests in flight"),
    _served(
        "arena-byte-size", integer(MIB), str(8 << 30), "memory shared with one backend process, at most; taken as used"
    ),
    _served("backend-restart-limit", integer(0, 1000), "5", "crashes within the window after which a model stays down"),
    _served("backend-restart-window-secs", seconds(1), "300", "the window in which crashes count", "SECONDS"),
    _served(
        "backend-environment",
        choice(*POLICIES),
        NO_SECRETS,
        "environment variables that backend processes get: inherit, no-secrets or minimal",
        "WHICH",
    ),
    _served("backend-env", name, None, "a variable (* and ? stand for text) that they get anyway", "NAME", many=True),
    _served(
        "backend-memory-limit", bytes_or_none(MIB), "0", "private memory of one backend process, at most; 0 = no limit"
    ),
    _served(
        "backend-config",
        scoped_setting("backend"),
        None,
        "<backend>,<key>=<value>; without a backend: for all",
        "SETTING",
        many=True,
    ),
    _served(
        "cache-config",
        scoped_settings("cache"),
        None,
        "where answers are kept: local,size=BYTES, or redis,host=HOST,port=PORT with user, password, db, "
        "connect_timeout, socket_timeout, wait_timeout (ms), pool_size, ttl (s)",
        "SETTING",
        many=True,
    ),
    _served("response-cache-byte-size", integer(0), "0", "deprecated: use --cache-config local,size=..."),
    _served(
        "rate-limit",
        choice("off", "execution_count"),
        "off",
        "execution_count: an instance runs only while the resources of its rate_limiter are there",
        "MODE",
    ),
    _served(
        "rate-limit-resource",
        resource_limit,
        None,
        "<resource>:<count>[:<device>]; without it there are as many as the neediest instance needs",
        "LIMIT",
        many=True,
    ),
    _served(
        "gpu-count",
        integer(0, 64),
        None,
        "GPUs that instances may be placed on; default: those of /dev, as far as CUDA_VISIBLE_DEVICES names them",
        "N",
    ),
    _served(
        "host-policy",
        scoped_settings("policy"),
        None,
        "<policy>,cpu-cores=0-3,8 or <policy>,numa-node=0: the processors of instances that name this host_policy, or "
        "of all of a kind: cpu, model, gpu_<device>",
        "SETTING",
        many=True,
    ),
    _served("allow-http", boolean, "true", "serve HTTP", "BOOL"),
    _served("http-address", name, "0.0.0.0", "address of the HTTP service: a host, or unix:<path>", "ADDRESS"),
    _served("http-port", _PORT, "8000", "port of the HTTP service; 0 = any free one", "PORT"),
    _served("reuse-http-port", boolean, "false", "share the HTTP port with other processes", "BOOL"),
    _served(
        "http-max-input-size",
        integer(1),
        str(64 * MIB),
        "largest JSON part, JSON tensor or inflated body of an HTTP request, in bytes",
    ),
    _served(
        "http-max-body-size", integer(1), str(2 << 30), "largest HTTP request body, binary tensors included, in bytes"
    ),
    _served(
        "http-max-connections",
        integer(0, 1 << 20),
        "0",
        "HTTP connections open at once; one more gets 503. 0 = half of the descriptors (RLIMIT_NOFILE)",
    ),
    _served(
        "http-header-forward-pattern", pattern, "", "headers whose name matches become request parameters", "REGEX"
    ),
    _served(
        "http-restricted-api",
        parse_group,
        None,
        f"<kinds>:<header>=<value>: only who sends the header may call these; kinds are {', '.join(KINDS)}",
        "GROUP",
        many=True,
    ),
    _served("allow-grpc", boolean, "true", "serve gRPC", "BOOL"),
    _served("grpc-address", name, "0.0.0.0", "address of the gRPC service: a host, or unix:<path>", "ADDRESS"),
    _served("grpc-port", _PORT, "8001", "port of the gRPC service; 0 = any free one", "PORT"),
    _served("reuse-grpc-port", boolean, "false", "share the gRPC port with other processes", "BOOL"),
    _served(
        "grpc-max-message-size",
        integer(1024, 2**31 - 1),
        str(2**31 - 1),
        "bytes of one message, inflated; a smaller limit is kept by the grpcio transport alone",
    ),
    _served("grpc-transport", choice("auto", "grpcio", "pygrpc-native"), "auto", "implementation of gRPC", "NAME"),
    _served(
        "grpc-header-forward-pattern", pattern, "", "metadata whose key matches becomes request parameters", "REGEX"
    ),
    _served(
        "grpc-restricted-protocol",
        parse_group,
        None,
        "as http-restricted-api; the metadata is triton-grpc-protocol-<header>",
        "GROUP",
        many=True,
    ),
    _served("grpc-reflection", boolean, "true", "tell tools what the gRPC services look like", "BOOL"),
    _served(
        "grpc-infer-response-compression-level",
        choice("none", "low", "medium", "high"),
        "none",
        "compression of gRPC answers",
        "LEVEL",
    ),
    _served("grpc-keepalive-time", _MILLISECONDS, "7200000", "ms without traffic before a ping"),
    _served("grpc-keepalive-timeout", _MILLISECONDS, "20000", "ms to wait for a ping's answer"),
    _served("grpc-keepalive-permit-without-calls", boolean, "false", "ping without open calls too", "BOOL"),
    _served(
        "grpc-http2-max-pings-without-data", integer(0, INT32_MAX), "2", "pings without data between; 0 = without limit"
    ),
    _served(
        "grpc-http2-min-recv-ping-interval-without-data",
        integer(0, INT32_MAX),
        "300000",
        "ms that must lie between a client's pings without data",
    ),
    _served(
        "grpc-http2-max-ping-strikes",
        integer(0, INT32_MAX),
        "2",
        "bad pings before a connection is closed; 0 = any number",
    ),
    _served("grpc-max-connection-age", integer(0, INT32_MAX), "0", "ms after which a connection is closed; 0 = never"),
    _served(
        "grpc-max-connection-age-grace", integer(0, INT32_MAX), "0", "ms left to its calls then; 0 = all they need"
    ),
    _served("allow-metrics", boolean, "true", "serve metrics", "BOOL"),
    _served("allow-cpu-metrics", boolean, "true", "tell the machine's CPU and memory use too", "BOOL"),
    _served("allow-gpu-metrics", boolean, "true", "tell GPUs' use too, where the extra nvml is installed", "BOOL"),
    _served("metrics-address", name, None, "address of the metrics service; default: as HTTP", "ADDRESS"),
    _served("metrics-port", _PORT, "8002", "port of the metrics service; 0 = any free one", "PORT"),
    _served("reuse-metrics-port", boolean, "false", "share the metrics port with other processes", "BOOL"),
    _served(
        "metrics-compat",
        choice("none", "vllm"),
        "none",
        "vllm: show language models' figures as vLLM names them, too",
        "NAME",
    ),
    _served("metrics-interval-ms", integer(1, INT32_MAX), "2000", "ms between two samples of processes and machine"),
    _served(
        "metrics-config",
        setting,
        None,
        "counter_latencies=BOOL, histogram_latencies=BOOL, summary_latencies=BOOL, summary_quantiles=0.5:0.05,...",
        "SETTING",
        many=True,
    ),
    _served(
        "trace-config",
        scoped_setting("mode"),
        None,
        "level=LEVEL, rate=N, count=N, triton,file=FILE, triton,log-frequency=N",
        "SETTING",
        many=True,
    ),
    *(
        _served(f"trace-{old}", text, None, f"deprecated: use --trace-config {new}=...", "VALUE", many=True)
        for old, new in (
            ("file", "triton,file"),
            ("level", "level"),
            ("rate", "rate"),
            ("count", "count"),
            ("log-frequency", "triton,log-frequency"),
        )
    ),
    _served(
        "model-memory-budget",
        byte_size,
        "0",
        "memory for models, like 8G: they are loaded when they are asked for, and the least used go; 0 = all stay",
        "BYTES",
    ),
    _served("pin-model", name, None, "model that stays in memory; * and ? as in file names", "MODEL", many=True),
    _served("model-wait-secs", seconds(0), "60", "how long a request without a deadline waits for its model's load"),
    _served("model-min-residence-secs", seconds(0), "1", "how long a model that was loaded on demand stays at least"),
    _served("model-overlay", text, "", "YAML file of deployment settings laid over the models' configurations", "FILE"),
    _served("sticky-header", header_name, STICKY_HEADER, "header that keeps a caller with a model's version", "NAME"),
    _served("access-file", text, "", "YAML file of callers: their keys, roles, models and limits", "FILE"),
    *_tls("http", "HTTP"),
    *_tls("grpc", "gRPC"),
    *_tls("metrics", "metrics"),
    _served("log-verbose", integer(0, MOST_VERBOSE), "0", "how much is logged beyond info"),
    _served("log-info", boolean, "true", "log information", "BOOL"),
    _served("log-warning", boolean, "true", "log warnings", "BOOL"),
    _served("log-error", boolean, "true", "log errors", "BOOL"),
    _served("log-format", choice(*LOG_FORMATS), "default", "default, ISO8601 or json", "FORMAT"),
    _served(
        "log-access",
        choice("off", "failures", "all"),
        "off",
        "log a line for each inference request, or for each that failed: off, failures or all",
        "WHICH",
    ),
    _served("log-file", text, "", "log to this file instead of stdout and stderr", "FILE"),
)

_ONE_LOOP = "one event loop serves all connections"
_NO_POOL = "memory is not taken in pools"
_FIXED_DIRECTORY = "parts of the server come from installed packages"

IGNORED = (
    _ignored("http-thread-count", _ONE_LOOP),
    _ignored("grpc-infer-thread-count", _ONE_LOOP),
    _ignored("grpc-infer-allocation-pool-size", _NO_POOL),
    _ignored("grpc-max-response-pool-size", _NO_POOL),
    _ignored("pinned-memory-pool-byte-size", _NO_POOL),
    _ignored("cuda-memory-pool-byte-size", _NO_POOL),
    _ignored("cuda-virtual-address-size", _NO_POOL),
    _ignored("buffer-manager-thread-count", "buffers are copied where they are used"),
    _ignored("min-supported-compute-capability", "a backend's framework decides which GPUs it can use"),
    _ignored("model-load-gpu-limit", "GPU memory is not limited by the server"),
    _ignored("enable-peer-access", "a backend's framework decides about peer access"),
    _ignored("backend-directory", _FIXED_DIRECTORY),
    _ignored("repoagent-directory", _FIXED_DIRECTORY),
    _ignored("cache-directory", _FIXED_DIRECTORY),
    _ignored("sagemaker-port", "there is no SageMaker service"),
    _ignored("sagemaker-safe-port-range", "there is no SageMaker service"),
    _ignored("sagemaker-thread-count", "there is no SageMaker service"),
    _ignored("vertex-ai-port", "there is no Vertex AI service"),
    _ignored("vertex-ai-thread-count", "there is no Vertex AI service"),
    _ignored("vertex-ai-default-model", "there is no Vertex AI service"),
)

REFUSED = (
    _refused("strict-model-config", "false", "use --disable-auto-complete-config"),
    _refused("model-namespacing", "false", "model names must be unique over all repositories"),
    _refused("allow-sagemaker", "false", "there is no SageMaker service"),
    _refused("allow-vertex-ai", "false", "there is no Vertex AI service"),
)

FLAGS: dict[str, Flag] = {flag.name: flag for flag in (*SERVED, *IGNORED, *REFUSED)}

_ALIASES = {"model-store": "model-repository"}


def find_flag(name: str) -> Flag | None:
    """Return the option of this name or alias."""
    return FLAGS.get(_ALIASES.get(name, name))
