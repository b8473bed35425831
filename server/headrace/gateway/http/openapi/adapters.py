"""The schemas of the doors that are chats in other words: Responses, Anthropic's messages, and what vLLM tells of itself."""

from __future__ import annotations

from typing import Final

from headrace.gateway.http.openapi.schema import (
    MAX_INT64,
    Schema,
    array_of,
    described,
    exact_object,
    object_of,
    or_null,
)

_TEXT: Final[Schema] = {"type": "string"}
_FLAG: Final[Schema] = {"type": "boolean"}
_INTEGER: Final[Schema] = {"type": "integer"}
_ANY_OBJECT: Final[Schema] = {"type": "object"}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 1, "maximum": MAX_INT64}
_STOPS: Final[Schema] = {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 1024}, "maxItems": 4}


def adapter_schemas() -> dict[str, Schema]:
    """Return the schemas by name."""
    error = exact_object(
        {"type": _TEXT, "message": described(_TEXT, "What is wrong, in a sentence.")}, ("type", "message")
    )
    return {
        "AnthropicError": exact_object({"type": {"const": "error"}, "error": error}, ("type", "error")),
        "ResponseRequest": _nullable(_of_response(), ("input",)),
        "Response": _told(("id", "object", "created_at", "status", "model", "output", "usage")),
        "MessageRequest": _nullable({**_of_message(), "max_tokens": _COUNT}, ("messages", "max_tokens")),
        "CountRequest": _nullable(_of_message(), ("messages",)),
        "Message": _told(("id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage")),
        "TokenCount": exact_object({"input_tokens": _INTEGER}, ("input_tokens",)),
        "ServerVersion": exact_object({"version": _TEXT}, ("version",)),
        "ServerLoad": exact_object({"server_load": _INTEGER}, ("server_load",)),
    }


def _of_response() -> dict[str, Schema]:
    return {
        "model": _TEXT,
        "input": {"anyOf": [{"type": "string", "minLength": 1}, {**array_of(_ANY_OBJECT), "minItems": 1}]},
        "instructions": _TEXT,
        "max_output_tokens": _COUNT,
        "temperature": {"type": "number", "minimum": 0, "maximum": 2},
        "top_p": {"type": "number", "minimum": 0, "maximum": 1},
        "stream": _FLAG,
        "tools": array_of(_ANY_OBJECT),
        "tool_choice": {"anyOf": [_TEXT, _ANY_OBJECT]},
        "parallel_tool_calls": _FLAG,
        "text": described(_ANY_OBJECT, "`format`: text, json_object or json_schema."),
        "reasoning": described(_ANY_OBJECT, "`effort`."),
    }


def _of_message() -> dict[str, Schema]:
    role = {"type": "string", "enum": ["user", "assistant"]}
    content = {"anyOf": [_TEXT, array_of(_ANY_OBJECT)]}
    message = object_of({"role": role, "content": content}, ("role", "content"))
    return {
        "model": _TEXT,
        "messages": {**array_of(message), "minItems": 1},
        "system": content,
        "stop_sequences": _STOPS,
        "stream": _FLAG,
        "temperature": {"type": "number", "minimum": 0, "maximum": 2},
        "top_p": {"type": "number", "minimum": 0, "maximum": 1},
        "top_k": {"type": "integer", "minimum": -1, "maximum": MAX_INT64},
        "tools": array_of(_ANY_OBJECT),
        "tool_choice": _ANY_OBJECT,
        "thinking": _ANY_OBJECT,
    }


def _nullable(properties: dict[str, Schema], required: tuple[str, ...]) -> Schema:
    members = {name: schema if name in required else or_null(schema) for name, schema in properties.items()}
    return object_of(members, required)


def _told(names: tuple[str, ...]) -> Schema:
    """Return an object with these members, whatever they are, and others."""
    return object_of({name: {} for name in names}, names)
