"""DLPack between arrays in host memory and whoever else holds tensors, through ctypes.

numpy speaks DLPack but knows no BF16 (and in older releases no BOOL): those travel as integers of the same width, and
only the type written in the capsule tells. Memory of a GPU is not touched here but by `to_host`.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final, NamedTuple

import numpy as np

from headrace_backends.cuda_memory import load_runtime
from headrace_backends.python.errors import TritonModelException
from headrace_protocol.datatype import ALL, BF16, BOOL, BYTES, Array, DataType, element_count
from headrace_protocol.errors import InferError

CPU: Final = 1
CUDA: Final = 2
CUDA_HOST: Final = 3
CUDA_MANAGED: Final = 13
HOST_DEVICES: Final = (CPU, CUDA_HOST)
"""Kinds of devices whose memory this process reads as its own."""
_GPU_DEVICES: Final = (CUDA, CUDA_MANAGED)
_LEGACY_STREAM: Final = 1
"""DLPack's number for CUDA's default stream, in which `to_host` copies."""
_NAME: Final = b"dltensor"


class _DLTensor(ctypes.Structure):
    """The beginning of a DLManagedTensor, as dlpack.h lays it out."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_INT, _UINT, _FLOAT, _BFLOAT, _BOOL = 0, 1, 2, 4, 6
_KINDS: Final = {"i": _INT, "u": _UINT, "f": _FLOAT}
_BY_TYPE: Final = {
    (_KINDS[datatype.numpy.kind], datatype.itemsize * 8): datatype
    for datatype in ALL
    if datatype not in (BF16, BOOL, BYTES)
} | {(_BFLOAT, 16): BF16, (_BOOL, 8): BOOL}

_get_pointer: Final = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_is_valid: Final = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype = ctypes.c_int
_is_valid.argtypes = [ctypes.py_object, ctypes.c_char_p]


class Imported(NamedTuple):
    """What was found behind a DLPack object: an array in host memory, or a GPU's memory that stays where it is."""

    datatype: DataType
    shape: tuple[int, ...]
    array: Array | None
    """In host memory: a view of the producer's memory, BF16 as uint16."""
    device: tuple[int, int]
    producer: Any
    """Who holds the memory of a GPU: an object with `__dlpack__`."""


class Capsule:
    """A capsule that somebody made, as an object that gives it away once, which is what consumers want."""

    def __init__(self, capsule: Any, device: tuple[int, int]) -> None:
        self._capsule = capsule
        self._device = device

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def import_tensor(name: str, source: Any) -> Imported:
    """Return what `source` holds: a capsule named "dltensor", or an object with `__dlpack__`.

    Raises TritonModelException for a type that no tensor has, or a device that cannot be used.
    """
    if hasattr(source, "__dlpack__"):
        kind = int(source.__dlpack_device__()[0])
        capsule = source.__dlpack__(stream=_LEGACY_STREAM) if kind in _GPU_DEVICES else source.__dlpack__()
    else:
        capsule = source
    head = _head(name, capsule)
    device = (head.device_type, head.device_id)
    datatype = _BY_TYPE.get((head.code, head.bits)) if head.lanes == 1 else None
    if datatype is None:
        raise TritonModelException(
            f"tensor '{name}': DLPack type (code {head.code}, {head.bits} bits, {head.lanes} lanes) is no datatype of tensors"
        )
    shape = tuple(head.shape[: head.ndim])
    if head.device_type in HOST_DEVICES:
        if datatype in (BF16, BOOL):
            head.code = _UINT
        array = np.from_dlpack(Capsule(capsule, (CPU, 0)))
        return Imported(datatype, shape, array.view(np.bool_) if datatype is BOOL else array, device, None)
    if head.device_type not in _GPU_DEVICES:
        raise TritonModelException(f"tensor '{name}': memory of DLPack device {device} cannot be used")
    if not _is_contiguous(head, shape):
        raise TritonModelException(f"tensor '{name}': a tensor in GPU memory has to be contiguous, in C order")
    return Imported(datatype, shape, None, device, Capsule(capsule, device) if capsule is source else source)


def export_array(name: str, array: Array, datatype: DataType) -> Any:
    """Return a capsule of an array in host memory, which lives as long as the consumer needs it."""
    if datatype is BYTES:
        raise TritonModelException(f"tensor '{name}': DLPack has no strings")
    if not array.flags.writeable:
        array = array.copy()
    exported: Any = array.view(np.uint8) if datatype is BOOL else array
    capsule = exported.__dlpack__()
    if datatype is BF16:
        _head(name, capsule).code = _BFLOAT
    elif datatype is BOOL:
        _head(name, capsule).code = _BOOL
    return capsule


def to_host(name: str, tensor: Imported) -> Array:
    """Return a copy of GPU memory as an array, BF16 as uint16."""
    capsule = tensor.producer.__dlpack__(stream=_LEGACY_STREAM)
    head = _head(name, capsule)
    nbytes = element_count(tensor.shape) * tensor.datatype.itemsize
    try:
        data = load_runtime().to_host((head.data or 0) + head.byte_offset, nbytes)
    except InferError as error:
        raise TritonModelException(f"tensor '{name}': {error.message}") from error
    return np.frombuffer(data, tensor.datatype.numpy).reshape(tensor.shape)


def _head(name: str, capsule: Any) -> _DLTensor:
    if type(capsule).__name__ != "PyCapsule" or not _is_valid(capsule, _NAME):
        raise TritonModelException(
            f"tensor '{name}': expected a DLPack capsule that nobody has used, or an object with __dlpack__, got {capsule!r}"
        )
    return _DLTensor.from_address(_get_pointer(capsule, _NAME))


def _is_contiguous(head: _DLTensor, shape: tuple[int, ...]) -> bool:
    if not head.strides:
        return True
    expected = 1
    for axis in range(head.ndim - 1, -1, -1):
        if shape[axis] != 1 and head.strides[axis] != expected:
            return False
        expected *= shape[axis]
    return True
