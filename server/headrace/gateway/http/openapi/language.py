"""The schemas of OpenAI's doors: what is read of requests, and what answers have."""

from __future__ import annotations

from typing import Final

from headrace.gateway.http.openai import messages, prompts, sampling
from headrace.gateway.http.openapi.schema import (
    MAX_INT64,
    Schema,
    array_of,
    described,
    exact_object,
    object_of,
    or_null,
    reference,
)

_TEXT: Final[Schema] = {"type": "string"}
_FLAG: Final[Schema] = {"type": "boolean"}
_NUMBER: Final[Schema] = {"type": "number"}
_INTEGER: Final[Schema] = {"type": "integer"}
_ANY_OBJECT: Final[Schema] = {"type": "object"}


def language_schemas() -> dict[str, Schema]:
    """Return the schemas by name."""
    return {**_of_models(), **_of_requests(), **_of_answers()}


def _of_models() -> dict[str, Schema]:
    error = exact_object(
        {
            "message": described(_TEXT, "What is wrong, in a sentence."),
            "type": _TEXT,
            "param": described(or_null(_TEXT), "The member that is wrong, as messages[0].content."),
            "code": described(or_null(_TEXT), "A word for programs."),
        },
        ("message", "type", "param", "code"),
    )
    model = {
        "id": _TEXT,
        "object": {"const": "model"},
        "created": _INTEGER,
        "owned_by": _TEXT,
        "root": described(_TEXT, "The model's name in /v2."),
        "parent": described(or_null(_TEXT), "Of a LoRA adapter: its model."),
        "max_model_len": described(or_null(_INTEGER), "Tokens of prompt and output together; of language models."),
    }
    models = {"object": {"const": "list"}, "data": array_of(reference("OpenAIModel"))}
    return {
        "OpenAIError": exact_object({"error": error}, ("error",)),
        "OpenAIModel": exact_object(model, tuple(model)),
        "OpenAIModels": exact_object(models, tuple(models)),
    }


def _range(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def _integers(low: int, high: int | None = None) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": MAX_INT64 if high is None else high}


def _of_sampling() -> dict[str, Schema]:
    stop = {"type": "string", "minLength": 1, "maxLength": sampling.MAX_STOP}
    tokens = array_of(_integers(0))
    return {
        "model": _TEXT,
        "n": described(_integers(1, sampling.MAX_N), "Choices of each prompt."),
        "temperature": _range(0, 2),
        "top_p": _range(0, 1),
        "top_k": described(_integers(-1), "0 and -1 are off."),
        "min_p": _range(0, 1),
        "presence_penalty": _range(-2, 2),
        "frequency_penalty": _range(-2, 2),
        "repetition_penalty": described({"type": "number", "exclusiveMinimum": 0}, "Over prompt and output."),
        "logit_bias": {"type": "object", "additionalProperties": _range(-100, 100)},
        "seed": _INTEGER,
        "stop": {"anyOf": [stop, {**array_of(stop), "maxItems": sampling.MAX_STOPS}]},
        "stop_token_ids": tokens,
        "include_stop_str_in_output": _FLAG,
        "ignore_eos": _FLAG,
        "min_tokens": _integers(0),
        "bad_words": array_of(_TEXT),
        "allowed_token_ids": tokens,
        "skip_special_tokens": _FLAG,
        "spaces_between_special_tokens": _FLAG,
        "truncate_prompt_tokens": described(_integers(-1), "-1: as many as fit."),
        "truncation_side": {"type": "string", "enum": ["left", "right"]},
        "thinking_token_budget": _integers(-1),
        "repetition_detection": _ANY_OBJECT,
        "skip_reading_prefix_cache": _FLAG,
        "prompt_logprobs": _integers(-1),
        "return_token_ids": _FLAG,
        "return_tokens_as_token_ids": _FLAG,
        "stream": _FLAG,
        "stream_options": object_of({"include_usage": _FLAG, "continuous_usage_stats": _FLAG}),
        "response_format": object_of({"type": _TEXT, "json_schema": _ANY_OBJECT}, ("type",)),
        "structured_outputs": described(
            _ANY_OBJECT, "One of json, regex, choice, grammar, json_object, structural_tag."
        ),
        "use_beam_search": _FLAG,
        "length_penalty": _NUMBER,
        "add_special_tokens": _FLAG,
        "cache_salt": {"type": "string", "minLength": 1, "maxLength": 128},
        "priority": described(_INTEGER, "Lower runs first."),
        "timeout": described(_integers(0), "Microseconds in the queue; 0 = as the model is set."),
    }


def _of_requests() -> dict[str, Schema]:
    tokens = {**array_of(_integers(0)), "minItems": 1}
    text = {"type": "string", "minLength": 1}
    several = {**array_of({"anyOf": [text, tokens]}), "minItems": 1, "maxItems": prompts.MAX_PROMPTS}
    completion = {
        **_of_sampling(),
        "prompt": {"anyOf": [text, tokens, several]},
        "max_tokens": described(_integers(0), "Default 16."),
        "best_of": _integers(0, sampling.MAX_BEST_OF),
        "echo": _FLAG,
        "logprobs": _integers(-1),
    }
    chat: dict[str, Schema] = {
        **_of_sampling(),
        "messages": {**array_of(reference("ChatMessage")), "minItems": 1, "maxItems": messages.MAX_MESSAGES},
        "max_completion_tokens": described(_integers(1), "Default: as many as fit."),
        "max_tokens": described(_integers(1), "As max_completion_tokens, which wins."),
        "logprobs": _FLAG,
        "top_logprobs": _integers(-1),
        "echo": described(_FLAG, "Whether a message that is continued is told too."),
        "add_generation_prompt": _FLAG,
        "continue_final_message": _FLAG,
        "documents": array_of(_ANY_OBJECT),
        "chat_template": described(_TEXT, "Only where the model's settings trust clients with that."),
        "chat_template_kwargs": _ANY_OBJECT,
    }
    message: dict[str, Schema] = {
        "role": {"type": "string", "enum": list(messages.ROLES)},
        "content": {"anyOf": [_TEXT, array_of(_ANY_OBJECT)]},
        "name": _TEXT,
        "tool_call_id": _TEXT,
        "tool_calls": array_of(_ANY_OBJECT),
        "reasoning_content": _TEXT,
    }
    return {
        "CompletionRequest": _nullable(completion, ("prompt",)),
        "ChatRequest": _nullable(chat, ("messages",)),
        "ChatMessage": _nullable(message, ("role",)),
    }


def _nullable(properties: dict[str, Schema], required: tuple[str, ...]) -> Schema:
    """Return an object whose other members may be null, which is as if they were absent."""
    members = {name: schema if name in required else or_null(schema) for name, schema in properties.items()}
    return object_of(members, required)


def _of_answers() -> dict[str, Schema]:
    usage = reference("Usage")
    finish = {"finish_reason": or_null(_TEXT), "stop_reason": or_null({"type": ["string", "integer"]})}
    text = {"index": _INTEGER, "text": _TEXT, "logprobs": or_null(_ANY_OBJECT), **finish}
    whole = {"index": _INTEGER, "message": _ANY_OBJECT, "logprobs": or_null(_ANY_OBJECT), **finish}
    part = {"index": _INTEGER, "delta": _ANY_OBJECT, "logprobs": or_null(_ANY_OBJECT), **finish}
    counts = {
        "prompt_tokens": _INTEGER,
        "completion_tokens": _INTEGER,
        "total_tokens": _INTEGER,
        "prompt_tokens_details": object_of({"cached_tokens": _INTEGER}),
        "completion_tokens_details": object_of({"reasoning_tokens": _INTEGER}),
    }
    needed = ("index", "logprobs", "finish_reason")
    return {
        "Usage": object_of(counts, tuple(counts)),
        "Completion": _answer("text_completion", object_of(text, ("text", *needed)), usage),
        "CompletionChunk": _answer("text_completion", object_of(text, ("text", *needed)), None),
        "ChatCompletion": _answer("chat.completion", object_of(whole, ("message", *needed)), usage),
        "ChatCompletionChunk": _answer("chat.completion.chunk", object_of(part, ("delta", *needed)), None),
    }


def _answer(kind: str, choice: Schema, usage: Schema | None) -> Schema:
    members = {
        "id": _TEXT,
        "object": {"const": kind},
        "created": described(_INTEGER, "Unix time in seconds."),
        "model": described(_TEXT, "As the request names it."),
        "system_fingerprint": or_null(_TEXT),
        "choices": array_of(choice),
        "usage": or_null(reference("Usage")) if usage is None else usage,
    }
    return object_of(members, tuple(name for name in members if usage is not None or name != "usage"))
