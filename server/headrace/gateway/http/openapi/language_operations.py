"""The operations of OpenAI's doors in words. A table, no logic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from headrace.gateway.http.openapi.operation import Operation
from headrace.gateway.http.openapi.parts import answers_empty, answers_json, answers_json_or_chunks, takes_json
from headrace.gateway.http.openapi.schema import Schema, reference
from headrace.gateway.http.routes import Endpoint

_OF_A_MODEL: Final = (400, 401, 404, 503)
_TO_GENERATE: Final = (400, 401, 404, 415, 429, 503)
_HEADERS: Final = ("Content-Encoding", "X-Request-Id", "traceparent")
_MODEL: Final = "smollm2"
_COMPLETION: Final[dict[str, Any]] = {"model": _MODEL, "prompt": "Once upon a time", "max_tokens": 64}
_CHAT: Final[dict[str, Any]] = {
    "model": _MODEL,
    "messages": [{"role": "user", "content": "What is a watermill?"}],
    "stream": True,
    "stream_options": {"include_usage": True},
}
_RESPONSE: Final[dict[str, Any]] = {"model": _MODEL, "input": "What is a watermill?", "max_output_tokens": 64}
_MESSAGE: Final[dict[str, Any]] = {"model": _MODEL, "messages": [{"role": "user", "content": "What is a watermill?"}]}
_STREAMED: Final = (
    "With `stream` the answer comes as server-sent events. The status tells of what came first; what fails later is an "
    "event with a member `error`. The last event is `[DONE]`."
)

_EVENTS: Final = "On one line: the event, whose `type` is also the name that the line before it tells."


def _or_error(name: str) -> Schema:
    return {"anyOf": [reference(name), reference("OpenAIError")]}


LANGUAGE: Final[Mapping[tuple[Endpoint, str], Operation]] = {
    (Endpoint.OPENAI_MODELS, "GET"): Operation(
        "openai_models",
        "The language models, under each of their names",
        answers_json(reference("OpenAIModels"), "Aliases and LoRA adapters among them."),
        (401,),
        openai=True,
    ),
    (Endpoint.OPENAI_MODEL, "GET"): Operation(
        "openai_model",
        "One language model",
        answers_json(reference("OpenAIModel"), "About the model."),
        _OF_A_MODEL,
        "Slashes in the name may stand as they are.",
        openai=True,
    ),
    (Endpoint.COMPLETIONS, "POST"): Operation(
        "completion",
        "Continue prompts",
        answers_json_or_chunks(reference("Completion"), "The choices.", _or_error("CompletionChunk")),
        _TO_GENERATE,
        _STREAMED,
        _HEADERS,
        takes_json(reference("CompletionRequest"), {"a text": _COMPLETION}, required=True),
        openai=True,
    ),
    (Endpoint.CHAT_COMPLETIONS, "POST"): Operation(
        "chat_completion",
        "The next message of a conversation",
        answers_json_or_chunks(reference("ChatCompletion"), "The choices.", _or_error("ChatCompletionChunk")),
        _TO_GENERATE,
        _STREAMED,
        _HEADERS,
        takes_json(reference("ChatRequest"), {"a question, streamed": _CHAT}, required=True),
        openai=True,
    ),
    (Endpoint.RESPONSES, "POST"): Operation(
        "response",
        "The next response of a conversation",
        answers_json_or_chunks(reference("Response"), "The response.", {"type": "object"}, _EVENTS),
        _TO_GENERATE,
        "Nothing is kept: each request brings the whole conversation. With `stream` the answer comes as events.",
        _HEADERS,
        takes_json(reference("ResponseRequest"), {"a question": _RESPONSE}, required=True),
        openai=True,
    ),
    (Endpoint.MESSAGES, "POST"): Operation(
        "message",
        "The next message of a conversation, for Anthropic's clients",
        answers_json_or_chunks(reference("Message"), "The message.", {"type": "object"}, _EVENTS),
        _TO_GENERATE,
        "With `stream` the answer comes as events.",
        _HEADERS,
        takes_json(reference("MessageRequest"), {"a question": {**_MESSAGE, "max_tokens": 64}}, required=True),
        anthropic=True,
    ),
    (Endpoint.COUNT_TOKENS, "POST"): Operation(
        "count_tokens",
        "How many tokens a conversation has, for Anthropic's clients",
        answers_json(reference("TokenCount"), "The count."),
        _TO_GENERATE,
        headers=_HEADERS,
        body=takes_json(reference("CountRequest"), {"a question": _MESSAGE}, required=True),
        anthropic=True,
    ),
    (Endpoint.HEALTH, "GET"): Operation(
        "health", "As /v2/health/ready, for load balancers that know vLLM", answers_empty("It is ready."), (503,)
    ),
    (Endpoint.VERSION, "GET"): Operation(
        "version", "The server's version", answers_json(reference("ServerVersion"), "The version.")
    ),
    (Endpoint.SERVER_LOAD, "GET"): Operation(
        "load_of_server", "How many requests are under way", answers_json(reference("ServerLoad"), "The number.")
    ),
}
"""By endpoint and method."""
