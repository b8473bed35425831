"""Where instances run: how instance groups become processes, each on one device."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace.repository.model_config import InstanceGroup, ModelConfig, Need

_POLICY_OF_KIND: Final[Mapping[str, str]] = {"KIND_CPU": "cpu", "KIND_MODEL": "model"}


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the instances of one process are, and under which conditions they run."""

    kind: str = "KIND_CPU"
    """KIND_CPU, KIND_GPU or KIND_MODEL."""
    device: int = 0
    """Number of the GPU, else 0."""
    passive: bool = False
    """Whether they are there, and get no requests."""
    policy: str = ""
    """The host policy asked for by name; "" = that of the kind."""
    needs: tuple[Need, ...] = ()
    """What each takes while it runs."""
    priority: int = 1

    @property
    def policy_name(self) -> str:
        """The host policy that counts, if there is one of that name."""
        if self.policy:
            return self.policy
        return f"gpu_{self.device}" if self.kind == "KIND_GPU" else _POLICY_OF_KIND.get(self.kind, "")


ANYWHERE: Final = Placement()


def placements(groups: Iterable[InstanceGroup], *, limited: bool) -> dict[Placement, list[str]]:
    """Return the processes that instance groups make, each with the names of its instances, group by group.

    Instances of one device that differ in nothing share a process; `limited`: what they need while they run counts.
    """
    places: dict[Placement, list[str]] = {}
    for group in groups:
        for device in group.gpus if group.kind == "KIND_GPU" else (0,):
            needs, priority = (group.needs, group.priority) if limited else ((), 1)
            placement = Placement(group.kind, device, group.passive, group.host_policy, needs, priority)
            names = places.setdefault(placement, [])
            names.extend(f"{group.name}_{number}" for number in range(group.count))
    return places


def asked_for(config: ModelConfig, *, limited: bool) -> dict[Placement, tuple[bytes, ...]]:
    """Return the places that a configuration asks for, each with all that its instance groups say."""
    said: dict[Placement, tuple[bytes, ...]] = {}
    for group, proto in zip(config.instance_groups, config.proto.instance_group, strict=True):
        for placement in placements([group], limited=limited):
            said[placement] = (*said.get(placement, ()), proto.SerializeToString(deterministic=True))
    return said


def bind(pid: int, cores: frozenset[int]) -> None:
    """Have a process run on these processors alone, with every thread that it has and will have."""
    with contextlib.suppress(OSError):  # it has ended, which its channel tells
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores)
