"""POST /v1/chat/completions on a real socket, over a model whose every event the test sends."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from headrace_protocol.generation import ChoiceDelta, PromptTold
from openai_door import OpenAIDoor, opened

PATH = "/v1/chat/completions"
HELLO = {"model": "chatty", "messages": [{"role": "user", "content": "hello"}]}


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
