"""The inputs of a batch as numpy arrays over the memory they lie in. Knows nothing of where that memory comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from headrace_protocol.datatype import BY_NAME, BYTES, Array, element_count, to_numpy
from headrace_protocol.errors import internal
from headrace_protocol.tensor import Tensor


class InputViews(Mapping[str, Array]):
    """Inputs by name, read-only and borrowed until the batch is answered. Strings are decoded when first asked for."""

    __slots__ = ("_encoded", "_views")

    def __init__(self) -> None:
        self._views: dict[str, Array] = {}
        self._encoded: dict[str, tuple[Tensor, memoryview]] = {}

    def add(self, tensor: Tensor, memory: memoryview, offset: int) -> None:
        """Make `tensor`, whose bytes begin at `offset` in `memory`, available."""
        datatype, nbytes = BY_NAME[tensor.datatype], tensor.ref.nbytes
        if datatype is BYTES:
            self._encoded[tensor.name] = (tensor, memory[offset : offset + nbytes])
            return
        if nbytes != element_count(tensor.shape) * datatype.itemsize:
            raise internal(f"input '{tensor.name}' of shape {list(tensor.shape)} came with {nbytes} bytes")
        self._views[tensor.name] = np.ndarray(tensor.shape, datatype.numpy, memory, offset)

    def make(self, name: str, array: Array) -> None:
        """Make an input available that was made for the batch."""
        self._views[name] = array

    def __getitem__(self, name: str) -> Array:
        view = self._views.get(name)
        if view is None:
            tensor, data = self._encoded[name]
            view = self._views[name] = to_numpy(BYTES, tensor.shape, data)
        return view

    def __iter__(self) -> Iterator[str]:
        yield from self._encoded
        yield from (name for name in self._views if name not in self._encoded)

    def __len__(self) -> int:
        return sum(1 for _ in self)
