"""POST /v1/responses, /v1/messages and what is asked of the server itself: chats in other words."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace_protocol.errors import ErrorCode, InferError
from headrace_protocol.generation import ChoiceDelta, ModelCard, PromptTold
from openai_door import OpenAIDoor, opened

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
THINKING = ModelCard(max_model_len=256, vocab_size=1000, tool_format="hermes", reasoning_format="think_tags")


@pytest.fixture
async def door() -> AsyncIterator[OpenAIDoor]:
    async with opened() as started:
        started.data.cards["chatty"] = THINKING
        yield started


async def events(door: OpenAIDoor, path: str, body: dict[str, Any], *texts: str, finish: str = "stop") -> list[Any]:
    """Return the events of a stream in which the model says these texts."""
    task, call = await door.asked_raw(path, {**body, "stream": True})
    call.say(*texts, finish=finish)
    status, headers, answer = await task
    assert (status, headers["Content-Type"]) == (200, "text/event-stream; charset=utf-8"), answer
    told = []
    for event in answer.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        decoded = json.loads(data.removeprefix("data: "))
        assert name == f"event: {decoded['type']}"
        told.append(decoded)
    return told


# --- responses --------------------------------------------------------------------------------------------------------


async def test_a_response_has_items_of_thinking_text_and_calls(door):
    body = {"model": "chatty", "input": "hi", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]}
    task, call = await door.asked(RESPONSES, body, X_Request_Id="r1")
    call.say("<think>hm</think>", "Yes. ", CALL)
    status, _, answer = await task
    assert (status, answer["object"], answer["id"], answer["status"]) == (200, "response", "resp_r1", "completed")
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message", "function_call"]
    reasoning, message, function = answer["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert (message["role"], message["content"][0]["text"].strip()) == ("assistant", "Yes.")
    assert (function["name"], json.loads(function["arguments"])) == ("f", {"a": 1})
    assert {item["status"] for item in answer["output"]} == {"completed"}
    assert answer["usage"]["total_tokens"] == 6
    assert answer["tools"] == body["tools"]


async def test_what_a_response_is_asked_for_reaches_the_model(door):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
        {"role": "user", "content": "and?"},
    ]
    body = {
        "model": "chatty",
        "input": items,
        "instructions": "be brief",
        "max_output_tokens": 9,
        "temperature": 0,
        "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
        "reasoning": {"effort": "low"},
    }
    task, call = await door.asked(RESPONSES, body)
    call.say("{}")
    assert (await task)[0] == 200
    function = {"name": "f", "arguments": {"a": 1}}
    assert call.call.chat.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "assistant", "content": "so"},
        {"role": "user", "content": "and?"},
    ]
    assert (call.call.sampling["max_tokens"], call.call.sampling["temperature"]) == (9, 0)
    assert json.loads(call.call.structured.spec) == SCHEMA
    assert call.call.chat.chat_template_kwargs == {"reasoning_effort": "low"}


async def test_the_events_of_a_response_put_together_are_the_response(door):
    body = {"model": "chatty", "input": "hi", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]}
    told = await events(door, RESPONSES, body, "<think>h", "m</think>Ye", "s. ", CALL[:40], CALL[40:])
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert [event["type"] for event in told[:2]] == ["response.created", "response.in_progress"]
    assert told[-1]["type"] == "response.completed"
    final = told[-1]["response"]
    for kind, delta in (
        ("message", "output_text"),
        ("reasoning", "reasoning_text"),
        ("function_call", "function_call_arguments"),
    ):
        number = next(at for at, item in enumerate(final["output"]) if item["type"] == kind)
        of_item = [event for event in told if event.get("output_index") == number]
        assert of_item[0]["type"] == "response.output_item.added"
        assert of_item[-1]["type"] == "response.output_item.done"
        assert of_item[-1]["item"] == final["output"][number]
        text = "".join(event["delta"] for event in of_item if event["type"] == f"response.{delta}.delta")
        item = final["output"][number]
        assert text == (item["arguments"] if kind == "function_call" else item["content"][0]["text"])


async def test_a_response_that_ran_out_of_tokens_is_incomplete(door):
    told = await events(door, RESPONSES, {"model": "chatty", "input": "hi"}, "a", "b", finish="length")
    assert told[-1]["type"] == "response.incomplete"
    assert told[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert told[-1]["response"]["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "image"}]}, "input[0].type"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
async def test_what_responses_refuse(door, members, param):
    status, _, answer = await door.post(RESPONSES, {"model": "chatty", "input": "hi", **members})
    assert (status, answer["error"]["param"]) == (400, param), answer


# --- messages ---------------------------------------------------------------------------------------------------------


def message(**members: Any) -> dict[str, Any]:
    return {"model": "chatty", "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}], **members}


TOOL = {"name": "f", "description": "d", "input_schema": SCHEMA}


async def test_a_message_has_blocks_of_thinking_text_and_calls(door):
    task, call = await door.asked(MESSAGES, message(tools=[TOOL]), X_Request_Id="r1")
    call.tell(prompts=(PromptTold(5, 2),))
    call.say("<think>hm</think>", "Yes. ", CALL, prompt_tokens=0)
    status, headers, answer = await task
    assert (status, headers["request-id"]) == (200, "r1")
    assert (answer["id"], answer["type"], answer["role"], answer["model"]) == (
        "msg_r1",
        "message",
        "assistant",
        "chatty",
    )
    thinking, text, use = answer["content"]
    assert thinking == {"type": "thinking", "thinking": "hm", "signature": ""}
    assert (text["type"], text["text"].strip()) == ("text", "Yes.")
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "f", {"a": 1})
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    assert (answer["usage"]["input_tokens"], answer["usage"]["cache_read_input_tokens"]) == (3, 2)
    assert answer["usage"]["output_tokens"] == 3


@pytest.mark.parametrize(
    ("finish", "stop_reason", "told"),
    [
        ("stop", None, ("end_turn", None)),
        ("length", None, ("max_tokens", None)),
        ("stop", "END", ("stop_sequence", "END")),
    ],
)
async def test_why_a_message_ended(door, finish, stop_reason, told):
    task, call = await door.asked(MESSAGES, message(stop_sequences=["END"]))
    delta = ChoiceDelta(0, "x", num_tokens=1, finish_reason=finish, stop_reason=stop_reason)
    call.tell(delta, prompts=(PromptTold(1),), final=True)
    _, _, answer = await task
    assert (answer["stop_reason"], answer["stop_sequence"]) == told


async def test_what_a_message_is_asked_for_reaches_the_model(door):
    blocks = [
        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "2"}]},
        {"type": "text", "text": "and?"},
    ]
    said = [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "wait"},
        {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
    ]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": blocks},
        {"role": "assistant", "content": "It is"},
    ]
    body = message(
        messages=messages,
        system=[{"type": "text", "text": "be brief"}],
        stop_sequences=["END"],
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "f"},
        thinking={"type": "enabled", "budget_tokens": 7},
        top_k=3,
    )
    task, call = await door.asked(MESSAGES, body)
    call.say(" 2")
    assert (await task)[0] == 200
    assert call.call.chat.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "wait",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "It is"},
    ]
    assert (call.call.chat.continue_final_message, call.call.chat.add_generation_prompt) == (True, False)
    assert call.call.chat.tools[0]["function"]["parameters"] == SCHEMA
    wanted = {"max_tokens": 20, "stop": ["END"], "top_k": 3, "thinking_token_budget": 7}
    assert {name: call.call.sampling[name] for name in wanted} == wanted
    assert call.call.chat.chat_template_kwargs == {"enable_thinking": True}
    assert call.call.structured is not None, "the tool has to be called"


async def test_the_events_of_a_message_are_blocks_one_after_another(door):
    told = await events(door, MESSAGES, message(tools=[TOOL]), "<think>h", "m</think>Ye", "s. ", CALL[:40], CALL[40:])
    assert [event["type"] for event in told if not event["type"].startswith("content_block")] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    blocks = [event["content_block"]["type"] for event in told if event["type"] == "content_block_start"]
    assert blocks == ["thinking", "text", "tool_use"]
    for number in range(3):
        of_block = [event["type"] for event in told if event.get("index") == number]
        assert of_block[0] == "content_block_start"
        assert of_block[-1] == "content_block_stop"
        assert set(of_block[1:-1]) == {"content_block_delta"}
    text = {
        kind: "".join(event["delta"].get(kind, "") for event in told if event["type"] == "content_block_delta")
        for kind in ("thinking", "text", "partial_json")
    }
    assert (text["thinking"], text["text"].strip(), json.loads(text["partial_json"])) == ("hm", "Yes.", {"a": 1})
    assert told[-2]["delta"]["stop_reason"] == "tool_use"
    assert told[-2]["usage"]["output_tokens"] == 5


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"max_tokens": None}, "'max_tokens' is missing"),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"stop_sequences": [""]}, "stop"),
    ],
)
async def test_what_messages_refuse_in_anthropics_words(door, members, words):
    status, headers, answer = await door.post(MESSAGES, message(**members))
    assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
    assert words in answer["error"]["message"]
    assert headers["request-id"] == headers["x-request-id"]


@pytest.mark.parametrize(("path", "name"), [(MESSAGES, "error"), (RESPONSES, "error")])
async def test_a_failure_in_the_middle_is_an_event_of_its_own(door, path, name):
    body = message() if path == MESSAGES else {"model": "chatty", "input": "hi"}
    task, call = await door.asked_raw(path, {**body, "stream": True})
    call.tell(ChoiceDelta(0, "a", num_tokens=1), prompts=(PromptTold(1),))
    call.fail(InferError(ErrorCode.UNAVAILABLE, "the backend is gone"))
    _, _, answer = await task
    last = answer.decode().split("\n\n")[-2]
    assert last.startswith(f"event: {name}\ndata: ")
    told = json.loads(last.partition("data: ")[2])
    assert (told["type"], told["error"]["message"]) == ("error", "the backend is gone")


async def test_other_failures_of_messages_have_anthropics_shape_too(door):
    status, _, answer = await door.post(MESSAGES, message(model="nope"))
    assert (status, answer["error"]["type"]) == (404, "not_found_error")
    got, _, body = await door.ask("GET", MESSAGES)
    assert (got, json.loads(body)["type"]) == (405, "error")


async def test_tokens_of_a_conversation_are_counted_without_an_answer(door):
    body = message()
    del body["max_tokens"]
    task, call = await door.asked(f"{MESSAGES}/count_tokens", body)
    assert call.call.task == "tokenize"
    call.tell(prompts=(PromptTold(12),), final=True)
    assert (await task)[2] == {"input_tokens": 12}


# --- the server -------------------------------------------------------------------------------------------------------


async def test_the_server_tells_of_itself_as_vllm_does(door):
    assert (await door.ask("GET", "/health"))[0] == 200
    door.data.is_ready = False
    assert (await door.ask("GET", "/health"))[0] == 503
    assert json.loads((await door.ask("GET", "/version"))[2]) == {"version": "1.0"}
    assert json.loads((await door.ask("GET", "/load"))[2]) == {"server_load": 0}
