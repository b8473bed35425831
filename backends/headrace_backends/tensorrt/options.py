"""How a model's configuration becomes settings of its engine. Pure: it does not import tensorrt.

Used of `optimization`: `priority` (of streams), `cuda.graphs`, `cuda.graph_spec`, `cuda.busy_wait_events`,
`cuda.output_copy_stream`, `input_pinned_memory`, `output_pinned_memory`. Of instance groups: `profile` and
`secondary_devices` of KIND_NVDLA. Parameter: execution_context_allocation_strategy. --backend-config: plugins,
version-compatible; `execution-policy` and `coalesce-request-input` need nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from headrace_backends.api import ModelContext
from headrace_protocol.errors import invalid

DEFAULT_FILE: Final = "model.plan"
_STRATEGY: Final = "execution_context_allocation_strategy"
_STRATEGIES: Final = ("STATIC", "ON_PROFILE_CHANGE")
_DLA: Final = "KIND_NVDLA"


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """Sizes to capture a CUDA graph for when the model is loaded."""

    batch_size: int
    """0 where the model does not batch."""
    dims: Mapping[str, tuple[int, ...]]
    """Of inputs, without the batch dimension."""
    lower_batch: int | None = None
    """The smallest batch that may run in it; None = only one of exactly this size."""


@dataclass(frozen=True, slots=True)
class InstanceOptions:
    """What one instance uses."""

    name: str
    profiles: tuple[int, ...] = ()
    """Numbers of optimization profiles, none twice; empty = all of the engine's."""
    dla_core: int | None = None


@dataclass(frozen=True, slots=True)
class TensorRtOptions:
    """Settings of a model, every value checked as far as that can be done without its engine."""

    filename: str
    by_capability: Mapping[str, str]
    """Other files for GPUs of some compute capability, by its text, as 8.0."""
    instances: tuple[InstanceOptions, ...]
    """In the order of the instances of this process."""
    groups: tuple[InstanceOptions, ...] = ()
    """One for each instance group, also those whose instances other processes serve."""
    version_compatible: bool = False
    """Whether code that is in an engine may run, which engines for other versions need."""
    plugins: tuple[str, ...] = ()
    priority: str = "PRIORITY_DEFAULT"
    graphs: bool = False
    graph_specs: tuple[GraphSpec, ...] = ()
    busy_wait: bool = False
    output_copy_stream: bool = False
    pinned_input: bool = True
    pinned_output: bool = True
    memory_on_profile_change: bool = False
    """Whether an instance holds memory for the profiles that it has used, rather than for all of its profiles."""


def parse_options(model: ModelContext) -> TensorRtOptions:
    """Return the settings of `model`. Raises INVALID_ARG with everything that cannot be used."""
    problems: list[str] = []
    optimization: Mapping[str, Any] = model.config.get("optimization") or {}
    cuda: Mapping[str, Any] = optimization.get("cuda") or {}
    specs = tuple(
        spec
        for index, value in enumerate(cuda.get("graph_spec", ()))
        if (spec := _graph_spec(value, f"optimization.cuda.graph_spec[{index}]", model, problems)) is not None
    )
    strategy = model.parameter(_STRATEGY) or _STRATEGIES[0]
    if strategy not in _STRATEGIES:
        problems.append(f"parameters.{_STRATEGY}: expected {' or '.join(_STRATEGIES)}, got '{strategy}'")
    groups, by_name = _instances(model, problems)
    options = TensorRtOptions(
        filename=model.config.get("default_model_filename") or DEFAULT_FILE,
        by_capability=dict(model.config.get("cc_model_filenames") or {}),
        instances=tuple(by_name.get(name) or InstanceOptions(name) for name in model.instances),
        groups=groups,
        version_compatible=_switch(model.backend_config, "version-compatible", problems),
        plugins=tuple(path for path in model.backend_config.get("plugins", "").split(";") if path),
        priority=optimization.get("priority", "PRIORITY_DEFAULT"),
        graphs=bool(cuda.get("graphs", False)),
        graph_specs=specs,
        busy_wait=bool(cuda.get("busy_wait_events", False)),
        output_copy_stream=bool(cuda.get("output_copy_stream", False)),
        pinned_input=_pinned(optimization, "input_pinned_memory"),
        pinned_output=_pinned(optimization, "output_pinned_memory"),
        memory_on_profile_change=strategy == _STRATEGIES[1],
    )
    if problems:
        raise invalid(f"model '{model.name}': " + "; ".join(problems))
    return options


def _pinned(optimization: Mapping[str, Any], name: str) -> bool:
    return bool((optimization.get(name) or {}).get("enable", True))


def _switch(settings: Mapping[str, str], name: str, problems: list[str]) -> bool:
    text = settings.get(name, "false").lower()
    if text not in {"true", "false", "1", "0"}:
        problems.append(f"backend config '{name}': expected true or false, got '{text}'")
    return text in {"true", "1"}


def _instances(
    model: ModelContext, problems: list[str]
) -> tuple[tuple[InstanceOptions, ...], dict[str, InstanceOptions]]:
    """Return the options of each group, and of each instance by its name, `<group>_<number>`."""
    groups: list[InstanceOptions] = []
    by_name: dict[str, InstanceOptions] = {}
    for index, group in enumerate(model.config.get("instance_group", ())):
        path = f"instance_group[{index}]"
        profiles = _profiles(group.get("profile", ()), path, problems)
        core = _dla_core(group.get("secondary_devices", ()), path, problems)
        groups.append(InstanceOptions(group["name"], profiles, core))
        for number in range(group.get("count", 1)):
            name = f"{group['name']}_{number}"
            by_name[name] = InstanceOptions(name, profiles, core)
    return tuple(groups), by_name


def _profiles(texts: Sequence[str], path: str, problems: list[str]) -> tuple[int, ...]:
    numbers: dict[int, None] = {}
    for place, text in enumerate(texts):
        if text.isascii() and text.isdecimal():
            numbers[int(text)] = None
        else:
            problems.append(f"{path}.profile[{place}]: expected the number of a profile, got '{text}'")
    return tuple(numbers)


def _dla_core(devices: Sequence[Mapping[str, Any]], path: str, problems: list[str]) -> int | None:
    for place, device in enumerate(devices):
        if place or device.get("kind", _DLA) != _DLA:
            problems.append(f"{path}.secondary_devices: expected one device of {_DLA} at most")
    return int(devices[0].get("device_id", 0)) if devices else None


def _graph_spec(value: Mapping[str, Any], path: str, model: ModelContext, problems: list[str]) -> GraphSpec | None:
    before = len(problems)
    batches = model.config.get("max_batch_size", 0) > 0
    batch = value.get("batch_size", 0)
    if batch < 0 or (batch and not batches) or batch > max(0, model.config.get("max_batch_size", 0)):
        limit = model.config.get("max_batch_size", 0)
        if batch < 0 or batches:
            problems.append(f"{path}.batch_size: expected 1 to max_batch_size = {limit}, got {batch}")
    dims = _shapes(value.get("input") or {}, f"{path}.input", problems)
    lower: int | None = None
    bound = value.get("graph_lower_bound")
    if bound is not None:
        lower = bound.get("batch_size", 0)
        if not 0 < lower <= batch:
            problems.append(f"{path}.graph_lower_bound.batch_size: expected 1 to {batch}, got {lower}")
        lower_dims = _shapes(bound.get("input") or {}, f"{path}.graph_lower_bound.input", problems)
        if any(shape != dims.get(name, shape) for name, shape in lower_dims.items()):
            text = "only the batch may be smaller than the graph's: expected the dims of the graph itself"
            problems.append(f"{path}.graph_lower_bound.input: {text}")
    return GraphSpec(batch, dims, lower) if len(problems) == before else None


def _shapes(values: Mapping[str, Any], path: str, problems: list[str]) -> dict[str, tuple[int, ...]]:
    shapes = {name: tuple(int(dim) for dim in shape.get("dim", ())) for name, shape in values.items()}
    for name, shape in shapes.items():
        if any(dim < 1 for dim in shape):
            problems.append(f"{path}.{name}: expected dims >= 1, got {list(shape)}")
    return shapes
