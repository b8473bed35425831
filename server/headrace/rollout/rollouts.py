"""Rollouts: the traffic policies in force, by model, and how requests and the registry follow them. Used from one loop.

It decides nothing by itself: shares are split.py's, bounds guard.py's. Policies outlive reloads and unloads of their models,
but not the server. One that came by a call counts before one that a configuration brings, until it is reset.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, Protocol

from headrace.instances.loaded_model import LoadedModel
from headrace.repository.sources import Preference
from headrace.rollout.policy import HUNDRED, TrafficPolicy, parse_policy_text
from headrace.rollout.split import Split, Turns
from headrace.types import InferenceRequest
from headrace_protocol.errors import InferError, unavailable

_log = logging.getLogger("headrace.rollout")

MOST_MODELS: Final = 10_000
"""Models with a policy."""
MOST_ROLLBACKS: Final = 16
"""Of a model, that are remembered."""
MANUAL: Final = "manual"
REASONS: Final = ("error_rate", "p99", "crashes", "stalled", "gone", MANUAL)
"""Why weights were taken away."""


class Registry(Protocol):
    """The models, as far as they matter here."""

    def acquire(self, name: str, version: int) -> LoadedModel: ...

    def release(self, model: LoadedModel) -> None: ...

    def prefer(self, name: str, preference: Preference | None) -> None: ...


class Rollback(NamedTuple):
    """A version that lost its weight."""

    version: int
    reason: str
    text: str
    wall_ns: int


class ShadowCounts:
    """What became of the shadow requests to one version. All of it only grows."""

    __slots__ = ("error", "full", "ok", "refused", "timeout")

    def __init__(self) -> None:
        self.ok = 0
        self.error = 0
        """Answered with an error, or lost with its process."""
        self.timeout = 0
        self.full = 0
        """Not sent, for too many were under way."""
        self.refused = 0
        """Not begun: the version does not serve, or does not take such a request."""


class ModelRollout:
    """What is in force for one model."""

    __slots__ = (
        "by_call",
        "policy",
        "rollbacks",
        "rolled_back",
        "shadow_counts",
        "shadow_turns",
        "split",
        "tried",
        "turns",
    )

    def __init__(self) -> None:
        self.policy = TrafficPolicy()
        self.by_call = False
        """Whether it came by a call; otherwise it is the configuration's, as `tried` has it."""
        self.tried: TrafficPolicy | None = None
        """What the configuration says; None = nothing."""
        self.split: Split | None = None
        """None = no version but the default has a weight."""
        self.turns = Turns()
        self.shadow_turns = Turns(1 << 63)  # else the requests of a version with a weight would be those with a shadow
        self.shadow_counts: dict[int, ShadowCounts] = {}
        """By version."""
        self.rollbacks: deque[Rollback] = deque(maxlen=MOST_ROLLBACKS)
        self.rolled_back = dict.fromkeys(REASONS, 0)

    @property
    def idle(self) -> bool:
        """Whether nothing is lost by forgetting it."""
        return self.policy == TrafficPolicy() and not self.by_call and not self.rollbacks and not self.shadow_counts


class Rollouts:
    """Implements repository.sources.TrafficBook; `connect` joins it to the registry that it is given to."""

    def __init__(self, wall_ns: Callable[[], int]) -> None:
        self._models: dict[str, ModelRollout] = {}
        self._registry: Registry
        self._wall_ns = wall_ns
        self.on_change: Callable[[], None] = _nothing
        """Called when a policy has changed."""

    def connect(self, registry: Registry) -> None:
        """Say whose models these are."""
        self._registry = registry

    # --- for requests -------------------------------------------------------------------------------------------------

    @property
    def any_split(self) -> bool:
        """Whether some model's requests go to several versions."""
        return any(rollout.split is not None for rollout in self._models.values())

    @property
    def any_shadow(self) -> bool:
        """Whether some model has a shadow."""
        return any(rollout.policy.shadow is not None for rollout in self._models.values())

    def acquire(self, request: InferenceRequest) -> LoadedModel:
        """Lease the version that gets a request which names none. Raises as ModelRegistry.acquire does.

        Where the version whose turn it is would not serve now, it goes where it would without weights: also while a process
        of that version is being started again, for a request would wait for that, and is perhaps what ends it once more.
        """
        name = request.model_name
        rollout = self._models.get(name)
        if rollout is not None and rollout.split is not None:
            version = rollout.split.version_of(_key(request, rollout.split))
            try:
                model = self._registry.acquire(name, version)
            except InferError:
                return self._registry.acquire(name, request.model_version)
            if model.ready or version == rollout.policy.default:
                return model
            self._registry.release(model)
        return self._registry.acquire(name, request.model_version)

    # --- what is ------------------------------------------------------------------------------------------------------

    def get(self, name: str) -> ModelRollout | None:
        """Return what is in force for a model; None = nothing was ever said of it."""
        return self._models.get(name)

    def policy(self, name: str) -> TrafficPolicy:
        """Return the policy of a model, one without settings where it has none."""
        rollout = self._models.get(name)
        return TrafficPolicy() if rollout is None else rollout.policy

    def items(self) -> Iterator[tuple[str, ModelRollout]]:
        """Return the models of which something was said, with that."""
        return iter(sorted(self._models.items()))

    # --- changes ------------------------------------------------------------------------------------------------------

    def adopt(self, name: str, text: str | None) -> None:
        """Take over what a configuration says; see repository.sources.TrafficBook."""
        policy = None if text is None else parse_policy_text(text, "parameters.traffic")
        rollout = self._models.get(name)
        if rollout is None:
            if policy is None:
                return
            rollout = self._begin(name)
        if policy == rollout.tried:
            return  # also where the guard has taken weights away since
        rollout.tried = policy
        if not rollout.by_call:
            self._apply(name, rollout, policy or TrafficPolicy())

    def set(self, name: str, policy: TrafficPolicy) -> None:
        """Have a model follow this policy, whatever its configuration says. Raises UNAVAILABLE for too many."""
        rollout = self._models.get(name) or self._begin(name)
        rollout.by_call = True
        self._apply(name, rollout, policy)

    def reset(self, name: str) -> None:
        """Have a model follow its configuration again."""
        rollout = self._models.get(name)
        if rollout is not None:
            rollout.by_call = False
            rollout.rollbacks.clear()
            self._apply(name, rollout, rollout.tried or TrafficPolicy())

    def roll_back(self, name: str, version: int | None, reason: str, text: str) -> None:
        """Take the weight of a version away, of all of them for None; the default gets what they had."""
        rollout = self._models[name]
        policy = rollout.policy
        taken = sorted(policy.weights) if version is None else [version]
        weights = {number: weight for number, weight in policy.weights.items() if number not in taken}
        for number in taken:
            rollout.rollbacks.append(Rollback(number, reason, text, self._wall_ns()))
            rollout.rolled_back[reason] += 1
            level = logging.INFO if reason == MANUAL else logging.WARNING
            said = "model %s version %d is rolled back from %g %% of the requests (%s): %s"
            _log.log(level, said, name, number, policy.weights.get(number, 0.0), reason, text)
        changed = TrafficPolicy(policy.default, weights, policy.sticky_parameter, policy.shadow, policy.guard)
        self._apply(name, rollout, changed)

    def _begin(self, name: str) -> ModelRollout:
        if len(self._models) >= MOST_MODELS:
            raise unavailable(f"{MOST_MODELS} models have a traffic policy, there is no room for another")
        rollout = self._models[name] = ModelRollout()
        return rollout

    def _apply(self, name: str, rollout: ModelRollout, policy: TrafficPolicy) -> None:
        rollout.policy = policy
        rollout.split = Split(name, policy, rollout.turns) if policy.weights else None
        if policy.shadow is not None:
            rollout.shadow_counts.setdefault(policy.shadow.version, ShadowCounts())
        bad = {rollback.version for rollback in rollout.rollbacks} - {policy.default}
        shadow = set() if policy.shadow is None else {policy.shadow.version}
        last = frozenset({*policy.weights, *shadow, *bad})
        preference = Preference(policy.default, last) if policy.default is not None or last else None
        self._registry.prefer(name, preference)
        if rollout.idle:
            del self._models[name]
        self.on_change()


def shares(policy: TrafficPolicy, default: int) -> dict[int, float]:
    """Return the percent of each version that has any, the default's that serves now included."""
    if not policy.weights:
        return {default: HUNDRED}
    found = dict(policy.weights)
    if policy.default_weight:
        assert policy.default is not None
        found[policy.default] = policy.default_weight
    return found


def _key(request: InferenceRequest, split: Split) -> str | bytes | int | None:
    """Return what keeps a request with its version: header, parameter or sequence; None = nothing does."""
    if request.sticky:
        return request.sticky
    if split.sticky_parameter and request.parameters is not None:
        value = request.parameters.get(split.sticky_parameter)
        if value is not None:
            return str(value)
    return request.correlation_id or None


def _nothing() -> None:
    return
