"""Where instances may run: which devices this machine offers to the backends that are installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

GPU_PACKAGES: Final = ("onnxruntime-gpu",)
"""Distributions that let a backend run on an NVIDIA GPU. Without one of them a GPU is of no use to us."""


def gpu_count(devices: Path = Path("/dev")) -> int:
    """Return how many NVIDIA GPUs instances can be placed on; 0 where no installed backend could use them."""
    if not any(map(_installed, GPU_PACKAGES)):
        return 0
    return sum(path.name.removeprefix("nvidia").isdecimal() for path in devices.glob("nvidia*"))


def _installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True
