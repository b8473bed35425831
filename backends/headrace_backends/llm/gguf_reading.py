"""Makes reading of a GGUF file quick: transformers reads it three times, and asks for a table anew for each tensor.

Both come from the package gguf by name at each call, so that for the time of a load they can be answered from what was
read before. Knows nothing of models.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import gguf
import numpy as np


class _PlainReader(gguf.GGUFReader):  # type: ignore[misc]  # the package has no types here
    """The package's reader without its costs: a slice of a memmap takes ten times as long as one of a plain array."""

    _plain: np.ndarray[Any, Any] | None = None

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        if self._plain is None:
            self._plain = self.data.view(np.ndarray)
        kind = _kind(dtype, self.byte_order if override_order is None else override_order)
        return self._plain[offset : offset + kind.itemsize * int(count)].view(kind)


@lru_cache(maxsize=64)
def _kind(dtype: Any, order: str) -> np.dtype[Any]:
    kind: np.dtype[Any] = np.dtype(dtype).newbyteorder(order)
    return kind


@contextlib.contextmanager
def read_once() -> Iterator[None]:
    """Read each GGUF file once while this is open. Not for two threads at once."""
    readers: dict[str, _PlainReader] = {}
    maps: dict[tuple[Any, ...], Any] = {}
    reader, name_map = gguf.GGUFReader, gguf.get_tensor_name_map

    def read(path: os.PathLike[str] | str, mode: str = "r") -> Any:
        key = f"{os.fspath(path)}:{mode}"
        if key not in readers:
            readers[key] = _PlainReader(path, mode)
        return readers[key]

    def named(*arguments: Any) -> Any:
        if arguments not in maps:
            maps[arguments] = name_map(*arguments)
        return maps[arguments]

    gguf.GGUFReader, gguf.get_tensor_name_map = read, named
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = reader, name_map
