"""An ensemble held against its members: do names, datatypes and shapes fit, what is decoupled, and the plan that follows.

Pure: members are their configurations. Shapes are compared with the batch dimension in them, as requests carry them, so
that models that batch and models that do not may share an ensemble where their shapes agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from headrace.repository.ensemble_config import Ensemble, EnsembleStep
from headrace.repository.model_config import ModelConfig, Problem, TensorConfig
from headrace.scheduling.ensemble_plan import ROOT, EnsembleOutput, EnsemblePlan, PlannedStep, StepInput, StepOutput
from headrace_protocol.datatype import DataType

MAX_DEPTH: Final = 16
"""Ensembles within ensembles, this one included."""
_WRITTEN: Final = "ensemble_scheduling.step"


@dataclass(frozen=True, slots=True)
class Member:
    """What an ensemble must know of a model that is its member."""

    config: ModelConfig
    depth: int = 0
    """Ensembles within it, itself included; 0 = it is none."""
    decoupled_models: frozenset[str] = frozenset()
    """Decoupled models that run for it, by name."""
    takes_sequences: bool = False
    """Whether it, or a model that runs for it, remembers earlier requests."""


class _Declared(NamedTuple):
    """What one place says of a tensor."""

    datatype: DataType
    dims: tuple[int, ...]
    who: str


class _Checker:
    def __init__(self, config: ModelConfig, ensemble: Ensemble, members: Sequence[Member]) -> None:
        self.config = config
        self.ensemble = ensemble
        self.members = members
        self.problems: list[Problem] = []
        self.numbers: dict[str, int] = {}
        self.declared: dict[str, list[_Declared]] = {}
        self.homes: dict[str, int] = {}
        self.within: dict[int, frozenset[str]] = {ROOT: frozenset()}
        """For each scope, the decoupled models that must go on for it to go on."""

    def note(self, path: str, text: str) -> None:
        self.problems.append(Problem(path, text))

    def declare(self, path: str, tensor: str, declared: _Declared) -> None:
        """Hold what a place says of a tensor against what others said before."""
        self.numbers.setdefault(tensor, len(self.numbers))
        for other in self.declared.setdefault(tensor, []):
            if other.datatype is not declared.datatype:
                said = f"{other.who} says {other.datatype.name}, {declared.who} says {declared.datatype.name}"
                self.note(path, f"inconsistent datatype of tensor {tensor!r}: {said}")
                return
            if not _agree(other.dims, declared.dims):
                said = f"{other.who} says {list(other.dims)}, {declared.who} says {list(declared.dims)}"
                self.note(path, f"inconsistent shape of tensor {tensor!r}: {said} (batch dimension included)")
                return
        self.declared[tensor].append(declared)

    def own_tensors(self) -> None:
        batches = self.config.max_batch_size > 0
        for kind, tensors in (("input", self.config.inputs), ("output", self.config.outputs)):
            for index, tensor in enumerate(tensors):
                dims = tensor.dims if tensor.reshape is None else tensor.reshape
                declared = _Declared(tensor.datatype, (-1, *dims) if batches else dims, "the ensemble")
                self.declare(f"{kind}[{index}]", tensor.name, declared)
        self.homes.update(dict.fromkeys((tensor.name for tensor in self.config.inputs), ROOT))

    def batch_size(self, number: int, member: Member) -> None:
        most, allowed = self.config.max_batch_size, member.config.max_batch_size
        if 0 < allowed < most:
            text = f"the ensemble allows batches of {most}, and model {member.config.name!r} only of {allowed}"
            self.note("max_batch_size", f"{text} (step {number})")

    def inputs(self, number: int, step: EnsembleStep, member: Member) -> tuple[StepInput, ...]:
        known = {tensor.name: tensor for tensor in member.config.inputs}
        path = f"{_WRITTEN}[{number}].input_map"
        found = []
        for name, tensor in step.inputs.items():
            if name not in known:
                self.note(f"{path}.{name}", _no_such("input", name, member.config, known))
                continue
            self.declare(f"{path}.{name}", tensor, _said(known[name], member.config))
            found.append(StepInput(name, self.numbers[tensor], required=not known[name].optional))
        for name, declared in known.items():
            if not declared.optional and name not in step.inputs:
                self.note(path, f"input {name!r}, which model {member.config.name!r} needs, is mapped to no tensor")
        return tuple(found)

    def outputs(self, number: int, step: EnsembleStep, member: Member) -> tuple[StepOutput, ...]:
        known = {tensor.name: tensor for tensor in member.config.outputs}
        path = f"{_WRITTEN}[{number}].output_map"
        found = []
        for name, tensor in step.outputs.items():
            if name not in known:
                self.note(f"{path}.{name}", _no_such("output", name, member.config, known))
                continue
            self.declare(f"{path}.{name}", tensor, _said(known[name], member.config))
            found.append(StepOutput(name, self.numbers[tensor]))
        return tuple(found)

    def scopes(self, number: int, step: EnsembleStep, member: Member) -> tuple[int, int]:
        """Return where a step runs and where its outputs are; those before it are known."""
        origins = {home: tensor for tensor in step.inputs.values() if (home := self.homes.get(tensor, ROOT)) != ROOT}
        if len(origins) > 1:
            names = " and ".join(f"{tensor!r}" for tensor in origins.values())
            text = f"model {member.config.name!r} would combine {names}, which come from different decoupled models"
            self.note(f"{_WRITTEN}[{number}].input_map", text)
        scope = child = max(origins, default=ROOT)
        if member.config.decoupled:
            child = number + 1
            twice = self.within[scope] & member.decoupled_models
            if twice:
                self.note(
                    f"{_WRITTEN}[{number}]",
                    f"the responses of decoupled model {min(twice)!r} come back to it: an instance that waits for "
                    "them to be read would wait for itself",
                )
            self.within[child] = self.within[scope] | member.decoupled_models
        self.homes.update(dict.fromkeys(step.outputs.values(), child))
        return scope, child


def check_members(
    config: ModelConfig, ensemble: Ensemble, members: Sequence[Member]
) -> tuple[EnsemblePlan, list[Problem]]:
    """Return the plan of an ensemble, `members` being the models of its steps, and what is wrong with it.

    The plan must not be used where something is. `ensemble` is valid by itself.
    """
    check = _Checker(config, ensemble, members)
    check.own_tensors()
    depth = 1 + max(member.depth for member in members)
    if depth > MAX_DEPTH:
        check.note(_WRITTEN, f"ensembles within ensembles go {MAX_DEPTH} deep at most, got {depth}")
    planned = []
    for number in _in_order(ensemble):
        step, member = ensemble.steps[number], members[number]
        check.batch_size(number, member)
        inputs = check.inputs(number, step, member)
        outputs = check.outputs(number, step, member)
        scope, child = check.scopes(number, step, member)
        timeout_ns = step.timeout_ms * 1_000_000
        planned.append(PlannedStep(number, step.model_name, inputs, outputs, scope, child, timeout_ns, step.retries))
    numbers = check.numbers
    plan = EnsemblePlan(
        config.name,
        [(tensor.name, numbers[tensor.name]) for tensor in config.inputs],
        [EnsembleOutput(tensor.name, numbers[tensor.name]) for tensor in config.outputs],
        planned,
        [check.homes.get(tensor, ROOT) for tensor in numbers],
        ensemble.max_inflight_requests,
    )
    return plan, check.problems


def as_member(config: ModelConfig, members: Sequence[Member]) -> Member:
    """Return what another ensemble must know of one with these members."""
    models = frozenset[str]().union(*(member.decoupled_models for member in members))
    depth = 1 + max(member.depth for member in members)
    return Member(config, depth, models, any(member.takes_sequences for member in members))


def model_as_member(config: ModelConfig) -> Member:
    """Return what an ensemble must know of a model that is none."""
    decoupled = frozenset({config.name}) if config.decoupled else frozenset[str]()
    return Member(config, 0, decoupled, config.sequence_batching is not None)


def _in_order(ensemble: Ensemble) -> list[int]:
    """Return the numbers of the steps, each after those that write its tensors."""
    writer = {tensor: number for number, step in enumerate(ensemble.steps) for tensor in step.outputs.values()}
    before = [{writer[t] for t in step.inputs.values() if t in writer} for step in ensemble.steps]
    order: list[int] = []
    done: set[int] = set()
    while len(order) < len(before):
        ready = [number for number in range(len(before)) if number not in done and before[number] <= done]
        assert ready, "a valid ensemble has no circles"
        order += ready
        done.update(ready)
    return order


def _said(tensor: TensorConfig, model: ModelConfig) -> _Declared:
    batches = model.max_batch_size > 0 and not tensor.is_shape_tensor
    return _Declared(tensor.datatype, (-1, *tensor.dims) if batches else tensor.dims, f"model {model.name!r}")


def _agree(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other, strict=True))


def _no_such(kind: str, name: str, model: ModelConfig, known: dict[str, TensorConfig]) -> str:
    return f"model {model.name!r} has no {kind} {name!r}; its {kind}s are {', '.join(known) or 'none'}"
