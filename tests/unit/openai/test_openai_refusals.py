"""What the doors refuse before any work waits: each wrong member by its name, in the words of OpenAI's errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

from headrace.gateway.http.settings import HttpSettings
from headrace.gateway.restricted import Restriction
from headrace_protocol.errors import ErrorCode, ErrorDetail, FailureReason, InferError
from openai_door import OpenAIDoor, opened

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"model": "chatty", "messages": [{"role": "user", "content": "hello"}]}
ONCE = {"model": "chatty", "prompt": "Once"}
DEEP = json.loads("[" * 99 + "]" * 99)


@pytest.fixture
async def door() -> AsyncIterator[OpenAIDoor]:
    async with opened() as started:
        yield started


def refused(*cases: tuple[dict[str, object], str]) -> list[object]:
    return [
        pytest.param(members, param, id=f"{list(members)[0]}-{number}") for number, (members, param) in enumerate(cases)
    ]


BOTH = refused(
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "warm"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"presence_penalty": -3}, "presence_penalty"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 1.5}, "n"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": list("abcde")}, "stop"),
    ({"stop": ["x"] * 1000}, "stop"),
    ({"stop": "x" * 1_000_00}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {str(token): 1 for token in range(2000)}}, "logit_bias"),
    ({"stop_token_ids": list(range(2000))}, "stop_token_ids"),
    ({"allowed_token_ids": list(range(2000))}, "allowed_token_ids"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 129}, "cache_salt"),
    ({"priority": 2**64}, "priority"),
    ({"timeout": -1}, "timeout"),
    ({"stream": True, "use_beam_search": True}, "use_beam_search"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
        "response_format.json_schema.name",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": "bar"}}},
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"x": "y" * 300_000}}}},
        "response_format.json_schema.schema",
    ),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1]"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a" * 20_000}}, "structured_outputs.regex"),
    ({"structured_outputs": {"json": {}}, "response_format": {"type": "json_object"}}, "structured_outputs"),
)
OF_COMPLETIONS = refused(
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt[0]"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [{"a": 1}]}, "prompt[0]"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1000]}, "prompt"),
    ({"prompt": [[1], [-1]]}, "prompt[1]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": ["a"] * 100_000}, "prompt"),
    ({"prompt": ["a"] * 1000, "n": 2}, "n"),
    ({"prompt": ["a"] * 100, "best_of": 20}, "best_of"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 21}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"suffix": "end"}, "suffix"),
)
OF_CHATS = refused(
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user", "content": "a"}] * 5000}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "function"}]}]},
        "messages[0].tool_calls[0].function",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {}}, "audio"),
    ({"tools": []}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"documents": [5]}, "documents[0]"),
)


async def refusal(door: OpenAIDoor, path: str, body: dict[str, object]) -> dict[str, object]:
    status, headers, answer = await door.post(path, body)
    assert status == 400, answer
    assert headers["content-type"] == "application/json"
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["type"] == "invalid_request_error"
    assert door.data.calls.empty(), "nothing waits"
    return answer["error"]


@pytest.mark.parametrize(("path", "base"), [(CHAT, HELLO), (COMPLETIONS, ONCE)], ids=["chat", "completion"])
@pytest.mark.parametrize(("members", "param"), BOTH)
async def test_what_both_doors_refuse(door, path, base, members, param):
    error = await refusal(door, path, {**base, **members})
    assert error["param"] == param
    assert error["code"] in ("invalid_value", "missing_required_parameter", "unsupported_parameter")


@pytest.mark.parametrize(("members", "param"), OF_COMPLETIONS)
async def test_what_completions_refuse(door, members, param):
    assert (await refusal(door, COMPLETIONS, {**ONCE, **members}))["param"] == param


@pytest.mark.parametrize(("members", "param"), OF_CHATS)
async def test_what_chats_refuse(door, members, param):
    assert (await refusal(door, CHAT, {**HELLO, **members}))["param"] == param


async def test_more_tokens_than_the_model_takes_are_refused_before_they_wait(door):
    error = await refusal(door, COMPLETIONS, {**ONCE, "prompt": [1] * 257})
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "empty"),
        (b"{", 400, "not valid JSON"),
        (b"[]", 400, "expected 'object'"),
        (b'{"prompt": ' + b"[" * 500_000, 400, "nested deeper"),
        (b'{"tools": ' + b'{"a":' * 200 + b"1" + b"}" * 201, 400, "nested deeper"),
        (b'{"prompt": "' + b"x" * (1 << 19) + b'"}', 413, "limit"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_body_that_is_no_request(door, path, body, status, words):
    got, headers, answer = await door.ask("POST", path, body, Content_Type="application/json; charset=utf-8")
    error = json.loads(answer)["error"]
    assert (got, headers["Content-Type"]) == (status, "application/json")
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


async def test_a_body_that_says_it_is_no_json(door):
    status, _, answer = await door.ask("POST", CHAT, HELLO, Content_Type="text/plain")
    assert (status, json.loads(answer)["error"]["type"]) == (415, "invalid_request_error")


@pytest.mark.parametrize(
    ("model", "status", "code"),
    [("nope", 404, "model_not_found"), ("echo", 404, "model_not_found"), ("loading", 503, None)]
    + [("embedder", 400, "unsupported_model"), ("chatty/versions/9", 404, "model_not_found")]
    + [("chatty/versions/x", 400, None)],
)
async def test_a_model_that_does_not_serve(door, model, status, code):
    got, _, answer = await door.post(CHAT, {**HELLO, "model": model})
    assert (got, answer["error"]["code"]) == (status, code), answer
    assert answer["error"]["param"] in ("model", None)


async def test_a_request_without_a_model_is_for_the_only_one(door):
    task, call = await door.asked(CHAT, {"messages": HELLO["messages"]})
    call.say("x")
    assert (await task)[2]["model"] == "chatty"
    door.data.cards["other"] = door.data.cards["chatty"]
    status, _, answer = await door.post(CHAT, {"messages": HELLO["messages"]})
    assert (status, answer["error"]["param"]) == (400, "model")
    assert "chatty, other" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (InferError(ErrorCode.INTERNAL, "x"), 500, "server_error", None),
        (InferError(ErrorCode.UNKNOWN, "x"), 500, "server_error", None),
        (InferError(ErrorCode.UNAVAILABLE, "x"), 503, "server_error", None),
        (InferError(ErrorCode.UNAVAILABLE, "x", FailureReason.REJECTED), 429, "rate_limit_error", "queue_full"),
        (
            InferError(ErrorCode.UNAVAILABLE, "x", detail=ErrorDetail.QUEUE_FULL),
            *(429, "rate_limit_error", "queue_full"),
        ),
        (InferError(ErrorCode.NOT_FOUND, "x"), 404, "not_found_error", "model_not_found"),
        (InferError(ErrorCode.UNSUPPORTED, "x", param="top_k"), 501, "server_error", None),
        (InferError(ErrorCode.CANCELLED, "x"), 503, "server_error", None),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_failure_before_the_first_token_has_its_status(door, stream, at_once, error, status, kind, code):
    body = {**HELLO, "stream": stream}
    if at_once:
        door.data.refusal = error
        got, headers, answer = await door.post(CHAT, body)
    else:
        task, call = await door.asked(CHAT, body)
        call.fail(error)
        got, headers, answer = await task
    assert (got, answer["error"]["type"], answer["error"]["code"]) == (status, kind, code)
    assert ("retry-after" in headers) is (status == 429)
    assert answer["error"]["message"] == "x"


async def test_a_fault_of_our_own_says_nothing_of_itself(door, monkeypatch):
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(door.data, "model_config", broken)
    status, _, answer = await door.post(CHAT, HELLO)
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert "secret" not in answer["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nope", 404), ("GET", CHAT, 405), ("DELETE", "/v1/models/chatty", 405), ("POST", "/v1", 404)],
)
async def test_paths_and_methods_that_there_are_not_are_refused_in_the_same_shape(door, method, path, status):
    got, headers, answer = await door.ask(method, path)
    assert (got, set(json.loads(answer)["error"])) == (status, {"message", "type", "param", "code"})
    assert ("Allow" in headers) is (status == 405)


async def test_a_path_of_v2_keeps_its_own_shape(door):
    status, _, answer = await door.ask("GET", "/v2/nope")
    assert (status, json.loads(answer)) == (404, {"error": "no such path"})


async def test_a_key_may_be_wanted_of_everybody():
    restricted = {"openai": Restriction("authorization", b"Bearer secret")}
    async with opened(HttpSettings(address="127.0.0.1", port=0, restricted=restricted)) as door:
        status, headers, answer = await door.post(CHAT, HELLO, Authorization="Bearer other")
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert headers["www-authenticate"] == "Bearer"
        task, call = await door.asked(CHAT, HELLO, Authorization="Bearer secret")
        call.say("x")
        assert (await task)[0] == 200
        assert await door.is_well(), "other kinds are open"


async def test_another_header_may_be_wanted_of_everybody():
    async with opened(
        HttpSettings(address="127.0.0.1", port=0, restricted={"openai": Restriction("x-key", b"k")})
    ) as door:
        status, _, answer = await door.post(CHAT, HELLO)
        assert (status, answer["error"]["type"]) == (403, "permission_error")
