"""How a model's configuration becomes ONNX Runtime's settings. Pure: it does not import onnxruntime.

Configuration parameters: intra_op_thread_count, inter_op_thread_count (0 = as many as cores), execution_mode (0
sequential, 1 parallel), enable_mem_arena, enable_mem_pattern, memory.enable_memory_arena_shrinkage, and every
`session.*`, `optimization.*` and `ep.*` key that ONNX Runtime itself knows. --backend-config intra-op-thread-count and
inter-op-thread-count are defaults of the first two. `enable-global-threadpool` needs nothing: a process has one session
and so one pool, which all instances share.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from headrace_backends.api import ModelContext
from headrace_protocol.errors import InferError, invalid, unsupported

CPU: Final = "CPUExecutionProvider"
CUDA: Final = "CUDAExecutionProvider"
TENSORRT: Final = "TensorrtExecutionProvider"
OPENVINO: Final = "OpenVINOExecutionProvider"

ARENA_SHRINKAGE: Final = "memory.enable_memory_arena_shrinkage"
_DEVICES: Final = re.compile(r"(cpu|gpu):\d+(;(cpu|gpu):\d+)*")
_ENTRY_PREFIXES: Final = ("session.", "optimization.", "ep.")
_GRAPH_LEVELS: Final = {
    -1: "ORT_ENABLE_BASIC",
    0: "ORT_ENABLE_ALL",
    1: "ORT_ENABLE_EXTENDED",
    2: "ORT_DISABLE_ALL",
}
_TENSORRT_NAMES: Final = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "max_partition_iterations": "trt_max_partition_iterations",
    "min_subgraph_size": "trt_min_subgraph_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
_TENSORRT_PRECISIONS: Final[dict[str, dict[str, str]]] = {
    "FP32": {},
    "FP16": {"trt_fp16_enable": "True"},
    "INT8": {"trt_int8_enable": "True"},
}

T = TypeVar("T")
Provider = tuple[str, dict[str, str]]


@dataclass(frozen=True, slots=True)
class OnnxOptions:
    """Settings of a session, every value checked."""

    graph_level: str
    """Name of a member of onnxruntime.GraphOptimizationLevel."""
    intra_op_threads: int
    inter_op_threads: int
    parallel: bool
    memory_arena: bool
    memory_pattern: bool
    entries: Mapping[str, str]
    """Session configuration entries."""
    run_entries: Mapping[str, str]
    """Configuration entries of each run."""
    providers: Sequence[Provider]
    """In order of preference, each with its options."""
    op_libraries: tuple[str, ...]
    """Libraries of custom operators, as the configuration names them."""


def parse_options(model: ModelContext, available: Sequence[str]) -> OnnxOptions:
    """Return the settings for `model` where onnxruntime offers the providers `available`.

    Raises InferError INVALID_ARG with every setting that cannot be used, or UNSUPPORTED for a provider that is absent.
    """
    problems: list[str] = []

    def setting(name: str, default: T, parse: Callable[[str], T], backend_name: str = "") -> T:
        value, where = model.parameter(name), f"parameters.{name}"
        if value is None and backend_name in model.backend_config:
            value, where = model.backend_config[backend_name], f"backend config '{backend_name}'"
        if value is None:
            return default
        try:
            return parse(value)
        except ValueError as error:
            problems.append(f"{where}: expected {error}, got '{value}'")
            return default

    parallel = setting("execution_mode", default=False, parse=_execution_mode)
    optimization: dict[str, Any] = model.config.get("optimization") or {}
    level = (optimization.get("graph") or {}).get("level", 0)
    if level not in _GRAPH_LEVELS:
        problems.append(f"optimization.graph.level: expected -1, 0, 1 or 2, got {level}")
    options = OnnxOptions(
        graph_level=_GRAPH_LEVELS.get(level, ""),
        intra_op_threads=setting("intra_op_thread_count", model.threads, _count, "intra-op-thread-count"),
        inter_op_threads=setting(
            "inter_op_thread_count", model.threads if parallel else 1, _count, "inter-op-thread-count"
        ),
        parallel=parallel,
        memory_arena=setting("enable_mem_arena", default=True, parse=_switch),
        memory_pattern=setting("enable_mem_pattern", default=True, parse=_switch),
        entries=_session_entries(model),
        run_entries=setting(ARENA_SHRINKAGE, {}, _arena_shrinkage),
        providers=_providers(model, optimization, available, problems),
        op_libraries=tuple((model.config.get("model_operations") or {}).get("op_library_filename", ())),
    )
    if problems:
        raise invalid(f"model '{model.name}': " + "; ".join(problems))
    return options


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) > 1024:
        raise ValueError("an integer from 0 to 1024")
    return int(text)


def _switch(text: str) -> bool:
    if text.lower() not in {"0", "1", "true", "false"}:
        raise ValueError("0, 1, true or false")
    return text.lower() in {"1", "true"}


def _execution_mode(text: str) -> bool:
    if text not in {"0", "1"}:
        raise ValueError("0 (sequential) or 1 (parallel)")
    return text == "1"


def _session_entries(model: ModelContext) -> dict[str, str]:
    """Return the entries that the model asks for. Spinning is off unless asked for: cores here are shared."""
    entries = {"session.intra_op.allow_spinning": "0", "session.inter_op.allow_spinning": "0"}
    for name in model.config.get("parameters", {}):
        if name.startswith(_ENTRY_PREFIXES):
            entries[name] = model.parameter(name) or ""
    return entries


def _arena_shrinkage(text: str) -> dict[str, str]:
    if not _DEVICES.fullmatch(text):
        raise ValueError("devices like 'cpu:0' or 'gpu:0;gpu:1'")
    return {ARENA_SHRINKAGE: text}


def _providers(
    model: ModelContext, optimization: dict[str, Any], available: Sequence[str], problems: list[str]
) -> list[Provider]:
    """Return the providers for the model's device, the accelerators that it names first."""
    accelerators = optimization.get("execution_accelerators") or {}
    providers: list[Provider] = []
    if model.kind == "KIND_GPU":
        cuda: dict[str, str] = {"device_id": str(model.device)}
        for accelerator in accelerators.get("gpu_execution_accelerator", ()):
            name, parameters = accelerator["name"], accelerator.get("parameters") or {}
            if name == "tensorrt":
                providers.append((TENSORRT, {"device_id": str(model.device), **_tensorrt(parameters, problems)}))
            elif name == "cuda":
                cuda |= parameters
            else:
                problems.append(f"gpu_execution_accelerator: expected 'tensorrt' or 'cuda', got '{name}'")
        providers.append((CUDA, cuda))
    else:
        for accelerator in accelerators.get("cpu_execution_accelerator", ()):
            name = accelerator["name"]
            if name == "openvino":
                providers.append((OPENVINO, dict(accelerator.get("parameters") or {})))
            else:
                problems.append(f"cpu_execution_accelerator: expected 'openvino', got '{name}'")
    for name, _ in providers:
        if name not in available:
            raise _absent(model, name, available)
    return [*providers, (CPU, {})]


def _tensorrt(parameters: Mapping[str, str], problems: list[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for name, value in parameters.items():
        where = f"gpu_execution_accelerator 'tensorrt': parameters.{name}"
        if name == "precision_mode":
            if value not in _TENSORRT_PRECISIONS:
                problems.append(f"{where}: expected FP32, FP16 or INT8, got '{value}'")
            options |= _TENSORRT_PRECISIONS.get(value, {})
        elif name in _TENSORRT_NAMES:
            options[_TENSORRT_NAMES[name]] = value
        elif name.startswith("trt_"):
            options[name] = value
        else:
            problems.append(f"{where}: is not a parameter of this accelerator")
    return options


def _absent(model: ModelContext, provider: str, available: Sequence[str]) -> InferError:
    return unsupported(
        f"model '{model.name}' on {model.kind} needs {provider}, which the installed onnxruntime does not offer; "
        f"it offers {', '.join(available)}"
    )
