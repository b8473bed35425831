"""Words that schemas are put together from."""

from __future__ import annotations

from typing import Any, Final

Schema = dict[str, Any]

MAX_INT64: Final = 2**63 - 1
MAX_UINT64: Final = 2**64 - 1

UINT64: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": MAX_UINT64}
SIZE: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": MAX_INT64}
SCALAR: Final[Schema] = {
    "type": ["string", "boolean", "number"],
    "description": "An integer is between -2^63 and 2^64 - 1.",
}
"""A parameter for a model."""


def reference(name: str) -> Schema:
    """Return a reference to the schema of that name."""
    return {"$ref": f"#/components/schemas/{name}"}


def or_null(schema: Schema) -> Schema:
    """Return the schema of a member that may be null, which is as if it were absent."""
    return {"anyOf": [schema, {"type": "null"}]}


def described(schema: Schema, text: str) -> Schema:
    """Return `schema` with a description."""
    return {**schema, "description": text}


def array_of(items: Schema) -> Schema:
    """Return the schema of a list."""
    return {"type": "array", "items": items}


def object_of(properties: dict[str, Schema], required: tuple[str, ...] = (), **more: Any) -> Schema:
    """Return the schema of an object; members that it does not name are allowed, unless `more` says otherwise."""
    schema: Schema = {"type": "object", "properties": properties, **more}
    return {**schema, "required": list(required)} if required else schema


def exact_object(properties: dict[str, Schema], required: tuple[str, ...] = ()) -> Schema:
    """Return the schema of an object without other members."""
    return object_of(properties, required, additionalProperties=False)
