"""Tensor element types of KServe v2, and the codecs of the two that numpy does not have (BYTES, BF16).

Wire form of every tensor: little-endian, row-major, unpadded. BYTES: per element a 4-byte little-endian unsigned
length, then that many bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from headrace_protocol.errors import invalid

Array = npt.NDArray[np.generic]
Buffer = bytes | bytearray | memoryview


class DataType:
    """One element type. Instances are singletons: compare with `is`."""

    __slots__ = ("config_name", "itemsize", "name", "number", "numpy")

    def __init__(self, name: str, number: int, itemsize: int, numpy: npt.DTypeLike) -> None:
        self.name: Final = name
        """Protocol name, e.g. "FP32"."""
        self.number: Final = number
        """Value in ModelConfig's DataType enum."""
        self.itemsize: Final = itemsize
        """Bytes an element; 0 for BYTES, whose elements vary."""
        self.numpy: Final[np.dtype[np.generic]] = np.dtype(numpy)
        """The numpy dtype: object for BYTES, uint16 (the raw bits) for BF16."""
        self.config_name: Final = "TYPE_STRING" if name == "BYTES" else f"TYPE_{name}"

    def __repr__(self) -> str:
        return f"DataType({self.name})"

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (_by_name, (self.name,))


BOOL = DataType("BOOL", 1, 1, np.bool_)
UINT8 = DataType("UINT8", 2, 1, np.uint8)
UINT16 = DataType("UINT16", 3, 2, np.uint16)
UINT32 = DataType("UINT32", 4, 4, np.uint32)
UINT64 = DataType("UINT64", 5, 8, np.uint64)
INT8 = DataType("INT8", 6, 1, np.int8)
INT16 = DataType("INT16", 7, 2, np.int16)
INT32 = DataType("INT32", 8, 4, np.int32)
INT64 = DataType("INT64", 9, 8, np.int64)
FP16 = DataType("FP16", 10, 2, np.float16)
FP32 = DataType("FP32", 11, 4, np.float32)
FP64 = DataType("FP64", 12, 8, np.float64)
BYTES = DataType("BYTES", 13, 0, np.object_)
BF16 = DataType("BF16", 14, 2, np.uint16)

ALL: Final = (BOOL, UINT8, UINT16, UINT32, UINT64, INT8, INT16, INT32, INT64, FP16, FP32, FP64, BYTES, BF16)
BY_NAME: Final = {datatype.name: datatype for datatype in ALL}
BY_NUMBER: Final = {datatype.number: datatype for datatype in ALL}
_BY_NUMPY: Final = {datatype.numpy: datatype for datatype in ALL if datatype is not BF16}


def _by_name(name: str) -> DataType:
    return BY_NAME[name]


def of_numpy(dtype: np.dtype[np.generic]) -> DataType | None:
    """Return the type whose elements numpy holds as `dtype` (strings of any kind: BYTES), or None."""
    if dtype.kind in "SUO":
        return BYTES
    return _BY_NUMPY.get(dtype)


def element_count(shape: Sequence[int]) -> int:
    """Return the product of `shape` (1 for rank 0). Python integers: no overflow."""
    count = 1
    for dim in shape:
        count *= dim
    return count


def encode_bytes(elements: Sequence[bytes]) -> bytes:
    """Return the wire form of BYTES elements."""
    parts: list[bytes] = []
    pack = struct.Struct("<I").pack
    for element in elements:
        parts.append(pack(len(element)))
        parts.append(element)
    return b"".join(parts)


def decode_bytes(data: Buffer, expected: int) -> list[bytes]:
    """Return the `expected` elements held in `data`; the inverse of encode_bytes.

    Raises InferError INVALID_ARG where a length runs past the end or the number of elements differs.
    """
    view = memoryview(data)
    total = len(view)
    if total < 4 * expected:
        raise invalid(f"expected {expected} string elements, but {total} bytes cannot hold their lengths")
    elements: list[bytes] = []
    offset = 0
    unpack = struct.Struct("<I").unpack_from
    while offset < total:
        if len(elements) == expected:
            raise invalid(f"expected {expected} string elements, got {total - offset} bytes more")
        if offset + 4 > total:
            raise invalid(f"incomplete string length after element {len(elements)}")
        (length,) = unpack(view, offset)
        offset += 4
        if offset + length > total:
            raise invalid(f"string element {len(elements)} declares {length} bytes, {total - offset} are left")
        elements.append(bytes(view[offset : offset + length]))
        offset += length
    if len(elements) != expected:
        raise invalid(f"expected {expected} string elements, got {len(elements)}")
    return elements


def check_bytes(data: Buffer, expected: int) -> None:
    """Raise as decode_bytes does, without building the elements."""
    view = memoryview(data)
    total = len(view)
    count = offset = 0
    unpack = struct.Struct("<I").unpack_from
    while offset < total:
        if offset + 4 > total:
            raise invalid(f"incomplete string length after element {count}")
        (length,) = unpack(view, offset)
        offset += 4 + length
        if offset > total:
            raise invalid(f"string element {count} declares {length} bytes, {total - offset + length} are left")
        count += 1
    if count != expected:
        raise invalid(f"expected {expected} string elements, got {count}")


def bf16_to_fp32(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Widen BF16 bit patterns to FP32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def fp32_to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round FP32 to the nearest BF16 bit pattern, ties to even; a NaN stays a NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), ((bits >> 16) | 0x40).astype(np.uint16), rounded)


def to_numpy(datatype: DataType, shape: Sequence[int], data: Buffer) -> Array:
    """Return `data` (wire form) as an array of `shape`: a view, except for BYTES, whose elements are copied."""
    if datatype is BYTES:
        array = np.empty(element_count(shape), dtype=np.object_)
        array[:] = decode_bytes(data, array.size)
        return array.reshape(shape)
    return np.frombuffer(data, dtype=datatype.numpy).reshape(shape)


def from_numpy(array: Array, datatype: DataType) -> Buffer:
    """Return the wire form of `array`, a view where it is contiguous and not BYTES. str elements become UTF-8."""
    if datatype is BYTES:
        return encode_bytes([as_bytes(element) for element in array.reshape(-1)])
    contiguous = np.ascontiguousarray(array, dtype=datatype.numpy)
    return contiguous.reshape(-1).view(np.uint8).data


def as_bytes(element: object) -> bytes:
    """Return one BYTES element as bytes: bytes as they are, str in UTF-8, anything else by its str()."""
    if isinstance(element, bytes):
        return element
    return (element if isinstance(element, str) else str(element)).encode()
