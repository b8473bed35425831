"""Whatever JSON a client sends, reading it for OpenAI's or Anthropic's door ends in a call or in an error for the client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.gateway.http.anthropic.request import chat_of as chat_of_message
from headrace.gateway.http.errors import HttpError
from headrace.gateway.http.openai.chat import read_chat
from headrace.gateway.http.openai.completions import read_completion
from headrace.gateway.http.openai.directory import LanguageModel
from headrace.gateway.http.openai.fields import Fields
from headrace.gateway.http.openai.responses.request import chat_of as chat_of_response
from headrace.gateway.http.openapi.bodies import schemas
from headrace_protocol.errors import InferError
from headrace_protocol.generation import CALL_DECODER, ENCODER, GenerationCall, ModelCard

CARD = ModelCard(max_model_len=64, vocab_size=100, tool_format="hermes", reasoning_format="think_tags")
MODEL = LanguageModel("m", "m", -1, CARD, "fp")
READERS: dict[str, Callable[[Fields], GenerationCall]] = {
    "CompletionRequest": lambda fields: read_completion(fields, MODEL)[0],
    "ChatRequest": lambda fields: read_chat(fields, MODEL)[0],
    "ResponseRequest": lambda fields: read_chat(Fields(chat_of_response(fields)), MODEL)[0],
    "MessageRequest": lambda fields: read_chat(Fields(chat_of_message(fields)), MODEL)[0],
}
MORE = (
    *(
        "type",
        "text",
        "role",
        "content",
        "function",
        "name",
        "arguments",
        "parameters",
        "json_schema",
        "schema",
        "regex",
    ),
    *(
        "tools",
        "tool_choice",
        "functions",
        "function_call",
        "tool_calls",
        "tool_call_id",
        "id",
        "call_id",
        "output",
        "input",
    ),
    *("structured_outputs", "response_format", "choice", "include_usage", "thinking", "budget_tokens", "tool_use_id"),
)
WORDS = (
    "",
    "a",
    "user",
    "assistant",
    "tool",
    "text",
    "function",
    "json_schema",
    "json_object",
    "auto",
    "required",
    "none",
)
WORDS_OF_ITEMS = (
    "tool_use",
    "tool_result",
    "function_call",
    "function_call_output",
    "reasoning",
    "enabled",
    "{}",
    "message",
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 130),
    st.sampled_from([2**31, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e308]),
    st.sampled_from([*WORDS, *WORDS_OF_ITEMS]),
    st.text(max_size=3),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(MORE), inner, max_size=4),
    max_leaves=12,
)
GOOD: dict[str, dict[str, Any]] = {
    "CompletionRequest": {"prompt": "a"},
    "ChatRequest": {"messages": [{"role": "user", "content": "a"}]},
    "ResponseRequest": {"input": "a"},
    "MessageRequest": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3},
}


@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_every_body_is_read_or_refused_by_name(name: str, data: st.DataObject) -> None:
    members = st.sampled_from([*schemas()[name]["properties"], *MORE])
    body = {**GOOD[name], **data.draw(st.dictionaries(members, VALUES, max_size=4))}
    decoded = msgspec.json.decode(msgspec.json.encode(body))
    try:
        call = READERS[name](Fields(decoded))
    except HttpError as error:
        assert error.status == 400
        assert error.message
        assert error.param
    except InferError as error:
        assert error.code.value == "INVALID_ARG"
    else:
        assert CALL_DECODER.decode(ENCODER.encode(call)) == call, "what is sent is what was read"
