"""From a model's directory to its frozen configuration: the steps of the other modules, in order.

    read_config -> draft_config -> (the backend loads and says Ready) -> finish_config

A draft is what the backend is started with: complete but for what only the model can tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headrace.repository.auto_complete import DEFAULT_MAX_BATCH_SIZE, backend_of, check_against_model, complete
from headrace.repository.config_text import MAX_CONFIG_BYTES, ParsedConfig, parse_text
from headrace.repository.freeze import freeze
from headrace.repository.labels import check_label_files
from headrace.repository.model_config import ConfigError, ModelConfig, Problem
from headrace.repository.normalise import NormaliseSettings, normalise
from headrace.repository.overlay import Overlay
from headrace.repository.planning import CHANGED_IN_PLACE
from headrace.repository.proto_json import from_dict, to_dict
from headrace.repository.sequence_validation import check_sequence_tensors, shown_to_clients
from headrace.repository.unsupported import ignored
from headrace.repository.validation import validate
from headrace.repository.warm_up_validation import check_warm_up_files
from headrace_protocol._generated import model_config_pb2 as pb
from headrace_protocol.messages import Ready

CONFIG_FILE: Final = "config.pbtxt"
MAX_SHOWN_PROBLEMS: Final = 100
"""Problems that one ConfigError tells."""
_SCHEDULERS: Final = frozenset({"dynamic_batching", "sequence_batching", "ensemble_scheduling"})


@dataclass(frozen=True, slots=True)
class Completion:
    """The server's settings that shape a configuration."""

    auto_complete: bool = True
    """Whether what the backend finds in the model completes the configuration."""
    default_max_batch_size: int = DEFAULT_MAX_BATCH_SIZE
    """For models that can batch and whose configuration says nothing about it."""
    gpu_count: int = 0
    without_gpu: frozenset[str] = frozenset()
    """Backends that cannot use those GPUs."""

    def gpus_for(self, backend: str) -> int:
        """Return how many GPUs the instances of a backend can be placed on."""
        return 0 if backend in self.without_gpu else self.gpu_count


def config_path(model_directory: Path, config_name: str | None) -> Path | None:
    """Return the configuration file that counts: `configs/<config_name>.pbtxt` if it is there, else config.pbtxt."""
    if config_name:
        if Path(config_name).name != config_name or config_name in (".", "..") or "\0" in config_name:
            raise ConfigError([Problem("", f"the name of a configuration is one path component, got {config_name!r}")])
        custom = model_directory / "configs" / f"{config_name}.pbtxt"
        if custom.is_file():
            return custom
    default = model_directory / CONFIG_FILE
    return default if default.is_file() else None


def read_config(model_directory: Path, config_name: str | None = None, overlay: Overlay | None = None) -> ParsedConfig:
    """Read what the author of the model wrote, changed as the deployment says. Raises ConfigError.

    Where there is no file, the author's configuration is empty.
    """
    parsed = _read_written(model_directory, config_name)
    return parsed if overlay is None else overlay.applied(model_directory.name, parsed)


def _read_written(model_directory: Path, config_name: str | None) -> ParsedConfig:
    path = config_path(model_directory, config_name)
    if path is None:
        return ParsedConfig()
    name = str(path.relative_to(model_directory))
    text = _read_text(path, name)
    try:
        return parse_text(text, name)
    except ConfigError as error:
        raise ConfigError([Problem(f"{name}:{found.path}", found.message) for found in error.problems]) from None


def _read_text(path: Path, name: str) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
        if len(content) > MAX_CONFIG_BYTES:
            raise ConfigError([Problem(name, f"has more than {MAX_CONFIG_BYTES} bytes")])
        return content.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError([Problem(name, f"cannot be read: {error.strerror}")]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([Problem(name, f"is not UTF-8 text: {error.reason} at byte {error.start}")]) from None


def draft_config(
    parsed: ParsedConfig,
    *,
    model_name: str,
    model_directory: Path,
    version_directory: Path | None,
    completion: Completion = Completion(),
) -> ModelConfig:
    """Return the configuration as far as it is known before the model is loaded.

    Backend, defaults, instance groups and everything the author wrote are there and valid; inputs, outputs and
    max_batch_size may still be missing. Raises ConfigError with all problems.
    """
    proto, _ = _with_backend(parsed, version_directory, model_name)
    if not completion.auto_complete and not parsed.source:
        raise ConfigError([Problem("", f"there is no {CONFIG_FILE}, and auto-completion is off")])
    gpus = completion.gpus_for(proto.backend)
    normalise(proto, model_name=model_name, server=NormaliseSettings(gpus))
    problems = validate(proto, model_name=model_name, gpu_count=gpus, draft=completion.auto_complete)
    _raise_if(problems + check_label_files(proto, model_directory) + check_warm_up_files(proto, model_directory))
    return freeze(proto, str(model_directory))


def finish_config(
    parsed: ParsedConfig,
    ready: Ready,
    *,
    model_name: str,
    model_directory: Path,
    version_directory: Path | None,
    completion: Completion = Completion(),
) -> tuple[ModelConfig, list[str]]:
    """Return the final configuration, and notes: sentences on what was completed and which hints are not used.

    `ready` is what the backend found in the model. Raises ConfigError with all problems.
    """
    proto, notes = _with_backend(parsed, version_directory, model_name)
    before = pb.ModelConfig()
    before.CopyFrom(proto)
    problems: list[Problem] = []
    if completion.auto_complete:
        given = set(parsed.written)
        problems += _adopt(proto, given, ready.config or {}, replaces=ready.replaces)
        problems += complete(
            proto,
            *shown_to_clients(proto, ready.inputs, ready.outputs),
            ready.batching,
            default_max_batch_size=completion.default_max_batch_size,
            max_batch_size_given="max_batch_size" in given,
        )
    notes += _completed(before, proto)
    gpus = completion.gpus_for(proto.backend)
    normalise(proto, model_name=model_name, server=NormaliseSettings(gpus))
    problems += validate(proto, model_name=model_name, gpu_count=gpus)
    problems += check_label_files(proto, model_directory)
    problems += check_warm_up_files(proto, model_directory)
    if not problems:
        inputs, _ = shown_to_clients(proto, ready.inputs, ready.outputs)
        problems = check_against_model(proto, inputs, ready.outputs)
        problems += check_sequence_tensors(proto, ready.inputs, ready.outputs)
    _raise_if(problems)
    return freeze(proto, str(model_directory)), notes + ignored(proto)


def with_instances(config: ModelConfig, draft: ModelConfig, model_directory: Path) -> ModelConfig:
    """Return a complete configuration with the instance groups and the version policy of a draft."""
    proto = pb.ModelConfig()
    proto.CopyFrom(config.proto)
    for field in CHANGED_IN_PLACE:
        proto.ClearField(field)
    proto.instance_group.extend(draft.proto.instance_group)
    proto.version_policy.CopyFrom(draft.proto.version_policy)
    return freeze(proto, str(model_directory))


def backend_values(config: ModelConfig) -> dict[str, Any]:
    """Return the configuration as a backend gets it: JSON-ready, the model's directory expanded in `parameters`."""
    values = to_dict(config.proto)
    values["parameters"] = {key: {"string_value": value} for key, value in config.parameters.items()}
    return values


def _with_backend(
    parsed: ParsedConfig, version_directory: Path | None, model_name: str
) -> tuple[pb.ModelConfig, list[str]]:
    """Return a copy of the configuration with backend, platform and file name, and notes on those that were found."""
    proto = pb.ModelConfig()
    proto.CopyFrom(parsed.proto)
    kind = backend_of(proto, version_directory, model_name)
    notes = []
    for name, given, found in (
        ("backend", proto.backend, kind.backend),
        ("platform", proto.platform, kind.platform),
        ("default_model_filename", proto.default_model_filename, kind.filename),
    ):
        if given != found:
            notes.append(f"{name} was completed: {found!r}")
    proto.backend, proto.platform, proto.default_model_filename = kind.backend, kind.platform, kind.filename
    return proto, notes


def _adopt(proto: pb.ModelConfig, given: set[str], values: Mapping[str, Any], *, replaces: bool) -> list[Problem]:
    """Take over top-level fields that the backend proposes and the user did not write; they count as given then.

    With `replaces` also those which the user wrote: the backend has seen and kept to them.
    """
    proposed = pb.ModelConfig()
    problems = [
        Problem(problem.path, f"{problem.message} (from the backend)") for problem in from_dict(values, proposed)
    ]
    # a scheduler that is proposed together with a batch size goes with that batch size
    scheduled = bool(given & _SCHEDULERS) or ("max_batch_size" in values and "max_batch_size" in given)
    for field, _ in proposed.ListFields():
        taken = not replaces and (field.name in given or (field.name in _SCHEDULERS and scheduled))
        if taken or field.name in ("name", "backend", "platform"):
            proposed.ClearField(field.name)
        elif replaces:
            proto.ClearField(field.name)
    if "max_batch_size" in values:
        given.add("max_batch_size")
    proto.MergeFrom(proposed)
    return problems


def _completed(before: pb.ModelConfig, after: pb.ModelConfig) -> list[str]:
    notes = []
    if before.max_batch_size != after.max_batch_size:
        notes.append(f"max_batch_size was completed: {after.max_batch_size}, for the model can batch")
    if not before.HasField("dynamic_batching") and after.HasField("dynamic_batching"):
        notes.append("dynamic_batching was added; write max_batch_size alone to batch without it")
    for name, old, new in (("input", before.input, after.input), ("output", before.output, after.output)):
        if not old and new:
            notes.append(f"{name} was completed from the model: {', '.join(_shown(tensor) for tensor in new)}")
    return notes


def _shown(tensor: pb.ModelInput | pb.ModelOutput) -> str:
    return f"{tensor.name} {pb.DataType.Name(tensor.data_type)} {list(tensor.dims)}"


def _raise_if(problems: list[Problem]) -> None:
    if not problems:
        return
    shown = problems[:MAX_SHOWN_PROBLEMS]
    if len(problems) > len(shown):
        shown.append(Problem("", f"and {len(problems) - len(shown)} problems more"))
    raise ConfigError(shown)
