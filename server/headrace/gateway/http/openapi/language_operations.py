"""The operations of OpenAI's doors in words. A table, no logic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from headrace.gateway.http.openapi.operation import Operation
from headrace.gateway.http.openapi.parts import answers_json, answers_json_or_chunks, takes_json
from headrace.gateway.http.openapi.schema import reference
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
_STREAMED: Final = (
    "With `stream` the answer comes as server-sent events. The status tells of what came first; what fails later is an "
    "event with a member `error`. The last event is `[DONE]`."
)

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
        answers_json_or_chunks(reference("Completion"), "The choices.", reference("CompletionChunk")),
        _TO_GENERATE,
        _STREAMED,
        _HEADERS,
        takes_json(reference("CompletionRequest"), {"a text": _COMPLETION}, required=True),
        openai=True,
    ),
    (Endpoint.CHAT_COMPLETIONS, "POST"): Operation(
        "chat_completion",
        "The next message of a conversation",
        answers_json_or_chunks(reference("ChatCompletion"), "The choices.", reference("ChatCompletionChunk")),
        _TO_GENERATE,
        _STREAMED,
        _HEADERS,
        takes_json(reference("ChatRequest"), {"a question, streamed": _CHAT}, required=True),
        openai=True,
    ),
}
"""By endpoint and method."""
