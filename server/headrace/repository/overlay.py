"""Overlay: what a deployment says about models apart from their repository, laid over their configurations as they are read.

A YAML file, read once at the start. Pure but for that. The repository's files are never touched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from headrace.repository.config_text import ParsedConfig
from headrace.repository.model_config import ConfigError, Problem
from headrace.repository.planning import TRAFFIC
from headrace.repository.proto_json import from_dict
from headrace.rollout.policy import parse_policy
from headrace_protocol._generated import model_config_pb2 as pb

MAX_OVERLAY_BYTES: Final = 4 << 20
FIELDS: Final = ("instance_group", "max_batch_size", "dynamic_batching", "version_policy", "response_cache")
"""Fields of a configuration that an overlay may set; each takes the place of the whole field."""
_PARAMETERS: Final = "parameters"
_KNOWN: Final = (*FIELDS, _PARAMETERS, TRAFFIC)


@dataclass(frozen=True, slots=True)
class _Entry:
    """What is said of the models whose names fit a pattern."""

    pattern: str
    proto: pb.ModelConfig
    named: tuple[str, ...]
    """Fields that are set, or with null taken away."""
    parameters: Mapping[str, str | None]
    """None = taken away."""


@dataclass(frozen=True, slots=True)
class Overlay:
    """The entries, in order: of several that set one field, the last one counts."""

    entries: tuple[_Entry, ...]

    def applied(self, name: str, config: ParsedConfig) -> ParsedConfig:
        """Return a model's configuration with what is said of the model laid over it."""
        entries = [entry for entry in self.entries if fnmatchcase(name, entry.pattern)]
        if not entries:
            return config
        proto = pb.ModelConfig()
        proto.CopyFrom(config.proto)
        written = set(config.written)
        for entry in entries:
            _lay(entry, proto, written)
        return replace(config, proto=proto, written=frozenset(written))


def _lay(entry: _Entry, proto: pb.ModelConfig, written: set[str]) -> None:
    given = {field.name for field, _ in entry.proto.ListFields()}
    for name in entry.named:
        proto.ClearField(name)
        written.discard(name)
        if name in given or name == "max_batch_size":
            written.add(name)
    proto.MergeFrom(entry.proto)
    for key, value in entry.parameters.items():
        if value is None:
            proto.parameters.pop(key, None)
        else:
            proto.parameters[key].string_value = value
    if proto.parameters:
        written.add(_PARAMETERS)


def read_overlay(path: Path) -> Overlay:
    """Return the overlay that a file holds. Raises ConfigError with every problem; paths begin with `models`."""
    import yaml  # not needed by who has no overlay

    try:
        with path.open("rb") as file:
            text = file.read(MAX_OVERLAY_BYTES + 1)
    except OSError as error:
        raise ConfigError([Problem(str(path), f"cannot be read: {error.strerror}")]) from None
    if len(text) > MAX_OVERLAY_BYTES:
        raise ConfigError([Problem(str(path), f"has more than {MAX_OVERLAY_BYTES} bytes")])
    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError([Problem(str(path), f"is no YAML: {' '.join(str(error).split())}")]) from None
    return parse_overlay(document)


def parse_overlay(document: object) -> Overlay:
    """Return the overlay that JSON-ready values say. Raises ConfigError."""
    problems: list[Problem] = []
    if not isinstance(document, dict) or not isinstance(document.get("models", {}), dict):
        raise ConfigError([Problem("models", "expected names or patterns of models, each with its settings")])
    problems += [Problem(str(key), "is unknown; there is models") for key in document if key != "models"]
    entries = [_entry(str(name), values, problems) for name, values in (document.get("models") or {}).items()]
    if problems:
        raise ConfigError(problems)
    return Overlay(tuple(entries))


def _entry(pattern: str, values: object, problems: list[Problem]) -> _Entry:
    path = f"models.{pattern}"
    if not isinstance(values, dict):
        problems.append(Problem(path, f"expected settings, got {type(values).__name__}"))
        values = {}
    there_are = f"is unknown; there are {', '.join(_KNOWN)}"
    problems += [Problem(f"{path}.{key}", there_are) for key in values if key not in _KNOWN]
    proto = pb.ModelConfig()
    fields = {name: values[name] for name in FIELDS if name in values}
    problems += [Problem(f"{path}.{found.path}", found.message) for found in from_dict(fields, proto)]
    parameters = _parameters(values.get(_PARAMETERS) or {}, f"{path}.{_PARAMETERS}", problems)
    if TRAFFIC in parameters:
        problems.append(
            Problem(f"{path}.{_PARAMETERS}.{TRAFFIC}", f"is written beside {_PARAMETERS}: {path}.{TRAFFIC}")
        )
    if TRAFFIC in values:
        parameters[TRAFFIC] = _traffic(values[TRAFFIC], f"{path}.{TRAFFIC}", problems)
    return _Entry(pattern, proto, tuple(fields), parameters)


def _parameters(given: object, path: str, problems: list[Problem]) -> dict[str, str | None]:
    if not isinstance(given, dict):
        problems.append(Problem(path, f"expected keys with values, got {type(given).__name__}"))
        return {}
    found: dict[str, str | None] = {}
    for key, value in given.items():
        if value is None or isinstance(value, str):
            found[str(key)] = value
        elif isinstance(value, bool):
            found[str(key)] = "true" if value else "false"
        elif isinstance(value, int | float):
            found[str(key)] = str(value)
        else:
            problems.append(
                Problem(f"{path}.{key}", f"expected text, a number or a boolean, got {type(value).__name__}")
            )
    return found


def _traffic(given: Any, path: str, problems: list[Problem]) -> str | None:
    if given is None:
        return None
    document = _with_text_keys(given)
    try:
        parse_policy(document, path)
    except ConfigError as error:
        problems += error.problems
    return json.dumps(document, default=str)


def _with_text_keys(given: Any) -> Any:
    """Return a policy whose versions are text: YAML reads them as numbers."""
    if isinstance(given, dict) and isinstance(given.get("weights"), dict):
        return {**given, "weights": {str(version): weight for version, weight in given["weights"].items()}}
    return given
