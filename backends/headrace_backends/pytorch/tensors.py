"""numpy's arrays as PyTorch's tensors, and back, without copies where both can look at the same memory."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from headrace_backends.pytorch.naming import BOOL, FLOAT, INT, STRING
from headrace_protocol import datatype
from headrace_protocol.datatype import Array, DataType
from headrace_protocol.errors import internal, invalid

DATATYPES: Final[Mapping[torch.dtype, DataType]] = {
    torch.bool: datatype.BOOL,
    torch.uint8: datatype.UINT8,
    torch.uint16: datatype.UINT16,
    torch.uint32: datatype.UINT32,
    torch.uint64: datatype.UINT64,
    torch.int8: datatype.INT8,
    torch.int16: datatype.INT16,
    torch.int32: datatype.INT32,
    torch.int64: datatype.INT64,
    torch.float16: datatype.FP16,
    torch.float32: datatype.FP32,
    torch.float64: datatype.FP64,
    torch.bfloat16: datatype.BF16,
}
TORCH_TYPES: Final[Mapping[DataType, torch.dtype]] = {ours: theirs for theirs, ours in DATATYPES.items()}

_SCALARS: Final[Mapping[str, type]] = {INT: int, FLOAT: float, BOOL: bool}


def _expect_readonly_arrays() -> None:
    """Use up the one warning that PyTorch gives of arrays it must not write to: whether it may is decided elsewhere."""
    array = np.zeros(1, np.float32)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(array)


_expect_readonly_arrays()


def to_tensor(array: Array, element: DataType) -> torch.Tensor:
    """Return a tensor over the memory of `array`, which may be read-only: what is written to it is written there."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if element is datatype.BF16 else tensor


def to_value(name: str, array: Array, element: DataType, kind: str) -> Any:
    """Return the input `name` as an argument of this kind. Raises InferError INVALID_ARG where its elements are none."""
    if element is datatype.BYTES:
        texts = _texts(name, array)
        return _only(name, texts) if kind == STRING else texts
    if kind in _SCALARS:
        return _SCALARS[kind](_only(name, array.reshape(-1).tolist()))
    return to_tensor(array, element)


def _texts(name: str, array: Array) -> list[str]:
    try:
        return [element.decode() for element in array.reshape(-1).tolist()]
    except UnicodeDecodeError:
        raise invalid(f"input '{name}' has an element that is not UTF-8, as PyTorch's strings must be") from None


def _only(name: str, elements: list[Any]) -> Any:
    if len(elements) != 1:
        raise invalid(f"input '{name}' is one value for the model, got {len(elements)} elements")
    return elements[0]


def to_array(name: str, value: Any, element: DataType | None = None) -> Array:
    """Return the output `name` of a model as an array, a view where that is possible; plain numbers as `element`.

    Raises InferError INTERNAL, in terms of the output, for what is no tensor of a datatype and no string.
    """
    if isinstance(value, torch.Tensor):
        plain = dense(name, value)
        if plain.dtype is torch.bfloat16:
            plain = plain.view(torch.uint16)
        array: Array = plain.numpy()
        return array
    if isinstance(value, str):
        return np.array([value], np.object_)
    if isinstance(value, list) and all(isinstance(element, str) for element in value):
        texts = np.empty(len(value), np.object_)
        texts[:] = value
        return texts
    if isinstance(value, (bool, int, float)):
        return np.array(value, None if element in {None, datatype.BYTES} else element.numpy)
    raise internal(f"output '{name}' of the model is of type {type(value).__name__}, which is no tensor")


def dense(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the CPU, with its elements in plain memory, and apart from any gradient."""
    if tensor.dtype not in DATATYPES:
        raise internal(f"output '{name}' of the model is of {tensor.dtype}, which is no tensor datatype")
    if tensor.layout is not torch.strided:
        raise internal(f"output '{name}' of the model is a tensor of layout {tensor.layout}, expected a dense one")
    return tensor.detach().cpu().resolve_conj().resolve_neg()


def flatten(value: Any) -> list[Any]:
    """Return the tensors and strings in a result, in order: tuples, lists and dictionaries are taken apart.

    A list of strings, or an empty one, is one of them.
    """
    if isinstance(value, Mapping):
        return [leaf for part in value.values() for leaf in flatten(part)]
    if isinstance(value, tuple) or (isinstance(value, list) and not all(isinstance(part, str) for part in value)):
        return [leaf for part in value for leaf in flatten(part)]
    return [value]


def pick(result: Any, wanted: Sequence[str], placed: Mapping[str, int]) -> dict[str, Any]:
    """Return the wanted outputs out of what a model gave: by the names it gives them, otherwise by their places.

    Raises InferError INTERNAL where there is none.
    """
    named = _fields(result)
    if named is not None and all(name in named for name in wanted):
        return {name: named[name] for name in wanted}
    leaves = flatten(result)
    for name in wanted:
        if placed[name] >= len(leaves):
            keys = "" if named is None else f" ({', '.join(map(str, named))})"
            raise internal(f"output '{name}' is result {placed[name]} of the model, which gave {len(leaves)}{keys}")
    return {name: leaves[placed[name]] for name in wanted}


def _fields(result: Any) -> Mapping[str, Any] | None:
    """Return the parts of a result by the names that the model gives them, None where it gives none."""
    if isinstance(result, Mapping):
        return result
    fields = getattr(result, "_fields", None)  # a named tuple's
    return None if fields is None else dict(zip(fields, result, strict=True))
