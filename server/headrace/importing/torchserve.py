"""What an archive of TorchServe's says, as a model of ours: name, version, batching, instances; and what cannot be. Pure.

Nothing of the archive's code is looked at but the names of the modules that it imports.
"""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from headrace.repository.layout import MAX_VERSION, is_model_name
from headrace_protocol._generated import model_config_pb2 as pb

INPUT: Final = "data"
OUTPUT: Final = "result"
DEFAULT_BATCH_DELAY_MS: Final = 100
"""TorchServe's own."""
MAX_BATCH: Final = 1 << 20
MAX_WORKERS: Final = 256
_NOT_CONVERTED: Final = {
    "parallelType": "a model that is spread over several processes (parallelType)",
    "asyncCommunication": "a handler that answers asynchronously (asyncCommunication)",
    "continuousBatching": "continuous batching (continuousBatching)",
    "sequenceBatching": "stateful sequences (sequenceBatching)",
    "sequenceMaxIdleMSec": "stateful sequences (sequenceMaxIdleMSec)",
}
"""A setting -> what a handler that needs it does. Without it the handler would give other answers, or none."""
_WITHOUT_EFFECT: Final = {
    "responseTimeout": "requests have no time limit of their own here; set dynamic_batching.default_queue_policy, or the "
    "timeout of a request",
    "startupTimeout": "use --model-load-timeout-secs",
    "useVenv": "give the model an environment by the parameter EXECUTION_ENV_PATH",
    "maxWorkers": "the number of instances is fixed: that of minWorkers",
}


class NotImportableError(Exception):
    """A model that cannot be imported; the text says why."""


@dataclass(frozen=True, slots=True)
class ImportedModel:
    """What is to be written."""

    name: str
    version: int
    config: pb.ModelConfig
    notes: tuple[str, ...]
    """Sentences for whoever imports it: what is left to do, what has no effect."""


def plan(
    manifest: object, settings: object, files: Collection[str], *, name: str = "", version: int = 0
) -> ImportedModel:
    """Return the model that an archive makes; `files` are the paths in it, `name` and `version` win over what it says.

    Raises NotImportableError where it cannot be converted.
    """
    described = _described(manifest)
    settings = _settings(settings)
    for key, what in _NOT_CONVERTED.items():
        if settings.get(key):
            raise NotImportableError(f"it asks for {what}, which cannot be converted")
    handler = _text(described, "handler")
    if not handler:
        raise NotImportableError("its manifest names no handler (model.handler)")
    notes = []
    for key in ("serializedFile", "modelFile"):
        file = _text(described, key)
        if file and file.rpartition("/")[2] not in {path.rpartition("/")[2] for path in files}:
            raise NotImportableError(f"its manifest names {file!r} (model.{key}), which is not in it")
    if f"{handler.partition(':')[0].removesuffix('.py')}.py" not in files:
        notes.append(f"the handler {handler!r} comes with TorchServe: install the package torchserve, and torch")
    if _text(described, "requirementsFile"):
        file = _text(described, "requirementsFile")
        notes.append(f"{file} is not installed: install what it lists where the model's processes run")
    for key, text in _WITHOUT_EFFECT.items():
        if key in settings:
            notes.append(f"{key} has no effect: {text}")
    name = name or _text(described, "modelName")
    if not is_model_name(name):
        raise NotImportableError(f"{name!r} cannot be the name of a model: give another one with --name")
    return ImportedModel(
        name, version or _version(_text(described, "modelVersion")), _config(name, settings), tuple(notes)
    )


def imported_modules(sources: Mapping[str, str]) -> list[str]:
    """Return the modules that `sources` (path -> Python text) import, without their own and those of Python itself.

    Only imports at the top of a file count. A source that is no Python imports nothing.
    """
    own = {path.removesuffix(".py").rpartition("/")[2] for path in sources} | {
        path.partition("/")[0] for path in sources if "/" in path
    }
    wanted: set[str] = set()
    for text in sources.values():
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        for node in tree.body:
            if isinstance(node, ast.Import):
                wanted.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                wanted.add(node.module.partition(".")[0])
    return sorted(wanted - own - sys.stdlib_module_names)


def _described(manifest: object) -> Mapping[str, Any]:
    if not isinstance(manifest, dict):
        raise NotImportableError("its manifest is not a JSON object")
    if "workflow" in manifest:
        raise NotImportableError(
            "it is a workflow archive: import the archives of its models, and write an ensemble of them"
        )
    described = manifest.get("model")
    if not isinstance(described, dict):
        raise NotImportableError("its manifest describes no model")
    runtime = manifest.get("runtime", "python")
    if not isinstance(runtime, str) or not runtime.lower().startswith("python"):
        raise NotImportableError(f"its handler runs on {runtime!r}; only those in Python can be converted")
    return described


def _settings(settings: object) -> dict[str, Any]:
    if settings is None:
        return {}
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise NotImportableError("its model-config.yaml does not hold settings by name")
    return settings


def _text(described: Mapping[str, Any], key: str) -> str:
    value = described.get(key, "")
    if not isinstance(value, (str, int, float)) or isinstance(value, bool):
        raise NotImportableError(f"its manifest has no text as model.{key}, but {value!r}")
    return str(value)


def _version(text: str) -> int:
    """Return the version folder for TorchServe's version, which may be any text: the number before the first dot."""
    whole = text.partition(".")[0]
    number = int(whole) if whole.isdecimal() and len(whole) < 20 else 1
    return number if 1 <= number <= MAX_VERSION else 1


def _number(settings: Mapping[str, Any], key: str, default: int, low: int, high: int) -> int:
    value = settings.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise NotImportableError(f"{key} in its model-config.yaml is not a number, but {value!r}")
    if not low <= value <= high:
        raise NotImportableError(f"{key} in its model-config.yaml is {value}, expected {low} to {high}")
    return int(value)


def _config(name: str, settings: Mapping[str, Any]) -> pb.ModelConfig:
    batch = _number(settings, "batchSize", 1, 1, MAX_BATCH)
    config = pb.ModelConfig(name=name, backend="python", max_batch_size=batch)
    config.input.add(name=INPUT, data_type=pb.TYPE_STRING, dims=[1])
    config.output.add(name=OUTPUT, data_type=pb.TYPE_STRING, dims=[1])
    queue = _number(settings, "jobQueueSize", 0, 0, 1 << 31)
    if batch > 1 or queue:
        config.dynamic_batching.SetInParent()
    if batch > 1:
        delay_ms = _number(settings, "maxBatchDelay", DEFAULT_BATCH_DELAY_MS, 0, 24 * 3600 * 1000)
        config.dynamic_batching.max_queue_delay_microseconds = delay_ms * 1000
    if queue:
        config.dynamic_batching.default_queue_policy.max_queue_size = queue
    group = config.instance_group.add(count=_number(settings, "minWorkers", 1, 1, MAX_WORKERS))
    device = settings.get("deviceType", "")
    if device == "cpu":
        group.kind = pb.ModelInstanceGroup.KIND_CPU
    elif device not in ("", "gpu"):
        raise NotImportableError(f"deviceType in its model-config.yaml is {device!r}, expected cpu or gpu")
    devices = settings.get("deviceIds") or []
    if not isinstance(devices, list) or not all(isinstance(gpu, int) and 0 <= gpu < 1024 for gpu in devices):
        raise NotImportableError(f"deviceIds in its model-config.yaml is no list of GPUs, but {devices!r}")
    if devices:
        group.kind = pb.ModelInstanceGroup.KIND_GPU
        group.gpus.extend(devices)
    return config
