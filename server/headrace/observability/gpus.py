"""What NVML tells of the machine's GPUs, through NVIDIA's own package (`pip install 'headrace[nvml]'`), where both are there.

Each value may be missing by itself: cards in parts (MIG) have no utilisation, small ones no energy counter. A driver that
fails in the middle leaves out what it does not tell, and nothing else.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from headrace.observability.snapshot import Snapshot

_log = logging.getLogger(__name__)

_FAMILIES: Final = (
    ("nv_gpu_utilization", "Share of the time in which a kernel ran, 0 to 1", "utilization"),
    ("nv_gpu_memory_total_bytes", "Memory of the GPU", "memory_total_bytes"),
    ("nv_gpu_memory_used_bytes", "Memory of the GPU that is in use", "memory_used_bytes"),
    ("nv_gpu_power_usage", "Power that the GPU draws, in watts", "power_watts"),
    ("nv_gpu_power_limit", "Power that it may draw, in watts", "power_limit_watts"),
)


@dataclass(frozen=True, slots=True)
class GpuSample:
    """What was told of one GPU; None = that was not."""

    uuid: str
    utilization: float | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    energy_joules: float | None = None
    """Since the driver was loaded."""


class Gpus:
    """Asks NVML, which is opened with the first question; once that has failed there are no GPUs. Not thread-safe."""

    def __init__(self, load: Callable[[], Any] | None = None) -> None:
        """`load` returns the module `pynvml`; raises ImportError."""
        self._load = load or (lambda: importlib.import_module("pynvml"))
        self._nvml: Any = None
        self._handles: list[tuple[str, Any]] | None = None

    def sample(self) -> tuple[GpuSample, ...]:
        """Return what is told of each GPU now. Slow: up to a second the first time, milliseconds a GPU then."""
        if self._handles is None:
            self._handles = self._open()
        return tuple(self._sample(uuid, handle) for uuid, handle in self._handles)

    def _open(self) -> list[tuple[str, Any]]:
        try:
            nvml = self._nvml = self._load()
        except ImportError:
            _log.debug("there are no GPU metrics: the package nvidia-ml-py is missing (headrace[nvml])")
            return []
        try:
            nvml.nvmlInit()
            handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
            return [(_text(nvml.nvmlDeviceGetUUID(handle)), handle) for handle in handles]
        except nvml.NVMLError as error:
            _log.info("there are no GPU metrics: %s", error)
            return []

    def _sample(self, uuid: str, handle: Any) -> GpuSample:
        nvml = self._nvml
        rates = self._told(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._told(nvml.nvmlDeviceGetMemoryInfo, handle)
        power = self._told(nvml.nvmlDeviceGetPowerUsage, handle)
        limit = self._told(nvml.nvmlDeviceGetPowerManagementLimit, handle)
        energy = self._told(nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        return GpuSample(
            uuid,
            None if rates is None else rates.gpu / 100,  # NVML tells percent, milliwatts and millijoules
            None if memory is None else int(memory.total),
            None if memory is None else int(memory.used),
            None if power is None else power / 1000,
            None if limit is None else limit / 1000,
            None if energy is None else energy / 1000,
        )

    def _told(self, ask: Callable[[Any], Any], handle: Any) -> Any:
        try:
            return ask(handle)
        except self._nvml.NVMLError:
            return None


def add_gpus(snapshot: Snapshot, gpus: Iterable[GpuSample]) -> None:
    """Add the series of GPUs, under Triton's names."""
    for gpu in gpus:
        labels = {"gpu_uuid": gpu.uuid}
        for name, help_text, field in _FAMILIES:
            value = getattr(gpu, field)
            if value is not None:
                snapshot.gauge(name, help_text, labels, value)
        if gpu.energy_joules is not None:
            help_text = "Energy that the GPU took since its driver was loaded, in joules"
            snapshot.counter("nv_energy_consumption", help_text, labels, gpu.energy_joules)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # old versions of the package give bytes
