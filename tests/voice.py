"""A voice detector that others made, in two forms, and a sound for it; its state is carried by whoever calls it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

RATE = 16000
FRAME, CONTEXT = 512, 64
"""Samples that the detector takes at once at this rate, after those that came just before them."""
_RANDOM = np.random.default_rng(7)


def detector_file(suffix: str) -> Path:
    """Return the detector's `.onnx` or `.jit` file without importing its package, which needs torch and torchaudio."""
    package = importlib.util.find_spec("silero_vad")
    if package is None or not package.submodule_search_locations:
        pytest.skip("the package silero-vad is not installed")
    return Path(package.submodule_search_locations[0]) / "data" / f"silero_vad{suffix}"


def speech_like(frames: int) -> np.ndarray:
    """Return FP32 samples: a voiced buzz with a syllable's rise and fall, after a second of near silence."""
    count = np.arange(frames * FRAME)
    buzz = sum(np.sin(2 * np.pi * 120 * harmonic * count / RATE) / harmonic for harmonic in range(1, 25))
    loud = np.where(count < RATE, 1e-4, 0.5 * (1 + np.sin(2 * np.pi * 4 * count / RATE)))
    return (0.2 * buzz * loud + 1e-4 * _RANDOM.standard_normal(count.size)).astype(np.float32)


def probabilities(
    step: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]], sound: np.ndarray
) -> np.ndarray:
    """Return what the detector finds in each frame. `step` gets a frame and the state, and gives (found, next state)."""
    state = np.zeros((2, 1, 128), np.float32)
    padded = np.concatenate([np.zeros(CONTEXT, np.float32), sound])
    found = []
    for start in range(0, sound.size, FRAME):
        output, state = step(padded[None, start : start + CONTEXT + FRAME], state)
        found.append(output.item())
    return np.array(found)
