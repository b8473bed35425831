"""Tools, thinking, vectors and tokens by OpenAI's client against a real server, over models that say what they are told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from openai import OpenAI

import scripted_engine
from harness import RunningServer, running
from scripted_engine import DIMENSIONS, script

FORMATS = ("hermes", "llama3_json", "mistral", "pythonic")
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}
TIME: Any = {"type": "function", "function": {"name": "get_time"}}
CALLS = [("get_weather", {"town": "Bath é 🎉", "days": [1, {"a": None}]}), ("get_time", {})]
SAID = {
    "hermes": "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'
        for name, arguments in CALLS
    ),
    "llama3_json": "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in CALLS),
    "mistral": "[TOOL_CALLS]" + json.dumps([{"name": name, "arguments": arguments} for name, arguments in CALLS]),
    "pythonic": "[get_weather(town='Bath é 🎉', days=[1, {'a': None}]), get_time()]",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("tools")
    models = folder / "models"
    models.mkdir()
    environment = scripted_engine.installed(folder / "site")
    for tool_format in FORMATS:
        scripted_engine.add_model(models, tool_format, tool_format=tool_format, reasoning_format="think_tags")
    scripted_engine.add_model(models, "mute")
    with running(models, env=environment) as started:
        yield started


@pytest.fixture
def client(server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0, timeout=20) as made:
        yield made


def asking(text: str = "What is it like?", **members: Any) -> Any:
    return [{"role": "user", "content": text + (script(**members) if members else "")}]


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


@pytest.mark.parametrize("per_step", [1, 7, 1000])
@pytest.mark.parametrize("tool_format", FORMATS)
def test_calls_are_heard_in_the_form_of_each_model(client, tool_format, per_step):
    said = f"<think>\nWhich town?\n</think>\n\n{SAID[tool_format]}"
    asked: Any = {
        "model": tool_format,
        "messages": asking(say=said, per_step=per_step),
        "tools": [WEATHER, TIME],
    }
    whole = client.chat.completions.create(**asked).choices[0]
    with client.chat.completions.stream(**asked) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_completion().choices[0]
    for choice in (whole, streamed):
        assert choice.finish_reason == "tool_calls"
        assert calls_of(choice.message) == CALLS
        assert not choice.message.content
        assert choice.message.reasoning_content == "Which town?"
    assert "tool_calls.function.arguments.done" in events
    assert len({call.id for call in whole.message.tool_calls}) == 2


def test_a_conversation_with_tools_goes_on_with_what_they_gave(client):
    messages = asking(say=SAID["hermes"])
    first = client.chat.completions.create(model="hermes", messages=messages, tools=[WEATHER, TIME]).choices[0].message
    messages.append(first.model_dump(exclude_none=True))
    for number, call in enumerate(first.tool_calls):
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"result {number}"})
    messages.append(asking("And now?" + script(say="It rains."))[0])
    answer = client.chat.completions.create(model="hermes", messages=messages, tools=[WEATHER, TIME])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("It rains.", "stop")


@pytest.mark.parametrize("model", ["mute", "hermes"])
def test_a_required_and_a_named_call_need_no_form_of_the_model(client, model):
    said = '[{"name": "get_weather", "parameters": {"town": "Bath"}}]'
    required = client.chat.completions.create(
        model=model, messages=asking(say=said), tools=[WEATHER], tool_choice="required"
    ).choices[0]
    assert (calls_of(required.message), required.finish_reason) == ([("get_weather", {"town": "Bath"})], "tool_calls")
    named = client.chat.completions.create(
        model=model,
        messages=asking(say='{"town": "Bath"}'),
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
    ).choices[0]
    assert (calls_of(named.message), named.finish_reason) == ([("get_weather", {"town": "Bath"})], "stop")


def test_a_model_without_a_form_refuses_tools_that_it_may_choose(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="mute", messages=asking(), tools=[WEATHER])
    assert (refused.value.param, refused.value.code) == ("tools", "unsupported_parameter")


def test_one_call_at_a_time_is_the_first(client):
    choice = client.chat.completions.create(
        model="hermes", messages=asking(say=SAID["hermes"]), tools=[WEATHER, TIME], parallel_tool_calls=False
    ).choices[0]
    assert calls_of(choice.message) == CALLS[:1]


def test_thoughts_are_counted_whether_they_are_streamed_or_not(client):
    asked: Any = {"model": "mute", "messages": asking(say="<think>Hm.</think>Yes.")}
    assert client.chat.completions.create(**asked).usage.completion_tokens_details.reasoning_tokens == 0
    asked["model"] = "hermes"
    answer = client.chat.completions.create(**asked)
    assert answer.choices[0].message.content == "Yes."
    thought = answer.usage.completion_tokens_details.reasoning_tokens
    assert thought == len("<think>Hm.</think")  # the last of its marker ends it
    *_, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert last.usage == answer.usage


def test_a_prompt_may_open_the_thinking(client):
    options = {"chat_template_kwargs": {"thinking": True}}
    answer = client.chat.completions.create(model="hermes", messages=asking(say="Hm.</think>Yes."), extra_body=options)
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("Hm.", "Yes.")
    hidden = (
        client.chat.completions.create(
            model="hermes", messages=asking(say="Hm.</think>Yes."), extra_body={**options, "include_reasoning": False}
        )
        .choices[0]
        .message
    )
    assert hidden.content == "Yes."
    assert not hasattr(hidden, "reasoning_content")


def test_vectors_of_a_language_model(client):
    answer = client.embeddings.create(model="mute", input=["ab", "abc"])
    assert [len(one.embedding) for one in answer.data] == [DIMENSIONS, DIMENSIONS]
    assert [np.linalg.norm(one.embedding) for one in answer.data] == pytest.approx([1, 1])
    assert answer.usage.prompt_tokens == len("ab") + len("abc") + 2  # and where each text begins
    floats = client.embeddings.create(model="mute", input=["ab", "abc"], encoding_format="float")
    assert [one.embedding for one in floats.data] == [one.embedding for one in answer.data]
    tokens = client.embeddings.create(model="mute", input=[[97, 98], [99]], dimensions=2)
    assert [len(one.embedding) for one in tokens.data] == [2, 2]
    assert [np.linalg.norm(one.embedding) for one in tokens.data] == pytest.approx([1, 1])
    assert tokens.usage.prompt_tokens == 3
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model="mute", input="a", dimensions=DIMENSIONS + 1)
    assert refused.value.param == "dimensions"
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model="mute", input=["a" * 5000])
    assert (refused.value.param, refused.value.code) == ("input", "context_length_exceeded")


def test_texts_are_ranked_by_a_language_model_that_embeds(client):
    body = {"model": "mute", "query": "aaaa", "documents": ["bbbb", "aaab", {"text": "aaaa"}]}
    answer: Any = client.post("/rerank", body=body, cast_to=object)
    assert [one["index"] for one in answer["results"]] == [2, 1, 0]
    assert answer["results"][0]["relevance_score"] == pytest.approx(1)


def test_tokens_and_their_text(client, server):
    outside = client.with_options(base_url=f"http://{server.http}")
    body = {"model": "mute", "prompt": "hé", "return_token_strs": True}
    answer: Any = outside.post("/tokenize", body=body, cast_to=object)
    assert answer["tokens"] == [256, *"hé".encode()]
    assert (answer["count"], answer["max_model_len"], len(answer["token_strs"])) == (4, 4096, 4)
    chat: Any = outside.post("/tokenize", body={"model": "mute", "messages": asking("hi")}, cast_to=object)
    assert bytes(chat["tokens"]) == b"<|user|>hi\n<|assistant|>"
    back: Any = outside.post("/detokenize", body={"model": "mute", "tokens": answer["tokens"]}, cast_to=object)
    assert back == {"prompt": "<s>hé"}
