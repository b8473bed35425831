"""A request in the objects of the stock clients, and their results in plain values, the same for both doors."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from conformance.table.tensors import Answer, Infer, Output, Tensor


def named(request: Infer) -> dict[str, Any]:
    return {
        "model_name": request.model,
        "model_version": request.version,
        "request_id": request.id,
        "parameters": dict(request.parameters) or None,
        **copy.deepcopy(dict(request.more)),  # the stock client of HTTP adds to the headers that it is given
    }


def http_input(one: Tensor) -> httpclient.InferInput:
    built = httpclient.InferInput(one.name, list(one.shape), one.datatype)
    if one.region is not None:
        built.set_shared_memory(one.region.name, one.region.nbytes, one.region.offset)
    else:
        built.set_data_from_numpy(one.data, binary_data=not one.text)
    return built


def http_output(one: Output) -> httpclient.InferRequestedOutput:
    built = httpclient.InferRequestedOutput(one.name, binary_data=one.binary, class_count=one.classes)
    if one.region is not None:
        built.set_shared_memory(one.region.name, one.region.nbytes, one.region.offset)
    return built


def http_answer(result: httpclient.InferResult) -> Answer:
    told = result.get_response()
    outputs = told["outputs"]
    arrays = {one["name"]: result.as_numpy(one["name"]) for one in outputs if _has_data(one)}
    return Answer(
        told["model_name"],
        told["model_version"],
        told.get("id"),
        told.get("parameters", {}),
        {name: _as_bytes(array) for name, array in arrays.items()},
        {one["name"]: one["datatype"] for one in outputs},
        {one["name"]: tuple(one["shape"]) for one in outputs},
        [one["name"] for one in outputs],
    )


def _has_data(output: Mapping[str, Any]) -> bool:
    return "data" in output or "binary_data_size" in output.get("parameters", {})


def grpc_input(one: Tensor) -> grpcclient.InferInput:
    built = grpcclient.InferInput(one.name, list(one.shape), one.datatype)
    if one.region is not None:
        built.set_shared_memory(one.region.name, one.region.nbytes, one.region.offset)
    else:
        built.set_data_from_numpy(one.data)
    return built


def grpc_output(one: Output) -> grpcclient.InferRequestedOutput:
    built = grpcclient.InferRequestedOutput(one.name, class_count=one.classes)
    if one.region is not None:
        built.set_shared_memory(one.region.name, one.region.nbytes, one.region.offset)
    return built


def grpc_answer(result: grpcclient.InferResult) -> Answer:
    told = result.get_response()
    assert len(told.raw_output_contents) in (0, len(told.outputs)), "an entry for each output"
    assert not any(one.HasField("contents") for one in told.outputs), "answers have raw contents alone"
    sent = zip(told.outputs, told.raw_output_contents, strict=False)
    arrays = {one.name: result.as_numpy(one.name) for one, raw in sent if raw or 0 in one.shape}
    return Answer(
        told.model_name,
        told.model_version,
        told.id or None,
        {key: getattr(value, value.WhichOneof("parameter_choice")) for key, value in told.parameters.items()},
        {name: _as_bytes(array) for name, array in arrays.items()},
        {one.name: one.datatype for one in told.outputs},
        {one.name: tuple(one.shape) for one in told.outputs},
        [one.name for one in told.outputs],
    )


def _as_bytes(array: np.ndarray) -> np.ndarray:
    """Return an array with its strings as bytes; the stock client gives those of JSON as text."""
    if array.dtype != object:
        return array
    items = [item.encode() if isinstance(item, str) else item for item in array.ravel()]
    out = np.empty(len(items), object)
    out[:] = items
    return out.reshape(array.shape)
