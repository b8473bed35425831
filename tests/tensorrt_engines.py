"""Engine files for the stand-in of TensorRT in fake_gpu, and a way into its process-wide state."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FAKE_GPU = Path(__file__).parent / "fake_gpu"
INSTALLED = "10.16.1.11"
"""The version that the stand-in has."""

Tensor = dict[str, Any]


def tensor(name: str, shape: Sequence[int], dtype: str = "FLOAT", **more: Any) -> Tensor:
    """Return one tensor; those whose names begin with OUT are outputs."""
    mode = "OUTPUT" if name.startswith("OUT") else "INPUT"
    return {"name": name, "mode": mode, "dtype": dtype, "shape": list(shape), **more}


def profile(**ranges: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return a profile: least, best and most of each input; `NAME_values` for the values of a shape tensor."""
    return {name.replace("_values", " values"): [list(shape) for shape in three] for name, three in ranges.items()}


def engine(
    program: str,
    tensors: Sequence[Tensor],
    *profiles: Mapping[str, Any],
    version: str = INSTALLED,
    prefix: bytes = b"",
    **more: Any,
) -> bytes:
    """Return an engine file."""
    numbers = (int(part) for part in version.split("."))
    header = prefix + struct.pack("<4sIQQ4B", b"ftrt", 0, 0, 0, *numbers)
    return header + json.dumps({"program": program, "tensors": tensors, "profiles": profiles, **more}).encode()


def add_sub(*most: int, **more: Any) -> bytes:
    """Return an engine of INPUT0 + INPUT1 and INPUT0 - INPUT1, rows of 4, with a profile for batches up to each of `most`."""
    tensors = [tensor(f"{kind}{number}", (-1, 4)) for kind in ("INPUT", "OUTPUT") for number in range(2)]
    profiles = [profile(**dict.fromkeys(("INPUT0", "INPUT1"), ((1, 4), (size, 4), (size, 4)))) for size in most or (8,)]
    return engine("add_sub", tensors, *profiles, **more)


def add_model(repository: Path, name: str, content: bytes, config: str | None = None, version: int = 1) -> Path:
    """Write a model; without `config` its folder has none. Returns its folder."""
    folder = repository / name
    (folder / str(version)).mkdir(parents=True, exist_ok=True)
    (folder / str(version) / "model.plan").write_bytes(content)
    if config is not None:
        (folder / "config.pbtxt").write_text(config)
    return folder
