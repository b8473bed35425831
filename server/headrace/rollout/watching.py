"""GuardWatch: reads what versions on trial have counted, once a second, and takes the weight of one away that is not good.

The shell of guard.py. Where no model has a guard it does nothing, and has no timer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from headrace.instances.loaded_model import LoadedModel
from headrace.observability.statistics import ModelStatistics
from headrace.rollout.guard import Guard, Sample, Trip
from headrace.rollout.policy import GuardPolicy
from headrace.rollout.rollouts import Rollouts
from headrace_protocol.errors import FailureReason, InferError

PERIOD_S: Final = 1.0
_FAULTS: Final = (FailureReason.BACKEND, FailureReason.OTHER)


class Registry(Protocol):
    """The models, as far as they matter here."""

    def get(self, name: str, version: int) -> LoadedModel: ...

    def leases(self, model: LoadedModel) -> int: ...


class _Watched(NamedTuple):
    """A version on trial."""

    policy: GuardPolicy
    default: int | None
    guard: Guard


class GuardWatch:
    """One a server; `update` after each change of a policy, `close` at the end."""

    def __init__(self, rollouts: Rollouts, registry: Registry, now_ns: Callable[[], int]) -> None:
        self._rollouts = rollouts
        self._registry = registry
        self._now_ns = now_ns
        self._watched: dict[tuple[str, int], _Watched] = {}
        self._loads: dict[tuple[str, int], tuple[ModelStatistics, int]] = {}
        """What each version counted into when it was last looked at, and how often that was another."""
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def update(self) -> None:
        """Watch the versions that now have a weight and a guard."""
        watched: dict[tuple[str, int], _Watched] = {}
        for name, rollout in self._rollouts.items():
            policy = rollout.policy
            for version in policy.weights if policy.guard is not None else ():
                assert policy.guard is not None
                before = self._watched.get((name, version))
                same = before is not None and (before.policy, before.default) == (policy.guard, policy.default)
                fresh = _Watched(policy.guard, policy.default, Guard(policy.guard))
                watched[name, version] = before if same and before is not None else fresh
        self._watched = watched
        wanted = {*watched, *((name, one.default) for (name, _), one in watched.items() if one.default is not None)}
        self._loads = {key: load for key, load in self._loads.items() if key in wanted}
        if watched and self._timer is None and not self._closed:
            self.look()

    def look(self) -> None:
        """Look at every version that is watched, and again after a second."""
        now = self._now_ns()
        trips: list[tuple[str, int, Trip]] = []
        for (name, version), watched in self._watched.items():
            trial, default = self._sample(name, version), self._sample(name, watched.default)
            if trial is None and ((name, version) not in self._loads or default is None):
                continue  # it has not served yet, or the model was unloaded
            trip = watched.guard.observe(now, trial or _GONE, default)
            if trip is not None:
                trips.append((name, version, trip))
        self._timer = None
        for name, version, trip in trips:
            if (name, version) not in self._watched:
                continue  # taken back already, in a look that the one before it brought about
            self._rollouts.roll_back(name, version, trip.reason, trip.text)
        if self._watched and self._timer is None and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self.look)

    def close(self) -> None:
        """Look no more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sample(self, name: str, version: int | None) -> Sample | None:
        """Return what a version has counted; None where it does not serve."""
        if version is None:
            return None
        try:
            model = self._registry.get(name, version)
        except InferError:
            return None
        statistics = model.statistics
        known, load = self._loads.get((name, version), (None, 0))
        if known is not statistics:
            load += 1
            self._loads[name, version] = (statistics, load)
        return Sample(
            load=load,
            answered=statistics.success_count,
            failed=sum(statistics.failures[reason] for reason in _FAULTS),
            under_way=self._registry.leases(model),
            crashes=model.restarts,
            durations=tuple(statistics.keep_summaries().request.counts),
            serves=model.accepting,
        )


_GONE: Final = Sample(0, 0, 0, 0, 0, (), serves=False)
