"""Answers that come in pieces: generate_stream on a connection, from its first response to its end or its client's."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from echo_planes import StreamCall
from headrace_protocol import datatype as dt
from headrace_protocol.errors import ErrorCode, InferError
from http_connection import LAST, READY, SECONDS, Client, Door, generate, infer

FAILURE = InferError(ErrorCode.UNAVAILABLE, "the backend is gone")
SMALL_BUFFERS = {"limit": 1024}


async def begin(door: Door, *requests: bytes) -> tuple[Client, StreamCall]:
    client = await door.connect()
    client.send(*(requests or (generate(),)))
    (call,) = await door.data.begun()
    return client, call


def test_each_response_is_an_event_as_soon_as_it_is_there(on_door):
    async def scenario(door: Door) -> None:
        client, call = await begin(door)
        for number in range(3):
            call.send(bytes([number]))
            if number == 0:
                status, headers = await client.head()
                assert (status, headers["Transfer-Encoding"]) == (200, "chunked")
                assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
                assert "Content-Length" not in headers
            assert await client.event() == {"id": "1", "model_name": "stream", "model_version": "1", "OUTPUT0": number}
            assert call.unread == 0
        call.send(b"ab", final=True)
        assert (await client.event())["OUTPUT0"] == [97, 98]
        assert await client.chunk() == b""
        client.send(READY)
        assert (await client.answer())[0] == 200, "the connection goes on"

    on_door(scenario)


def test_an_end_without_a_response_adds_no_event(on_door):
    async def scenario(door: Door) -> None:
        client, call = await begin(door)
        call.send(b"a")
        call.send(None)
        assert (await client.head())[0] == 200
        assert (await client.event())["OUTPUT0"] == 97
        assert await client.chunk() == b""
        assert call.unread == 0

    on_door(scenario)


def test_a_stream_without_any_response_is_empty(on_door):
    async def scenario(door: Door) -> None:
        client, call = await begin(door)
        call.send(None)
        assert (await client.head())[0] == 200
        assert await client.chunk() == b""

    on_door(scenario)


def test_a_failure_before_the_first_response_has_a_status_of_its_own(on_door):
    async def scenario(door: Door) -> None:
        client, call = await begin(door)
        call.fail(FAILURE)
        status, headers, body = await client.answer()
        assert (status, headers["Content-Type"]) == (503, "application/json")
        assert json.loads(body) == {"error": "the backend is gone"}
        client.send(READY)
        assert (await client.answer())[0] == 200

    on_door(scenario)


def test_a_failure_after_the_first_response_is_an_event_and_the_end(on_door):
    async def scenario(door: Door) -> None:
        client, call = await begin(door)
        for _ in range(3):
            call.send(b"a")
        call.fail(FAILURE)
        assert (await client.head())[0] == 200
        assert [(await client.event())["OUTPUT0"] for _ in range(3)] == [97] * 3
        assert await client.event() == {"error": "the backend is gone"}
        assert await client.chunk() == b""
        client.send(READY)
        assert (await client.answer())[0] == 200

    on_door(scenario)


@pytest.mark.parametrize("begun", [False, True])
def test_a_response_that_json_cannot_carry_ends_the_request(on_door, begun):
    async def scenario(door: Door) -> None:
        client, call = await begin(door)
        if begun:
            call.send(b"a")
            await client.head()
            await client.event()
        call.send(b"ab", datatype=dt.FP16)
        if begun:
            said = await client.event()
            assert await client.chunk() == b""
        else:
            status, _, body = await client.answer()
            said = json.loads(body)
            assert status == 400
        assert "JSON has no form for FP16; use infer and ask for binary data" in said["error"]
        assert call.cancelled.is_set()
        assert call.unread == 0

    on_door(scenario)


@pytest.mark.parametrize("how", ["closes", "closes one way", "resets"])
@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_goes_away_cancels_its_stream_at_once(on_door, how, begun):
    async def scenario(door: Door) -> None:
        client, call = await begin(door)
        if begun:
            call.send(b"a")
            await client.head()
        if how == "closes":
            client.writer.close()
        elif how == "closes one way":
            client.writer.write_eof()
        else:
            linger = b"\1\0\0\0\0\0\0\0"
            client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            client.writer.transport.abort()
        await asyncio.wait_for(call.cancelled.wait(), SECONDS)
        other = await door.connect()
        other.send(READY)
        assert (await other.answer())[0] == 200

    on_door(scenario)


def fill(call: StreamCall, count: int) -> None:
    for _ in range(count):
        call.send(bytes(8192))


async def slow_client(door: Door, request: bytes) -> tuple[Client, StreamCall]:
    """Return a client that reads nothing, with a stream in which responses wait for it."""
    client = await door.connect(**SMALL_BUFFERS)
    client.writer.transport.pause_reading()
    client.send(request)
    (call,) = await door.data.begun()
    while not call.unread:
        fill(call, 16)
        await asyncio.sleep(0.01)
    fill(call, 5)
    assert call.unread >= 6
    return client, call


def test_responses_stay_unread_while_the_client_takes_none(on_door):
    async def scenario(door: Door) -> None:
        client, call = await slow_client(door, generate())
        unread = call.unread
        await asyncio.sleep(0.1)
        assert call.unread == unread, "nothing moves while the client does not read"
        call.send(b"z", final=True)
        client.writer.transport.resume_reading()
        await client.head()
        last = None
        while piece := await client.chunk():
            last = piece
        assert last is not None
        assert json.loads(last[6:])["OUTPUT0"] == ord("z"), "in order, and nothing is lost"
        assert call.unread == 0

    on_door(scenario)


@pytest.mark.parametrize("how", ["closes one way", "resets"])
def test_a_client_that_goes_away_while_responses_wait_lets_them_go(on_door, how):
    async def scenario(door: Door) -> None:
        client, call = await slow_client(door, generate())
        if how == "resets":
            client.writer.transport.abort()
        else:
            client.writer.write_eof()
        await asyncio.wait_for(call.cancelled.wait(), SECONDS)
        assert call.unread == 0

    on_door(scenario)


def test_a_client_that_takes_nothing_for_too_long_is_cut_off(on_door):
    async def scenario(door: Door) -> None:
        _, call = await slow_client(door, generate())
        await asyncio.wait_for(call.cancelled.wait(), SECONDS)
        assert call.unread == 0

    on_door(scenario, write_idle_timeout=0.2)


def test_a_client_that_takes_a_little_now_and_then_is_not(on_door):
    async def scenario(door: Door) -> None:
        client, call = await begin(door)
        call.send(bytes(8 << 20), final=True)  # more than sockets buffer, written at once
        for _ in range(12):
            taken = 0
            while taken < 1 << 20:
                piece = await client.reader.read(65536)
                assert piece, "cut off"
                taken += len(piece)
            await asyncio.sleep(0.15)
        tail = b""
        while not tail.endswith(b"\r\n0\r\n\r\n"):
            tail = tail[-8:] + await asyncio.wait_for(client.reader.read(65536), SECONDS)

    on_door(scenario, write_idle_timeout=0.5)


def test_a_model_may_think_for_long(on_door):
    async def scenario(door: Door) -> None:
        client, call = await begin(door)
        call.send(b"a")
        await client.head()
        await client.event()
        await asyncio.sleep(0.5)
        call.send(b"b", final=True)
        assert (await client.event())["OUTPUT0"] == 98

    on_door(scenario, write_idle_timeout=0.1, body_idle_timeout=0.1, keepalive_timeout=0.1)


def test_what_is_sent_after_a_streams_request_waits_for_its_end(on_door):
    async def scenario(door: Door) -> None:
        client, call = await begin(door, generate(), infer(), generate(id="2"), LAST)
        call.send(b"a")
        await client.head()
        await client.event()
        assert door.data.answered == 0
        call.send(b"b", final=True)
        await client.event()
        assert await client.chunk() == b""
        assert (await client.answer())[0] == 200
        second = (await door.data.begun(2))[1]
        second.send(b"c", final=True)
        await client.head()
        assert (await client.event())["id"] == "2"
        assert await client.chunk() == b""
        assert (await client.answer())[0] == 200
        assert await client.rest() == b""

    on_door(scenario)


def test_what_is_sent_ahead_during_a_stream_is_bounded(on_door):
    async def scenario(door: Door) -> None:
        client, call = await begin(door)
        call.send(b"a")
        count = (32 << 20) // len(READY)
        client.send(READY * count)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.writer.drain(), 0.3)
        call.send(b"b", final=True)
        await client.head()
        for _ in range(2):
            await client.event()
        assert await client.chunk() == b""
        for _ in range(1000):
            assert (await client.answer())[0] == 200

    on_door(scenario)


def test_a_client_of_http_1_0_reads_until_the_close(on_door):
    async def scenario(door: Door) -> None:
        client, call = await begin(door, generate("Connection: keep-alive", version="1.0"))
        call.send(b"a")
        call.send(b"b", final=True)
        answer = await client.rest()
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.0 200 OK\r\n")
        assert b"Connection: close" in head
        assert b"Transfer-Encoding" not in head
        assert [json.loads(event[6:])["OUTPUT0"] for event in body.split(b"\n\n")[:-1]] == [97, 98]

    on_door(scenario)


def test_a_connection_that_is_to_close_does_so_after_the_stream(on_door):
    async def scenario(door: Door) -> None:
        client, call = await begin(door, generate("Connection: close"))
        call.send(b"a", final=True)
        assert (await client.head())[1]["Connection"] == "close"
        await client.event()
        assert await client.rest() == b"0\r\n\r\n"

    on_door(scenario)


def test_a_stop_lets_a_stream_end_and_closes_its_connection(on_door):
    async def scenario(door: Door) -> None:
        client, call = await begin(door)
        call.send(b"a")
        await client.head()
        stopping = asyncio.create_task(door.gateway.stop(30))
        await asyncio.sleep(0.05)
        assert not stopping.done()
        call.send(b"b")
        call.fail(FAILURE)
        assert [await client.event() for _ in range(3)][2] == {"error": "the backend is gone"}
        assert await client.rest() == b"0\r\n\r\n"
        await asyncio.wait_for(stopping, SECONDS)

    on_door(scenario)


def test_a_stop_cuts_a_stream_that_outlasts_the_grace_so_that_its_client_knows(on_door):
    async def scenario(door: Door) -> None:
        client, call = await begin(door)
        call.send(b"a")
        await client.head()
        await asyncio.wait_for(door.gateway.stop(0.05), SECONDS)
        assert call.cancelled.is_set()
        try:
            rest = await client.rest()
        except ConnectionResetError:
            rest = b""
        assert not rest.endswith(b"0\r\n\r\n")

    on_door(scenario)


def test_expect_100_continue_goes_before_a_stream(on_door):
    async def scenario(door: Door) -> None:
        client = await door.connect()
        head, _, body = generate("Expect: 100-continue").partition(b"\r\n\r\n")
        client.send(head + b"\r\n\r\n")
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(body)
        (call,) = await door.data.begun()
        call.send(b"a", final=True)
        assert (await client.head())[0] == 200
        assert (await client.event())["OUTPUT0"] == 97

    on_door(scenario)


def test_a_chunked_body_begins_a_stream_too(on_door):
    async def scenario(door: Door) -> None:
        client = await door.connect()
        path = b"/v2/models/stream/generate_stream"
        client.send(b"POST %b HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" % path)
        for piece in (b'{"id":"1",', b'"text":', b'"x"}'):
            client.send(b"%x\r\n%b\r\n" % (len(piece), piece))
        client.send(b"0\r\n\r\n", READY)
        (call,) = await door.data.begun()
        call.send(b"a", final=True)
        await client.head()
        assert (await client.event())["OUTPUT0"] == 97
        assert await client.chunk() == b""
        assert (await client.answer())[0] == 200

    on_door(scenario)


def test_many_streams_of_many_connections_do_not_mix(on_door):
    async def scenario(door: Door) -> None:
        clients = [await door.connect() for _ in range(50)]
        for number, client in enumerate(clients):
            client.send(generate(id=str(number)))
        calls = await door.data.begun(50)
        for _ in range(20):
            for call in calls:
                call.send(bytes([int(call.request.id)]))
        for call in calls:
            call.send(None)
        for number, client in enumerate(clients):
            await client.head()
            for _ in range(20):
                event = await client.event()
                assert (event["id"], event["OUTPUT0"]) == (str(number), number)
            assert await client.chunk() == b""

    on_door(scenario)


def test_the_answer_of_an_ordinary_model_is_a_stream_of_one_event(on_door):
    async def scenario(door: Door) -> None:
        client = await door.connect()
        body = b'{"INPUT0": [1, 2, 3, 4.5]}'
        client.send(
            b"POST /v2/models/echo/generate_stream HTTP/1.1\r\nAccept-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"
            % len(body)
            + body
        )
        status, headers = await client.head()
        assert (status, headers.get("Content-Encoding")) == (200, None)
        assert await client.event() == {"model_name": "echo", "model_version": "1", "OUTPUT0": [1.0, 2.0, 3.0, 4.5]}
        assert await client.chunk() == b""
        assert door.data.released == 1

    on_door(scenario)
