"""Tools and reasoning in chats on a real socket, over a model whose every event the test sends."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from headrace_protocol.generation import ChoiceDelta, PromptTold
from openai_door import OpenAIDoor, opened

PATH = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
HELLO = {"model": "chatty", "messages": [{"role": "user", "content": "hello"}]}
ASK = {**HELLO, "tools": [TOOL]}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'


@pytest.fixture
async def door() -> AsyncIterator[OpenAIDoor]:
    async with opened() as started:
        yield started


def added(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """Return the message that the deltas of a choice add up to, as OpenAI's clients add them up."""
    message: dict[str, Any] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = dict(choice["delta"])
            for call in delta.pop("tool_calls", []):
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    calls.append({"id": call["id"], "type": call["type"], "function": {**call["function"]}})
                else:
                    assert set(call) == {"index", "function"}
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            for name, text in delta.items():
                if name != "function_call":
                    message[name] = message.get(name, "") + text
                elif name in message:
                    message[name]["arguments"] += text["arguments"]
                else:
                    message[name] = dict(text)
    return message


def texts(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


async def test_calls_are_told_with_null_content_and_their_own_reason(door):
    task, call = await door.asked(PATH, ASK)
    assert call.call.chat.tools == [TOOL]
    assert call.call.structured is None
    assert "skip_special_tokens" not in call.call.sampling
    call.say(f"{CALL}\n{CALL}")
    _, _, answer = await task
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    first, second = choice["message"]["tool_calls"]
    assert choice["message"]["content"] is None
    assert first["function"] == {"name": "get_weather", "arguments": '{"city": "Bern"}'}
    assert first["type"] == "function"
    assert first["id"] != second["id"]


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_streamed_calls_add_up_to_the_message_that_is_told_as_a_whole(door, size):
    said = f"Let me see.\n{CALL}\n{CALL}\nDone."
    task, call = await door.asked(PATH, ASK)
    call.say(*texts(said, size))
    whole = (await task)[2]["choices"][0]["message"]
    stream, call = await door.streamed(PATH, ASK)
    call.say(*texts(said, size))
    chunks = await stream
    message = added(chunks)
    for one in (*whole["tool_calls"], *message["tool_calls"]):
        assert one.pop("id").startswith("call_")
    assert {name: whole[name] for name in message} == message
    assert message["content"] == "Let me see.\nDone."
    assert all(chunk["choices"][0]["delta"] or chunk["choices"][0]["finish_reason"] for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    begun = [chunk for chunk in chunks if "id" in chunk["choices"][0]["delta"].get("tool_calls", [{}])[0]]
    assert [chunk["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"] for chunk in begun] == ["", ""]


async def test_what_may_begin_a_call_is_held_back_and_told_when_it_is_none(door):
    stream, call = await door.streamed(PATH, ASK)
    call.say("a <tool", "ed wall", " <", "b>")
    chunks = await stream
    told = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    assert told == ["", "a", " <tooled wall", " <b>", None]


async def test_a_call_that_is_cut_keeps_the_reason_and_what_there_is_of_it(door):
    task, call = await door.asked(PATH, ASK)
    call.say(CALL[: CALL.index("city") + 4], finish="length")
    choice = (await task)[2]["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city'


async def test_a_required_call_is_kept_by_the_grammar_and_read_from_its_json(door):
    task, call = await door.asked(PATH, {**ASK, "tool_choice": "required"})
    assert call.call.structured.kind == "json_schema"
    assert json.loads(call.call.structured.spec)["type"] == "array"
    call.say('[{"name": "get_weather", ', '"parameters": {"city": "Bern"}}]')
    choice = (await task)[2]["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Bern"}'}


async def test_a_named_call_is_the_whole_text_and_ends_with_stop(door):
    named = {"type": "function", "function": {"name": "get_weather"}}
    stream, call = await door.streamed(PATH, {**ASK, "tool_choice": named})
    assert json.loads(call.call.structured.spec) == {"type": "object"}
    call.say('{"city"', ': "Bern"}')
    chunks = await stream
    assert added(chunks)["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Bern"}'}
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_tools_that_are_not_to_be_called_leave_the_text_as_it_is(door):
    task, call = await door.asked(PATH, {**ASK, "tool_choice": "none"})
    assert call.call.chat.tools == [TOOL]
    call.say(CALL)
    message = (await task)[2]["choices"][0]["message"]
    assert message["content"] == CALL
    assert "tool_calls" not in message


async def test_functions_of_old_are_answered_as_of_old(door):
    old = {**HELLO, "functions": [TOOL["function"]]}
    task, call = await door.asked(PATH, old)
    assert call.call.chat.tools == [TOOL]
    call.say(CALL)
    choice = (await task)[2]["choices"][0]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "get_weather", "arguments": '{"city": "Bern"}'}
    stream, call = await door.streamed(PATH, old)
    call.say(*texts(CALL, 2))
    assert added(await stream)["function_call"] == choice["message"]["function_call"]


async def test_a_model_that_calls_nothing_says_so(door):
    door.data.cards["mute"] = msgspec.structs.replace(door.data.cards["chatty"], tool_format=None)
    status, _, answer = await door.post(PATH, {**ASK, "model": "mute"})
    assert status == 400
    assert (answer["error"]["param"], answer["error"]["code"]) == ("tools", "unsupported_parameter")
    assert door.data.calls.empty()


async def test_thinking_is_told_apart_and_its_tokens_are_counted(door):
    door.data.cards["thinker"] = msgspec.structs.replace(door.data.cards["chatty"], reasoning_format="think_tags")
    asked = {**HELLO, "model": "thinker", "reasoning_effort": "low", "chat_template_kwargs": {"a": 1}}
    pieces = ["<th", "ink>", "\nHm", ".\n", "</think>", "\n\n", "Yes", "."]
    task, call = await door.asked(PATH, asked)
    assert call.call.chat.chat_template_kwargs == {"reasoning_effort": "low", "a": 1}
    assert call.call.stream, "each step has to be told for its tokens to be counted"
    call.say(*pieces)
    _, _, answer = await task
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("Hm.", "Hm.", "Yes.")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
    stream, call = await door.streamed(PATH, {**asked, "stream_options": {"include_usage": True}})
    call.say(*pieces)
    chunks = await stream
    assert added(chunks) == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm.", "reasoning": "Hm."}
    assert chunks[-1]["usage"] == answer["usage"]


async def test_a_prompt_may_have_opened_the_thinking(door):
    door.data.cards["thinker"] = msgspec.structs.replace(door.data.cards["chatty"], reasoning_format="think_tags")
    task, call = await door.asked(PATH, {**HELLO, "model": "thinker"})
    told = (PromptTold(3, in_reasoning=True),)
    call.tell(ChoiceDelta(0, "never ends", num_tokens=2, finish_reason="length"), prompts=told, final=True)
    answer = (await task)[2]
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("never ends", None)
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2


async def test_what_a_tool_gave_says_which_call_it_answers(door):
    messages = [{"role": "user", "content": "hello"}, {"role": "tool", "content": "7"}]
    status, _, answer = await door.post(PATH, {**ASK, "messages": messages})
    assert (status, answer["error"]["param"]) == (400, "messages[1].tool_call_id")
    assert door.data.calls.empty()


async def test_each_of_several_choices_is_read_by_itself(door):
    stream, call = await door.streamed(PATH, {**ASK, "n": 2})
    both = zip(
        texts(CALL, 7),
        texts("Only words, and nothing to be called here at all, whatever one may say.", 7),
        strict=False,
    )
    pairs = list(both)
    for number, (left, right) in enumerate(pairs):
        finish = "stop" if number == len(pairs) - 1 else None
        call.tell(
            ChoiceDelta(0, left, num_tokens=number, finish_reason=finish),
            ChoiceDelta(1, right, num_tokens=number, finish_reason=finish),
            prompts=() if number else (PromptTold(3),),
            final=finish is not None,
        )
    chunks = await stream
    assert added(chunks, 0)["tool_calls"][0]["function"]["arguments"] == '{"city": "Bern"}'
    assert "tool_calls" not in added(chunks, 1)
