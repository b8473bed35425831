"""What /proc and NVML tell of the machine and of the backend processes, sampled for a scrape; the series of the machine."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.config import MetricsSettings
from headrace.observability.gpus import Gpus, GpuSample, add_gpus
from headrace.observability.processes import (
    CpuUtilization,
    ProcessUsage,
    machine_memory,
    process_usage,
)
from headrace.observability.snapshot import Snapshot

_NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class MachineSample:
    """What they told at one moment."""

    taken_ns: int
    usage: dict[int, ProcessUsage]
    """By process id; a process that is gone is missing."""
    cpu_utilization: float
    memory: tuple[int, int]
    gpus: tuple[GpuSample, ...] = ()


class MachineMetrics:
    """Samples them at most once an interval, however often it is asked."""

    def __init__(self, settings: MetricsSettings, gpus: Gpus | None = None) -> None:
        self._settings = settings
        self._gpus = gpus or Gpus()
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
            usage = {pid: found for pid in set(pids) if (found := process_usage(pid)) is not None}
            cpu = last.cpu_utilization if last is not None and fresh else self._cpu.sample()
            if last is not None and fresh:
                gpus = last.gpus
            else:
                gpus = self._gpus.sample() if self._settings.gpu_metrics else ()
            self._last = MachineSample(now_ns, usage, cpu, machine_memory(), gpus)
            return self._last

    def add(self, snapshot: Snapshot, sample: MachineSample) -> None:
        """Add the series of the machine."""
        add_gpus(snapshot, sample.gpus)
        if self._settings.cpu_metrics:
            total, used = sample.memory
            for name, help_text, value in (
                ("nv_cpu_utilization", "Share of the machine's CPU time in use, 0 to 1", sample.cpu_utilization),
                ("nv_cpu_memory_total_bytes", "Memory of the machine", total),
                ("nv_cpu_memory_used_bytes", "Memory of the machine that is in use", used),
            ):
                snapshot.gauge(name, help_text, {}, value)
