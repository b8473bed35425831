"""Finds libcudart, NVIDIA's CUDA runtime: in this process, where the loader looks, where NVIDIA's wheels put it.

Nothing is linked, so that processes that never touch a GPU never load it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Final

LIBRARIES: Final = ("libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so")
_FOLDERS: Final = ("nvidia/cu13/lib", "nvidia/cuda_runtime/lib")
"""Below a folder of packages: where the wheels for CUDA 13 and for older ones have it."""


def load_cudart() -> ctypes.CDLL | None:
    """Return the library: the one that a framework here has loaded, else the newest; None where there is none."""
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name, os.RTLD_LAZY | os.RTLD_NOLOAD)
        except OSError:
            continue
    for name in LIBRARIES:
        for place in (name, *_in_wheels(name)):
            try:
                return ctypes.CDLL(place)
            except OSError:
                continue
    return None


def _in_wheels(name: str) -> list[str]:
    places = (Path(entry) / folder / name for entry in sys.path for folder in _FOLDERS)
    return [str(place) for place in places if place.is_file()]
