"""Whatever JSON a client sends for tools, reasoning, embeddings and rerank is read, or refused as its own fault by name."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.gateway.http.errors import HttpError
from headrace.gateway.http.openai.directory import LanguageModel
from headrace.gateway.http.openai.embeddings import read_inputs
from headrace.gateway.http.openai.fields import Fields
from headrace.gateway.http.openai.rerank import read_documents, read_texts
from headrace.gateway.http.openai.tools.chat_plan import plan_chat
from headrace_protocol.generation import ModelCard

EXAMPLES = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
_WORDS = st.sampled_from(
    [
        *("function", "name", "f", "g", "", "a b", "auto", "none", "required", "allowed_tools", "type", "object"),
        *("parameters", "strict", "$ref", "#", "#/$defs/x", "$defs", "properties", "text", "mode", "tools", "high"),
    ]
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _WORDS | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS, inner, max_size=4),
    max_leaves=12,
)
_FUNCTION = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "g", "h"])},
    optional={"parameters": st.dictionaries(_WORDS, _JSON, max_size=4), "strict": st.booleans()},
)
_TOOLS = st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": _FUNCTION}), max_size=3)
_NAMED = st.fixed_dictionaries({"type": st.just("function"), "function": st.fixed_dictionaries({"name": st.just("f")})})
_BODIES = st.fixed_dictionaries(
    {},
    optional={
        "tools": _TOOLS | _JSON,
        "tool_choice": _NAMED | _JSON,
        "functions": st.lists(_FUNCTION, max_size=2) | _JSON,
        "function_call": st.fixed_dictionaries({"name": st.just("f")}) | _JSON,
        "parallel_tool_calls": st.booleans() | _JSON,
        "reasoning_effort": _JSON,
        "include_reasoning": st.booleans() | _JSON,
        "response_format": _JSON,
    },
)
_FORMATS = st.sampled_from([None, "hermes", "llama3_json", "mistral", "pythonic", "harmony"])


def refused(error: HttpError) -> None:
    """Check that a refusal says whose fault it is."""
    assert error.status == 400
    assert error.param
    assert error.message


@EXAMPLES
@given(_BODIES, _FORMATS, st.text(max_size=40))
def test_tools_and_reasoning(body: dict[str, Any], tool_format: str | None, text: str) -> None:
    card = ModelCard(100, 50, tool_format=tool_format, reasoning_format="think_tags")
    model = LanguageModel(id="m", name="m", version=-1, card=card, fingerprint="fp")
    try:
        plan = plan_chat(Fields(body), model)
    except HttpError as error:
        refused(error)
        return
    if plan.structured is not None:
        json.loads(plan.structured.spec)
    reader = plan.reader(in_reasoning=False)
    assert reader is not None
    for piece in text:
        reader.feed(piece)
    assert reader.end("stop")[1] in ("stop", "tool_calls", "function_call")


_ITEMS = st.none() | _WORDS | st.lists(_WORDS | st.integers(-1, 60) | _JSON, max_size=5) | _JSON


@EXAMPLES
@given(_ITEMS)
def test_inputs_of_embeddings(value: Any) -> None:
    model = LanguageModel(id="m", name="m", version=-1, card=ModelCard(100, 50), fingerprint="fp")
    try:
        prompts = read_inputs(Fields({"input": value}), model)
    except HttpError as error:
        refused(error)
    else:
        assert prompts
        assert all(prompt and isinstance(prompt, str | list) for prompt in prompts)


@EXAMPLES
@given(_ITEMS)
def test_documents_and_texts(value: Any) -> None:
    for read in (read_documents, lambda fields: read_texts(fields, ("text_1", "documents"))):
        try:
            texts = read(Fields({"documents": value}))
        except HttpError as error:
            refused(error)
        else:
            assert texts
            assert all(isinstance(text, str) and text for text in texts)
