"""JSON schemas of protobuf messages, as `proto_json.to_dict` prints them. Knows messages by their descriptors alone."""

from __future__ import annotations

from typing import Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from headrace.gateway.http.openapi.schema import Schema, array_of, reference

_INTEGERS: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_FLOATS: Final = (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE)
_NOT_FINITE: Final = ["NaN", "Infinity", "-Infinity"]


def message_schemas(message: Descriptor) -> dict[str, Schema]:
    """Return the schemas of `message` and of every message in it, by component name."""
    found: dict[str, Schema] = {}
    _collect(message, found)
    return found


def component_name(message: Descriptor) -> str:
    """Return what the schema of a message is called: its name, without the package."""
    return message.full_name.removeprefix(f"{message.file.package}.")


def _collect(message: Descriptor, found: dict[str, Schema]) -> None:
    name = component_name(message)
    if name in found:
        return
    schema: Schema = {"type": "object", "additionalProperties": False}
    found[name] = schema
    schema["required"] = [field.name for field in message.fields if not field.has_presence]
    schema["properties"] = {field.name: _field(field, found) for field in message.fields}


def _field(field: FieldDescriptor, found: dict[str, Schema]) -> Schema:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        return {"type": "object", "additionalProperties": _value(kind.fields_by_name["value"], found)}
    value = _value(field, found)
    return array_of(value) if isinstance(field.default_value, list) else value


def _value(field: FieldDescriptor, found: dict[str, Schema]) -> Schema:
    if field.message_type is not None:
        _collect(field.message_type, found)
        return reference(component_name(field.message_type))
    if field.enum_type is not None:
        return {"type": "string", "enum": [value.name for value in field.enum_type.values]}
    if field.cpp_type in _INTEGERS:
        low, high = _INTEGERS[field.cpp_type]
        return {"type": "integer", "minimum": low, "maximum": high}
    if field.cpp_type in _FLOATS:
        return {"anyOf": [{"type": "number"}, {"type": "string", "enum": _NOT_FINITE}]}
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return {"type": "boolean"}
    encoding = {"contentEncoding": "base64"} if field.type == FieldDescriptor.TYPE_BYTES else {}
    return {"type": "string", **encoding}
