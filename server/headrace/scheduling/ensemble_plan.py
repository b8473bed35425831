"""EnsemblePlan: the steps of an ensemble with its members' facts, and what of it one request needs. Pure, immutable.

Tensors and scopes are numbers. A *scope* is how often something happens for a request: scope ROOT once; every decoupled
step opens a scope of its own, in which its tensors, and the steps that read them, are there once for each of its
responses. A step reads tensors of one scope, and of ROOT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from headrace_protocol.errors import InferError, invalid

ROOT: Final = 0
_MOST_SELECTIONS: Final = 64


@dataclass(frozen=True, slots=True)
class StepInput:
    """An input of a step's model, and the tensor it is given."""

    name: str
    tensor: int
    required: bool


@dataclass(frozen=True, slots=True)
class StepOutput:
    """An output of a step's model, and the tensor it becomes."""

    name: str
    tensor: int


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A call of a member."""

    number: int
    """As the configuration counts, from 0."""
    model: str
    inputs: tuple[StepInput, ...]
    outputs: tuple[StepOutput, ...]
    scope: int
    """Where it runs."""
    child: int
    """Where its outputs are: the scope it opens if it is decoupled, else `scope`."""
    timeout_ns: int = 0
    """0 = none."""
    retries: int = 0

    @property
    def decoupled(self) -> bool:
        """Whether it has any number of responses."""
        return self.child != self.scope


@dataclass(frozen=True, slots=True)
class EnsembleOutput:
    """An output of the ensemble."""

    name: str
    tensor: int


@dataclass(frozen=True)
class Selection:
    """What one request needs of a plan: no step that none of its outputs depends on, no tensor that nobody reads."""

    steps: tuple[PlannedStep, ...]
    inputs: tuple[tuple[str, int], ...]
    """Inputs of the ensemble that some step reads, with their tensors."""
    outputs: tuple[EnsembleOutput, ...]
    scopes: tuple[int, ...]
    """ROOT, and those that the steps open."""
    homes: tuple[int, ...]
    """The scope of each tensor of the plan."""

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each tensor of the plan, the places in `steps` of those that read it."""
        found: list[list[int]] = [[] for _ in self.homes]
        for place, step in enumerate(self.steps):
            for tensor in dict.fromkeys(given.tensor for given in step.inputs):
                found[tensor].append(place)
        return tuple(map(tuple, found))

    @cached_property
    def groups(self) -> dict[int, tuple[EnsembleOutput, ...]]:
        """Outputs that are delivered together, by the scope that says how often: its own, then those of ROOT."""
        once = tuple(output for output in self.outputs if self.homes[output.tensor] == ROOT)
        often: dict[int, list[EnsembleOutput]] = {}
        for output in self.outputs:
            if self.homes[output.tensor] != ROOT:
                often.setdefault(self.homes[output.tensor], []).append(output)
        return {scope: (*own, *once) for scope, own in often.items()} or {ROOT: once}

    @cached_property
    def lasting(self) -> frozenset[int]:
        """Tensors of ROOT that are read in other scopes, so that nobody knows how often."""
        read = {
            given.tensor
            for step in self.steps
            if step.scope != ROOT
            for given in step.inputs
            if self.homes[given.tensor] == ROOT
        }
        if ROOT not in self.groups:
            read |= {output.tensor for output in self.outputs if self.homes[output.tensor] == ROOT}
        return frozenset(read)


class EnsemblePlan:
    """Steps in an order in which each comes after those whose tensors it reads."""

    def __init__(
        self,
        name: str,
        inputs: Sequence[tuple[str, int]],
        outputs: Sequence[EnsembleOutput],
        steps: Sequence[PlannedStep],
        homes: Sequence[int],
        max_inflight: int = 0,
    ) -> None:
        self.name: Final = name
        self.inputs: Final = tuple(inputs)
        self.outputs: Final = tuple(outputs)
        self.steps: Final = tuple(steps)
        self.homes: Final = tuple(homes)
        self.max_inflight: Final = max_inflight
        self._selections: dict[tuple[tuple[str, ...] | None, tuple[str, ...]], Selection] = {}

    def select(self, wanted: tuple[str, ...] | None, given: tuple[str, ...]) -> Selection:
        """Return what a request with these inputs needs to be given these outputs; None = all that can be had.

        Raises INVALID_ARG for an output that depends on an input which is not given, or where none can be had.
        """
        key = (wanted, given)
        found = self._selections.get(key)
        if found is None:
            found = self._select(wanted, frozenset(given))
            if len(self._selections) >= _MOST_SELECTIONS:
                self._selections.clear()
            self._selections[key] = found
        return found

    def _select(self, wanted: tuple[str, ...] | None, given: frozenset[str]) -> Selection:
        there = {tensor for name, tensor in self.inputs if name in given}
        homes = list(self.homes)
        runnable = []
        for step in self.steps:
            inputs = tuple(one for one in step.inputs if one.tensor in there)
            if inputs and all(one.tensor in there for one in step.inputs if one.required):
                scope = max(homes[one.tensor] for one in inputs)  # ROOT, where what it reads of another is left out
                child = step.child if step.decoupled else scope
                settings = (scope, child, step.timeout_ns, step.retries)
                runnable.append(PlannedStep(step.number, step.model, inputs, step.outputs, *settings))
                for output in step.outputs:
                    there.add(output.tensor)
                    homes[output.tensor] = child
        outputs = [o for o in self.outputs if o.tensor in there and (wanted is None or o.name in wanted)]
        missing = set(wanted or ()) - {output.name for output in outputs}
        if missing or not outputs:
            raise self._not_to_be_had(sorted(missing), given)
        return self._needed(runnable, outputs, homes)

    def _needed(self, runnable: list[PlannedStep], outputs: list[EnsembleOutput], homes: list[int]) -> Selection:
        needed = {output.tensor for output in outputs}
        steps = []
        for step in reversed(runnable):
            kept = tuple(output for output in step.outputs if output.tensor in needed)
            if kept:
                needed.update(one.tensor for one in step.inputs)
                steps.append(replace(step, outputs=kept))
        steps.reverse()
        return Selection(
            tuple(steps),
            tuple((name, tensor) for name, tensor in self.inputs if tensor in needed),
            tuple(outputs),
            (ROOT, *(step.child for step in steps if step.decoupled)),
            tuple(homes),
        )

    def _not_to_be_had(self, missing: list[str], given: frozenset[str]) -> InferError:
        lacking = [name for name, _ in self.inputs if name not in given]
        what = f"its output '{missing[0]}'" if missing else "any of its outputs"
        return invalid(f"ensemble '{self.name}' cannot give {what} without some of the inputs {lacking}")
