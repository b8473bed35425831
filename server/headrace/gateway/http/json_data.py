"""The `data` of a tensor in JSON: to the wire form, with exact ranges, and back.

Each datatype has a fast decoder; what that refuses goes to one careful walk, which finds the element at fault (or the
NaN and Infinity markers that the fast decoder does not know). The two agree on everything that both accept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.gateway.http.errors import too_large
from headrace.gateway.http.json_text import decode_any, describe, non_finite
from headrace_protocol import datatype as dt
from headrace_protocol.datatype import Buffer, DataType
from headrace_protocol.errors import InferError, invalid

_INTS: Final = msgspec.json.Decoder(list[int])
_FLOATS: Final = msgspec.json.Decoder(list[float])
_BOOLS: Final = msgspec.json.Decoder(list[bool])
_STRINGS: Final = msgspec.json.Decoder(list[str])

_RANGES: Final = {t: (0, 2 ** (8 * t.itemsize) - 1) for t in (dt.UINT8, dt.UINT16, dt.UINT32, dt.UINT64)} | {
    t: (-(2 ** (8 * t.itemsize - 1)), 2 ** (8 * t.itemsize - 1) - 1) for t in (dt.INT8, dt.INT16, dt.INT32, dt.INT64)
}
_LARGEST: Final = {dt.FP32: float(np.finfo(np.float32).max), dt.FP64: float(np.finfo(np.float64).max)}
_NO_JSON_FORM: Final = (dt.FP16, dt.BF16)
_MIN_STRING: Final = 4  # bytes that the shortest element of BYTES takes: its length
_SPACE: Final = (b" ", b"\n", b"\t", b"\r")


def pack(name: str, datatype: DataType, shape: Sequence[int], count: int, raw: msgspec.Raw) -> Buffer:
    """Return the wire form of the `count` elements that JSON array `raw`, flat or nested, holds in row-major order.

    `raw` has been found to be JSON, no deeper than the limit. Raises INVALID_ARG, naming input and element.
    """
    if datatype in _NO_JSON_FORM:
        raise invalid(f"input '{name}': JSON has no form for {datatype.name}; send it as binary data")
    text = bytes(raw)
    if not text.startswith(b"["):
        raise invalid(f"input '{name}': data: expected an array, got {describe(decode_any(text, 'data'))}")
    try:
        return _pack_fast(name, datatype, shape, count, text)
    except (msgspec.MsgspecError, OverflowError):
        return _pack_carefully(name, datatype, shape, count, text)


def _pack_fast(name: str, datatype: DataType, shape: Sequence[int], count: int, text: bytes) -> Buffer:
    if datatype is not dt.BYTES:
        if text.count(b"[") > 1:
            text = _flatten_text(text, count)
        if text.count(b",") > count:
            # Said before any element is built: the shape bounds what the text may cost.
            raise _count_mismatch(name, shape, count, f"at least {count + 2}")
    values = _decoder_of(datatype).decode(text)
    _check_count(name, shape, count, len(values))
    return _fast_wire(values, datatype)


def _flatten_text(text: bytes, count: int) -> bytes:
    """Return nested array `text` of numbers as the text of a flat one. Empty arrays leave commas behind: drop them."""
    for mark in _SPACE:
        text = text.replace(mark, b"")
    flat = text.replace(b"[", b"").replace(b"]", b"")
    if flat.count(b",") >= count and b"[]" in text:
        flat = b",".join(filter(None, flat.split(b",")))
    return b"[" + flat + b"]"


def _float_wire(values: npt.NDArray[np.float64], datatype: DataType) -> Buffer:
    """Return finite `values` in the wire form. Raises OverflowError where one is too large for the datatype."""
    if datatype is dt.FP64:
        return dt.from_numpy(values, datatype)
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    if not np.isfinite(narrow).all():
        raise OverflowError
    return dt.from_numpy(narrow, datatype)


def _integer_wire(values: list[int], datatype: DataType) -> Buffer:
    """Return `values` in the wire form. Raises OverflowError where one is out of the datatype's range."""
    low, high = _RANGES[datatype]
    if values and (min(values) < low or max(values) > high):
        raise OverflowError
    return dt.from_numpy(np.array(values, dtype=datatype.numpy), datatype)


def _pack_carefully(name: str, datatype: DataType, shape: Sequence[int], count: int, text: bytes) -> Buffer:
    values = _checked(name, datatype, text)
    _check_count(name, shape, count, len(values))
    return _wire(values, datatype)


def _checked(name: str, datatype: DataType, text: bytes) -> list[Any]:
    """Return the elements of JSON array `text`, each of which the datatype can hold."""
    values = list(_elements(decode_any(text, f"input '{name}': data")))
    for index, value in enumerate(values):
        problem = _problem(value, datatype)
        if problem is not None:
            raise invalid(f"input '{name}': data[{index}]: {problem}")
    return values


def _wire(values: list[Any], datatype: DataType) -> Buffer:
    """Return the wire form of elements that have been checked."""
    if datatype is dt.BYTES:
        return dt.encode_bytes([value.encode() for value in values])
    if datatype is dt.BOOL:
        return bytes(values)
    if datatype in (dt.FP32, dt.FP64):
        floats = [number if (number := non_finite(value)) is not None else float(value) for value in values]
        return dt.from_numpy(np.array(floats, dtype=datatype.numpy), datatype)
    return _integer_wire(values, datatype)


def _elements(values: list[Any]) -> Iterator[Any]:
    """Yield the elements of a nested array in row-major order, without recursion."""
    stack = [iter(values)]
    while stack:
        for value in stack[-1]:
            if type(value) is list:
                stack.append(iter(value))
                break
            yield value
        else:
            stack.pop()


def _problem(value: Any, datatype: DataType) -> str | None:
    """Return what is wrong with one element, or None."""
    kind = type(value)
    if datatype is dt.BYTES:
        return None if kind is str else f"expected a string for BYTES, got {describe(value)}"
    if datatype is dt.BOOL:
        return None if kind is bool else f"expected true or false for BOOL, got {describe(value)}"
    if datatype in _RANGES:
        low, high = _RANGES[datatype]
        if kind is int and low <= value <= high:
            return None
        return f"expected an integer between {low} and {high} for {datatype.name}, got {describe(value)}"
    if non_finite(value) is not None:
        return None
    if kind is not int and kind is not float:
        return f"expected a number for {datatype.name}, got {describe(value)}"
    try:
        with np.errstate(over="ignore"):
            fits = bool(np.isfinite(np.float32(value) if datatype is dt.FP32 else np.float64(value)))
    except OverflowError:
        fits = False
    return None if fits else f"{describe(value)} is too large for {datatype.name} (at most {_LARGEST[datatype]})"


def _check_count(name: str, shape: Sequence[int], count: int, got: int) -> None:
    if got != count:
        raise _count_mismatch(name, shape, count, str(got))


def _count_mismatch(name: str, shape: Sequence[int], count: int, got: str) -> InferError:
    return invalid(f"input '{name}': shape {list(shape)} takes {count} elements, data holds {got}")


def pack_whole(name: str, datatype: DataType, raw: msgspec.Raw, limit: int) -> tuple[int, Buffer]:
    """Return how many elements JSON `raw` holds, an array however nested or a single element, and their wire form.

    `raw` has been found to be JSON, no deeper than the limit. Raises INVALID_ARG, naming input and element; HttpError
    413 where the tensor takes more than `limit` bytes.
    """
    if datatype in _NO_JSON_FORM:
        raise invalid(f"input '{name}': JSON has no form for {datatype.name}; only infer takes it, as binary data")
    text = bytes(raw)
    if not text.startswith(b"["):
        text = b"[%b]" % text
    values = _fast(name, datatype, text, limit)
    try:
        if values is not None:
            return len(values), _fast_wire(values, datatype)
    except OverflowError:
        pass
    values = _checked(name, datatype, text)
    _check_size(name, datatype, len(values), limit)
    return len(values), _wire(values, datatype)


def _fast(name: str, datatype: DataType, text: bytes, limit: int) -> list[Any] | None:
    """Return the elements of JSON array `text`, None where they need the careful walk."""
    if datatype is not dt.BYTES:
        if text.count(b"[") > 1:
            text = _flatten_text(text, 0)
        _check_size(name, datatype, text.count(b","), limit)  # before any element is built
    try:
        values: list[Any] = _decoder_of(datatype).decode(text)
    except (msgspec.MsgspecError, OverflowError):
        return None
    _check_size(name, datatype, len(values), limit)
    return values


def _decoder_of(datatype: DataType) -> msgspec.json.Decoder[Any]:
    if datatype is dt.BYTES:
        return _STRINGS
    if datatype is dt.BOOL:
        return _BOOLS
    return _FLOATS if datatype in (dt.FP32, dt.FP64) else _INTS


def _fast_wire(values: list[Any], datatype: DataType) -> Buffer:
    """Return the wire form of elements of the right kind. Raises OverflowError where one is out of range."""
    if datatype is dt.BYTES:
        return dt.encode_bytes([string.encode() for string in values])
    if datatype is dt.BOOL:
        return bytes(values)
    if datatype in (dt.FP32, dt.FP64):
        return _float_wire(np.array(values, dtype=np.float64), datatype)
    return _integer_wire(values, datatype)


def _check_size(name: str, datatype: DataType, count: int, limit: int) -> None:
    if count * (datatype.itemsize or _MIN_STRING) > limit:
        raise too_large(f"input '{name}': more than {limit} bytes, which is the limit")


def unpack(
    name: str,
    datatype: DataType,
    shape: Sequence[int],
    data: Buffer,
    advice: str = "ask for it with 'binary_data': true",
) -> list[Any] | msgspec.Raw:
    """Return an output's elements as a flat JSON-ready list, or as JSON text where it holds NaN or Infinity.

    Raises INVALID_ARG where JSON cannot carry them; `advice` says what the client can do.
    """
    if datatype is dt.BYTES:
        try:
            return [element.decode() for element in dt.decode_bytes(data, dt.element_count(shape))]
        except UnicodeDecodeError:
            raise invalid(f"output '{name}': not all strings are UTF-8; {advice}") from None
    if datatype in _NO_JSON_FORM:
        raise invalid(f"output '{name}': JSON has no form for {datatype.name}; {advice}")
    array = np.frombuffer(data, dtype=datatype.numpy)
    values: list[Any] = array.tolist()
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return msgspec.Raw(json.dumps(values, separators=(",", ":")).encode())
    return values
