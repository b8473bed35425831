"""POST /tokenize and /detokenize, over a language model whose answer the test sends."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from headrace_protocol.errors import ErrorCode, InferError
from headrace_protocol.generation import GenerationEvent, PromptTold
from openai_door import OpenAIDoor, opened


@pytest.fixture
async def door() -> AsyncIterator[OpenAIDoor]:
    async with opened() as started:
        yield started


async def test_the_tokens_of_a_text_are_told(door):
    task, call = await door.asked("/tokenize", {"model": "chatty", "prompt": "hi", "return_token_strs": True})
    asked = call.call
    assert (asked.task, asked.prompts, asked.add_special_tokens) == ("tokenize", ["hi"], None)
    assert asked.return_token_strings
    told = PromptTold(2, token_ids=(5, 6), token_strings=("h", "i"))
    call.respond(GenerationEvent(prompts=(told,)), final=True)
    status, _, answer = await task
    assert status == 200
    assert answer == {"count": 2, "max_model_len": 256, "tokens": [5, 6], "token_strs": ["h", "i"]}


async def test_the_tokens_of_a_conversation_are_told(door):
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "poet", "messages": messages, "add_generation_prompt": False, "add_special_tokens": True}
    task, call = await door.asked("/tokenize", body)
    asked = call.call
    assert (asked.chat.messages, asked.chat.add_generation_prompt) == (messages, False)
    assert (asked.add_special_tokens, asked.adapter, asked.return_token_strings) == (True, "poet", False)
    call.respond(GenerationEvent(prompts=(PromptTold(1, token_ids=(5,)),)), final=True)
    assert (await task)[2] == {"count": 1, "max_model_len": 256, "tokens": [5], "token_strs": None}


async def test_the_text_of_tokens_is_told(door):
    task, call = await door.asked("/detokenize", {"model": "chatty", "tokens": [5, 6]})
    assert (call.call.task, call.call.prompts) == ("detokenize", [[5, 6]])
    call.respond(GenerationEvent(text="hi"), final=True)
    assert (await task)[2] == {"prompt": "hi"}


async def test_what_a_backend_refuses_is_named_as_the_client_named_it(door):
    task, call = await door.asked("/tokenize", {"model": "chatty", "prompt": "hi"})
    call.fail(InferError(ErrorCode.INVALID_ARG, "prompts[0]: too long", param="prompts"))
    status, _, answer = await task
    assert (status, answer["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("/tokenize", {}, 400, "prompt", "missing_required_parameter"),
        ("/tokenize", {"prompt": 5}, 400, "prompt", "invalid_value"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, 400, "prompt", "invalid_value"),
        ("/tokenize", {"messages": []}, 400, "messages", "invalid_value"),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, 400, "return_token_strs", "invalid_value"),
        ("/tokenize", {"model": "unknown", "prompt": "a"}, 404, "model", "model_not_found"),
        ("/detokenize", {}, 400, "tokens", "missing_required_parameter"),
        ("/detokenize", {"tokens": [1, 1000]}, 400, "tokens[1]", "invalid_value"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]", "invalid_value"),
        ("/detokenize", {"tokens": [1] * 257}, 400, "tokens", "invalid_value"),
        ("/detokenize", {"model": "embedder", "tokens": [1]}, 400, "model", "unsupported_model"),
    ],
)
async def test_what_is_wrong_is_named(door, path, body, status, param, code):
    got, _, answer = await door.post(path, {"model": "chatty", **body})
    assert (got, answer["error"]["param"], answer["error"]["code"]) == (status, param, code)
    assert door.data.calls.empty()
