"""A request for a message as the chat that it is: blocks become messages, calls and results of tools. Pure."""

from __future__ import annotations

from typing import Any, Final

from headrace.gateway.http.errors import HttpError
from headrace.gateway.http.openai.errors import missing, refusal, unsupported
from headrace.gateway.http.openai.fields import Fields
from headrace.gateway.http.openai.messages import MAX_MESSAGES, MAX_PARTS

MAX_TOOLS: Final = 128
_PASSED: Final = ("model", "temperature", "top_p", "top_k", "stream")
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


def chat_of(fields: Fields, *, counts: bool = False) -> dict[str, Any]:
    """Return the body of the chat that a message's request asks for. Raises HttpError 400.

    `counts`: its tokens are to be counted alone, so that `max_tokens` may be left out.
    """
    body: dict[str, Any] = {name: fields.any(name) for name in _PASSED if fields.has(name)}
    max_tokens = fields.integer("max_tokens", 1)
    if max_tokens is None and not counts:
        raise missing("max_tokens")
    body["max_tokens"] = max_tokens
    body["stop"] = list(fields.items("stop_sequences", 4, "stop sequences") or ()) or None
    messages = _system(fields)
    given = fields.objects("messages", MAX_MESSAGES, "messages")
    if given is None:
        raise missing("messages")
    if not given:
        raise refusal("'messages' is empty", "messages")
    for message in given:
        messages += _message(message)
    body["messages"] = messages
    if messages[-1]["role"] == "assistant":  # what is there of the answer is continued
        body["continue_final_message"] = True
    tools = fields.objects("tools", MAX_TOOLS, "tools")
    if tools:
        body["tools"] = [_tool(tool) for tool in tools]
        _choose(fields, body)
    _think(fields, body)
    return body


def _system(fields: Fields) -> list[dict[str, Any]]:
    value = fields.any("system")
    if value is None or value == "":
        return []
    if isinstance(value, str):
        return [{"role": "system", "content": value}]
    texts = [_text_of(block) for block in fields.objects("system", MAX_PARTS, "blocks") or ()]
    return [{"role": "system", "content": "\n".join(texts)}] if texts else []


def _message(fields: Fields) -> list[dict[str, Any]]:
    role = fields.choice("role", ("user", "assistant"))
    if role is None:
        raise missing(fields.at("role"))
    value = fields.any("content")
    if value is None:
        raise missing(fields.at("content"))
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    blocks = fields.objects("content", MAX_PARTS, "blocks") or []
    return [_of_assistant(blocks)] if role == "assistant" else _of_user(blocks)


def _of_user(blocks: list[Fields]) -> list[dict[str, Any]]:
    """Return what the user said, with what tools gave as messages of their own, in their order."""
    messages: list[dict[str, Any]] = []
    for block in blocks:
        if _kind(block) == "tool_result":
            answered = block.needed_text("tool_use_id")
            messages.append({"role": "tool", "tool_call_id": answered, "content": _result(block)})
        elif messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += "\n" + _text_of(block)
        else:
            messages.append({"role": "user", "content": _text_of(block)})
    return messages or [{"role": "user", "content": ""}]


def _result(block: Fields) -> str:
    value = block.any("content")
    if value is None or isinstance(value, str):
        return value or ""
    return "\n".join([_text_of(part) for part in block.objects("content", MAX_PARTS, "blocks") or ()])


def _of_assistant(blocks: list[Fields]) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        match _kind(block):
            case "thinking":
                thoughts.append(block.text("thinking") or "")
            case "redacted_thinking":
                pass  # sealed by another server
            case "tool_use":
                function = {"name": block.needed_text("name"), "arguments": block.mapping("input") or {}}
                calls.append({"id": block.needed_text("id"), "type": "function", "function": function})
            case _:
                texts.append(_text_of(block))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _kind(block: Fields) -> str:
    kind = block.text("type")
    if kind is None:
        raise missing(block.at("type"))
    return kind


def _text_of(block: Fields) -> str:
    kind = _kind(block)
    if kind != "text":
        raise unsupported(block.at("type"), f"'{block.at('type')}': the model takes text alone here, got {kind[:80]!r}")
    text = block.text("text")
    if text is None:
        raise missing(block.at("text"))
    return text


def _tool(fields: Fields) -> dict[str, Any]:
    if fields.text("type") not in (None, "custom"):
        raise unsupported(fields.at("type"), f"'{fields.at('type')}': the server runs no tools of its own")
    function = {
        "name": fields.needed_text("name"),
        "description": fields.text("description") or "",
        "parameters": fields.mapping("input_schema") or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def _choose(fields: Fields, body: dict[str, Any]) -> None:
    choice = fields.object("tool_choice")
    if choice is None:
        return
    kind = choice.choice("type", (*_CHOICES, "tool"))
    if kind is None:
        raise missing(choice.at("type"))
    if kind == "tool":
        body["tool_choice"] = {"type": "function", "function": {"name": choice.needed_text("name")}}
    else:
        body["tool_choice"] = _CHOICES[kind]
    body["parallel_tool_calls"] = not choice.flag("disable_parallel_tool_use")


def _think(fields: Fields, body: dict[str, Any]) -> None:
    thinking = fields.object("thinking")
    if thinking is None:
        return
    match thinking.choice("type", ("enabled", "disabled", "adaptive")):
        case None:
            raise missing(thinking.at("type"))
        case "disabled":
            body["reasoning_effort"] = "none"
        case "enabled":
            body["thinking_token_budget"] = _budget(thinking)
            body["chat_template_kwargs"] = {"enable_thinking": True}


def _budget(thinking: Fields) -> int:
    budget = thinking.integer("budget_tokens", 1)
    if budget is None:
        error: HttpError = missing(thinking.at("budget_tokens"))
        raise error
    return budget
