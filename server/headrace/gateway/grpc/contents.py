"""Typed `contents` of a gRPC input, checked and turned into the wire form that raw contents have already."""

from __future__ import annotations

from typing import Final

import numpy as np

from headrace_protocol import datatype as dt
from headrace_protocol._generated.grpc_service_pb2 import InferTensorContents
from headrace_protocol.datatype import Buffer, DataType
from headrace_protocol.errors import invalid

FIELD: Final[dict[DataType, str]] = {
    dt.BOOL: "bool_contents",
    dt.UINT8: "uint_contents",
    dt.UINT16: "uint_contents",
    dt.UINT32: "uint_contents",
    dt.UINT64: "uint64_contents",
    dt.INT8: "int_contents",
    dt.INT16: "int_contents",
    dt.INT32: "int_contents",
    dt.INT64: "int64_contents",
    dt.FP32: "fp32_contents",
    dt.FP64: "fp64_contents",
    dt.BYTES: "bytes_contents",
}
"""Where the elements of each type belong; FP16 and BF16 have no typed form."""

_CARRIER: Final = {"int_contents": np.dtype(np.int32), "uint_contents": np.dtype(np.uint32)}
"""Fields that carry narrower types too."""


def typed_to_wire(name: str, datatype: DataType, shape: tuple[int, ...], contents: InferTensorContents) -> Buffer:
    """Return the wire form of input `name` from its typed contents.

    Raises InferError INVALID_ARG for elements in the wrong field or in several, a wrong number of them, and integers
    that the datatype cannot hold.
    """
    field = FIELD.get(datatype)
    if field is None:
        raise invalid(f"input '{name}': {datatype.name} has no typed contents, send it in raw_input_contents")
    filled = contents.ListFields()
    count = dt.element_count(shape)
    if not filled:
        if count:
            raise invalid(f"input '{name}': shape {list(shape)} needs {count} elements in contents.{field}, got none")
        return b""
    if len(filled) > 1:
        names = ", ".join(f"contents.{descriptor.name}" for descriptor, _ in filled)
        raise invalid(f"input '{name}': elements must be in one typed field, got {names}")
    descriptor, values = filled[0]
    if descriptor.name != field:
        raise invalid(
            f"input '{name}': {datatype.name} elements belong in contents.{field}, got contents.{descriptor.name}"
        )
    if len(values) != count:
        raise invalid(
            f"input '{name}': shape {list(shape)} needs {count} elements in contents.{field}, got {len(values)}"
        )
    if datatype is dt.BYTES:
        return dt.encode_bytes(values)
    array = np.fromiter(values, dtype=_CARRIER.get(field, datatype.numpy), count=count)
    if array.dtype is not datatype.numpy and array.dtype != datatype.numpy:
        _check_range(name, datatype, field, array)
        array = array.astype(datatype.numpy)
    return array.view(np.uint8).data


def _check_range(name: str, datatype: DataType, field: str, array: dt.Array) -> None:
    limits = np.iinfo(datatype.numpy.name)
    for extreme in (int(array.min()), int(array.max())):
        if not limits.min <= extreme <= limits.max:
            raise invalid(
                f"input '{name}': contents.{field} holds {extreme}, {datatype.name} takes {limits.min} to {limits.max}"
            )
