"""What is known of models that need not be in memory: read from their folders, without loading them. Blocking."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from headrace.repository.auto_complete import backend_of
from headrace.repository.config_loading import read_config
from headrace.repository.config_text import ParsedConfig
from headrace.repository.layout import ModelLayout
from headrace.repository.model_config import ConfigError, Problem
from headrace.repository.overlay import Overlay
from headrace.repository.planning import choose_versions, members_of
from headrace.types import ModelMetadata
from headrace_protocol._generated import model_config_pb2 as pb

PINNED: Final = "pinned"
"""The parameter of a configuration by which a model stays in memory."""
MEMORY_BYTES: Final = "memory_bytes"
"""The parameter that says what it takes, while nobody has measured it."""
_WORDS: Final = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, slots=True)
class Entry:
    """A model of the repositories."""

    layout: ModelLayout
    backend: str = ""
    """"" = it has none, being an ensemble, or nothing tells."""
    versions: tuple[int, ...] = ()
    """Those that its policy chooses, lowest first."""
    file_bytes: int = 0
    """Of those versions."""
    memory_bytes: int | None = None
    """What its configuration says that it takes."""
    pinned: bool = False
    members: frozenset[str] = frozenset()
    decoupled: bool = False
    timeout_ns: int = 0
    """How long its queue policy lets requests wait; 0 = for ever."""
    problem: str = ""
    """Why it cannot be loaded, as far as that is known."""


class Known:
    """What a model told of itself when it was last in memory."""

    __slots__ = ("config", "decoupled", "metadata")

    def __init__(self, metadata: ModelMetadata, config: pb.ModelConfig, *, decoupled: bool) -> None:
        self.metadata = metadata
        self.config = config
        self.decoupled = decoupled


def study(layout: ModelLayout, config_name: str | None, overlay: Overlay | None, pins: Iterable[str]) -> Entry:
    """Return what a model's folder tells; `pins` are the patterns of names that are pinned."""
    pinned = any(fnmatchcase(layout.name, pattern) for pattern in pins)
    if layout.problem:
        return Entry(layout, pinned=pinned, problem=layout.problem)
    try:
        config = read_config(layout.directory, config_name, overlay)
        says, memory_bytes = _parameters(config)
    except ConfigError as error:
        return Entry(layout, pinned=pinned, problem=str(error))
    chosen = choose_versions(config.proto.version_policy, layout.versions).versions
    members = members_of(config.proto)
    batching = config.proto.dynamic_batching.default_queue_policy
    return Entry(
        layout,
        backend="" if members else _backend(config.proto, layout, chosen),
        versions=chosen,
        file_bytes=sum(_bytes_below(layout.versions[version]) for version in chosen),
        memory_bytes=memory_bytes,
        pinned=pinned or says,
        members=members,
        decoupled=config.proto.model_transaction_policy.decoupled,
        timeout_ns=batching.default_timeout_microseconds * 1000,
    )


def _parameters(config: ParsedConfig) -> tuple[bool, int | None]:
    """Return whether a configuration pins its model, and the bytes that it gives. Raises ConfigError."""
    parameters = config.proto.parameters
    pinned, memory_bytes = False, None
    if PINNED in parameters:
        found = _WORDS.get(parameters[PINNED].string_value.strip().lower())
        if found is None:
            raise ConfigError(
                [Problem(f"parameters.{PINNED}", f"expected true or false, got {_text(config, PINNED)!r}")]
            )
        pinned = found
    if MEMORY_BYTES in parameters:
        text = _text(config, MEMORY_BYTES)
        if not text.isdecimal():
            raise ConfigError([Problem(f"parameters.{MEMORY_BYTES}", f"expected a number of bytes, got {text!r}")])
        memory_bytes = int(text)
    return pinned, memory_bytes


def _text(config: ParsedConfig, name: str) -> str:
    return config.proto.parameters[name].string_value.strip()[:100]


def _backend(proto: pb.ModelConfig, layout: ModelLayout, versions: Iterable[int]) -> str:
    for version in versions:
        try:
            return backend_of(proto, layout.versions[version], layout.name).backend
        except ConfigError:
            break
    return proto.backend


def _bytes_below(folder: Path) -> int:
    total = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(directory, name)).st_size  # noqa: PTH116, PTH118 - thousands of files
            except OSError:
                continue  # it went while we looked
    return total
