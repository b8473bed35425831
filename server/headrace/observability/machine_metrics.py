"""The series that belong to no model: the server's own process, the machine, the build."""

from __future__ import annotations

import os
import platform
import resource
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from headrace import __version__
from headrace.config import MetricsSettings
from headrace.observability.exposition import Exposition, Kind, labels
from headrace.observability.processes import (
    CpuUtilization,
    ProcessUsage,
    boot_time,
    machine_memory,
    open_descriptors,
    process_usage,
)

_NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class MachineSample:
    """What /proc told at one moment."""

    taken_ns: int
    usage: dict[int, ProcessUsage]
    """By process id; a process that is gone is missing."""
    descriptors: int
    cpu_utilization: float
    memory: tuple[int, int]


class MachineMetrics:
    """Samples /proc at most once an interval, however often it is asked."""

    def __init__(self, settings: MetricsSettings) -> None:
        self._settings = settings
        self._pid = os.getpid()
        self._boot = boot_time()
        self._cpu = CpuUtilization()
        self._lock = threading.Lock()
        self._last: MachineSample | None = None

    def sample(self, pids: Sequence[int], now_ns: int) -> MachineSample:
        """Return a sample with these processes in it, no older than the interval. Slow; any thread may call it."""
        with self._lock:
            last = self._last
            fresh = last is not None and now_ns - last.taken_ns < self._settings.interval_ms * _NS_PER_MS
            if last is not None and fresh and last.usage.keys() >= set(pids):
                return last
            usage = {pid: found for pid in {self._pid, *pids} if (found := process_usage(pid)) is not None}
            cpu = last.cpu_utilization if last is not None and fresh else self._cpu.sample()
            self._last = MachineSample(now_ns, usage, open_descriptors(), cpu, machine_memory())
            return self._last

    def add(self, exposition: Exposition, sample: MachineSample) -> None:
        """Add the series of the server's process, of the machine and of the build."""
        _add_process(exposition, sample, sample.usage.get(self._pid), self._boot)
        if self._settings.cpu_metrics:
            total, used = sample.memory
            for name, help_text, value in (
                ("nv_cpu_utilization", "Share of the machine's CPU time in use, 0 to 1", sample.cpu_utilization),
                ("nv_cpu_memory_total_bytes", "Memory of the machine", total),
                ("nv_cpu_memory_used_bytes", "Memory of the machine that is in use", used),
            ):
                exposition.family(name, Kind.GAUGE, help_text).add("", value)
        build = labels({"version": __version__, "python": platform.python_version()})
        exposition.family("headrace_build_info", Kind.GAUGE, "The server's version; the value is always 1").add(
            build, 1
        )


def _add_process(exposition: Exposition, sample: MachineSample, usage: ProcessUsage | None, boot: float) -> None:
    if usage is None:
        return
    exposition.family("process_cpu_seconds_total", Kind.COUNTER, "CPU time of the server's process").add(
        "", usage.cpu_seconds
    )
    for name, help_text, value in (
        ("process_resident_memory_bytes", "Resident memory of the server's process", usage.rss_bytes),
        ("process_virtual_memory_bytes", "Virtual memory of the server's process", usage.virtual_bytes),
        (
            "process_start_time_seconds",
            "When the server's process started, since the epoch",
            boot + usage.start_seconds,
        ),
        ("process_open_fds", "Open file descriptors of the server's process", sample.descriptors),
        ("process_max_fds", "How many file descriptors it may have", resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
    ):
        exposition.family(name, Kind.GAUGE, help_text).add("", value)
