"""What the text has to be so that it is a call of a tool: JSON schemas for the backend's grammar. Pure.

A schema's own references are moved along with it: each function's schema gets a place of its own below `$defs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from headrace_protocol.generation import StructuredOutput

NAME: Final = "name"
PARAMETERS: Final = "parameters"


def arguments_of(schema: dict[str, Any]) -> StructuredOutput:
    """Return the constraint of a text that is the arguments of one function."""
    return _constraint({"type": "object", **schema})


def any_call(functions: Sequence[tuple[str, dict[str, Any]]], *, parallel: bool) -> StructuredOutput:
    """Return the constraint of a text that is an array of calls, `{"name": ..., "parameters": ...}` each: one at least."""
    calls = [
        {
            "type": "object",
            "properties": {NAME: {"type": "string", "enum": [name]}, PARAMETERS: {"$ref": f"#/$defs/f{number}"}},
            "required": [NAME, PARAMETERS],
            "additionalProperties": False,
        }
        for number, (name, _) in enumerate(functions)
    ]
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
    }
    if not parallel:
        schema["maxItems"] = 1
    schema["$defs"] = {
        f"f{number}": moved({"type": "object", **schema}, f"#/$defs/f{number}")
        for number, (_, schema) in enumerate(functions)
    }
    return _constraint(schema)


def strict_calls(functions: Sequence[tuple[str, dict[str, Any]]], tool_format: str) -> StructuredOutput | None:
    """Return the constraint of a text in which every call that the model begins is of one of the functions.

    None for forms whose calls have no marker of their own in front.
    """
    if tool_format != "hermes":
        return None
    structures = [
        {
            "begin": f'<tool_call>\n{{"name": {msgspec.json.encode(name).decode()}, "arguments": ',
            "schema": {"type": "object", **schema},
            "end": "}\n</tool_call>",
        }
        for name, schema in functions
    ]
    told = {"type": "structural_tag", "structures": structures, "triggers": ["<tool_call>"]}
    return StructuredOutput("structural_tag", msgspec.json.encode(told).decode())


def moved(schema: Any, place: str) -> Any:
    """Return a schema whose references to itself hold where it lies at `place`, a reference such as `#/$defs/a`.

    Its depth was checked when it was read, so that it may be walked by recursion.
    """
    if isinstance(schema, list):
        return [moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: place + value[1:]
        if key == "$ref" and isinstance(value, str) and value[:2] in ("#", "#/")
        else value
        if key in ("const", "enum", "default", "examples")
        else moved(value, place)
        for key, value in schema.items()
    }


def _constraint(schema: dict[str, Any]) -> StructuredOutput:
    return StructuredOutput("json_schema", msgspec.json.encode(schema).decode())
