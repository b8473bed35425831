"""TrafficControl: what an operator asks and says about the versions of a model while the server runs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

from headrace.config import ControlMode
from headrace.instances.loaded_model import LoadedModel
from headrace.observability.statistics import ModelStatistics
from headrace.repository.model_config import ConfigError
from headrace.repository.registry import ModelRegistry
from headrace.rollout.policy import TrafficPolicy, changed, parse_policy, to_document
from headrace.rollout.rollouts import MANUAL, Rollback, Rollouts, shares
from headrace.types import LATEST
from headrace_protocol.errors import ErrorCode, FailureReason, InferError, invalid, unavailable

Document = dict[str, Any]

OPERATIONS: Final = ("switch", "promote", "rollback", "reset")
"""Members of a change that stand alone; all others are settings of the policy."""
_SWITCH: Final = ("version", "load", "unload_old", "timeout_secs")
_LOOK_S: Final = 0.05


class Shadows(Protocol):
    """Who sends shadows."""

    def in_flight(self, name: str) -> int: ...


class TrafficControl:
    """Implements planes.TrafficControl over the policies in force."""

    def __init__(
        self, rollouts: Rollouts, registry: ModelRegistry[LoadedModel], shadows: Shadows, mode: ControlMode
    ) -> None:
        self._rollouts = rollouts
        self._registry = registry
        self._shadows = shadows
        self._mode = mode

    def get(self, model: str) -> Document:
        """Return what is in force for a model, and how its versions do. Raises NOT_FOUND, UNAVAILABLE."""
        default = self._registry.get(model, LATEST).version
        policy = self._rollouts.policy(model)
        weights = shares(policy, default)
        told: Document = {"model": model, "policy": to_document(policy), "default": default}
        told["versions"] = [
            {
                "version": version,
                "ready": served.ready,
                "weight": weights.get(version, 0.0),
                **_counts(served.statistics),
            }
            for version in self._registry.versions(model)
            if (served := self._registry.get(model, version))
        ]
        rollout = self._rollouts.get(model)
        told["set_by"] = "call" if rollout is not None and rollout.by_call else "configuration"
        told["shadow_in_flight"] = self._shadows.in_flight(model)
        shadows = {} if rollout is None else rollout.shadow_counts
        told["shadows"] = {
            str(version): {name: getattr(counts, name) for name in counts.__slots__}
            for version, counts in sorted(shadows.items())
        }
        told["rollbacks"] = [_shown(rollback) for rollback in (() if rollout is None else rollout.rollbacks)]
        return told

    async def update(self, model: str, changes: Mapping[str, Any]) -> Document:
        """Change settings of the policy, all or none, or do one of OPERATIONS; return what is in force then.

        Raises INVALID_ARG with every problem; NOT_FOUND, UNAVAILABLE for a version that does not serve.
        """
        asked = [name for name in OPERATIONS if name in changes]
        if not changes:
            return self.get(model)
        if not asked:
            self._change(model, changes)
        elif len(changes) > 1:
            raise invalid(f"'{asked[0]}' stands alone, got {', '.join(map(repr, changes))}")
        elif asked == ["switch"]:
            await self._switch(model, changes["switch"])
        elif asked == ["promote"]:
            self._promote(model, _version(changes["promote"], "promote"))
        elif asked == ["rollback"]:
            self._roll_back(model, changes["rollback"])
        else:
            if changes["reset"] is not True:
                raise invalid(f"reset: expected true, got {changes['reset']!r:.80}")
            self._registry.get(model, LATEST)
            self._rollouts.reset(model)
        return self.get(model)

    def _change(self, model: str, changes: Mapping[str, Any]) -> None:
        serving = self._registry.get(model, LATEST)
        document = changed(self._rollouts.policy(model), changes)
        if document.get("weights") and document.get("default") is None:
            document["default"] = self._implied_default(model, serving.version, document["weights"])
        policy = self._parsed(document)
        for version in sorted(policy.versions()):
            self._check_serves(model, version)
        self._rollouts.set(model, policy)

    def _implied_default(self, model: str, serving: int, weights: object) -> int:
        """Return the version that gets what others do not, where a change names none: the one that does so far."""
        named = set(weights) if isinstance(weights, Mapping) else set()
        others = [version for version in self._registry.versions(model) if str(version) not in named]
        if not others:
            raise invalid(f"weights: model '{model}' serves no version beside these, which could be the default")
        return serving if serving in others else max(others)

    @staticmethod
    def _parsed(document: Document) -> TrafficPolicy:
        try:
            return parse_policy(document)
        except ConfigError as error:
            raise invalid(str(error)) from None

    def _promote(self, model: str, version: int) -> None:
        self._check_serves(model, version)
        document = to_document(self._rollouts.policy(model))
        document["default"] = version
        document.pop("weights", None)
        if document.get("shadow", {}).get("version") == version:
            del document["shadow"]
        self._rollouts.set(model, self._parsed(document))

    def _roll_back(self, model: str, given: object) -> None:
        self._registry.get(model, LATEST)
        weights = self._rollouts.policy(model).weights
        version = None if given is True else _version(given, "rollback")
        if not weights or (version is not None and version not in weights):
            which = "no version" if version is None else f"version {version}, which does not"
            raise invalid(f"rollback: {which} of model '{model}' has a weight")
        self._rollouts.roll_back(model, version, MANUAL, "by a call")

    async def _switch(self, model: str, given: object) -> None:
        """Make a version the default once it is ready, and unload the one before it where that is asked for."""
        options = given if isinstance(given, Mapping) else {"version": given}
        unknown = [key for key in options if key not in _SWITCH]
        if unknown:
            raise invalid(f"switch.{unknown[0]}: is unknown; there are {', '.join(_SWITCH)}")
        version = _version(options.get("version"), "switch.version")
        load, unload_old = (_flag(options.get(name, False), f"switch.{name}") for name in ("load", "unload_old"))
        timeout = options.get("timeout_secs", 60)
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout <= 3600:
            raise invalid(f"switch.timeout_secs: expected a number from 0 to 3600, got {timeout!r:.80}")
        old = self._registry.get(model, LATEST).version
        if (load or unload_old) and self._mode is not ControlMode.EXPLICIT:
            raise unavailable(
                f"switch: versions cannot be loaded or unloaded in model control mode {self._mode.value!r}"
            )
        if load and version not in self._registry.versions(model):
            with self.pinned(model):
                await self._registry.load_version(model, version)
        await self._until_ready(model, version, float(timeout))
        self._promote(model, version)
        if unload_old and old != version:
            await self._registry.unload_version(model, old)

    async def _until_ready(self, model: str, version: int, timeout_s: float) -> None:
        """Wait until a version would serve a request. Raises UNAVAILABLE with the reason where it does not in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._check_serves(model, version)
            except InferError as error:
                if error.code is not ErrorCode.UNAVAILABLE or time.monotonic() >= deadline:
                    raise
            else:
                return
            await asyncio.sleep(_LOOK_S)

    def _check_serves(self, model: str, version: int) -> None:
        served = self._registry.get(model, version)
        if not served.ready:
            raise unavailable(f"model '{model}' version {version} is not ready: {served.not_ready_reason}")

    @contextlib.contextmanager
    def pinned(self, model: str) -> Iterator[None]:
        """Keep the version that serves by default the default, while another one is loaded beside it and afterwards.

        Otherwise a higher one would get all requests at once. If the load fails, all is as before.
        """
        before = self._rollouts.get(model)
        policy, by_call = self._rollouts.policy(model), before is not None and before.by_call
        if policy.default is not None or not self._registry.versions(model):
            yield
            return
        pinned = dataclasses.replace(policy, default=self._registry.get(model, LATEST).version)
        self._rollouts.set(model, pinned)
        try:
            yield
        except BaseException:
            if self._rollouts.policy(model) is pinned:
                if by_call:
                    self._rollouts.set(model, policy)
                else:
                    self._rollouts.reset(model)
            raise

    def unloading(self, model: str, version: int) -> None:
        """Note that a version is to be unloaded. Raises INVALID_ARG where it is the default that was set."""
        policy = self._rollouts.policy(model)
        if policy.default == version:
            raise invalid(f"version {version} is the default of model '{model}': make another one that first")
        if version in policy.weights:
            self._rollouts.roll_back(model, version, MANUAL, "it is unloaded by a call")


def _version(given: object, path: str) -> int:
    text = str(given) if isinstance(given, int | str) and not isinstance(given, bool) else ""
    if text.isascii() and text.isdigit() and 0 < int(text) < 1 << 63:
        return int(text)
    raise invalid(f"{path}: expected a version, which is a number above 0, got {given!r:.80}")


def _flag(given: object, path: str) -> bool:
    if isinstance(given, bool):
        return given
    raise invalid(f"{path}: expected true or false, got {given!r:.80}")


def _counts(statistics: ModelStatistics) -> Document:
    failed = statistics.failures[FailureReason.BACKEND] + statistics.failures[FailureReason.OTHER]
    return {"answered": statistics.success_count, "failed": failed}


def _shown(rollback: Rollback) -> Document:
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(rollback.wall_ns / 1e9))
    return {"version": rollback.version, "reason": rollback.reason, "text": rollback.text, "at": at}
