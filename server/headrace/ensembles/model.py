"""EnsembleModel: a loaded version of an ensemble, and how it stands with its members as they come and go.

It keeps no member. Whenever another copy of some model serves it looks at its own again; if they do not fit it is
unavailable, with the reason, until they do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final
from uuid import uuid4

from headrace.clock import Clock
from headrace.ensembles.access import MemberAccess
from headrace.ensembles.driver import EnsembleDriver
from headrace.instances.arenas import ArenaTable
from headrace.instances.loaded_model import LoadedModel
from headrace.instances.served_model import InstancePool
from headrace.instances.signature import ModelSignature
from headrace.observability.statistics import ModelStatistics
from headrace.repository.ensemble_config import Ensemble, ensemble_of
from headrace.repository.model_config import ConfigError, ModelConfig, Problem
from headrace.response_cache import ResponseCache
from headrace.scheduling.cached_driver import CachedDriver
from headrace.scheduling.driver import Driver
from headrace.scheduling.ensemble_members import Member, as_member, check_members, model_as_member
from headrace.scheduling.ensemble_plan import EnsemblePlan
from headrace_protocol._generated import model_config_pb2 as pb
from headrace_protocol.errors import InferError, unavailable


@dataclass(frozen=True, slots=True)
class Checked:
    """An ensemble held against some members. `plan` must not be used where there are problems."""

    config: ModelConfig
    """The ensemble's, decoupled where one of the members is."""
    plan: EnsemblePlan
    member: Member
    """What other ensembles must know of this one."""
    problems: list[Problem]


def check(config: ModelConfig, ensemble: Ensemble, members: Sequence[Member]) -> Checked:
    """Hold an ensemble, valid by itself, against the models of its steps."""
    plan, problems = check_members(config, ensemble, members)
    decoupled = any(member.config.decoupled for member in members)
    if decoupled and config.proto.response_cache.enable:
        text = "answers of an ensemble with a decoupled member cannot be kept: leave it out, or set enable to false"
        problems.append(Problem("response_cache.enable", text))
    if config.proto.response_cache.enable and any(member.takes_sequences for member in members):
        text = "answers of an ensemble with a member that takes sequences depend on what came before: leave it out"
        problems.append(Problem("response_cache.enable", text))
    proto = pb.ModelConfig()
    proto.CopyFrom(config.proto)
    proto.ClearField("model_transaction_policy")
    if decoupled:
        proto.model_transaction_policy.decoupled = True
    config = replace(config, decoupled=decoupled, proto=proto)
    return Checked(config, plan, as_member(config, members), problems)


class _Standing:
    """The members of a moment, and what follows from them."""

    __slots__ = ("checked", "error", "labels", "members", "serial")

    def __init__(
        self, serial: int, members: tuple[LoadedModel, ...], checked: Checked, error: InferError | None
    ) -> None:
        self.serial = serial
        """Another number for other members."""
        self.members = members
        self.checked = checked
        self.error = error
        self.labels: Mapping[str, Sequence[str]] = {}


class EnsembleModel:
    """Implements instances.loaded_model.LoadedModel. Raises ConfigError, InferError where its members do not fit."""

    sequences: Final = None
    restarts: Final = 0
    accepting: Final = True
    """A request to an ensemble that cannot serve just now is told why."""

    def __init__(
        self,
        config: ModelConfig,
        version: int,
        labels: Mapping[str, Sequence[str]],
        statistics: ModelStatistics,
        access: MemberAccess,
        arenas: ArenaTable,
        clock: Clock,
        cache: ResponseCache | None = None,
    ) -> None:
        self.name: Final = config.name
        self.version: Final = version
        self.signature: Final = ModelSignature(config, version)
        self.statistics: Final = statistics
        self.load_seconds = 0.0
        self._own = config
        self._labels = labels
        self._ensemble = ensemble_of(config.proto)
        self._access = access
        self._identity = uuid4().bytes
        self._generation = access.generation
        self._standing = self._first_standing()
        driver = EnsembleDriver(self._ensemble, self, self.signature, statistics, access, arenas, clock)
        self.cached: Final = cache is not None
        self.driver: Final[Driver] = (
            driver
            if cache is None
            else CachedDriver(driver, cache, self._cache_identity, self.signature, statistics, clock)
        )

    # --- what it is -----------------------------------------------------------------------------------------------

    @property
    def config(self) -> ModelConfig:
        """Its configuration, decoupled where one of its members is."""
        return self._stand().checked.config

    @property
    def member(self) -> Member:
        """What other ensembles must know of it."""
        return self._stand().checked.member

    @property
    def serial(self) -> int:
        """A number that changes with its members, of whatever depth."""
        return self._stand().serial

    @property
    def labels(self) -> Mapping[str, Sequence[str]]:
        """Class labels by output name: its own, or else those of the member that makes the output."""
        return self._stand().labels

    @property
    def ready(self) -> bool:
        """Whether every member is there, fits and is ready."""
        standing = self._stand()
        return standing.error is None and all(member.ready for member in standing.members)

    @property
    def not_ready_reason(self) -> str:
        """Why it is not ready; "" when it is."""
        standing = self._stand()
        if standing.error is not None:
            return standing.error.message
        waiting = next((member for member in standing.members if not member.ready), None)
        return "" if waiting is None else f"its member {waiting.name!r} is not ready: {waiting.not_ready_reason}"

    def pools(self, outputs: Sequence[str] | None) -> list[InstancePool]:
        """Return the instances of the members that a request for these outputs needs, at any depth."""
        standing = self._stand()
        if standing.error is not None:
            return []
        try:
            given = tuple(tensor.name for tensor in self._own.inputs)
            selection = standing.checked.plan.select(tuple(outputs) if outputs else None, given)
        except InferError:
            return []  # the request will be told
        found: dict[InstancePool, None] = {}
        for step in selection.steps:
            found.update(dict.fromkeys(standing.members[step.number].pools([o.name for o in step.outputs])))
        return list(found)

    def pids(self) -> list[int]:
        """Return no process: its members have them."""
        return []

    def plan(self) -> EnsemblePlan:
        """Return the plan for the members as they are now. Raises UNAVAILABLE where they do not fit."""
        standing = self._stand()
        if standing.error is not None:
            raise unavailable(f"ensemble '{self.name}' cannot be served: {standing.error.message}")
        return standing.checked.plan

    # --- its end --------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Fail what runs, at once: the server stops. `stop` follows."""
        self.driver.fail_waiting(unavailable("the server is stopping"))

    async def stop(self) -> None:
        """End it. The registry calls it when the last lease is gone."""
        self.driver.fail_waiting(unavailable(f"model '{self.name}' version {self.version} is being unloaded"))

    # --- its members ----------------------------------------------------------------------------------------------

    def _first_standing(self) -> _Standing:
        members = self._find()
        checked = check(self._own, self._ensemble, _facts(members))
        if checked.problems:
            raise ConfigError(checked.problems)
        standing = _Standing(0, members, checked, None)
        standing.labels = self._labels_of(members)
        return standing

    def _find(self) -> tuple[LoadedModel, ...]:
        """Return the models of the steps. Raises UNAVAILABLE with the name of one that does not serve."""
        found = []
        for step in self._ensemble.steps:
            try:
                found.append(self._access.find(step.model_name, step.model_version))
            except InferError as error:
                raise unavailable(f"its member cannot be used: {error.message}") from None
        return tuple(found)

    def _stand(self) -> _Standing:
        generation = self._access.generation
        if generation != self._generation:
            self._generation = generation
            self._look_again()
        return self._standing

    def _look_again(self) -> None:
        """Find out what has become of the members."""
        before = self._standing
        try:
            members = self._find()
        except InferError as error:
            self._standing = _Standing(before.serial + 1, (), before.checked, error.with_traceback(None))
            return
        if before.error is None and members == before.members and not any(map(_is_ensemble, members)):
            return
        checked = check(self._own, self._ensemble, _facts(members))
        misfit: InferError | None = None
        if checked.problems:
            misfit = unavailable("; ".join(map(str, checked.problems)))
            checked = before.checked  # which tells what it is when it can serve
        self._standing = _Standing(before.serial + 1, members, checked, misfit)
        self._standing.labels = self._labels_of(members)
        self.statistics.streamed = checked.config.decoupled

    def _labels_of(self, members: tuple[LoadedModel, ...]) -> Mapping[str, Sequence[str]]:
        labels: dict[str, Sequence[str]] = {}
        for step, member in zip(self._ensemble.steps, members, strict=True):
            for output, tensor in step.outputs.items():
                if output in member.labels:
                    labels[tensor] = member.labels[output]
        return labels | dict(self._labels)

    def _cache_identity(self) -> bytes:
        return self._identity + self.serial.to_bytes(8, "little")


def _is_ensemble(model: LoadedModel) -> bool:
    return isinstance(model, EnsembleModel)


def _facts(members: Sequence[LoadedModel]) -> list[Member]:
    return [
        member.member if isinstance(member, EnsembleModel) else model_as_member(member.config) for member in members
    ]
