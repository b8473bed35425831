"""Which path is which endpoint, as one table. Pure: no request, no regular expression; a path is split once.

The table is also what describes the door: which paths there are, with which methods, of which kind.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from headrace.gateway.version import parse_version
from headrace.types import LATEST
from headrace_protocol.errors import invalid


class Endpoint(enum.Enum):
    """What can be asked for; the value is its kind, by which an operator may restrict it, and its methods."""

    LIVE = ("health", 1, "GET")
    READY = ("health", 2, "GET")
    MODEL_READY = ("health", 3, "GET")
    SERVER_METADATA = ("metadata", 1, "GET")
    MODELS = ("metadata", 2, "GET")
    MODEL_METADATA = ("metadata", 3, "GET")
    OPENAPI = ("metadata", 4, "GET")
    INFER = ("inference", 1, "POST")
    GENERATE = ("inference", 2, "POST")
    GENERATE_STREAM = ("inference", 3, "POST")
    MODEL_CONFIG = ("model-config", 1, "GET")
    STATISTICS = ("statistics", 1, "GET")
    INDEX = ("model-repository", 1, "POST")
    LOAD = ("model-repository", 2, "POST")
    UNLOAD = ("model-repository", 3, "POST")
    SYSTEM_STATUS = ("shared-memory", 1, "GET")
    SYSTEM_REGISTER = ("shared-memory", 2, "POST")
    SYSTEM_UNREGISTER = ("shared-memory", 3, "POST")
    CUDA_STATUS = ("shared-memory", 4, "GET")
    CUDA_REGISTER = ("shared-memory", 5, "POST")
    CUDA_UNREGISTER = ("shared-memory", 6, "POST")
    TRACE = ("trace", 1, "GET", "POST")
    LOGGING = ("logging", 1, "GET", "POST")
    TRAFFIC = ("rollout", 1, "GET", "POST")
    OPENAI_MODELS = ("openai", 1, "GET")
    OPENAI_MODEL = ("openai", 2, "GET")
    COMPLETIONS = ("openai", 3, "POST")
    CHAT_COMPLETIONS = ("openai", 4, "POST")
    EMBEDDINGS = ("openai", 5, "POST")
    RERANK = ("openai", 6, "POST")
    RERANK_V2 = ("openai", 7, "POST")
    SCORE = ("openai", 8, "POST")
    TOKENIZE = ("openai", 9, "POST")
    DETOKENIZE = ("openai", 10, "POST")
    MESSAGES = ("openai", 11, "POST")
    COUNT_TOKENS = ("openai", 12, "POST")
    RESPONSES = ("openai", 13, "POST")
    HEALTH = ("health", 4, "GET")
    VERSION = ("metadata", 5, "GET")
    SERVER_LOAD = ("statistics", 2, "GET")

    def __init__(self, kind: str, _number: int, *methods: str) -> None:
        self.kind = kind
        self.methods = methods
        """Those that do something; HEAD goes with GET, and OPTIONS with every path."""

    @property
    def allowed(self) -> tuple[str, ...]:
        """Every method that is answered, as `Allow` lists them."""
        return ("GET", "HEAD", *self.methods[1:], "OPTIONS") if "GET" in self.methods else (*self.methods, "OPTIONS")


class Route(NamedTuple):
    """What a path names. `repository` and `region` are empty where the path has none."""

    endpoint: Endpoint
    model: str = ""
    version: int = LATEST
    repository: str = ""
    region: str = ""


def _of_model(tail: str, endpoint: Endpoint) -> dict[str, Endpoint]:
    return {f"/v2/models/{{model}}{tail}": endpoint, f"/v2/models/{{model}}/versions/{{version}}{tail}": endpoint}


def _of_memory(name: str, status: Endpoint, register: Endpoint, unregister: Endpoint) -> dict[str, Endpoint]:
    actions = {"status": status, "register": register, "unregister": unregister}
    return {
        f"/v2/{name}{region}/{action}": endpoint
        for action, endpoint in actions.items()
        for region in ("", "/region/{region}")
    }


PATHS: Final[Mapping[str, Endpoint]] = {
    "/v2": Endpoint.SERVER_METADATA,
    "/v2/health/live": Endpoint.LIVE,
    "/v2/health/ready": Endpoint.READY,
    "/v2/models": Endpoint.MODELS,
    "/v2/models/stats": Endpoint.STATISTICS,
    **_of_model("", Endpoint.MODEL_METADATA),
    **_of_model("/ready", Endpoint.MODEL_READY),
    **_of_model("/config", Endpoint.MODEL_CONFIG),
    **_of_model("/stats", Endpoint.STATISTICS),
    **_of_model("/infer", Endpoint.INFER),
    **_of_model("/generate", Endpoint.GENERATE),
    **_of_model("/generate_stream", Endpoint.GENERATE_STREAM),
    "/v2/models/{model}/trace/setting": Endpoint.TRACE,
    "/v2/models/{model}/traffic": Endpoint.TRAFFIC,
    "/v2/repository/index": Endpoint.INDEX,
    "/v2/repository/{repository}/index": Endpoint.INDEX,
    "/v2/repository/models/{model}/load": Endpoint.LOAD,
    "/v2/repository/models/{model}/unload": Endpoint.UNLOAD,
    "/v2/repository/{repository}/models/{model}/load": Endpoint.LOAD,
    "/v2/repository/{repository}/models/{model}/unload": Endpoint.UNLOAD,
    **_of_memory("systemsharedmemory", Endpoint.SYSTEM_STATUS, Endpoint.SYSTEM_REGISTER, Endpoint.SYSTEM_UNREGISTER),
    **_of_memory("cudasharedmemory", Endpoint.CUDA_STATUS, Endpoint.CUDA_REGISTER, Endpoint.CUDA_UNREGISTER),
    "/v2/trace/setting": Endpoint.TRACE,
    "/v2/logging": Endpoint.LOGGING,
    "/openapi.json": Endpoint.OPENAPI,
    "/v1/models": Endpoint.OPENAI_MODELS,
    "/v1/models/{model}": Endpoint.OPENAI_MODEL,
    "/v1/completions": Endpoint.COMPLETIONS,
    "/v1/chat/completions": Endpoint.CHAT_COMPLETIONS,
    "/v1/responses": Endpoint.RESPONSES,
    "/v1/messages": Endpoint.MESSAGES,
    "/v1/messages/count_tokens": Endpoint.COUNT_TOKENS,
    "/health": Endpoint.HEALTH,
    "/version": Endpoint.VERSION,
    "/load": Endpoint.SERVER_LOAD,
    "/v1/embeddings": Endpoint.EMBEDDINGS,
    "/v1/rerank": Endpoint.RERANK,
    "/rerank": Endpoint.RERANK,
    "/v2/rerank": Endpoint.RERANK_V2,
    "/v1/score": Endpoint.SCORE,
    "/score": Endpoint.SCORE,
    "/tokenize": Endpoint.TOKENIZE,
    "/detokenize": Endpoint.DETOKENIZE,
}
"""Every path of the door. A segment in braces stands for any one that is not empty; the first that matches counts."""


_OPENAI_MODEL: Final = "/v1/models/"


class _Template:
    """A path of the table, cut into segments."""

    __slots__ = ("endpoint", "fields", "literals")

    def __init__(self, path: str, endpoint: Endpoint) -> None:
        segments = path.split("/")
        self.endpoint = endpoint
        self.literals = [(at, text) for at, text in enumerate(segments) if not text.startswith("{")]
        self.fields = [(at, text[1:-1]) for at, text in enumerate(segments) if text.startswith("{")]

    def matches(self, segments: list[str]) -> bool:
        return all(segments[at] == text for at, text in self.literals) and all(segments[at] for at, _ in self.fields)

    def route(self, segments: list[str]) -> Route:
        found: dict[str, Any] = {name: decode_segment(segments[at]) for at, name in self.fields}
        if "version" in found:
            found["version"] = parse_version(found["version"])
        return Route(self.endpoint, **found)


_BY_LENGTH: Final[dict[int, list[_Template]]] = {}
for _path, _endpoint in PATHS.items():
    _BY_LENGTH.setdefault(_path.count("/") + 1, []).append(_Template(_path, _endpoint))


def resolve(path: str) -> Route | None:
    """Return what the percent-encoded `path` (without query) names, None for an unknown one.

    Raises InferError INVALID_ARG for a name that is not UTF-8 and for a version that is no number.
    """
    segments = path.split("/")
    for template in _BY_LENGTH.get(len(segments), ()):
        if template.matches(segments):
            return template.route(segments)
    if path.startswith(_OPENAI_MODEL):  # whose names may have slashes in them
        return Route(Endpoint.OPENAI_MODEL, decode_segment(path.removeprefix(_OPENAI_MODEL)))
    return None


def decode_segment(text: str) -> str:
    """Return a path segment with its percent-escapes decoded."""
    if "%" not in text:
        return text
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise invalid(f"path segment {text[:80]!r} is not UTF-8") from None
