"""The schemas of what travels as JSON, by name. What a struct or a message of the server prints is derived from it."""

from __future__ import annotations

from typing import Final

import msgspec

from headrace.gateway.http.openapi.proto_schema import message_schemas
from headrace.gateway.http.openapi.schema import (
    SIZE,
    Schema,
    array_of,
    described,
    exact_object,
    object_of,
    or_null,
    reference,
)
from headrace.gateway.http.openapi.tensors import inference_schemas
from headrace.types import CudaRegion, IndexEntry, ModelMetadata, ServerMetadata, SystemRegion
from headrace_protocol._generated import grpc_service_pb2, model_config_pb2

_TEXT: Final[Schema] = {"type": "string"}
_FLAG: Final[Schema] = {"type": "boolean"}


def schemas() -> dict[str, Schema]:
    """Return every schema that operations refer to, and those that these refer to."""
    return {
        "Error": exact_object({"error": described(_TEXT, "What is wrong, in a sentence.")}, ("error",)),
        **inference_schemas(),
        **_of_repository(),
        **_of_memory(),
        **_of_settings(),
        **_of_structs(),
        **_of_messages(),
    }


def _of_repository() -> dict[str, Schema]:
    dependents = described(_FLAG, "Also the models that only this one needs.")
    return {
        "ModelNames": exact_object({"models": array_of(_TEXT)}, ("models",)),
        "IndexRequest": object_of({"ready": described(_FLAG, "Only models that are ready.")}),
        "LoadRequest": object_of({"parameters": or_null(reference("LoadParameters"))}),
        "LoadParameters": _load_parameters(),
        "UnloadRequest": object_of({"parameters": or_null(reference("UnloadParameters"))}),
        "UnloadParameters": exact_object({"unload_dependents": dependents}),
    }


def _load_parameters() -> Schema:
    config = {"type": "string", "contentMediaType": "application/json"}
    content = {"type": "string", "contentEncoding": "base64"}
    return {
        "type": "object",
        "properties": {
            "config": described(config, "The model's configuration as JSON text, instead of its config.pbtxt.")
        },
        "patternProperties": {"^file:": described(content, "Content of a file of the model, by its path.")},
        "additionalProperties": False,
    }


def _of_structs() -> dict[str, Schema]:
    """Return what the server prints from structs, exact: without further members."""
    kinds = (ServerMetadata, ModelMetadata, IndexEntry, SystemRegion, CudaRegion)
    _, found = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for schema in found.values():
        schema["additionalProperties"] = False
        for member in schema["properties"].values():
            member.pop("default", None)  # left out of the answer, not filled in by the reader
    return found


def _of_messages() -> dict[str, Schema]:
    config = model_config_pb2.DESCRIPTOR.message_types_by_name["ModelConfig"]
    statistics = grpc_service_pb2.DESCRIPTOR.message_types_by_name["ModelStatisticsResponse"]
    return {**message_schemas(config), **message_schemas(statistics)}


def _of_memory() -> dict[str, Schema]:
    handle = {"type": "string", "contentEncoding": "base64", "description": "The cudaIpcMemHandle_t, 64 bytes."}
    return {
        "SystemRegionRequest": exact_object(
            {
                "key": described(_TEXT, "Name of the shared memory object."),
                "offset": described(SIZE, "Where in the object the region starts, in bytes. Default 0."),
                "byte_size": SIZE,
            },
            ("key", "byte_size"),
        ),
        "CudaRegionRequest": exact_object(
            {
                "raw_handle": exact_object({"b64": handle}, ("b64",)),
                "device_id": described({**SIZE, "maximum": 2**31 - 1}, "Number of the GPU."),
                "byte_size": SIZE,
            },
            ("raw_handle", "device_id", "byte_size"),
        ),
    }


def _of_settings() -> dict[str, Schema]:
    levels = array_of({"type": "string", "enum": ["OFF", "TIMESTAMPS", "TENSORS"]})
    number, flag = or_null(_TEXT), or_null(_FLAG)
    return {
        "TraceSettings": object_of({"trace_level": levels}, ("trace_level",), additionalProperties=_TEXT),
        "TraceSettingsRequest": object_of(
            {
                "trace_level": or_null(levels),
                "trace_rate": number,
                "trace_count": number,
                "log_frequency": number,
            }
        ),
        "LogSettings": exact_object(
            {
                "log_file": _TEXT,
                "log_info": _FLAG,
                "log_warning": _FLAG,
                "log_error": _FLAG,
                "log_verbose_level": {"type": "integer", "minimum": 0},
                "log_format": _TEXT,
            },
            ("log_file", "log_info", "log_warning", "log_error", "log_verbose_level", "log_format"),
        ),
        "LogSettingsRequest": object_of(
            {
                "log_info": flag,
                "log_warning": flag,
                "log_error": flag,
                "log_verbose_level": or_null({"type": "integer"}),
                "log_format": or_null(_TEXT),
            }
        ),
    }
