"""Streams of the doors in trouble: failures, clients that are slow or gone, silence, and many at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from headrace.access.caller import Caller, Grant, Limits, Role
from headrace.gateway.gatekeeper import Gatekeeper
from headrace.gateway.http.openai import call as calls
from headrace_protocol.errors import ErrorCode, InferError
from headrace_protocol.generation import ChoiceDelta, GenerationEvent, PromptTold
from http_door import SETTINGS
from openai_door import OpenAIDoor, opened

CHAT = "/v1/chat/completions"
HELLO = {"model": "chatty", "messages": [{"role": "user", "content": "hello"}], "stream": True}
COMPLETION = {"model": "chatty", "prompt": "Once", "stream": True}
DOORS = pytest.mark.parametrize(
    ("path", "body"), [(CHAT, HELLO), ("/v1/completions", COMPLETION)], ids=["chat", "text"]
)


@pytest.fixture
async def door() -> AsyncIterator[OpenAIDoor]:
    async with opened() as started:
        yield started


async def begun(door: OpenAIDoor, path: str, body: dict[str, object]):
    """Ask; return the task of the raw answer and the call behind it."""
    task = asyncio.create_task(door.ask("POST", path, body, Content_Type="application/json"))
    return task, await door.call()


def events(body: bytes) -> list[str]:
    pieces = body.decode().split("\n\n")
    assert pieces[-1] == ""
    return pieces[:-1]


@DOORS
async def test_a_failure_after_the_first_token_is_an_event_and_ends_the_stream(door, path, body):
    task, call = await begun(door, path, body)
    call.tell(ChoiceDelta(0, "a", num_tokens=1), prompts=(PromptTold(1),))
    call.fail(InferError(ErrorCode.UNAVAILABLE, "the backend is gone"))
    status, _, answer = await task
    assert status == 200
    *_, error, done = events(answer)
    assert json.loads(error.removeprefix("data: "))["error"]["message"] == "the backend is gone"
    assert done == "data: [DONE]"
    assert call.unread == 0


class Charged(Caller):
    """A caller whose tokens are limited, and what it was charged."""

    def __init__(self) -> None:
        super().__init__(Grant("some", frozenset({Role.INFER}), limits=Limits(tokens_per_minute=100)), 0)
        self.charges: list[int] = []

    def charge(self, tokens: int, now_ns: int) -> None:
        self.charges.append(tokens)


@DOORS
@pytest.mark.parametrize("stream", [True, False])
async def test_a_call_that_fails_is_charged_for_what_it_told(path, body, stream):
    class OnlyOne:
        anonymous = Charged()

    async with opened(replace(SETTINGS, gatekeeper=Gatekeeper(OnlyOne()))) as door:
        task, call = await begun(door, path, {**body, "stream": stream})
        call.tell(ChoiceDelta(0, "a", num_tokens=1), prompts=(PromptTold(3),))
        call.fail(InferError(ErrorCode.UNAVAILABLE, "the backend is gone"))
        await task
    assert OnlyOne.anonymous.charges == [4]


@DOORS
@pytest.mark.parametrize("reason", ["error", "abort"])
@pytest.mark.parametrize("after", [0, 1])
async def test_a_choice_that_breaks_off_is_a_failure_of_the_whole(door, path, body, reason, after):
    task, call = await begun(door, path, {**body, "n": 2})
    if after:
        call.tell(ChoiceDelta(0, "a", num_tokens=1), prompts=(PromptTold(1),))
    call.tell(ChoiceDelta(1, "", num_tokens=1, finish_reason=reason, error="no luck"), prompts=(PromptTold(1),))
    status, _, answer = await task
    assert status == (200 if after else 500 if reason == "error" else 503)
    assert b"no luck" in answer
    assert call.cancelled.is_set(), "the other choice does not go on for nobody"
    assert call.unread == 0


@DOORS
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("told", [None, GenerationEvent(), GenerationEvent((PromptTold(1),))])
async def test_an_end_without_an_answer_is_never_an_empty_success(door, path, body, stream, told):
    task, call = await begun(door, path, {**body, "stream": stream})
    call.respond(told, final=True)
    status, _, answer = await task
    assert (status, json.loads(answer)["error"]["type"]) == (500, "server_error")


@DOORS
async def test_a_stream_whose_choice_has_no_end_is_told_to_have_failed(door, path, body):
    task, call = await begun(door, path, body)
    call.tell(ChoiceDelta(0, "a", num_tokens=1), prompts=(PromptTold(1),))
    call.respond(None)
    *_, error, done = events((await task)[2])
    assert "ended before" in json.loads(error.removeprefix("data: "))["error"]["message"]
    assert done == "data: [DONE]"


@DOORS
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens", [0, 2])
async def test_a_client_that_goes_away_cancels_its_call(door, path, body, stream, tokens):
    task, call = await begun(door, path, {**body, "stream": stream})
    for number in range(tokens):
        call.tell(ChoiceDelta(0, "a", num_tokens=number + 1), prompts=(PromptTold(1),) if not number else ())
    task.cancel()
    await asyncio.wait_for(call.cancelled.wait(), 5)
    assert call.unread == 0


async def opened_by_hand(door: OpenAIDoor) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request whose answer the test reads when it wants to."""
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port, limit=1 << 12)
    body = json.dumps(HELLO).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    return reader, writer


async def read_until(reader: asyncio.StreamReader, end: bytes) -> bytes:
    answer = b""
    while end not in answer:
        piece = await asyncio.wait_for(reader.read(1 << 16), 10)
        assert piece, answer[-1000:]
        answer += piece
    return answer


async def test_a_client_that_reads_slowly_has_the_model_wait(door):
    reader, writer = await opened_by_hand(door)
    call = await door.call()
    call.tell(ChoiceDelta(0, "a", num_tokens=1), prompts=(PromptTold(1),))
    sent = 0
    while not call.unread:
        sent += 1
        call.tell(ChoiceDelta(0, "x" * 65536, num_tokens=sent + 1))
        await asyncio.sleep(0)
        assert sent < 1000
    call.tell(ChoiceDelta(0, "", num_tokens=sent + 2, finish_reason="stop"), final=True)
    assert call.unread == 2, "what the client has no room for is kept, and counts"
    answer = await read_until(reader, b"[DONE]")
    assert answer.count(b"x" * 65536) <= sent
    assert answer.count(b'"content":"x') == sent
    assert call.unread == 0
    writer.close()


async def test_silence_is_broken_so_that_proxies_keep_the_connection(door, monkeypatch):
    monkeypatch.setattr(calls, "PING_S", 0.01)
    reader, writer = await opened_by_hand(door)
    call = await door.call()
    call.tell(ChoiceDelta(0, "a", num_tokens=1), prompts=(PromptTold(1),))
    began = await read_until(reader, b": ping\n\n")
    assert began.index(b'"content":"a"') < began.index(b": ping")
    call.tell(ChoiceDelta(0, "", num_tokens=1, finish_reason="stop"), final=True)
    await read_until(reader, b"[DONE]")
    writer.close()


async def test_a_connection_goes_on_after_a_stream(door):
    reader, writer = await opened_by_hand(door)
    for _ in range(2):
        call = await door.call()
        call.say("a")
        await read_until(reader, b"0\r\n\r\n")
        if not _:
            body = json.dumps(HELLO).encode()
            writer.write(
                b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (CHAT.encode(), len(body), body)
            )
    writer.close()


@DOORS
async def test_streams_of_several_clients_are_not_mixed(door, path, body):
    asked = [await begun(door, path, body) for _ in range(5)]
    for number, (_, call) in enumerate(asked):
        call.tell(ChoiceDelta(0, f"<{number}>", num_tokens=1), prompts=(PromptTold(1),))
    for number, (_, call) in reversed(list(enumerate(asked))):
        call.tell(ChoiceDelta(0, f"({number})", num_tokens=2, finish_reason="stop"), final=True)
    for number, (task, _) in enumerate(asked):
        _, _, answer = await task
        for other in range(5):
            assert (f"<{other}>".encode() in answer) is (other == number)
            assert (f"({other})".encode() in answer) is (other == number)


async def test_a_stream_says_how_it_may_be_kept(door):
    task, call = await begun(door, CHAT, HELLO)
    call.say("a")
    _, headers, _ = await task
    assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert headers["Cache-Control"] == "no-cache"
    assert {"x-request-id", "openai-processing-ms"} <= {name.lower() for name in headers}
