"""Which models are in memory, decided: what to load, whom to evict for it, and what can never be loaded.

Pure: no I/O, and time is an argument, monotonic nanoseconds. The shell (keeper.py) tells what happened, and obeys what
`decide` returns, in order. Memory is accounted by model: what a loaded one was measured to take, and what one that is
being loaded is expected to take, so that loads under way fit too. A model that leaves counts until its processes are gone.

Rules: who was asked for first is loaded first; the least recently used goes first; never one that is pinned, has requests
or sequences in it, has just come, or is a member of an ensemble that has to stay. When idle models do not suffice for a
while, busy ones are closed: new requests to them wait, and they go when their last request has ended. An ensemble is
loaded after its members and goes before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from headrace.residency.decisions import (
    Activity,
    Close,
    Decision,
    Evict,
    Load,
    Refuse,
    Reload,
    Reopen,
    Settings,
    Stage,
    Traits,
)

_QUIET: Final = Activity()


class _Model:
    __slots__ = (
        "closed_for",
        "held",
        "measured",
        "memory",
        "name",
        "since_ns",
        "stage",
        "stale",
        "traits",
        "wanted_ns",
    )

    def __init__(self, name: str, traits: Traits) -> None:
        self.name = name
        self.traits = traits
        self.stage = Stage.ABSENT
        self.memory = 0
        """Bytes that count against the budget."""
        self.measured: int | None = None
        """The most it was measured to take, kept while it is away; None = never."""
        self.since_ns = 0
        """When it was loaded."""
        self.wanted_ns: int | None = None
        """Since when somebody waits for it."""
        self.held = False
        """Whether it is to stay, though it is not pinned."""
        self.stale = False
        """Whether it serves what is not its content any more."""
        self.closed_for: str | None = None
        """The model for whose sake new requests to it wait."""

    @property
    def cost(self) -> int:
        return self.traits.estimate if self.measured is None else self.measured

    @property
    def fixed(self) -> bool:
        return self.traits.pinned or self.held

    @property
    def serves(self) -> bool:
        return self.stage in (Stage.RESIDENT, Stage.RELOADING)


class ResidencyPolicy:
    """The models of a server and the memory that they take."""

    def __init__(self, settings: Settings) -> None:
        self.settings: Final = settings
        self._models: dict[str, _Model] = {}

    # --- what is ------------------------------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        """Bytes that count against the budget now."""
        return sum(model.memory for model in self._models.values())

    @property
    def wanting(self) -> bool:
        """Whether somebody waits for a model, or a model for room."""
        return any(model.wanted_ns is not None or model.stale for model in self._models.values())

    def __contains__(self, name: str) -> bool:
        return name in self._models

    def stage(self, name: str) -> Stage:
        """Return where a model is; ABSENT also for one that nobody knows."""
        model = self._models.get(name)
        return Stage.ABSENT if model is None else model.stage

    def open(self, name: str) -> bool:
        """Return whether requests to a model go to it now."""
        model = self._models[name]
        return model.serves and model.closed_for is None

    def memory(self) -> dict[str, int]:
        """Return the bytes by model, of those that take any."""
        return {model.name: model.memory for model in self._models.values() if model.memory}

    def held(self, name: str) -> bool:
        """Return whether a model is to stay, though it is not pinned."""
        return self._models[name].held

    def names(self, *stages: Stage) -> list[str]:
        """Return the models in these stages."""
        return [model.name for model in self._models.values() if model.stage in stages]

    def closure(self, name: str) -> set[str]:
        """Return a model and its members, of whatever depth."""
        return self._closure(name)

    def wanted(self, name: str) -> bool:
        """Return whether somebody waits for a model."""
        model = self._models.get(name)
        return model is not None and model.wanted_ns is not None

    # --- what happens -------------------------------------------------------------------------------------------------

    def put(self, name: str, traits: Traits, *, changed: bool = False) -> None:
        """Take note of a model; `changed`: its content is another, so what it took before tells nothing."""
        model = self._models.setdefault(name, _Model(name, traits))
        model.traits = traits
        if changed:
            model.measured = None

    def drop(self, name: str) -> None:
        """Forget a model; one that is in memory is told to be leaving, and forgotten by `freed`."""
        model = self._models[name]
        model.wanted_ns, model.stale, model.held = None, False, False
        if model.stage is Stage.ABSENT:
            del self._models[name]

    def hold(self, name: str, *, held: bool) -> None:
        """Have a model stay, or not any more."""
        self._models[name].held = held

    def want(self, name: str, now_ns: int) -> None:
        """Note that somebody waits for a model."""
        model = self._models[name]
        if model.wanted_ns is None:
            model.wanted_ns = now_ns

    def unwant(self, name: str) -> None:
        """Note that nobody waits for it any more. A load that has begun goes on."""
        model = self._models.get(name)
        if model is not None:
            model.wanted_ns = None

    def outdate(self, name: str, *, stale: bool = True) -> None:
        """Note that the content of a model that serves, or is being loaded, is another now."""
        model = self._models[name]
        model.stale = stale and (model.serves or model.stage is Stage.LOADING)

    def loaded(self, name: str, nbytes: int, now_ns: int) -> None:
        """Note that a load or reload has succeeded; the model was measured to take that much."""
        model = self._models[name]
        model.stage = Stage.RESIDENT
        model.since_ns = now_ns
        model.measured = model.memory = nbytes

    def load_failed(self, name: str) -> list[str]:
        """Note that a load has failed; what served before a reload serves on.

        Returns the models, ensembles with this member among them, that nobody need wait for any longer.
        """
        model = self._models[name]
        if model.stage is Stage.RELOADING:
            model.stage, model.memory = Stage.RESIDENT, model.cost
        else:
            model.stage, model.memory, model.stale = Stage.ABSENT, 0, False
        hopeless = [other for other in self._models.values() if other.wanted_ns is not None]
        hopeless = [other for other in hopeless if name in self._closure(other.name) and not other.serves]
        for other in hopeless:
            other.wanted_ns = None
        model.wanted_ns = None
        return [other.name for other in hopeless]

    def measured(self, name: str, nbytes: int) -> None:
        """Note that a model that serves takes that much now."""
        model = self._models.get(name)
        if model is not None and model.stage is Stage.RESIDENT:
            model.memory = nbytes
            model.measured = max(nbytes, model.measured or 0)

    def leaving(self, name: str) -> None:
        """Note that a model is being unloaded, whoever wanted that."""
        model = self._models[name]
        model.stage = Stage.LEAVING
        model.closed_for, model.stale = None, False

    def freed(self, name: str) -> None:
        """Note that nothing of a model that left is in memory any more."""
        model = self._models[name]
        assert model.stage is Stage.LEAVING, (name, model.stage)
        model.stage, model.memory = Stage.ABSENT, 0

    # --- what to do ---------------------------------------------------------------------------------------------------

    def decide(self, now_ns: int, activity: Mapping[str, Activity]) -> list[Decision]:
        """Return what is to be done now; it is taken for done. `activity` is that of the models that serve."""
        decisions = self._reopened()
        kept: set[str] = set()
        for model in sorted(
            (model for model in self._models.values() if model.wanted_ns is not None),
            key=lambda model: (model.wanted_ns, model.name),
        ):
            kept |= self._closure(model.name)
            decisions += self._bring(model, kept, now_ns, activity)
        for model in [model for model in self._models.values() if model.stale]:
            decisions += self._renew(model, kept | self._closure(model.name), now_ns, activity)
        excess = self.used - self.settings.budget
        if excess > 0 and not any(model.stage is Stage.LEAVING for model in self._models.values()):
            decisions += self._evict(self._groups(kept, now_ns, activity), excess, whole=False)
        return decisions

    def _bring(self, wanted: _Model, kept: set[str], now_ns: int, activity: Mapping[str, Activity]) -> list[Decision]:
        """Load what a wanted model needs, or make room for it."""
        closure = [self._models[name] for name in sorted(self._closure(wanted.name))]
        if wanted.serves and all(model.serves for model in closure):
            if wanted.closed_for is None:
                wanted.wanted_ns = None
            return []
        absent = [model for model in closure if model.stage is Stage.ABSENT]
        reserve = sum(model.cost for model in absent)
        reason = self._never(wanted.name, closure)
        if reason:
            wanted.wanted_ns = None
            return [Refuse(wanted.name, reason)]
        room = self._make_room(wanted, reserve, kept, now_ns, activity)
        if room is not None:
            return room
        decisions: list[Decision] = []
        for model in absent:
            members = [self._models[name] for name in model.traits.members if name in self._models]
            if all(member.serves for member in members):
                model.stage, model.memory = Stage.LOADING, model.cost
                decisions.append(Load(model.name))
        return decisions

    def _renew(self, model: _Model, kept: set[str], now_ns: int, activity: Mapping[str, Activity]) -> list[Decision]:
        """Load the new content of a model beside the old, once there is room for both."""
        if model.stage is not Stage.RESIDENT or model.closed_for is not None:
            return []
        room = self._make_room(model, model.cost, kept, now_ns, activity, patient=True)
        if room is not None:
            return room
        model.stale = False
        model.stage = Stage.RELOADING
        model.memory += model.cost
        return [Reload(model.name)]

    def _make_room(
        self,
        wanted: _Model,
        reserve: int,
        kept: set[str],
        now_ns: int,
        activity: Mapping[str, Activity],
        *,
        patient: bool = False,
    ) -> list[Decision] | None:
        """Return None where there is room for `reserve` bytes more; else what is done to come to it, maybe nothing yet."""
        missing = self.used + reserve - self.settings.room
        if missing <= 0:
            return None
        missing -= sum(model.memory for model in self._models.values() if model.stage is Stage.LEAVING)
        if missing <= 0:
            return []
        mine = {model.name for model in self._models.values() if model.closed_for == wanted.name}
        decisions = self._evict(self._groups(kept, now_ns, activity, mine), missing, whole=True)
        if decisions or patient or wanted.wanted_ns is None or now_ns - wanted.wanted_ns < self.settings.patience_ns:
            return decisions
        return self._close(wanted, missing, kept, now_ns, activity)

    def _close(
        self, wanted: _Model, missing: int, kept: set[str], now_ns: int, activity: Mapping[str, Activity]
    ) -> list[Decision]:
        """Close as many models as have to go for `wanted`, those that came first first."""
        for model in self._models.values():
            if model.closed_for == wanted.name:
                missing -= model.memory
        decisions: list[Decision] = []
        for _, group in sorted(self._groups(kept, now_ns, activity, busy=True)):
            if missing <= 0:
                break
            for name in group:
                model = self._models[name]
                if model.stage is Stage.RESIDENT and model.closed_for is None:
                    model.closed_for = wanted.name
                    missing -= model.memory
                    decisions.append(Close(name))
        if missing > 0:  # it would be in vain
            for decision in decisions:
                self._models[decision.name].closed_for = None
            return []
        return decisions

    def _reopened(self) -> list[Decision]:
        """Open what was closed for models that nobody waits for any more, or that are being loaded."""
        decisions: list[Decision] = []
        for model in self._models.values():
            if model.closed_for is None:
                continue
            wanted = self._models.get(model.closed_for)
            if wanted is None or wanted.wanted_ns is None or wanted.stage is not Stage.ABSENT:
                model.closed_for = None
                decisions.append(Reopen(model.name))
        return decisions

    def _groups(
        self,
        kept: set[str],
        now_ns: int,
        activity: Mapping[str, Activity],
        mine: Iterable[str] = (),
        *,
        busy: bool = False,
    ) -> list[tuple[int, list[str]]]:
        """Return what may go: each time a model that takes memory with the ensembles that need it, these first.

        With each the time by which the order goes: of the last use, or where `busy` ones may be closed, of its load. Models
        closed for somebody go for nobody else; `mine` are those closed for who asks.
        """
        found: list[tuple[int, list[str]]] = []
        for model in self._models.values():
            if not model.memory or model.stage is not Stage.RESIDENT:
                continue
            group = [*self._dependents(model.name), model.name]
            models = [self._models[name] for name in group]
            if any(name in kept for name in group) or not all(one.stage is Stage.RESIDENT for one in models):
                continue
            if any(one.fixed or (one.closed_for is not None and one.name not in mine) for one in models):
                continue
            if any(one.wanted_ns is not None and one.closed_for is None for one in models):
                continue  # who waited for it is about to be let in
            doing = [activity.get(name, _QUIET) for name in group]
            if any(one.bound or (one.busy and not busy) for one in doing):
                continue
            if any(now_ns - one.since_ns < self.settings.min_residence_ns for one in models):
                continue
            order = (one.since_ns for one in models) if busy else (one.used_ns for one in doing)
            found.append((max(order), group))
        return found

    def _evict(self, groups: list[tuple[int, list[str]]], missing: int, *, whole: bool) -> list[Decision]:
        """Evict the least recently used until `missing` bytes are free; `whole`: nothing, where they would not be."""
        chosen: dict[str, None] = {}
        for _, group in sorted(groups):
            if missing <= 0:
                break
            for name in group:
                if name not in chosen:
                    chosen[name] = None
                    missing -= self._models[name].memory
        if missing > 0 and whole:
            return []
        dependents_first = sorted(chosen, key=lambda name: len(self._closure(name)), reverse=True)
        for name in dependents_first:
            self.leaving(name)
        return [Evict(name) for name in dependents_first]

    def _never(self, name: str, closure: list[_Model]) -> str:
        """Return why a model cannot be loaded whatever else goes; "" where it can."""
        names = {model.name for model in closure}
        cost = sum(model.cost for model in closure)
        fixed = set().union(*(self._closure(model.name) for model in self._models.values() if model.fixed))
        pinned = sum(self._models[other].memory for other in fixed - names)
        if cost + pinned <= self.settings.room:
            return ""
        beside = f", {pinned} of them for models that are pinned" if pinned else ""
        budget, spare = self.settings.budget, self.settings.budget - self.settings.room
        memory = f"the memory for models is {budget} bytes{beside}, with {spare} kept free"
        return f"model {name!r} takes about {cost} bytes, and {memory}"

    def _closure(self, name: str) -> set[str]:
        """Return a model and its members, of whatever depth."""
        found: set[str] = set()
        todo = [name]
        while todo:
            one = todo.pop()
            if one not in found and one in self._models:
                found.add(one)
                todo.extend(self._models[one].traits.members)
        return found

    def _dependents(self, name: str) -> list[str]:
        """Return the ensembles in memory, or on their way, that need a model."""
        return [
            model.name
            for model in self._models.values()
            if model.traits.members
            and model.name != name
            and model.stage is not Stage.ABSENT
            and name in self._closure(model.name)
        ]

    def check_integrity(self) -> None:
        """Assert what holds between events."""
        for model in self._models.values():
            assert (model.stage is Stage.ABSENT) == (model.memory == 0) or not model.cost, model.name
            assert model.closed_for is None or model.stage is Stage.RESIDENT, model.name
            if model.stage in (Stage.LOADING, Stage.RESIDENT):
                members = [self._models[name] for name in model.traits.members if name in self._models]
                assert all(member.serves for member in members), model.name
