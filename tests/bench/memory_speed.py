"""How fast memory is read, and how much of it a token of a language model reads: one stream cannot be faster than that."""

from __future__ import annotations

import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_NUMBERS = 2**26
"""Of 8 bytes: far more than the last cache of a processor that CI has."""
_HEADS = frozenset({"lm_head.weight", "output.weight"})
_EMBEDDINGS = ("embed_tokens.weight", "token_embd.weight")
"""As safetensors and GGUF files have them."""


def memory_speed(threads: int) -> float:
    """Return how many GB/s so many threads read together, the best of several."""
    parts = np.array_split(np.ones(_NUMBERS), threads)
    times = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(7):
            began = time.perf_counter()
            list(pool.map(np.max, parts))
            times.append(time.perf_counter() - began)
    return 8 * _NUMBERS / min(times) / 1e9


@dataclass(frozen=True)
class Weights:
    """What one token reads of a model: all of it, but of an embedding that is not the head as well a single row."""

    numbers: int
    size: int
    """Bytes, as they lie in the files."""
    exact: int
    """Bytes that our engine keeps where it multiplies in fp32: as in the files, or 4 a number of kinds that it unpacks."""


def weights(path: Path) -> Weights:
    """Read the headers of a folder's safetensors, or of a GGUF file or a folder with one.

    Raises FileNotFoundError where there is neither.
    """
    found = [path] if path.is_file() else sorted(path.glob("*.safetensors")) or sorted(path.glob("*.gguf"))
    if not found:
        raise FileNotFoundError(f"{path}: neither safetensors nor a GGUF file")
    tensors: dict[str, tuple[int, int, int]] = {}
    for file in found:
        tensors |= _gguf(file) if file.suffix == ".gguf" else _safetensors(file)
    if _HEADS & tensors.keys():
        tensors = {name: size for name, size in tensors.items() if not name.endswith(_EMBEDDINGS)}
    return Weights(*(sum(column) for column in zip(*tensors.values(), strict=True)))


def _safetensors(file: Path) -> dict[str, tuple[int, int, int]]:
    """Return how many numbers and bytes each tensor has, and how many bytes our engine keeps of it."""
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    header.pop("__metadata__", None)
    return {
        name: _counted(
            math.prod(tensor["shape"]),
            tensor["data_offsets"][1] - tensor["data_offsets"][0],
            exact=tensor["dtype"] in {"BF16", "F32"},
        )
        for name, tensor in header.items()
    }


def _gguf(file: Path) -> dict[str, tuple[int, int, int]]:
    import gguf

    kept = {"F32", "BF16", "Q8_0", "Q4_0", "Q4_1"}
    return {
        tensor.name: _counted(int(tensor.n_elements), int(tensor.n_bytes), exact=tensor.tensor_type.name in kept)
        for tensor in gguf.GGUFReader(file).tensors
    }


def _counted(numbers: int, size: int, *, exact: bool) -> tuple[int, int, int]:
    return numbers, size, size if exact else 4 * numbers
