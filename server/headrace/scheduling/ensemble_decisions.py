"""What an EnsembleRun decides: commands for whoever runs the steps and answers the client, to be obeyed in order."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from headrace.scheduling.ensemble_plan import PlannedStep
from headrace_protocol.errors import InferError


@dataclass(frozen=True, slots=True)
class Take:
    """A tensor to be taken out of a source, where it has the name `of`, and called `name`."""

    name: str
    source: Hashable
    of: str


@dataclass(frozen=True, slots=True)
class StartStep:
    """Ask the model of a step; report `responded` and `failed` with this number. Whoever asks holds the sources."""

    run: int
    step: PlannedStep
    inputs: tuple[Take, ...]


@dataclass(frozen=True, slots=True)
class CancelStep:
    """Nobody waits for this step any more; nothing is to be reported of it."""

    run: int


@dataclass(frozen=True, slots=True)
class HoldStep:
    """Hold back the further responses of a decoupled step, or let them come."""

    run: int
    paused: bool


@dataclass(frozen=True, slots=True)
class Deliver:
    """Give the client a response; with `final` it is over. No output, and `final`: say that it has come to its end."""

    outputs: tuple[Take, ...]
    final: bool


@dataclass(frozen=True, slots=True)
class Release:
    """Nothing will be taken out of this source any more."""

    source: Hashable


@dataclass(frozen=True, slots=True)
class Fail:
    """Give the client an error, the last it gets."""

    error: InferError


Decision = StartStep | CancelStep | HoldStep | Deliver | Release | Fail
