"""A request for a response as the chat that it is: items become messages, calls and results of tools. Pure."""

from __future__ import annotations

from typing import Any, Final

from headrace.gateway.http.openai.errors import missing, refusal, unsupported
from headrace.gateway.http.openai.fields import Fields
from headrace.gateway.http.openai.messages import MAX_MESSAGES

MAX_TOOLS: Final = 128
_PASSED: Final = (
    *("model", "temperature", "top_p", "stream", "parallel_tool_calls", "seed", "stop", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "top_k", "min_p", "repetition_penalty", "ignore_eos", "min_tokens"),
    *("priority", "timeout", "cache_salt", "chat_template_kwargs", "thinking_token_budget", "structured_outputs"),
)
_NOT_KEPT: Final = ("previous_response_id", "conversation", "prompt")


def chat_of(fields: Fields) -> dict[str, Any]:
    """Return the body of the chat that a request asks for. Raises HttpError 400."""
    for name in _NOT_KEPT:
        if fields.has(name):
            raise unsupported(name, f"'{name}' is not served: nothing is kept here, send all items of the conversation")
    if fields.flag("background"):
        raise unsupported("background", "'background' is not served: answers are not kept")
    body: dict[str, Any] = {name: fields.any(name) for name in _PASSED if fields.has(name)}
    body["max_completion_tokens"] = fields.integer("max_output_tokens", 1)
    instructions = fields.text("instructions")
    messages = [] if not instructions else [{"role": "system", "content": instructions}]
    body["messages"] = messages + _input(fields)
    tools = fields.objects("tools", MAX_TOOLS, "tools")
    if tools:
        body["tools"] = [_tool(tool) for tool in tools]
    _choose(fields, body)
    _format(fields, body)
    reasoning = fields.object("reasoning")
    if reasoning is not None and reasoning.has("effort"):
        body["reasoning_effort"] = reasoning.text("effort")
    return body


def _input(fields: Fields) -> list[dict[str, Any]]:
    value = fields.any("input")
    if value is None:
        raise missing("input")
    if isinstance(value, str):
        if not value:
            raise refusal("'input' is empty", "input")
        return [{"role": "user", "content": value}]
    items = fields.objects("input", MAX_MESSAGES, "items") or []
    if not items:
        raise refusal("'input' is empty", "input")
    messages: list[dict[str, Any]] = []
    for item in items:
        _add(messages, item)
    return messages


def _add(messages: list[dict[str, Any]], item: Fields) -> None:
    """Add one item; calls of tools are part of the assistant's message before them."""
    match item.text("type"):
        case None | "message":
            if not item.has("role"):
                raise missing(item.at("role"))
            messages.append({"role": item.text("role"), "content": item.any("content")})
        case "function_call":
            function = {"name": item.needed_text("name"), "arguments": item.text("arguments") or "{}"}
            call = {"id": item.needed_text("call_id"), "type": "function", "function": function}
            _assistant(messages).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            output = item.any("output")
            told = {
                "role": "tool",
                "tool_call_id": item.needed_text("call_id"),
                "content": "" if output is None else output,
            }
            messages.append(told)
        case "reasoning":
            texts = [part.text("text") or "" for part in item.objects("content", MAX_MESSAGES) or ()]
            if texts:
                messages.append({"role": "assistant", "content": "", "reasoning_content": "\n".join(texts)})
        case kind:
            raise unsupported(item.at("type"), f"'{item.at('type')}': items of the type {kind[:80]!r} are not served")


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant's message at the end, which may be a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _tool(fields: Fields) -> dict[str, Any]:
    kind = fields.text("type")
    if kind != "function":
        raise unsupported(
            fields.at("type"), f"'{fields.at('type')}': the server runs no tools of its own, got {kind!r}"
        )
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: fields.any(name) for name in names if fields.has(name)}}


def _choose(fields: Fields, body: dict[str, Any]) -> None:
    choice = fields.any("tool_choice")
    if choice is None or ("tools" not in body and choice in ("auto", "none")):
        return
    if isinstance(choice, dict):
        name = Fields(choice, "tool_choice").needed_text("name")
        choice = {"type": "function", "function": {"name": name}}
    body["tool_choice"] = choice


def _format(fields: Fields, body: dict[str, Any]) -> None:
    text = fields.object("text")
    wanted = None if text is None else text.object("format")
    if wanted is None:
        return
    if wanted.text("type") != "json_schema":
        body["response_format"] = dict(wanted.members)
        return
    names = ("name", "description", "schema", "strict")
    described = {name: wanted.any(name) for name in names if wanted.has(name)}
    body["response_format"] = {"type": "json_schema", "json_schema": described}
