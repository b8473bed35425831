"""An ensemble as its own configuration describes it: steps, tensors between them, and what is wrong with them. Pure.

What its members say to that, which are other models, is checked in scheduling/ensemble_members.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from headrace.repository.model_config import Problem
from headrace.types import LATEST
from headrace_protocol._generated import model_config_pb2 as pb

MAX_STEPS: Final = 256
MAX_RETRIES: Final = 100
MAX_TIMEOUT_MS: Final = 7 * 24 * 3600 * 1000
_STEP_PARAMETER: Final = re.compile(r"step\.(\d{1,9})\.(timeout_ms|retries)")
_PATH: Final = "ensemble_scheduling.step"
_NOT_FOR_ENSEMBLES: Final = {
    "instance_group": "an ensemble has no instances: its members have",
    "optimization": "an ensemble runs nothing itself: this belongs to its members",
    "model_warmup": "an ensemble is not warmed up: its members are",
    "batch_input": "an ensemble forms no batches: its members do",
    "batch_output": "an ensemble forms no batches: its members do",
    "model_operations": "an ensemble runs nothing itself: this belongs to its members",
}


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    """One call of a member, for each request or for each response of the decoupled member before it."""

    model_name: str
    model_version: int
    """LATEST = the highest that serves."""
    inputs: Mapping[str, str]
    """Input of the member -> tensor of the ensemble."""
    outputs: Mapping[str, str]
    """Output of the member -> tensor of the ensemble; others are not asked for."""
    timeout_ms: int = 0
    """How long the member may take to its (next) response; 0 = any time."""
    retries: int = 0
    """How often it is asked again after a failure that may pass."""


@dataclass(frozen=True, slots=True)
class Ensemble:
    """The steps of an ensemble, in the order in which they are written."""

    steps: tuple[EnsembleStep, ...]
    max_inflight_requests: int = 0
    """Requests of one step under way for one request of the ensemble, at most; 0 = no limit of its own."""


def ensemble_of(proto: pb.ModelConfig) -> Ensemble:
    """Return the steps of a valid configuration."""
    settings, _ = _settings(proto)
    steps = [
        EnsembleStep(
            step.model_name,
            step.model_version if step.model_version > 0 else LATEST,
            dict(sorted(step.input_map.items())),
            dict(sorted(step.output_map.items())),
            settings.get((index, "timeout_ms"), 0),
            settings.get((index, "retries"), 0),
        )
        for index, step in enumerate(proto.ensemble_scheduling.step)
    ]
    return Ensemble(tuple(steps), proto.ensemble_scheduling.max_inflight_requests)


def validate_ensemble(proto: pb.ModelConfig) -> list[Problem]:
    """Return everything wrong with an ensemble that its own configuration shows."""
    set_here = {field.name for field, _ in proto.ListFields()}
    problems = [Problem(name, text) for name, text in _NOT_FOR_ENSEMBLES.items() if name in set_here]
    steps = proto.ensemble_scheduling.step
    if not steps:
        problems.append(Problem(_PATH, "an ensemble has at least one step"))
    elif len(steps) > MAX_STEPS:
        problems.append(Problem(_PATH, f"expected at most {MAX_STEPS} steps, got {len(steps)}"))
        return problems
    if not proto.input:
        problems.append(Problem("input", "an ensemble names its inputs itself: expected at least one"))
    for index, step in enumerate(steps):
        problems += _step(step, f"{_PATH}[{index}]")
    problems += _settings(proto)[1]
    return problems or _connections(proto)


def _step(step: pb.ModelEnsembling.Step, path: str) -> Iterator[Problem]:
    if not step.model_name:
        yield Problem(f"{path}.model_name", "missing: a step names the model that it calls")
    if step.model_version < LATEST:
        text = f"expected the number of a version, or -1 for the latest, got {step.model_version}"
        yield Problem(f"{path}.model_version", text)
    if step.model_namespace:
        yield Problem(f"{path}.model_namespace", f"models have no namespaces here, got {step.model_namespace!r}")
    for name, mapping in (("input_map", step.input_map), ("output_map", step.output_map)):
        if not mapping:
            yield Problem(f"{path}.{name}", f"missing: it maps {name[:-4]}s of {step.model_name!r} to tensors")
        for key, value in sorted(mapping.items()):
            if not key or not value:
                yield Problem(f"{path}.{name}", f"expected two names, got key {key!r} and value {value!r}")


def _settings(proto: pb.ModelConfig) -> tuple[dict[tuple[int, str], int], list[Problem]]:
    """Return the `step.<i>.<setting>` parameters by step and setting, and what is wrong with them."""
    found: dict[tuple[int, str], int] = {}
    problems = []
    limits = {"timeout_ms": MAX_TIMEOUT_MS, "retries": MAX_RETRIES}
    for key, parameter in sorted(proto.parameters.items()):
        if not key.startswith("step."):
            continue
        match = _STEP_PARAMETER.fullmatch(key)
        path = f"parameters.{key}"
        if match is None:
            problems.append(Problem(path, "expected step.<number>.timeout_ms or step.<number>.retries"))
            continue
        index, setting = int(match[1]), match[2]
        text, steps = parameter.string_value, len(proto.ensemble_scheduling.step)
        if index >= steps:
            problems.append(Problem(path, f"there is no step {index}: the ensemble has {steps}, counted from 0"))
        elif not (text.isascii() and text.isdecimal() and len(text) < 12 and int(text) <= limits[setting]):
            problems.append(Problem(path, f"expected an integer from 0 to {limits[setting]}, got {text!r}"))
        else:
            found[index, setting] = int(text)
    return found, problems


def _connections(proto: pb.ModelConfig) -> list[Problem]:
    """Check that every tensor has one origin and some use, and that no steps wait for each other."""
    writers, problems = _writers(proto)
    readers: dict[str, list[int]] = {}
    steps = proto.ensemble_scheduling.step
    inputs = {tensor.name for tensor in proto.input}
    outputs = {tensor.name for tensor in proto.output}
    for index, step in enumerate(steps):
        for key, tensor in sorted(step.input_map.items()):
            readers.setdefault(tensor, []).append(index)
            if tensor not in writers and tensor not in inputs:
                text = f"no step writes tensor {tensor!r}, and it is no input of the ensemble"
                problems.append(Problem(f"{_PATH}[{index}].input_map.{key}", text))
    for index, given in enumerate(proto.input):
        if given.name not in readers:
            problems.append(Problem(f"input[{index}]", f"{given.name!r} is read by no step"))
    for index, wanted in enumerate(proto.output):
        if wanted.name not in writers:
            problems.append(Problem(f"output[{index}]", f"{wanted.name!r} is written by no step"))
    for tensor, index in sorted(writers.items()):
        if tensor not in readers and tensor not in outputs:
            text = f"tensor {tensor!r} is read by no step and is no output of the ensemble: leave it out"
            problems.append(Problem(f"{_PATH}[{index}].output_map", text))
    return problems or _circles(proto, writers)


def _writers(proto: pb.ModelConfig) -> tuple[dict[str, int], list[Problem]]:
    writers: dict[str, int] = {}
    problems = []
    inputs = {tensor.name for tensor in proto.input}
    for index, step in enumerate(proto.ensemble_scheduling.step):
        for key, tensor in sorted(step.output_map.items()):
            path = f"{_PATH}[{index}].output_map.{key}"
            if tensor in inputs:
                problems.append(Problem(path, f"tensor {tensor!r} is an input of the ensemble, which no step writes"))
            elif tensor in writers:
                problems.append(Problem(path, f"tensor {tensor!r} is written by step {writers[tensor]} already"))
            else:
                writers[tensor] = index
    return writers, problems


def _circles(proto: pb.ModelConfig, writers: Mapping[str, int]) -> list[Problem]:
    steps = proto.ensemble_scheduling.step
    before = [{writers[t] for t in step.input_map.values() if t in writers} for step in steps]
    done: set[int] = set()
    while ready := [i for i in range(len(steps)) if i not in done and before[i] <= done]:
        done.update(ready)
    stuck = [index for index in range(len(steps)) if index not in done]
    if not stuck:
        return []
    names = ", ".join(f"{index} ({steps[index].model_name})" for index in stuck)
    return [Problem(_PATH, f"circular: these steps wait for each other's tensors: {names}")]
