"""RolloutService: joins policies, shadows and guards to a server's planes, and tells the metrics of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from headrace.clock import Clock
from headrace.instances.loaded_model import LoadedModel
from headrace.observability.snapshot import Snapshot
from headrace.repository.registry import ModelRegistry
from headrace.rollout.rollouts import Rollouts, shares
from headrace.rollout.shadow import ShadowSender
from headrace.rollout.watching import GuardWatch
from headrace.types import LATEST
from headrace_protocol.errors import InferError


class SplitPlane(Protocol):
    """The data plane, as far as it asks here; both are None while nobody needs them, so that a request costs one look."""

    traffic: Rollouts | None
    shadows: ShadowSender | None


class RolloutService:
    """One a server; borrows the registry and the data plane until `close`."""

    def __init__(
        self, rollouts: Rollouts, registry: ModelRegistry[LoadedModel], plane: SplitPlane, clock: Clock
    ) -> None:
        self._rollouts = rollouts
        self._registry = registry
        self._plane = plane
        self.shadows = ShadowSender(rollouts, registry, clock.now_ns)
        self._watch = GuardWatch(rollouts, registry, clock.now_ns)
        rollouts.connect(registry)
        rollouts.on_change = self._changed

    def _changed(self) -> None:
        self._plane.traffic = self._rollouts if self._rollouts.any_split else None
        self._plane.shadows = self.shadows if self._rollouts.any_shadow else None
        self._watch.update()

    def close(self) -> None:
        """Give up shadows under way, and send and watch no more."""
        self._rollouts.on_change = _nothing
        self._plane.shadows = None
        self._watch.close()
        self.shadows.close()

    def add_to(self, snapshot: Snapshot) -> None:
        """Add what the metrics tell of policies."""
        for name, rollout in self._rollouts.items():
            for version, percent in self._weights(name):
                help_text = "Percent of the requests naming no version that a version gets"
                labels = {"model": name, "version": str(version)}
                snapshot.gauge("headrace_traffic_weight", help_text, labels, percent)
            for version, counts in rollout.shadow_counts.items():
                for outcome in counts.__slots__:
                    labels = {"model": name, "version": str(version), "outcome": outcome}
                    help_text = (
                        "Requests that were sent to a version as shadows, and those that were not for want of room"
                    )
                    snapshot.counter("headrace_shadow_requests_total", help_text, labels, getattr(counts, outcome))
            for reason, count in rollout.rolled_back.items():
                help_text = "Versions whose share of the requests was taken away"
                labels = {"model": name, "reason": reason}
                snapshot.counter("headrace_rollbacks_total", help_text, labels, count)

    def _weights(self, name: str) -> Iterator[tuple[int, float]]:
        try:
            default = self._registry.get(name, LATEST).version
        except InferError:
            return
        yield from shares(self._rollouts.policy(name), default).items()


def _nothing() -> None:
    return
