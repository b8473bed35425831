"""Which path is which endpoint. Pure: no request, no regular expression, one dictionary look-up or one split a path."""

from __future__ import annotations

import enum
from typing import Final, NamedTuple
from urllib.parse import unquote

from headrace.gateway.version import parse_version
from headrace.types import LATEST
from headrace_protocol.errors import invalid


class Endpoint(enum.Enum):
    """What can be asked for; the value is the methods allowed."""

    SERVER_METADATA = (1, "GET")
    LIVE = (2, "GET")
    READY = (3, "GET")
    MODELS = (4, "GET")
    MODEL_METADATA = (5, "GET")
    MODEL_READY = (6, "GET")
    MODEL_CONFIG = (7, "GET")
    STATISTICS = (8, "GET")
    INFER = (9, "POST")
    INDEX = (10, "POST")
    LOAD = (11, "POST")
    UNLOAD = (12, "POST")
    NOT_SERVED = (13, "GET", "POST")
    """A known extension that this server does not have yet."""

    def __init__(self, _number: int, *methods: str) -> None:
        self.methods = methods


class Route(NamedTuple):
    """What a path names. `repository` is the {repo} segment of the repository API, empty where it has none."""

    endpoint: Endpoint
    model: str = ""
    version: int = LATEST
    repository: str = ""


_FIXED: Final = {
    "/v2": Route(Endpoint.SERVER_METADATA),
    "/v2/health/live": Route(Endpoint.LIVE),
    "/v2/health/ready": Route(Endpoint.READY),
    "/v2/models": Route(Endpoint.MODELS),
    "/v2/models/stats": Route(Endpoint.STATISTICS),
    "/v2/repository/index": Route(Endpoint.INDEX),
    "/v2/trace/setting": Route(Endpoint.NOT_SERVED),
    "/v2/logging": Route(Endpoint.NOT_SERVED),
}
_OF_MODEL: Final = {
    "infer": Endpoint.INFER,
    "ready": Endpoint.MODEL_READY,
    "config": Endpoint.MODEL_CONFIG,
    "stats": Endpoint.STATISTICS,
    "generate": Endpoint.NOT_SERVED,
    "generate_stream": Endpoint.NOT_SERVED,
}
_OF_REPOSITORY: Final = {"load": Endpoint.LOAD, "unload": Endpoint.UNLOAD}
_MEMORY_ACTIONS: Final = ("status", "register", "unregister")


def resolve(path: str) -> Route | None:
    """Return what the percent-encoded `path` (without query) names, None for an unknown one.

    Raises InferError INVALID_ARG for a model name that is not UTF-8 and for a version that is no number.
    """
    fixed = _FIXED.get(path)
    if fixed is not None:
        return fixed
    match path.split("/"):
        case ["", "v2", "models", model, *rest] if model:
            return _model_route(model, rest)
        case ["", "v2", "repository", *rest]:
            return _repository_route(rest)
        case ["", "v2", "systemsharedmemory" | "cudasharedmemory", *rest]:
            return _memory_route(rest)
    return None


def _model_route(model: str, rest: list[str]) -> Route | None:
    version = LATEST
    if rest and rest[0] == "versions":
        if len(rest) < 2 or not rest[1]:
            return None
        version = parse_version(decode_segment(rest[1]))
        rest = rest[2:]
    name = decode_segment(model)
    if not rest:
        return Route(Endpoint.MODEL_METADATA, name, version)
    if len(rest) == 1:
        endpoint = _OF_MODEL.get(rest[0])
        return None if endpoint is None else Route(endpoint, name, version)
    return Route(Endpoint.NOT_SERVED, name) if rest == ["trace", "setting"] and version == LATEST else None


def _repository_route(rest: list[str]) -> Route | None:
    match rest:
        case [repository, "index"] if repository:
            return Route(Endpoint.INDEX, repository=decode_segment(repository))
        case ["models", model, "load" | "unload" as action] if model:
            return Route(_OF_REPOSITORY[action], decode_segment(model))
        case [repository, "models", model, "load" | "unload" as action] if repository and model:
            return Route(_OF_REPOSITORY[action], decode_segment(model), repository=decode_segment(repository))
    return None


def _memory_route(rest: list[str]) -> Route | None:
    if len(rest) == 3 and rest[0] == "region" and rest[1]:
        rest = rest[2:]
    return Route(Endpoint.NOT_SERVED) if len(rest) == 1 and rest[0] in _MEMORY_ACTIONS else None


def decode_segment(text: str) -> str:
    """Return a path segment with its percent-escapes decoded."""
    if "%" not in text:
        return text
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise invalid(f"path segment {text[:80]!r} is not UTF-8") from None
