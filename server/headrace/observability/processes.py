"""What Linux tells of processes and of the machine: memory and CPU time, out of /proc.

Every reader gives None for a process that is gone: the server's children may die at any moment.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """A process at one moment."""

    cpu_seconds: float
    rss_bytes: int
    """Resident memory, shared pages counted in full."""
    pss_bytes: int | None
    """Resident memory, each shared page divided by its users: what sums up over processes. None = not told."""


def process_usage(pid: int) -> ProcessUsage | None:
    """Return what process `pid` uses, or None where there is no such process. PSS walks its page tables: slow."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()  # The command in parentheses may hold anything.
    return ProcessUsage(
        cpu_seconds=(int(fields[11]) + int(fields[12])) / _TICKS,
        rss_bytes=int(fields[21]) * _PAGE,
        pss_bytes=_pss(pid),
    )


def _pss(pid: int) -> int | None:
    try:
        text = (_PROC / str(pid) / "smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return None


def machine_memory() -> tuple[int, int]:
    """Return the machine's total memory and its used memory (total less available), in bytes."""
    values: dict[str, int] = {}
    for line in (_PROC / "meminfo").read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        if name in {"MemTotal", "MemAvailable"}:
            values[name] = int(rest.split()[0]) * 1024
    total = values.get("MemTotal", 0)
    return total, total - values.get("MemAvailable", total)


class CpuUtilization:
    """The share of the machine's CPU time that was used between two samples, 0 to 1."""

    def __init__(self) -> None:
        self._busy, self._total = _cpu_times()
        self._value = 0.0

    def sample(self) -> float:
        """Return the share since the last sample; the last value again where no tick has passed."""
        busy, total = _cpu_times()
        if total > self._total:
            self._value = min(1.0, max(0.0, (busy - self._busy) / (total - self._total)))
            self._busy, self._total = busy, total
        return self._value


def _cpu_times() -> tuple[int, int]:
    first = (_PROC / "stat").read_text(encoding="ascii").splitlines()[0]
    # user nice system idle iowait irq softirq steal; guest time is part of user already.
    times = [int(value) for value in first.split()[1:9]]
    idle = times[3] + times[4]
    return sum(times) - idle, sum(times)
