"""TrafficPolicy: what is said about the versions of one model, parsed once from JSON-ready values. Pure.

Knows neither which versions there are nor how requests are counted. Every mistake is a Problem with its path.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from headrace.repository.model_config import ConfigError, Problem

HUNDRED: Final = 100.0
MOST_VERSIONS: Final = 16
"""Versions that a policy may name."""
MAX_POLICY_BYTES: Final = 16384
_LONGEST_NAME: Final = 128
_VERSION: Final = re.compile(r"[1-9][0-9]{0,17}")


@dataclass(frozen=True, slots=True)
class ShadowPolicy:
    """Requests that are sent to another version as well, whose answers are dropped."""

    version: int
    percent: float
    """Of the requests that name no version; above 0, up to 100."""
    max_in_flight: int = 16
    """What would be more is not sent."""
    timeout_secs: float = 30.0
    """After which one is given up."""
    streams: bool = False
    """Also where the version gives any number of responses."""


@dataclass(frozen=True, slots=True)
class GuardPolicy:
    """Bounds within which the versions with a weight have to stay; at least one is set."""

    max_error_rate: float | None = None
    """Failed requests of all, 0 to 1."""
    max_error_rate_above_default: float | None = None
    """By how much the rate may be above that of the default version."""
    max_p99_ms: float | None = None
    """What 99 of 100 requests must not take longer than."""
    max_p99_ratio: float | None = None
    """The same, as a multiple of what the default version takes; >= 1."""
    min_requests: int = 20
    """Requests of the window below which nothing is said about errors or durations."""
    window_secs: int = 30


@dataclass(frozen=True, slots=True)
class TrafficPolicy:
    """What becomes of requests that name no version. Without any setting, the highest version gets them."""

    default: int | None = None
    """The version that gets what no other one does; None = the highest."""
    weights: Mapping[int, float] = field(default_factory=dict)
    """Percent of the requests, by version other than the default; together at most 100."""
    sticky_parameter: str = ""
    """The request parameter by whose value callers stay with a version, where they send no header for that."""
    shadow: ShadowPolicy | None = None
    guard: GuardPolicy | None = None

    @property
    def default_weight(self) -> float:
        """Percent that the default version gets."""
        return max(0.0, HUNDRED - sum(self.weights.values()))

    def versions(self) -> set[int]:
        """Return every version that is named."""
        shadow = () if self.shadow is None else (self.shadow.version,)
        return {*(() if self.default is None else (self.default,)), *self.weights, *shadow}


def parse_policy(document: object, path: str = "") -> TrafficPolicy:
    """Return the policy that JSON-ready values say. Raises ConfigError with every problem."""
    reader = _Reader(path)
    policy = reader.policy(document)
    if reader.problems:
        raise ConfigError(reader.problems)
    return policy


def parse_policy_text(text: str, path: str) -> TrafficPolicy:
    """Return the policy that JSON text says. Raises ConfigError."""
    if len(text) > MAX_POLICY_BYTES:
        raise ConfigError([Problem(path, f"has more than {MAX_POLICY_BYTES} characters")])
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError([Problem(path, f"is no JSON: {error}")]) from None
    return parse_policy(document, path)


def to_document(policy: TrafficPolicy) -> dict[str, Any]:
    """Return the values that `parse_policy` makes this policy of; what is not set is not there."""
    told: dict[str, Any] = {}
    if policy.default is not None:
        told["default"] = policy.default
    if policy.weights:
        told["weights"] = {str(version): weight for version, weight in sorted(policy.weights.items())}
    if policy.sticky_parameter:
        told["sticky_parameter"] = policy.sticky_parameter
    for name, part in (("shadow", policy.shadow), ("guard", policy.guard)):
        if part is not None:
            values = {key: getattr(part, key) for key in part.__dataclass_fields__}
            told[name] = {key: value for key, value in values.items() if value is not None}
    return told


def changed(policy: TrafficPolicy, changes: Mapping[str, object]) -> dict[str, Any]:
    """Return the values of a policy with top-level members replaced, taken away where the change says None."""
    document = {**to_document(policy), **changes}
    return {key: value for key, value in document.items() if value is not None}


class _Reader:
    """Reads values and gathers what is wrong with them."""

    def __init__(self, path: str) -> None:
        self._root = path
        self.problems: list[Problem] = []

    def policy(self, document: object) -> TrafficPolicy:
        values = self._object(document, "", TrafficPolicy.__dataclass_fields__)
        default = self._version(values.get("default"), "default") if "default" in values else None
        weights = self._weights(values.get("weights", {}))
        sticky = values.get("sticky_parameter", "")
        if not isinstance(sticky, str) or len(sticky) > _LONGEST_NAME:
            self._wrong(
                "sticky_parameter", f"the name of a request parameter, up to {_LONGEST_NAME} characters", sticky
            )
            sticky = ""
        shadow = self._shadow(values["shadow"]) if "shadow" in values else None
        guard = self._guard(values["guard"]) if "guard" in values else None
        if weights and default is None:
            self._problem("weights", "needs a 'default' for the other requests")
        if default in weights:
            self._problem(f"weights.{default}", "is the default, which gets what is left")
        if shadow is not None and shadow.version in {default, *weights}:
            self._problem("shadow.version", f"version {shadow.version} gets requests of its own already")
        return TrafficPolicy(default, weights, sticky, shadow, guard)

    def _weights(self, given: object) -> dict[int, float]:
        weights: dict[int, float] = {}
        for text, value in self._object(given, "weights", None).items():
            version, weight = self._version(text, "weights"), self._number(value, f"weights.{text}", 0, HUNDRED)
            if version is not None and weight:
                weights[version] = weight
        if len(weights) > MOST_VERSIONS:
            self._problem("weights", f"names {len(weights)} versions, at most {MOST_VERSIONS} go")
        if (total := sum(weights.values())) > HUNDRED + 1e-9:
            self._problem("weights", f"add up to {total:g}, which is more than 100 percent")
        return weights

    def _shadow(self, given: object) -> ShadowPolicy | None:
        values = self._object(given, "shadow", ShadowPolicy.__dataclass_fields__)
        version = self._version(values.get("version"), "shadow.version")
        percent = self._number(values.get("percent"), "shadow.percent", 0, HUNDRED)
        numbers: dict[str, Any] = {}
        if "max_in_flight" in values:
            numbers["max_in_flight"] = self._integer(values["max_in_flight"], "shadow.max_in_flight", 1, 4096)
        if "timeout_secs" in values:
            numbers["timeout_secs"] = self._number(values["timeout_secs"], "shadow.timeout_secs", 0.1, 3600)
        if "streams" in values:
            numbers["streams"] = values["streams"]
            if not isinstance(values["streams"], bool):
                self._wrong("shadow.streams", "true or false", values["streams"])
        return None if version is None or not percent else ShadowPolicy(version, percent, **numbers)

    def _guard(self, given: object) -> GuardPolicy | None:
        values = self._object(given, "guard", GuardPolicy.__dataclass_fields__)
        found: dict[str, Any] = {}
        for name, low, high in (
            ("max_error_rate", 0, 1),
            ("max_error_rate_above_default", 0, 1),
            ("max_p99_ms", 0.001, 3_600_000),
            ("max_p99_ratio", 1, 1000),
        ):
            if name in values:
                found[name] = self._number(values[name], f"guard.{name}", low, high)
        if not found:
            self._problem("guard", "sets no bound: one of max_error_rate, max_p99_ms and their like")
        for name, least, most in (("min_requests", 1, 1_000_000), ("window_secs", 2, 600)):
            if name in values:
                found[name] = self._integer(values[name], f"guard.{name}", least, most)
        return GuardPolicy(**found)

    def _object(self, given: object, path: str, known: Iterable[str] | None) -> Mapping[str, Any]:
        if not isinstance(given, Mapping):
            self._wrong(path, "an object", given)
            return {}
        if known is not None:
            names = list(known)
            for key in given:
                if key not in names:
                    self._problem(f"{path}.{key}" if path else str(key), f"is unknown; there are {', '.join(names)}")
        return given

    def _version(self, given: object, path: str) -> int | None:
        text = str(given) if isinstance(given, int | str) and not isinstance(given, bool) else ""
        if _VERSION.fullmatch(text):
            return int(text)
        self._wrong(path, "a version, which is a number above 0", given)
        return None

    def _number(self, given: object, path: str, low: float, high: float) -> float | None:
        good = isinstance(given, int | float) and not isinstance(given, bool)
        if good and math.isfinite(given) and low <= given <= high:  # type: ignore[arg-type,operator]
            return float(given)  # type: ignore[arg-type]
        self._wrong(path, f"a number from {low:g} to {high:g}", given)
        return None

    def _integer(self, given: object, path: str, low: int, high: int) -> int:
        if isinstance(given, int) and not isinstance(given, bool) and low <= given <= high:
            return given
        self._wrong(path, f"an integer from {low} to {high}", given)
        return low

    def _wrong(self, path: str, expected: str, given: object) -> None:
        shown = repr(given)
        self._problem(path, f"expected {expected}, got {shown if len(shown) <= 80 else shown[:80] + '...'}")

    def _problem(self, path: str, message: str) -> None:
        joined = ".".join(part for part in (self._root, path) if part)
        self.problems.append(Problem(joined, message))
