"""Looking tensors up by name, converting datatypes, and the wire form of strings: functions of the module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from headrace_backends.python.errors import TritonModelException
from headrace_backends.python.request import InferenceRequest
from headrace_backends.python.response import InferenceResponse
from headrace_backends.python.tensor import Tensor
from headrace_protocol.datatype import ALL, BF16, BY_NUMBER, BYTES, Array, Buffer, as_bytes, encode_bytes, of_numpy

TRITON_STRING_TO_NUMPY: Final[dict[str, type[Any]]] = {
    datatype.config_name: datatype.numpy.type for datatype in ALL if datatype is not BF16
}


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """Return the input `name` of the request, or None."""
    return inference_request._input(name)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """Return the output `name` of the response, or None. Raises TritonModelException with the error of a failed one."""
    error = inference_response._error
    if error is not None:
        raise TritonModelException(error._message)
    return next((tensor for tensor in inference_response._tensors if tensor._name == name), None)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> Any | None:
    """Return the input `name` of a configuration, or None."""
    return next((entry for entry in model_config.get("input", ()) if entry["name"] == name), None)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> Any | None:
    """Return the output `name` of a configuration, or None."""
    return next((entry for entry in model_config.get("output", ()) if entry["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Return whether the model of a configuration is decoupled."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def triton_string_to_numpy(triton_type_string: str) -> type[Any]:
    """Return the numpy type of a datatype as configurations name it. Raises KeyError for BF16, which numpy lacks."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> type[Any] | None:
    """Return the numpy type of a datatype's number in configurations; None where there is none."""
    datatype = BY_NUMBER.get(int(data_type))
    return None if datatype is None or datatype is BF16 else datatype.numpy.type


def numpy_to_triton_type(data_type: Any) -> int | None:
    """Return the number, as in configurations, of a numpy type; None where there is none."""
    datatype = of_numpy(np.dtype(data_type))
    return None if datatype is None else datatype.number


def serialize_byte_tensor(input_tensor: Array) -> bytes:
    """Return the wire form of strings: each with its length, 4 bytes little-endian, before it."""
    if of_numpy(input_tensor.dtype) is not BYTES:
        raise TritonModelException(f"serialize_byte_tensor: expected strings, got an array of {input_tensor.dtype}")
    return encode_bytes([as_bytes(element) for element in input_tensor.reshape(-1)])


def deserialize_bytes_tensor(encoded_tensor: Buffer) -> Array:
    """Return the strings of a wire form, as bytes in an object array of one dimension."""
    view = memoryview(encoded_tensor)
    elements: list[bytes] = []
    offset = 0
    while offset < len(view):
        end = offset + 4 + int.from_bytes(view[offset : offset + 4], "little")
        if end > len(view):
            raise TritonModelException(f"deserialize_bytes_tensor: string {len(elements)} runs past the end")
        elements.append(bytes(view[offset + 4 : end]))
        offset = end
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array
