"""Which GPUs there are, and which of the installed backends could use them. Asks no framework: the server has none."""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

GPU_PACKAGES: Final = {
    "onnxruntime": ("onnxruntime-gpu",),
    "pytorch": ("torch",),
    "llm": ("torch",),
    "vllm": ("torch",),
    "tensorrt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12", "tensorrt-cu11"),
    "identity": (),
}
"""Backend -> the distributions, one of which it needs to use a GPU. Backends that are not named here may use any."""


def gpu_count(given: int | None, visible: str | None, devices: Path = Path("/dev")) -> int:
    """Return how many NVIDIA GPUs instances can be placed on, numbered from 0 as CUDA numbers them for a process.

    `given` (--gpu-count) decides. Otherwise those of `devices` count, as far as `visible` names them: the value of
    CUDA_VISIBLE_DEVICES, a list that CUDA reads up to the first entry that names no GPU.
    """
    if given is not None:
        return given
    there = sum(path.name.removeprefix("nvidia").isdecimal() for path in devices.glob("nvidia*"))
    return there if visible is None else min(there, _named(visible, there))


def _named(visible: str, there: int) -> int:
    """Return how many GPUs a list names: numbers, or identifiers that begin with GPU- or MIG-."""
    count = 0
    for entry in (entry.strip() for entry in visible.split(",")):
        if (entry.isdecimal() and int(entry) < there) or entry.startswith(("GPU-", "MIG-")):
            count += 1
        else:
            break
    return count


def without_gpu(backends: Collection[str], installed: Callable[[str], str | None] | None = None) -> frozenset[str]:
    """Return the backends whose installed packages can use no GPU: their instances run on CPUs.

    `installed` tells the version of a distribution, None where it is absent; without it, this environment is looked at.
    """
    find = _installed if installed is None else installed
    return frozenset(
        backend
        for backend in backends
        if backend in GPU_PACKAGES and not any(map(_uses_gpu(find), GPU_PACKAGES[backend]))
    )


def _uses_gpu(find: Callable[[str], str | None]) -> Callable[[str], bool]:
    def uses(package: str) -> bool:
        found = find(package)
        return found is not None and not found.endswith("+cpu")

    return uses


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
