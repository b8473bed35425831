"""POST /v1/chat/completions on a real socket, over a model whose every event the test sends."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

from headrace_protocol.errors import ErrorCode, ErrorDetail, InferError
from headrace_protocol.generation import ChoiceDelta, PromptTold, StructuredOutput
from openai_door import OpenAIDoor, likely, opened

PATH = "/v1/chat/completions"
HELLO = {"model": "chatty", "messages": [{"role": "user", "content": "hello"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
async def door() -> AsyncIterator[OpenAIDoor]:
    async with opened() as started:
        yield started


async def test_a_chat_is_answered_as_openai_answers_it(door):
    task, call = await door.asked(PATH, HELLO, X_Request_Id="mine")
    call.say("Hel", "lo.", prompt_tokens=5)
    status, headers, answer = await task
    assert status == 200
    assert headers["x-request-id"] == "mine"
    assert int(headers["openai-processing-ms"]) >= 0
    assert isinstance(answer.pop("created"), int)
    assert answer.pop("system_fingerprint").startswith("fp_")
    assert answer == {
        "id": "chatcmpl-mine",
        "object": "chat.completion",
        "model": "chatty",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello.", "refusal": None, "annotations": []},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "service_tier": None,
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 2,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }
    assert call.unread == 0


async def test_a_streamed_chat_begins_with_the_role_and_ends_with_the_reason(door):
    task, call = await door.streamed(PATH, HELLO)
    call.tell(prompts=(PromptTold(3),))
    call.say("Hel", "", "lo.", prompt_tokens=3)
    chunks = await task
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo."},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)
    assert call.unread == 0
    assert call.call.stream


async def test_the_call_says_what_the_request_said(door):
    body = {**HELLO, "max_tokens": 7, "temperature": 0.5, "stop": "END", "seed": 3, "n": 2, "user": "u", "top_k": None}
    task, call = await door.asked(PATH, body)
    call.tell(
        ChoiceDelta(0, "a", num_tokens=1, finish_reason="stop"),
        ChoiceDelta(1, "b", num_tokens=2, finish_reason="length"),
        prompts=(PromptTold(3, 2),),
        final=True,
    )
    _, _, answer = await task
    assert call.call.sampling == {
        "max_tokens": 7,
        "temperature": 0.5,
        "stop": ["END"],
        "seed": 3,
        "n": 2,
        "top_k": 20,
    }
    assert call.call.chat.messages == [{"role": "user", "content": "hello"}]
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["a", "b"]
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


@pytest.mark.parametrize(
    ("members", "max_tokens"),
    [
        ({}, None),
        ({"max_tokens": None, "max_completion_tokens": None}, None),
        ({"max_tokens": 1}, 1),
        ({"max_tokens": 2**31}, 256),
        ({"max_completion_tokens": 5, "max_tokens": 9}, 5),
    ],
)
async def test_how_many_tokens_a_chat_may_have(door, members, max_tokens):
    task, call = await door.asked(PATH, {**HELLO, **members})
    call.say("x")
    await task
    assert call.call.sampling.get("max_tokens") == max_tokens


async def test_messages_reach_the_template_as_it_knows_them(door):
    messages = [
        {"role": "developer", "content": "be brief", "name": None},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "ann"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "assistant", "content": "so", "function_call": {"name": "g", "arguments": ""}},
    ]
    task, call = await door.asked(PATH, {**HELLO, "messages": messages})
    call.say("x")
    await task
    assert call.call.chat.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb", "name": "ann"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {
            "role": "assistant",
            "content": "so",
            "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "g", "arguments": {}}}],
        },
    ]


async def test_log_probabilities_have_an_entry_for_each_token_also_while_text_is_held_back(door):
    task, call = await door.streamed(PATH, {**HELLO, "logprobs": True, "top_logprobs": 1})
    call.tell(ChoiceDelta(0, "a", num_tokens=1, logprobs=(likely("a", -0.1, ("a", -0.1)),)), prompts=(PromptTold(3),))
    call.tell(ChoiceDelta(0, "", num_tokens=2, logprobs=(likely("b", None, ("c", -0.2)),)))
    call.tell(ChoiceDelta(0, "bd", num_tokens=3, logprobs=(likely("d"),)))
    call.tell(ChoiceDelta(0, "", num_tokens=4, logprobs=(likely("e"),)))
    call.tell(ChoiceDelta(0, "", num_tokens=4, finish_reason="stop"), final=True)
    chunks = await task
    told = [
        [entry["token"] for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
        for chunk in chunks
    ]
    assert told == [[], ["a"], ["b", "d"], ["e"]]
    assert not any(chunk["choices"][0]["delta"].get("content") == "" for chunk in chunks[1:])
    held = chunks[2]["choices"][0]["logprobs"]["content"][0]
    assert held == {
        "token": "b",
        "logprob": -9999.0,
        "bytes": [98],
        "top_logprobs": [{"token": "c", "logprob": -0.2, "bytes": [99]}],
    }
    assert call.call.sampling["logprobs"] == 1


@pytest.mark.parametrize("asked", [True, False])
async def test_usage_comes_in_one_more_chunk_where_it_was_asked_for(door, asked):
    options = {"stream_options": {"include_usage": True}} if asked else {}
    task, call = await door.streamed(PATH, {**HELLO, "n": 2, **options})
    call.tell(ChoiceDelta(0, "a", num_tokens=1), ChoiceDelta(1, "b", num_tokens=1), prompts=(PromptTold(3),))
    call.tell(
        ChoiceDelta(0, "c", num_tokens=2, finish_reason="stop"),
        ChoiceDelta(1, "", num_tokens=3, finish_reason="length"),
        final=True,
    )
    chunks = await task
    usages = [chunk.get("usage", "none") for chunk in chunks]
    if not asked:
        assert set(usages) == {"none"}
        return
    assert set(map(str, usages[:-1])) == {"None"}
    assert chunks[-1]["choices"] == []
    assert (usages[-1]["prompt_tokens"], usages[-1]["completion_tokens"], usages[-1]["total_tokens"]) == (3, 5, 8)


async def test_running_usage_is_in_every_chunk_where_that_was_asked_for(door):
    options = {"include_usage": True, "continuous_usage_stats": True}
    task, call = await door.streamed(PATH, {**HELLO, "stream_options": options})
    call.say("a", "b", "c")
    assert [chunk["usage"]["completion_tokens"] for chunk in await task] == [1, 1, 2, 3, 3, 3]


async def test_calls_of_tools_are_told_as_they_come_and_end_the_message(door):
    body = {**HELLO, "tools": [TOOL]}
    task, call = await door.streamed(PATH, body)
    call.say("So: <tool", '_call>{"name": "f", "argu', 'ments": {"a"', ": 1}}</tool_call>")
    chunks = await task
    assert call.call.chat.tools == [TOOL]
    content = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert content.strip() == "So:"
    calls = [one for chunk in chunks for one in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert (calls[0]["type"], calls[0]["function"]["name"]) == ("function", "f")
    assert [one["index"] for one in calls] == [0] * len(calls)
    assert all("id" not in one for one in calls[1:])
    assert json.loads("".join(one["function"]["arguments"] for one in calls)) == {"a": 1}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("old", [False, True])
async def test_a_message_that_is_a_call_alone_has_no_content(door, old):
    tools = {"functions": [TOOL["function"]]} if old else {"tools": [TOOL]}
    task, call = await door.asked(PATH, {**HELLO, **tools})
    call.say('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>')
    _, _, answer = await task
    (choice,) = answer["choices"]
    assert choice["message"]["content"] is None
    told = choice["message"]["function_call"] if old else choice["message"]["tool_calls"][0]["function"]
    assert (told["name"], json.loads(told["arguments"])) == ("f", {"a": 1})
    assert choice["finish_reason"] == ("function_call" if old else "tool_calls")


async def test_reasoning_is_told_apart_and_counted(door):
    door.data.cards["chatty"] = type(door.data.cards["chatty"])(
        max_model_len=256, vocab_size=1000, reasoning_format="think_tags"
    )
    task, call = await door.streamed(PATH, {**HELLO, "stream_options": {"include_usage": True}})
    call.say("<think>", "hm", "m</think>", "yes")
    chunks = await task
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hmm"
    assert "".join(delta.get("content", "") for delta in deltas) == "yes"
    assert chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_text_that_is_continued_may_be_told_too(door, stream):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "once "}]
    body = {**HELLO, "messages": messages, "continue_final_message": True, "echo": True}
    task, call = await (door.streamed if stream else door.asked)(PATH, body)
    assert (call.call.chat.continue_final_message, call.call.chat.add_generation_prompt) == (True, False)
    call.say("upon")
    told = await task
    if stream:
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in told) == "once upon"
    else:
        assert told[2]["choices"][0]["message"]["content"] == "once upon"


@pytest.mark.parametrize(
    ("wanted", "structured"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutput("json_object")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "null"}}}},
            StructuredOutput("json_schema", '{"type":"null"}'),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}},
            StructuredOutput("json_schema", "{}"),
        ),
        ({"structured_outputs": {"json": {"type": "null"}}}, StructuredOutput("json_schema", '{"type":"null"}')),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, StructuredOutput("json_schema", '{"type": "null"}')),
        ({"structured_outputs": {"regex": "a+", "json": None}}, StructuredOutput("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutput("choice", '["a","b"]')),
        ({"structured_outputs": {"grammar": "root ::= x"}}, StructuredOutput("grammar", "root ::= x")),
        ({"structured_outputs": {"json_object": True}}, StructuredOutput("json_object")),
    ],
)
async def test_what_the_text_has_to_be_reaches_the_model(door, wanted, structured):
    task, call = await door.asked(PATH, {**HELLO, **wanted})
    call.say("null")
    assert (await task)[0] == 200
    assert call.call.structured == structured


async def test_what_a_backend_refuses_is_named_as_the_client_named_it(door):
    task, call = await door.asked(PATH, HELLO)
    error = "chat: the prompt has 999 tokens; the model takes 256"
    call.fail(InferError(ErrorCode.INVALID_ARG, error, detail=ErrorDetail.CONTEXT_LENGTH, param="chat"))
    status, headers, answer = await task
    assert status == 400
    assert headers["x-request-id"]
    assert answer["error"] == {
        "message": "messages: the prompt has 999 tokens; the model takes 256",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }


async def test_tokens_of_prompt_and_answer_are_told_to_those_who_ask(door):
    body = {**HELLO, "return_token_ids": True}
    task, call = await door.streamed(PATH, body)
    call.tell(ChoiceDelta(0, "a", (5,), num_tokens=1), prompts=(PromptTold(2, token_ids=(1, 2)),))
    call.tell(ChoiceDelta(0, "", (6, 7), num_tokens=3, finish_reason="stop"), final=True)
    first, second, last = await task
    assert first["prompt_token_ids"] == [1, 2]
    assert second["choices"][0]["token_ids"] == [5]
    assert last["choices"][0]["token_ids"] == [6, 7]
    assert call.call.return_token_ids
