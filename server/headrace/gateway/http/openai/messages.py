"""The messages of a chat: checked, and made what chat templates know.

Templates want text for content and objects for the arguments of calls, and know no `developer`.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from headrace.gateway.http.errors import HttpError
from headrace.gateway.http.json_text import check_depth
from headrace.gateway.http.openai.errors import missing, refusal, unsupported
from headrace.gateway.http.openai.fields import Fields
from headrace_protocol.errors import InferError

MAX_MESSAGES: Final = 4096
MAX_PARTS: Final = 1024
MAX_CALLS: Final = 128
"""Of tools, in one message."""
ROLES: Final = {
    "developer": "system",
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXTS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Kinds of parts that are text, and the member that has it."""


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """Return the messages as templates take them. Raises HttpError 400, which names the member at fault."""
    messages = fields.objects("messages", MAX_MESSAGES, "messages")
    if messages is None:
        raise missing("messages")
    if not messages:
        raise refusal("'messages' is empty", "messages")
    return [_message(message) for message in messages]


def _message(fields: Fields) -> dict[str, Any]:
    role = fields.choice("role", ROLES)
    if role is None:
        raise missing(fields.at("role"))
    message: dict[str, Any] = {"role": ROLES[role]}
    calls = _calls(fields) if role == "assistant" else []
    content = _content(fields)
    if content is None:
        if role not in ("assistant", "function"):
            raise missing(fields.at("content"))
        content = fields.text("refusal") or ""
    message["content"] = content
    name = fields.text("name")
    if name is not None:
        message["name"] = name
    if role == "assistant":
        reasoning = fields.text("reasoning_content") or fields.text("reasoning")
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
    elif role == "tool":
        answered = fields.text("tool_call_id")
        if answered is None:
            raise missing(fields.at("tool_call_id"))
        message["tool_call_id"] = answered
    return message


def _content(fields: Fields) -> str | None:
    value = fields.any("content")
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise fields.wrong("content", "a string or an array of parts", value)
    if value and all(isinstance(part, str) for part in value):
        return "\n".join(value)
    parts = fields.objects("content", MAX_PARTS, "parts") or []
    return "\n".join([_part(part) for part in parts])


def _part(fields: Fields) -> str:
    kind = fields.text("type")
    if kind is None:
        raise missing(fields.at("type"))
    member = _TEXTS.get(kind)
    if member is None:
        raise unsupported(fields.at("type"), f"'{fields.at('type')}': the model takes text alone, got {kind[:80]!r}")
    text = fields.text(member)
    if text is None:
        raise missing(fields.at(member))
    return text


def _calls(fields: Fields) -> list[dict[str, Any]]:
    calls = [_call(call) for call in fields.objects("tool_calls", MAX_CALLS, "calls") or ()]
    old = fields.object("function_call")
    if old is not None and not calls:
        calls = [{"id": "call_0", "type": "function", "function": _function(old)}]
    return calls


def _call(fields: Fields) -> dict[str, Any]:
    kind = fields.text("type")
    if kind not in (None, "function"):
        raise unsupported(fields.at("type"), f"'{fields.at('type')}': only calls of functions are known, got {kind!r}")
    function = fields.object("function")
    if function is None:
        raise missing(fields.at("function"))
    return {"id": fields.text("id") or "", "type": "function", "function": _function(function)}


def _function(fields: Fields) -> dict[str, Any]:
    name = fields.needed_text("name")
    arguments = fields.any("arguments")
    if arguments is None or isinstance(arguments, dict):
        return {"name": name, "arguments": arguments or {}}
    text = fields.text("arguments") or "{}"
    try:
        check_depth(text.encode(), "arguments")
        decoded = msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError, InferError):
        raise _no_arguments(fields) from None
    if not isinstance(decoded, dict):
        raise _no_arguments(fields)
    return {"name": name, "arguments": decoded}


def _no_arguments(fields: Fields) -> HttpError:
    path = fields.at("arguments")
    return refusal(f"'{path}': expected a JSON object as text", path)
