"""The schemas of inferences: requests, tensors, answers."""

from __future__ import annotations

from typing import Final

from headrace.gateway.http.openapi.schema import (
    MAX_INT64,
    SCALAR,
    SIZE,
    UINT64,
    Schema,
    array_of,
    described,
    exact_object,
    object_of,
    or_null,
    reference,
)
from headrace.types import MAX_RANK
from headrace_protocol.datatype import BY_NAME

_ELEMENT: Final[Schema] = {"type": ["boolean", "number", "string"]}
_NO_TRITON: Final[Schema] = {"not": {"pattern": "^triton_"}}


def inference_schemas() -> dict[str, Schema]:
    """Return them by name."""
    return {
        "ElementType": {"type": "string", "enum": list(BY_NAME)},
        "Data": _data(),
        "InferRequest": _infer_request(),
        "InferParameters": _infer_parameters(),
        "InferInput": _infer_input(),
        "InferInputParameters": _input_parameters(),
        "InferRequestedOutput": _infer_requested_output(),
        "InferOutputParameters": _output_parameters(),
        "InferResponse": _infer_response(),
        "InferOutput": _infer_output(),
        "GenerateRequest": _generate_request(),
        "GenerateResponse": _generate_response(),
    }


def _data() -> Schema:
    return described(
        array_of({"anyOf": [_ELEMENT, reference("Data")]}),
        "Elements in row-major order, nested in any way or flat: booleans for BOOL, integers in the datatype's range "
        "for INT* and UINT*, numbers (and the bare tokens NaN, Infinity, -Infinity) for FP32 and FP64, strings for "
        "BYTES. FP16 and BF16 have no JSON form.",
    )


def _infer_request() -> Schema:
    return object_of(
        {
            "id": described(or_null({"type": "string"}), "Given back in the answer."),
            "parameters": or_null(reference("InferParameters")),
            "inputs": array_of(reference("InferInput")),
            "outputs": described(
                or_null(array_of(reference("InferRequestedOutput"))),
                "Absent or empty: every output of the model.",
            ),
        },
        ("inputs",),
    )


def _infer_parameters() -> Schema:
    return object_of(
        {
            "binary_data_output": described(
                {"type": "boolean"}, "Outputs as binary data, where `outputs` lists none. Default false."
            ),
            "priority": described(UINT64, "1 is the highest; 0 is the model's default."),
            "timeout": described(UINT64, "Longest time in the queue, in microseconds, where the model allows it."),
            "sequence_id": described(
                {"anyOf": [UINT64, {"type": "string", "maxLength": 128}]}, "0 and the empty string: no sequence."
            ),
            "sequence_start": {"type": "boolean"},
            "sequence_end": {"type": "boolean"},
            "headers": described({}, "Reserved for client libraries: not looked at."),
        },
        additionalProperties=described(
            SCALAR, "Reaches the model's backend. An integer is between -2^63 and 2^64 - 1."
        ),
        propertyNames=_NO_TRITON,
    )


_REGION: Final[dict[str, Schema]] = {
    "shared_memory_region": {
        "type": "string",
        "minLength": 1,
        "description": "Name of a registered region that the bytes lie in. Not beside classification or binary_data.",
    },
    "shared_memory_offset": described(SIZE, "Bytes from the region's start. Default 0."),
    "shared_memory_byte_size": described(SIZE, "Bytes of the tensor there; for an output, at least so many."),
}
_TOGETHER: Final = {
    "shared_memory_region": ["shared_memory_byte_size"],
    "shared_memory_offset": ["shared_memory_region"],
    "shared_memory_byte_size": ["shared_memory_region"],
}


def _infer_input() -> Schema:
    return object_of(
        {
            "name": {"type": "string"},
            "shape": {**array_of(SIZE), "maxItems": MAX_RANK},
            "datatype": reference("ElementType"),
            "parameters": or_null(reference("InferInputParameters")),
            "data": reference("Data"),
        },
        ("name", "shape", "datatype"),
        oneOf=[
            {"required": ["data"]},
            object_of({"parameters": object_of({}, ("binary_data_size",))}, ("parameters",)),
            object_of({"parameters": object_of({}, ("shared_memory_region",))}, ("parameters",)),
        ],
        description="A tensor: its elements are in `data`, in the binary part, or in shared memory.",
    )


def _input_parameters() -> Schema:
    binary = described(SIZE, "Bytes of this tensor in the binary part that follows the JSON.")
    return object_of({"binary_data_size": binary, **_REGION}, dependentRequired=_TOGETHER)


def _infer_requested_output() -> Schema:
    return object_of({"name": {"type": "string"}, "parameters": or_null(reference("InferOutputParameters"))}, ("name",))


def _output_parameters() -> Schema:
    classes = {"type": "integer", "minimum": 1, "maximum": MAX_INT64}
    return object_of(
        {
            "binary_data": described({"type": "boolean"}, "As binary data, not as JSON. Default false."),
            "classification": described(classes, "Its so many largest elements instead of the tensor itself, as text."),
            **_REGION,
        },
        additionalProperties=SCALAR,
        dependentRequired=_TOGETHER,
    )


def _infer_response() -> Schema:
    return exact_object(
        {
            "id": described({"type": "string"}, "Where the request had one."),
            "model_name": {"type": "string"},
            "model_version": {"type": "string"},
            "parameters": {"type": "object", "additionalProperties": SCALAR},
            "outputs": array_of(reference("InferOutput")),
        },
        ("model_name", "model_version", "outputs"),
    )


def _infer_output() -> Schema:
    return exact_object(
        {
            "name": {"type": "string"},
            "datatype": reference("ElementType"),
            "shape": array_of(SIZE),
            "parameters": described(
                exact_object({"binary_data_size": SIZE}, ("binary_data_size",)), "Where it is in the binary part."
            ),
            "data": described(array_of(_ELEMENT), "Row-major and flat."),
        },
        ("name", "datatype", "shape"),
    )


def _generate_request() -> Schema:
    return object_of(
        {
            "id": described(or_null({"type": "string"}), "Given back in the answer."),
            "parameters": described(or_null({"type": "object"}), "Members that are taken as if they stood outside."),
        },
        description="Inputs and parameters of the model by name. A tensor is a scalar or an array, nested or flat.",
    )


def _generate_response() -> Schema:
    return object_of(
        {"id": {"type": "string"}, "model_name": {"type": "string"}, "model_version": {"type": "string"}},
        ("model_name", "model_version"),
        additionalProperties=described(
            {"anyOf": [_ELEMENT, array_of(_ELEMENT)]},
            "An output, as a scalar where it has one element, or a parameter of the response.",
        ),
    )
