"""Trace settings: their values and ranges, who falls back on whom, and which requests they pick. Pure: no files, no time.

A model has the settings that were set for it, and the global ones for the rest; those fall back on the command line.
Models that share all settings share the counting too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from headrace_protocol.errors import InferError, invalid, unsupported

LEVELS: Final = ("TIMESTAMPS", "TENSORS")
OFF: Final = "OFF"
MODE: Final = "triton"
OTEL_MODE: Final = "opentelemetry"
RATES: Final = (0, 2**32 - 1)
COUNTS: Final = (-1, 2**31 - 1)
LOG_FREQUENCIES: Final = (0, 2**32 - 1)
_INTEGER: Final = re.compile(r"-?[0-9]{1,19}")
_LONGEST_VALUE: Final = 80

Changes = Mapping[str, Sequence[str] | None]


@dataclass(frozen=True, slots=True)
class TraceValues:
    """The settings of which there can be one set a model."""

    level: tuple[str, ...] = ()
    """What is written of a traced request, in the order of LEVELS; () = nothing is traced."""
    rate: int = 1000
    """One of so many requests is traced."""
    count: int = -1
    """How many more are traced; -1 = any number."""
    log_frequency: int = 0
    """Traces after which the next file begins; 0 = all go into one."""


def parse_level(values: Sequence[str]) -> tuple[str, ...]:
    """Return the levels that `values` name; raises ValueError with what was expected."""
    for value in values:
        if value not in (OFF, *LEVELS):
            raise ValueError(f"expected {OFF}, {' or '.join(LEVELS)}, got {_shortened(value)}")
    if OFF in values and len(values) > 1:
        raise ValueError(f"{OFF} stands alone, got {len(values)} levels")
    return tuple(level for level in LEVELS if level in values)


def parse_number(value: str, allowed: tuple[int, int]) -> int:
    """Return the integer that `value` writes; raises ValueError with the range that is allowed."""
    low, high = allowed
    number = int(value) if _INTEGER.fullmatch(value) else low - 1
    if not low <= number <= high:
        raise ValueError(f"expected an integer from {low} to {high}, got {_shortened(value)}")
    return number


def problem_of(values: TraceValues, *, has_file: bool) -> str:
    """Return why nothing could be traced though a level is set; "" where all is well."""
    if not values.level:
        return ""
    if not has_file:
        return (
            "trace_level: there is no file for traces; it is given when the server is started, "
            "as --trace-config triton,file=PATH"
        )
    return "" if values.rate else f"trace_rate: 0 is for trace_level {OFF} alone"


class Sampler:
    """Settings in force, and how far their counting is."""

    __slots__ = ("_seen", "remaining", "values")

    def __init__(self, values: TraceValues) -> None:
        self.values: Final = values
        self.remaining = values.count
        """How many more requests are traced; -1 = any number."""
        self._seen = 0

    @property
    def live(self) -> bool:
        """Whether a request may still be picked."""
        return bool(self.values.level) and self.remaining != 0

    def pick(self) -> bool:
        """Count one request; return whether it is to be traced."""
        if not self.live:
            return False
        self._seen += 1
        if self._seen < self.values.rate:
            return False
        self._seen = 0
        if self.remaining > 0:
            self.remaining -= 1
        return True


class TraceBook:
    """Which settings hold for which model."""

    def __init__(self, initial: TraceValues, *, has_file: bool, mode: str = MODE) -> None:
        self._initial = initial
        self._mode = mode
        self._has_file = has_file
        self._global = _Scope({}, Sampler(initial))
        self._models: dict[str, _Scope] = {}
        """The models for which something is set."""

    @property
    def models(self) -> tuple[str, ...]:
        """The models for which something is set."""
        return tuple(self._models)

    @property
    def live(self) -> bool:
        """Whether a request of some model may be picked."""
        return self._global.sampler.live or any(scope.sampler.live for scope in self._models.values())

    @property
    def on(self) -> bool:
        """Whether a level is set for some model, though perhaps none is picked any more."""
        return bool(self._global.sampler.values.level) or any(s.sampler.values.level for s in self._models.values())

    def sampler(self, model: str) -> Sampler:
        """Return what holds for a model ("" = for those for which nothing is set)."""
        return self._models.get(model, self._global).sampler

    def series(self, model: str) -> str:
        """Return under whose name the traces of a model are counted into files: its own, or "" for all others."""
        return model if model in self._models else ""

    def forget(self, model: str) -> None:
        """Drop what is set for a model."""
        self._models.pop(model, None)

    def update(self, model: str, changes: Changes) -> None:
        """Change settings, all or none; see planes.TraceSettings. `model` is known, or "" for the global settings."""
        given = {
            _field(name): _parsed(name, values)
            for name, values in changes.items()
            if not _is_mode(name, values, self._mode)
        }
        if not given:
            return
        if model:
            self._models |= self._model_after(model, given)
            if not self._models[model].given:
                del self._models[model]
        else:
            self._global, self._models = self._all_after(given)

    def _model_after(self, model: str, given: Mapping[str, Any]) -> dict[str, _Scope]:
        old = self._models.get(model)
        merged = _merged(old.given if old else {}, given)
        start = self._global.sampler.remaining if "count" in given or old is None else old.sampler.remaining
        return {model: self._scope(merged, self._global.sampler.values, given, start)}

    def _all_after(self, given: Mapping[str, Any]) -> tuple[_Scope, dict[str, _Scope]]:
        merged = _merged(self._global.given, given)
        start = self._initial.count if "count" in given else self._global.sampler.remaining
        new = self._scope(merged, self._initial, given, start)
        models: dict[str, _Scope] = {}
        for name, scope in self._models.items():
            falls_back = "count" in given and "count" not in scope.given
            start = new.sampler.remaining if falls_back else scope.sampler.remaining
            try:
                models[name] = self._scope(scope.given, new.sampler.values, {}, start)
            except InferError as error:
                raise invalid(f"model '{name}', which has settings of its own: {error.message}") from None
        return new, models

    def _scope(self, merged: dict[str, Any], base: TraceValues, given: Mapping[str, Any], remaining: int) -> _Scope:
        """Return a scope whose counting goes on with `remaining`, unless a count is given."""
        values = replace(base, **merged)
        problem = problem_of(values, has_file=self._has_file)
        if problem:
            raise invalid(problem)
        sampler = Sampler(values)
        if given.get("count") is None:
            sampler.remaining = remaining
        return _Scope(merged, sampler)


@dataclass(frozen=True, slots=True)
class _Scope:
    given: dict[str, Any]
    """What is set for it, by field of TraceValues."""
    sampler: Sampler


def shown(sampler: Sampler, file: str, mode: str = MODE) -> dict[str, str | list[str]]:
    """Return settings as the protocol shows them."""
    values = sampler.values
    return {
        "trace_level": list(values.level) or [OFF],
        "trace_rate": str(values.rate),
        "trace_count": str(sampler.remaining),
        "log_frequency": str(values.log_frequency),
        "trace_file": file,
        "trace_mode": mode,
    }


_NUMBERS: Final = {
    "trace_rate": ("rate", RATES),
    "trace_count": ("count", COUNTS),
    "log_frequency": ("log_frequency", LOG_FREQUENCIES),
}
_CHANGEABLE: Final = ("trace_level", *_NUMBERS)


def _field(name: str) -> str:
    """Return the field of a setting that can be changed. Raises where it cannot."""
    if name == "trace_level":
        return "level"
    if name in _NUMBERS:
        return _NUMBERS[name][0]
    if name in ("trace_file", "trace_mode"):
        raise unsupported(f"{name} is given when the server is started, and no call changes it")
    raise invalid(f"unknown trace setting {_shortened(name)}, expected one of {', '.join(_CHANGEABLE)}")


def _is_mode(name: str, values: Sequence[str] | None, mode: str) -> bool:
    """Return whether a setting only says the mode that there is, as clients do that send back what they got."""
    return name == "trace_mode" and values is not None and list(values) == [mode]


def _parsed(name: str, values: Sequence[str] | None) -> object:
    """Return a setting's value; None where it is to fall back."""
    if not values:
        return None
    try:
        if name == "trace_level":
            return parse_level(values)
        if len(values) != 1:
            raise ValueError(f"expected one value, got {len(values)}")
        return parse_number(values[0], _NUMBERS[name][1])
    except ValueError as error:
        raise invalid(f"{name}: {error}") from None


def _merged(old: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in {**old, **given}.items() if value is not None}


def _shortened(value: str) -> str:
    return ascii(value if len(value) <= _LONGEST_VALUE else f"{value[:_LONGEST_VALUE]}...")
