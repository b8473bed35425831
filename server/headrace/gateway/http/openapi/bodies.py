"""The schemas of what travels as JSON, by name. What a struct or a message of the server prints is derived from it."""

from __future__ import annotations

from typing import Final

import msgspec

from headrace.flags import LOG_FORMATS, MOST_VERBOSE
from headrace.gateway.http.openapi.adapters import adapter_schemas
from headrace.gateway.http.openapi.language import language_schemas
from headrace.gateway.http.openapi.proto_schema import message_schemas
from headrace.gateway.http.openapi.schema import (
    MAX_INT64,
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
from headrace.gateway.http.openapi.texts import text_schemas
from headrace.gateway.http.openapi.traffic import traffic_schemas
from headrace.observability.trace_settings import COUNTS, LEVELS, LOG_FREQUENCIES, MODE, OFF, RATES
from headrace.types import CudaRegion, IndexEntry, ModelMetadata, ServerMetadata, SystemRegion
from headrace_protocol._generated import grpc_service_pb2, model_config_pb2

_TEXT: Final[Schema] = {"type": "string"}
_FLAG: Final[Schema] = {"type": "boolean"}


def schemas() -> dict[str, Schema]:
    """Return every schema that operations refer to, and those that these refer to."""
    return {
        "Error": exact_object({"error": described(_TEXT, "What is wrong, in a sentence.")}, ("error",)),
        **inference_schemas(),
        **language_schemas(),
        **adapter_schemas(),
        **text_schemas(),
        **_of_repository(),
        **_of_memory(),
        **_of_settings(),
        **traffic_schemas(),
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
        "UnloadParameters": exact_object({"unload_dependents": dependents, "version": _one_version()}),
    }


def _load_parameters() -> Schema:
    config = {"type": "string", "contentMediaType": "application/json"}
    content = {"type": "string", "contentEncoding": "base64"}
    return {
        "type": "object",
        "properties": {
            "config": described(config, "The model's configuration as JSON text, instead of its config.pbtxt."),
            "version": _one_version(),
        },
        "patternProperties": {"^file:": described(content, "Content of a file of the model, by its path.")},
        "additionalProperties": False,
    }


def _one_version() -> Schema:
    number = {"type": "integer", "minimum": 1, "maximum": MAX_INT64}
    either = {"anyOf": [number, {"type": "string", "pattern": "^[1-9][0-9]{0,17}$"}]}
    return described(either, "This version alone, beside the others. Stands alone.")


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
    level = {"anyOf": [{"const": [OFF]}, array_of({"type": "string", "enum": list(LEVELS)})]}
    trace = {
        "trace_level": described(level, "What is written of a traced request."),
        "trace_rate": _decimal(RATES, "One of so many requests is traced."),
        "trace_count": _decimal(COUNTS, "How many more are traced; -1: any number."),
        "log_frequency": _decimal(LOG_FREQUENCIES, "Traces after which the next file begins; 0: all go into one."),
    }
    mode = {"const": MODE}
    shown = {**trace, "trace_file": described(_TEXT, "Where traces go."), "trace_mode": mode}
    verbosity = {"type": "integer", "minimum": 0, "maximum": MOST_VERBOSE}
    log = {
        "log_info": _FLAG,
        "log_warning": _FLAG,
        "log_error": _FLAG,
        "log_verbose_level": verbosity,
        "log_format": {"type": "string", "enum": list(LOG_FORMATS)},
    }
    told = {**log, "log_file": described(_TEXT, "Empty: stdout and stderr.")}
    return {
        "TraceSettings": exact_object(shown, tuple(shown)),
        "TraceSettingsRequest": exact_object(_nullable({**trace, "trace_mode": mode})),
        "LogSettings": exact_object(told, tuple(told)),
        "LogSettingsRequest": object_of(_nullable(log), additionalProperties={"type": "null"}),
    }


def _decimal(allowed: tuple[int, int], text: str) -> Schema:
    low, high = allowed
    pattern = "^-?[0-9]{1,19}$" if low < 0 else "^[0-9]{1,19}$"
    return {"type": "string", "pattern": pattern, "description": f"{text} {low} to {high}."}


def _nullable(properties: dict[str, Schema]) -> dict[str, Schema]:
    return {name: or_null(schema) for name, schema in properties.items()}
