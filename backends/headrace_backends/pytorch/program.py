"""What the backend asks of a model, whatever kind of file it came in."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headrace_backends.api import ModelDescription
from headrace_backends.pytorch.naming import TENSOR
from headrace_protocol.datatype import DataType


@dataclass(frozen=True, slots=True)
class Input:
    """One input of a model."""

    datatype: DataType
    kind: str = TENSOR
    """What the model takes it as; one of the kinds of naming.py."""


class Program(Protocol):
    """A loaded model. `run` may be called by as many threads as it has instances, unless it is `exclusive`."""

    @property
    def inputs(self) -> Mapping[str, Input]: ...
    @property
    def outputs(self) -> Mapping[str, DataType]:
        """What it can be asked for, with the datatypes that are promised."""
        ...

    @property
    def description(self) -> ModelDescription:
        """What the file tells of inputs and outputs."""
        ...

    @property
    def written(self) -> Collection[str]:
        """Inputs whose memory a run may write to."""
        ...

    @property
    def exclusive(self) -> bool:
        """Whether instances of it must not share a process: it keeps a state, or holds the interpreter while it runs."""
        ...

    @property
    def keeps_state(self) -> bool:
        """Whether it is known that one run can change what the next one gives."""
        ...

    def run(self, values: Mapping[str, Any], wanted: Sequence[str]) -> Mapping[str, Any]:
        """Return the wanted outputs: tensors, on any device, or strings. Raises whatever the model raises."""
        ...
