"""What a user writes for an input, turned into the wire form that the model's metadata asks for, and outputs printed."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.observability.logging import escape
from headrace.types import TensorMetadata
from headrace_protocol import datatype as dt
from headrace_protocol.datatype import Array, DataType
from headrace_protocol.errors import invalid

_LONGEST_PRINTED = 1000


@dataclass(frozen=True, slots=True)
class WireTensor:
    """A tensor as it travels. `note` says what was done to it that the user did not ask for."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes
    note: str = ""


def make_input(metadata: TensorMetadata, text: str) -> WireTensor:
    """Return the input that `text` describes: `@file.npy`, `@file.json`, `@any file` (BYTES), JSON, or plain text (BYTES).

    Raises InferError INVALID_ARG with the input's name.
    """
    datatype = dt.BY_NAME.get(metadata.datatype)
    if datatype is None:
        raise invalid(f"input {metadata.name!r}: the server declares the unknown datatype {metadata.datatype!r}")
    try:
        array = _convert(_read(text, datatype), datatype)
        array, note = _fit(array, metadata.shape)
    except (OSError, EOFError, ValueError) as error:
        raise invalid(f"input {metadata.name!r} ({metadata.datatype} {list(metadata.shape)}): {error}") from error
    return WireTensor(metadata.name, metadata.datatype, array.shape, bytes(dt.from_numpy(array, datatype)), note)


def _read(text: str, datatype: DataType) -> object:
    """Return an array, or what JSON gives; plain text and other files are one element of BYTES."""
    if text.startswith("@"):
        path = Path(text[1:])
        if path.suffix == ".npy":
            return np.load(path, allow_pickle=False)
        if path.suffix == ".json":
            return json.loads(path.read_text(encoding="utf-8"))
        if datatype is not dt.BYTES:
            raise ValueError(f"expected a .npy or .json file, got {path}")
        return path.read_bytes()
    try:
        value = json.loads(text)
    except ValueError as error:
        if datatype is dt.BYTES:
            return text
        raise ValueError(f"expected JSON or @file, got {text[:80]!r}: {error}") from error
    return text if datatype is dt.BYTES and not isinstance(value, str | list) else value


def _convert(value: object, datatype: DataType) -> Array:
    """Return `value` as an array of the datatype's numpy type; loss of more than precision is an error."""
    if datatype is dt.BYTES:
        return _strings(value)
    array = value if isinstance(value, np.ndarray) else np.array(value)
    target = datatype.numpy
    if array.size == 0:
        return np.empty(array.shape, dtype=target)
    if datatype is dt.BOOL:
        if array.dtype.kind != "b":
            raise ValueError(f"expected true and false, got {_kind(array)}")
        return array
    if array.dtype.kind not in "iuf":
        raise ValueError(f"expected numbers, got {_kind(array)}")
    if datatype is dt.BF16:
        return dt.fp32_to_bf16(_floats(array, np.dtype(np.float32)))
    return _integers(array, target) if target.kind in "iu" else _floats(array, target)


def _integers(array: Array, target: np.dtype[np.generic]) -> Array:
    if array.dtype.kind not in "iu":
        raise ValueError(f"expected integers, got {_kind(array)}")
    bits = 8 * target.itemsize
    least, most = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if target.kind == "i" else (0, (1 << bits) - 1)
    low, high = int(array.min()), int(array.max())
    if low < least or high > most:
        raise ValueError(f"expected integers from {least} to {most}, got {low if low < least else high}")
    return array.astype(target)


def _floats(array: Array, target: np.dtype[np.generic]) -> npt.NDArray[Any]:
    with np.errstate(over="ignore"):
        converted = array.astype(target)
    if (np.isinf(converted) & ~np.isinf(array)).any():
        raise ValueError(f"expected numbers that fit {target}, got {np.abs(array).max()}")
    return converted


def _strings(value: object) -> Array:
    shape: list[int] = []
    flat: list[object] = [value.tolist() if isinstance(value, np.ndarray) else value]
    while flat and all(isinstance(item, list) for item in flat):
        rows = [item for item in flat if isinstance(item, list)]
        if len({len(row) for row in rows}) > 1:
            raise ValueError(f"expected rows of equal length, got {sorted({len(row) for row in rows})}")
        shape.append(len(rows[0]))
        flat = [element for row in rows for element in row]
    wrong = next((item for item in flat if not isinstance(item, str | bytes)), None)
    if wrong is not None:
        raise ValueError(f"expected texts, got {type(wrong).__name__}")
    array = np.empty(len(flat), dtype=np.object_)
    array[:] = [dt.as_bytes(item) for item in flat]
    return array.reshape(shape)


def _kind(array: Array) -> str:
    names = {"b": "true and false", "U": "texts", "S": "texts", "i": "integers", "u": "integers", "f": "floating point"}
    return names.get(array.dtype.kind, "other values")


def _fit(array: Array, wanted: tuple[int, ...]) -> tuple[Array, str]:
    """Give a lone value and a row without its batch dimension the rank that is wanted; say so."""
    if array.ndim == 0 and wanted:
        return array.reshape((1,) * len(wanted)), ""
    if array.ndim == len(wanted) - 1 and wanted[0] == -1:
        shape = (1, *array.shape)
        return array.reshape(shape), f"added the batch dimension: {list(array.shape)} became {list(shape)}"
    return array, ""


def show(tensor: WireTensor) -> str:
    """Return a readable picture of an output: name, datatype, shape, then its elements (the first and last of many)."""
    head = f"{escape(tensor.name)}  {tensor.datatype}  {list(tensor.shape)}"
    datatype = dt.BY_NAME.get(tensor.datatype)
    if datatype is None:
        return f"{head}\n{len(tensor.data)} bytes"
    if datatype is not dt.BYTES and math.prod(tensor.shape) * datatype.itemsize != len(tensor.data):
        raise invalid(
            f"output {tensor.name!r}: shape {list(tensor.shape)} does not fit the {len(tensor.data)} bytes received"
        )
    array = dt.to_numpy(datatype, tensor.shape, tensor.data)
    if datatype is dt.BF16:
        array = dt.bf16_to_fp32(array)  # type: ignore[arg-type]
    if datatype is dt.BYTES:
        texts = np.empty(array.size, dtype=np.object_)
        texts[:] = [_text(element) for element in array.reshape(-1)]
        array = texts.reshape(array.shape)
        body = np.array2string(array, threshold=_LONGEST_PRINTED, formatter={"object": str}, separator=", ")
    else:
        body = np.array2string(array, threshold=_LONGEST_PRINTED, separator=", ")
    return f"{head}\n{body}"


def _text(element: object) -> str:
    data = element if isinstance(element, bytes) else str(element).encode()
    return json.dumps(escape(data.decode("utf-8", errors="backslashreplace"), _LONGEST_PRINTED), ensure_ascii=False)
