"""Tensor: a named array, as models of the Python backend are given it and make it."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from headrace_backends.python import dlpack
from headrace_backends.python.errors import TritonModelException
from headrace_protocol.datatype import ALL, BF16, BYTES, Array, DataType

_BY_DTYPE: Final = {datatype.numpy: datatype for datatype in ALL if datatype is not BF16}


class Tensor:
    """A named array in host memory. Its elements are read when a response is sent: until then the array may change."""

    __slots__ = ("__weakref__", "_array", "_datatype", "_name")

    def __init__(self, name: str, numpy_array: Array) -> None:
        """Raise TypeError where `numpy_array` is none, and TritonModelException where its dtype is no datatype."""
        datatype = _BY_DTYPE.get(numpy_array.dtype) if isinstance(numpy_array, np.ndarray) else None
        if datatype is None:
            numpy_array, datatype = _unusual(name, numpy_array)
        self._datatype = datatype
        self._name = name
        self._array = numpy_array

    def name(self) -> str:
        """Return the tensor's name."""
        return self._name

    def as_numpy(self) -> Array:
        """Return the elements: strings as bytes in an object array. Raises TritonModelException for BF16."""
        if self._datatype is BF16:
            raise TritonModelException(f"tensor '{self._name}': numpy has no BF16; use to_dlpack or torch.from_dlpack")
        return self._array

    def triton_dtype(self) -> int:
        """Return the datatype's number in a model configuration, e.g. 11 for TYPE_FP32."""
        return self._datatype.number

    def shape(self) -> list[int]:
        """Return the dimensions."""
        return list(self._array.shape)

    def is_cpu(self) -> bool:
        """Return whether the elements are in host memory."""
        return True

    def to_dlpack(self) -> Any:
        """Return a DLPack capsule of the elements. Raises TritonModelException for strings."""
        return dlpack.export_array(self._name, self._array, self._datatype)

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """Return a tensor over the memory of a DLPack capsule, or of an object with `__dlpack__`."""
        found = dlpack.import_tensor(name, tensor)
        return DeviceTensor(name, found) if found.array is None else tensor_of(name, found.array, found.datatype)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        del stream, max_version  # no stream runs over host memory; the first form of DLPack is one that all take
        if dl_device is not None and tuple(map(int, dl_device)) != self.__dlpack_device__():
            raise BufferError(f"tensor '{self._name}' is not on the device {dl_device}")
        array = self._array.copy() if copy else self._array
        return dlpack.export_array(self._name, array, self._datatype)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (dlpack.CPU, 0)

    def __repr__(self) -> str:
        return f"Tensor({self._name!r}, {self._datatype.name}, {self.shape()})"


class DeviceTensor(Tensor):
    """A tensor in a GPU's memory, which somebody else holds. Copied to the host whenever its elements are needed."""

    __slots__ = ("_found",)

    def __init__(self, name: str, found: dlpack.Imported) -> None:
        self._name = name
        self._datatype = found.datatype
        self._found = found

    @property
    def _array(self) -> Array:  # type: ignore[override]
        return dlpack.to_host(self._name, self._found)

    def as_numpy(self) -> Array:
        """Raise TritonModelException: the elements are in GPU memory."""
        raise TritonModelException(f"tensor '{self._name}' is in GPU memory; use to_dlpack or torch.from_dlpack")

    def shape(self) -> list[int]:
        return list(self._found.shape)

    def is_cpu(self) -> bool:
        return False

    def to_dlpack(self) -> Any:
        return self._found.producer.__dlpack__()

    def __dlpack__(self, **how: Any) -> Any:
        return self._found.producer.__dlpack__(**how)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._found.device


def tensor_of(name: str, array: Array, datatype: DataType) -> Tensor:
    """Return a tensor whose datatype is known already: that of BF16 cannot be told from the array."""
    tensor = Tensor.__new__(Tensor)
    tensor._name = name
    tensor._array = array
    tensor._datatype = datatype
    return tensor


def _unusual(name: str, array: object) -> tuple[Array, DataType]:
    """Return an array whose dtype is not in the table as one whose is."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"tensor '{name}': expected a numpy array, got {type(array).__name__}")
    if array.dtype.kind in "SU":
        return array, BYTES
    native = array.dtype.newbyteorder("=")
    datatype = _BY_DTYPE.get(native)
    if datatype is None:
        raise TritonModelException(f"tensor '{name}': numpy's {array.dtype} is no datatype of tensors")
    return array.astype(native), datatype
