"""What is told of GPUs, by a stand-in for NVIDIA's package, whose names and units are held to the real one."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pynvml
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from headrace.observability.gpus import Gpus, add_gpus
from headrace.observability.machine_metrics import MachineMetrics
from headrace.observability.snapshot import Snapshot
from metrics_scrapes import samples, settings


class FakeNvml:
    """Two GPUs, of which the second is small: it tells neither power nor energy, nor how busy it is."""

    NVMLError = pynvml.NVMLError

    def __init__(self, *, driver: bool = True, text: type = str) -> None:
        self.driver = driver
        self.text = text
        self.asked = self.opened = 0
        self.lost = False

    def nvmlInit(self) -> None:
        self.opened += 1
        if not self.driver:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str | bytes:
        uuid = f"GPU-{handle}"
        return uuid.encode() if self.text is bytes else uuid

    def _big_only(self, handle: int) -> None:
        self.asked += 1
        if handle or self.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST if self.lost else pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        self._big_only(handle)
        return SimpleNamespace(gpu=73, memory=12)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        if self.lost:
            self._big_only(handle)
        return SimpleNamespace(total=80 << 30, used=7 << 30, free=73 << 30)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self._big_only(handle)
        return 250_500

    def nvmlDeviceGetPowerManagementLimit(self, handle: int) -> int:
        self._big_only(handle)
        return 700_000

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        self._big_only(handle)
        return 123_456_789


def told(gpus: Gpus) -> dict[str, float]:
    snapshot = Snapshot()
    add_gpus(snapshot, gpus.sample())
    registry = CollectorRegistry()
    registry.register(snapshot)
    return samples(generate_latest(registry).decode())


@pytest.mark.parametrize("text", [str, bytes])
def test_each_gpu_is_told_by_its_uuid_in_tritons_units_and_what_it_does_not_tell_is_left_out(text):
    assert told(Gpus(lambda: FakeNvml(text=text))) == {
        'nv_gpu_utilization{gpu_uuid="GPU-0"}': 0.73,
        'nv_gpu_memory_total_bytes{gpu_uuid="GPU-0"}': 80 << 30,
        'nv_gpu_memory_total_bytes{gpu_uuid="GPU-1"}': 80 << 30,
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-0"}': 7 << 30,
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-1"}': 7 << 30,
        'nv_gpu_power_usage{gpu_uuid="GPU-0"}': 250.5,
        'nv_gpu_power_limit{gpu_uuid="GPU-0"}': 700.0,
        'nv_energy_consumption{gpu_uuid="GPU-0"}': 123456.789,
    }


def test_a_gpu_that_is_lost_in_the_middle_is_not_told_of_and_comes_back():
    nvml = FakeNvml()
    gpus = Gpus(lambda: nvml)
    before = told(gpus)
    nvml.lost = True
    assert told(gpus) == {}
    nvml.lost = False
    assert told(gpus) == before
    assert nvml.opened == 1


def test_without_a_driver_or_the_package_there_are_no_gpus_and_nobody_asks_twice():
    nvml = FakeNvml(driver=False)
    gpus = Gpus(lambda: nvml)
    assert gpus.sample() == gpus.sample() == ()
    assert nvml.opened == 1
    loads = []

    def missing() -> None:
        loads.append(1)
        raise ImportError

    absent = Gpus(missing)
    assert absent.sample() == absent.sample() == ()
    assert len(loads) == 1


def test_gpus_are_asked_once_an_interval_and_not_at_all_where_that_is_switched_off():
    nvml = FakeNvml()
    machine = MachineMetrics(settings(argv=("--metrics-interval-ms=1000",)), Gpus(lambda: nvml))
    first = machine.sample([], 1)
    asked = nvml.asked
    assert machine.sample([], 900_000_000).gpus == first.gpus
    assert nvml.asked == asked > 0
    machine.sample([], 2_000_000_000)
    assert nvml.asked == 2 * asked
    off = FakeNvml()
    assert MachineMetrics(settings(argv=("--allow-gpu-metrics=false",)), Gpus(lambda: off)).sample([], 1).gpus == ()
    assert not off.opened


def test_the_stand_ins_names_and_arguments_are_those_of_nvidias_package():
    ours = [name for name in vars(FakeNvml) if name.startswith("nvml")]
    assert len(ours) == 9
    for name in ours:
        real = inspect.signature(getattr(pynvml, name))
        needed = [p for p in real.parameters.values() if p.default is inspect.Parameter.empty]
        assert len(needed) == len(inspect.signature(getattr(FakeNvml, name)).parameters) - 1, name
    assert {"total", "used"} <= {field for field, _ in pynvml.c_nvmlMemory_t._fields_}
    assert "gpu" in {field for field, _ in pynvml.c_nvmlUtilization_t._fields_}


def test_nvidias_package_without_a_driver_is_no_failure():
    assert isinstance(Gpus().sample(), tuple)
