"""Ensembles for `headrace check`: held against what was found of the other models, with nothing loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from headrace.ensembles.loader import ensemble_config
from headrace.ensembles.model import check
from headrace.repository.config_loading import Completion
from headrace.repository.ensemble_config import ensemble_of
from headrace.repository.model_config import ConfigError, ModelConfig
from headrace.repository.sources import ModelSource
from headrace.scheduling.ensemble_members import Member, model_as_member
from headrace.types import LATEST
from headrace_protocol.errors import invalid


class FoundModels:
    """The models that were found to load."""

    def __init__(self) -> None:
        self._members: dict[str, dict[int, Member]] = {}

    def add(self, config: ModelConfig, version: int) -> None:
        """Note a model that loads."""
        self._members.setdefault(config.name, {})[version] = model_as_member(config)

    def check(self, source: ModelSource, version: int, completion: Completion) -> tuple[ModelConfig, list[str]]:
        """Check an ensemble whose members were checked; return its configuration, and notes.

        Raises ConfigError, INVALID_ARG for a member that is not there.
        """
        config, notes = ensemble_config(source, version, completion)
        ensemble = ensemble_of(config.proto)
        members = [self._find(step.model_name, step.model_version) for step in ensemble.steps]
        checked = check(config, ensemble, members)
        if checked.problems:
            raise ConfigError(checked.problems)
        self._members.setdefault(source.name, {})[version] = checked.member
        return checked.config, notes

    def _find(self, name: str, version: int) -> Member:
        versions = self._members.get(name, {})
        if not versions:
            raise invalid(f"its member {name!r} is not there, or cannot serve")
        number = max(versions) if version == LATEST else version
        if number not in versions:
            raise invalid(f"its member {name!r} has no version {number} that can serve; it has {sorted(versions)}")
        return versions[number]


def members_first(members: Mapping[str, Iterable[str]]) -> list[str]:
    """Return all names, each after those of its members, as far as they are not in a circle; else by name."""
    left = dict(sorted(members.items()))
    order: list[str] = []
    while left:
        ready = [name for name, needed in left.items() if not any(member in left for member in needed)]
        for name in ready or list(left):
            order.append(name)
            del left[name]
    return order
