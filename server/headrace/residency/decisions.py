"""What the policy of residency is told, and what it decides: the words of policy.py."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple


class Stage(enum.Enum):
    """Where a model is."""

    ABSENT = enum.auto()
    LOADING = enum.auto()
    RESIDENT = enum.auto()
    RELOADING = enum.auto()
    """It serves, and its new content is being loaded beside it."""
    LEAVING = enum.auto()
    """It takes no more requests; its memory is not free yet."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What is known of a model before it is loaded."""

    estimate: int
    """Bytes that it is expected to take, while nobody has measured it."""
    pinned: bool = False
    members: frozenset[str] = frozenset()
    """Models that it, an ensemble, is made of."""


@dataclass(frozen=True, slots=True)
class Activity:
    """What requests do to a model now."""

    used_ns: int = 0
    """When the last one came."""
    busy: bool = False
    """Whether there is any in it, or a sequence."""
    bound: bool = False
    """Whether it cannot be closed: there are sequences in it, whose requests have to reach it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The bounds."""

    budget: int
    """Bytes, > 0."""
    min_residence_ns: int = 1_000_000_000
    """A model that has come stays for that long at least."""
    patience_ns: int = 1_000_000_000
    """How long a request waits for models to become idle before busy ones are closed for it."""

    @property
    def room(self) -> int:
        """Bytes that a load may fill: the rest is for what models grow by between two measurements."""
        return self.budget - self.budget // 16


class Load(NamedTuple):
    """Load this model; report `loaded` or `load_failed`, once."""

    name: str


class Reload(NamedTuple):
    """Load the new content of this model beside what serves; report `loaded` or `load_failed`, once."""

    name: str


class Evict(NamedTuple):
    """Unload this model; report `freed` when its memory is free."""

    name: str


class Close(NamedTuple):
    """Have new requests to this model wait: it is to go when it is idle."""

    name: str


class Reopen(NamedTuple):
    """Let requests to this model through again."""

    name: str


class Refuse(NamedTuple):
    """Nobody need wait for this model: it cannot be loaded beside what is pinned. It is not wanted any more."""

    name: str
    reason: str


Decision = Load | Reload | Evict | Close | Reopen | Refuse
