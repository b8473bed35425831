"""The options about where and when instances run: what resources there are, and which processors a policy's name means."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

Limits = Mapping[tuple[str, int | None], int]
"""By resource, in small letters, and device; device None = of each device."""
HostPolicies = Mapping[str, frozenset[int]]
"""The processors of each policy."""

NUMA: Final = "numa-node"
CORES: Final = "cpu-cores"
_NODES: Final = Path("/sys/devices/system/node")
_MOST_CORES: Final = 1 << 16


def rate_limits(options: Mapping[str, Any], problems: list[str], warnings: list[str]) -> Limits | None:
    """Return the limits that the parsed `options` give; None where instances are not limited by resources."""
    given: Sequence[tuple[str, int | None, int]] = options["rate-limit-resource"]
    if options["rate-limit"] == "off":
        if given:
            warnings.append("--rate-limit-resource has no effect without --rate-limit=execution_count")
        return None
    limits: dict[tuple[str, int | None], int] = {}
    for name, device, count in given:
        if limits.setdefault((name, device), count) != count:
            where = "" if device is None else f" of device {device}"
            problems.append(
                f"--rate-limit-resource: '{name}'{where} is given twice, with {limits[name, device]} and {count}"
            )
    return limits


def host_policies(
    given: Iterable[tuple[str, Mapping[str, str]]],
    problems: list[str],
    available: Callable[[], Iterable[int]] = lambda: os.sched_getaffinity(0),
    nodes: Path = _NODES,
) -> HostPolicies:
    """Return the processors of each --host-policy; adds what is wrong."""
    settings: dict[str, dict[str, str]] = {}
    for name, values in given:
        settings.setdefault(name, {}).update(values)
    policies: dict[str, frozenset[int]] = {}
    mine = frozenset(available())
    for name, values in settings.items():
        try:
            cores = _cores(values, nodes)
        except ValueError as error:
            problems.append(f"--host-policy {name}: {error}")
            continue
        if cores & mine:
            policies[name] = cores & mine
        else:
            problems.append(f"--host-policy {name}: the server may run on none of its processors {sorted(cores)[:16]}")
    return policies


def _cores(values: Mapping[str, str], nodes: Path) -> frozenset[int]:
    cores: frozenset[int] | None = None
    for key, text in values.items():
        if key == CORES:
            found = core_list(text)
        elif key == NUMA:
            if not text.isdecimal():
                raise ValueError(f"{NUMA}: expected the number of a node, got {text!r}")
            try:
                found = core_list((nodes / f"node{int(text)}" / "cpulist").read_text())
            except OSError:
                raise ValueError(f"{NUMA}: this machine has no node {text}") from None
        else:
            raise ValueError(f"unknown setting {key!r}; there are {NUMA} and {CORES}")
        cores = found if cores is None else cores & found
    if not cores:
        raise ValueError(f"{NUMA} and {CORES} have no processor in common")
    return cores


def core_list(text: str) -> frozenset[int]:
    """Return the numbers of a list like `0-3,8`. Raises ValueError."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        low, high = first.strip(), last.strip() if dash else first.strip()
        if not (low.isdecimal() and high.isdecimal()) or not int(low) <= int(high) < _MOST_CORES:
            raise ValueError(f"{CORES}: expected processors like 0-3,8, got {text.strip()!r}")
        cores.update(range(int(low), int(high) + 1))
    return frozenset(cores)
