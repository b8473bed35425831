"""OpenAI's own client against a real server, over a language model whose every token the prompt decides."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

import scripted_engine
from figures import wait_until
from harness import RunningServer, running
from scripted_engine import SAYS, script

TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("openai")
    models = folder / "models"
    models.mkdir()
    environment = scripted_engine.installed(folder / "site")
    adapters = [{"name": "poet", "rank": 8}]
    scripted_engine.add_model(
        models, "chatty", tool_format="hermes", reasoning_format="think_tags", aliases=["talker"], adapters=adapters
    )
    with running(models, "--http-restricted-api=openai:authorization=Bearer secret", env=environment) as started:
        yield started


@pytest.fixture
def client(server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://{server.http}/v1", api_key="secret", max_retries=0, timeout=20) as made:
        yield made


def asking(text: str = "", **members: Any) -> Any:
    """Return the messages of a chat that has itself answered so."""
    return [{"role": "user", "content": text + (script(**members) if members else "")}]


def test_models_are_listed_and_found(client):
    assert {model.id for model in client.models.list()} == {"chatty", "talker", "poet"}
    assert client.models.retrieve("talker").id == "talker"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")


def test_a_chat(client):
    answer = client.chat.completions.create(model="chatty", messages=asking("hi"), max_completion_tokens=100)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", SAYS, "stop")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("<|user|>hi\n<|assistant|>")
    assert answer.usage.completion_tokens == len(SAYS) + 1  # and the end of the text
    assert answer._request_id is not None
    assert answer.id == f"chatcmpl-{answer._request_id}"


def test_chunks_put_together_are_the_answer_as_a_whole(client):
    said = 'Let me think: <think>no</think> <tool_call>{"name": "weather", "arguments": {"a": [1]}}</tool_call>🎉'
    for text, options in (("🎉 é done", {}), (said, {"tools": TOOLS}), (f"<think>hm</think>{said}", {"tools": TOOLS})):
        asked: Any = {"model": "chatty", "messages": asking("go", say=[text, "other"]), "n": 2, "seed": 1, **options}
        whole = client.chat.completions.create(**asked)
        with client.chat.completions.stream(**asked) as stream:
            for _ in stream:
                pass
            put_together = stream.get_final_completion()
        for one, other in zip(whole.choices, put_together.choices, strict=True):
            told, collected = one.message.model_dump(), other.message.model_dump()
            assert (one.index, one.finish_reason) == (other.index, other.finish_reason)
            assert (collected["content"] or "") == (told["content"] or "")
            assert collected.get("reasoning_content") == told.get("reasoning_content")
            calls = [
                [(c.function.name, c.function.arguments) for c in m.tool_calls or ()]
                for m in (one.message, other.message)
            ]
            assert calls[0] == calls[1]


def test_calls_of_tools_end_a_message(client):
    said = '<tool_call>{"name": "weather", "arguments": {"town": "Bath"}}</tool_call>'
    answer = client.chat.completions.create(model="chatty", messages=asking(say=said), tools=TOOLS)
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("weather", '{"town": "Bath"}')


def test_a_streamed_chat_with_usage_and_log_probabilities(client):
    chunks = list(
        client.chat.completions.create(
            model="chatty",
            messages=asking(say="🎉ab"),
            stream=True,
            logprobs=True,
            top_logprobs=2,
            stream_options={"include_usage": True},
        )
    )
    *told, usage = chunks
    assert (usage.choices, usage.usage and usage.usage.completion_tokens) == ([], 7)
    assert all(chunk.usage is None for chunk in told)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in told) == "🎉ab"
    entries = [
        entry for chunk in told if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content or ()
    ]
    assert [entry.bytes for entry in entries][:6] == [[240], [159], [142], [137], [97], [98]]
    assert [entry.token for entry in entries][:5] == ["\ufffd"] * 4 + ["a"]
    assert [len(entry.top_logprobs) for entry in entries][:2] == [2, 2]
    assert not any(chunk.choices[0].delta.content == "" for chunk in told[1:])


def test_completions_of_several_prompts_with_their_log_probabilities(client):
    answer = client.completions.create(
        model="chatty",
        prompt=["x" + script(say="ab"), "y" + script(say="cd")],
        n=2,
        logprobs=1,
        echo=True,
        max_tokens=2,
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[-2:] for choice in answer.choices] == ["ab", "ab", "cd", "cd"]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert choice.logprobs.text_offset is not None
        assert "".join(choice.logprobs.tokens) == choice.text
        assert choice.logprobs.text_offset[-1] == len(choice.text) - 1
        assert (choice.logprobs.token_logprobs or [1.0])[0] is None


def test_the_client_knows_each_failure(client, server):
    def chat(**members: Any) -> Any:
        return client.chat.completions.create(model="chatty", messages=asking(**members))

    with pytest.raises(openai.BadRequestError) as caught:
        chat(refuse="too_long")
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.RateLimitError) as limited:
        chat(refuse="busy")
    assert limited.value.response.headers["retry-after"] == "1"
    with pytest.raises(openai.InternalServerError):
        chat(fail_after=0)
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nope", messages=asking("x"))
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    assert unknown.value.request_id
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="chatty", messages=asking("x"), temperature=3)
    assert wrong.value.param == "temperature"
    stranger = OpenAI(base_url=f"http://{server.http}/v1", api_key="other", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_responses_as_a_whole_and_as_events(client):
    said = '<think>hm</think>Sure. <tool_call>{"name": "weather", "arguments": {"a": 1}}</tool_call>'
    tools: Any = [{"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}]
    asked: Any = {"model": "chatty", "input": "go" + script(say=said), "tools": tools, "max_output_tokens": 500}
    whole = client.responses.create(**asked)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert (whole.status, whole.output_text) == ("completed", "Sure.")
    assert whole.usage is not None
    assert whole.usage.output_tokens == len(said) + 1
    with client.responses.stream(**asked) as stream:
        for _ in stream:
            pass
        put_together = stream.get_final_response()
    assert put_together.output_text == whole.output_text
    assert put_together.usage == whole.usage
    kinds = [item.type for item in put_together.output]
    assert kinds == [item.type for item in whole.output]
    with pytest.raises(openai.APIError, match="the script says so"):
        list(client.responses.create(model="chatty", input=script(fail_after=2), stream=True))


def test_a_failure_in_the_middle_of_a_stream_is_raised_where_it_happens(client):
    stream = client.chat.completions.create(model="chatty", messages=asking(fail_after=2), stream=True)
    came = []
    with pytest.raises(openai.APIError, match="the script says so"):
        came.extend(chunk.choices[0].delta.content for chunk in stream)
    stream = client.completions.create(model="chatty", prompt=script(fail_after=2), stream=True)
    with pytest.raises(openai.APIError, match="the script says so"):
        list(stream)
    assert client.chat.completions.create(model="chatty", messages=asking("x")).choices[0].message.content == SAYS


def test_clients_at_once_get_each_their_own(client):
    def ask(number: int) -> tuple[str, str | None]:
        text = f"answer {number} " * 3
        if number % 2:
            parts = client.chat.completions.create(model="chatty", messages=asking(say=text), stream=True)
            return text, "".join(chunk.choices[0].delta.content or "" for chunk in parts)
        return text, client.chat.completions.create(model="chatty", messages=asking(say=text)).choices[
            0
        ].message.content

    with ThreadPoolExecutor(12) as pool:
        for wanted, got in pool.map(ask, range(48)):
            assert got == wanted


async def test_a_client_that_leaves_ends_its_generation(server):
    async with AsyncOpenAI(base_url=f"http://{server.http}/v1", api_key="secret", max_retries=0) as client:
        messages = asking(hold="for ever", at=3, say="abcdef")
        stream = await client.chat.completions.create(model="chatty", messages=messages, stream=True)
        came = [chunk.choices[0].delta.content async for chunk in _first(stream, 4)]
        assert came == ["", "a", "b", "c"]
        waiting = asyncio.create_task(
            client.chat.completions.create(model="chatty", messages=asking(hold="for ever", say="x"))
        )
        await asyncio.to_thread(wait_until, "both are generated", lambda: running_in(server) == 2)
        await stream.close()
        waiting.cancel()
        await asyncio.to_thread(wait_until, "neither is generated any more", lambda: running_in(server) == 0)


async def _first(stream: Any, count: int) -> Any:
    for _ in range(count):
        yield await anext(stream)


def running_in(server: RunningServer) -> int:
    """Return how many generations the engine has, running or waiting."""
    names = ("headrace_llm_num_requests_running{", "headrace_llm_num_requests_waiting{")
    found = [line for line in server.metrics().splitlines() if line.startswith(names)]
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in found))
