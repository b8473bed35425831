"""What a connection of the HTTP door does over time: order, waiting, disconnecting, closing. On both event loops."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.gateway.http.connection import Connection
from http_connection import BODY, LAST, READY, SECONDS, Door, generate, infer


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_requests_of_one_connection_are_answered_one_after_the_other(on_door):
    async def scenario(door: Door) -> None:
        client = await door.connect()
        client.send(infer(model="slow"), infer(), READY, infer(), LAST)
        await asyncio.wait_for(door.data.slow_began.wait(), SECONDS)
        assert [request.model_name for request in door.data.requests] == ["slow"]
        door.data.release_slow.set()
        answers = [await client.answer() for _ in range(5)]
        assert [status for status, _, _ in answers] == [200] * 5
        assert [len(body) > 0 for _, _, body in answers] == [True, True, False, True, False]
        assert await client.rest() == b""

    on_door(scenario)


def test_a_fault_after_an_answer_was_written_writes_no_second_one(on_door, monkeypatch):
    finished, streamed = Connection.finished, Connection.streamed

    def faulty_finished(self: Connection, *of: Any) -> None:
        finished(self, *of)
        raise ZeroDivisionError

    def faulty_streamed(self: Connection, *, keep_alive: bool) -> None:
        streamed(self, keep_alive=keep_alive)
        raise ZeroDivisionError

    monkeypatch.setattr(Connection, "finished", faulty_finished)
    monkeypatch.setattr(Connection, "streamed", faulty_streamed)

    async def scenario(door: Door) -> None:
        client = await door.connect()
        client.send(infer(), infer(), generate())
        assert [(await client.answer())[0] for _ in range(2)] == [200, 200]
        (stream,) = await door.data.begun()
        stream.send(b"1", final=True)
        assert (await client.head())[0] == 200
        assert await client.event()
        assert await client.chunk() == b""
        client.send(LAST)
        assert (await client.answer())[0] == 200
        assert await client.rest() == b""

    on_door(scenario)


def test_a_fault_before_an_answer_was_written_is_the_answer(on_door, monkeypatch):
    answer = Connection._answer
    answers: list[object] = []

    def faulty_once(self: Connection, *of: Any) -> None:
        answers.append(of)
        if len(answers) == 1:
            raise ZeroDivisionError
        answer(self, *of)

    monkeypatch.setattr(Connection, "_answer", faulty_once)

    async def scenario(door: Door) -> None:
        client = await door.connect()
        client.send(infer(), LAST)
        status, _, body = await client.answer()
        assert status == 500
        assert "its log has the reason" in body.decode()
        assert (await client.answer())[0] == 200
        assert await client.rest() == b""
        assert door.data.released == 1

    on_door(scenario)


def test_what_is_sent_ahead_of_a_slow_request_is_bounded(on_door):
    async def scenario(door: Door) -> None:
        client = await door.connect()
        client.send(infer(model="slow"))
        await asyncio.wait_for(door.data.slow_began.wait(), SECONDS)
        request = infer(body=BODY.ljust(8192))
        count = (48 << 20) // len(request)
        client.send(request * count)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.writer.drain(), 0.5)
        door.data.release_slow.set()
        assert (await client.answer())[0] == 200
        for _ in range(count):
            assert (await client.answer())[0] == 200

    on_door(scenario)


def test_a_client_that_takes_no_answers_is_not_read_from(on_door, request):
    if "asyncio" in request.node.name and ((3, 12) <= sys.version_info < (3, 12, 9) or sys.version_info[:2] == (3, 13)):
        pytest.skip("this asyncio does not pause after writelines (CVE-2024-12254); the server runs on uvloop")

    async def scenario(door: Door) -> None:
        client = await door.connect(limit=1024)
        payload = bytes(4 << 20)
        tensor = {"name": "INPUT0", "shape": [len(payload)], "datatype": "UINT8"}
        text = json.dumps({"inputs": [tensor | {"parameters": {"binary_data_size": len(payload)}}]})
        head = json.loads(text) | {"parameters": {"binary_data_output": True}}
        text = json.dumps(head)
        request = infer(f"Inference-Header-Content-Length: {len(text)}", body=text.encode() + payload)
        client.send(*[request] * 16)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.writer.drain(), 0.5)
        assert len(door.data.requests) < 16
        for _ in range(16):
            assert (await client.answer())[2][-len(payload) :] == payload
        assert len(door.data.requests) == 16

    on_door(scenario)


@pytest.mark.parametrize("how", ["closes", "closes one way", "resets"])
def test_a_client_that_goes_away_cancels_its_inference(on_door, how):
    async def scenario(door: Door) -> None:
        client = await door.connect()
        client.send(infer(model="slow"))
        await asyncio.wait_for(door.data.slow_began.wait(), SECONDS)
        if how == "closes":
            client.writer.close()
        elif how == "closes one way":
            client.writer.write_eof()
        else:
            linger = b"\1\0\0\0\0\0\0\0"
            client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            client.writer.transport.abort()
        await asyncio.wait_for(door.data.cancelled.wait(), SECONDS)
        if how == "closes one way":
            assert await client.rest() == b""

    on_door(scenario)


def test_a_task_that_cancels_itself_ends_its_connection_alone(on_door):
    async def scenario(door: Door) -> None:
        client, other = await door.connect(), await door.connect()
        client.send(b"POST /v2/repository/models/cancelled/load HTTP/1.1\r\nContent-Length: 0\r\n\r\n")
        try:
            assert await client.rest() == b""
        except ConnectionResetError:
            pass
        other.send(READY)
        assert (await other.answer())[0] == 200

    on_door(scenario)


def test_an_idle_connection_is_closed(on_door):
    async def scenario(door: Door) -> None:
        fresh, used = await door.connect(), await door.connect()
        used.send(READY)
        assert (await used.answer())[0] == 200
        assert await fresh.rest() == b""
        assert await used.rest() == b""

    on_door(scenario, keepalive_timeout=0.2)


def test_a_connection_in_use_outlives_the_idle_time(on_door):
    async def scenario(door: Door) -> None:
        client = await door.connect()
        for _ in range(6):
            client.send(READY)
            assert (await client.answer())[0] == 200
            await asyncio.sleep(0.1)
        client.send(infer(model="slow"))
        await asyncio.sleep(0.6)
        door.data.release_slow.set()
        assert (await client.answer())[0] == 200

    on_door(scenario, keepalive_timeout=0.4)


@pytest.mark.parametrize(("begin", "piece"), [(b"GET /v2", b"x"), (READY[:-2], b"X: y\r\n")])
def test_a_head_that_does_not_become_complete_gets_408(on_door, begin, piece):
    async def scenario(door: Door) -> None:
        client = await door.connect()
        client.send(READY)
        assert (await client.answer())[0] == 200
        client.send(begin)
        answer = asyncio.create_task(client.answer())
        while not answer.done():
            client.send(piece)
            await asyncio.sleep(0.05)
        assert (await answer)[0] == 408
        assert await client.rest() == b""

    on_door(scenario, body_idle_timeout=0.3)


def test_a_body_may_take_long_as_long_as_it_goes_on(on_door):
    async def scenario(door: Door) -> None:
        client = await door.connect()
        request = infer()
        for i in range(0, len(request), 20):
            client.send(request[i : i + 20])
            await asyncio.sleep(0.1)
        assert (await client.answer())[0] == 200
        client.send(request[:-5])
        status, headers, _ = await client.answer()
        assert (status, headers["Connection"]) == (408, "close")

    on_door(scenario, body_idle_timeout=0.3)


def test_a_client_sees_why_it_is_refused_although_it_goes_on_sending(on_door):
    async def scenario(door: Door) -> None:
        client = await door.connect()
        client.send(infer(body=bytes(8 << 20)))
        status, headers, _ = await client.answer()
        assert (status, headers["Connection"]) == (413, "close")
        assert await client.rest() == b""

    on_door(scenario, max_input_size=1 << 20)


def test_a_client_that_sends_for_ever_after_its_refusal_is_cut_off(on_door):
    async def scenario(door: Door) -> None:
        client = await door.connect()
        client.send(b"NONSENSE\r\n\r\n")
        assert (await client.answer())[0] == 400
        with pytest.raises(ConnectionError):
            while True:
                client.send(bytes(1000))
                await client.writer.drain()
                await asyncio.sleep(0.05)

    on_door(scenario)


def test_a_request_with_a_body_that_nobody_asked_for_leaves_the_connection_open(on_door):
    async def scenario(door: Door) -> None:
        client = await door.connect()
        wrong = infer().replace(b"/infer", b"/nope")
        client.send(wrong, infer("Content-Encoding: br"), READY.replace(b"GET", b"POST"), READY)
        assert [(await client.answer())[0] for _ in range(4)] == [404, 415, 405, 200]

    on_door(scenario)


def test_an_offer_to_upgrade_is_ignored(on_door):
    async def scenario(door: Door) -> None:
        client = await door.connect()
        offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA")
        client.send(infer(*offer), infer(*offer))
        for _ in range(2):
            status, headers, body = await client.answer()
            assert (status, headers.get("Connection")) == (200, None)
            assert json.loads(body)["outputs"][0]["data"] == [1, 2]

    on_door(scenario)


def test_the_answer_to_head_has_no_body_and_the_next_one_follows(on_door):
    async def scenario(door: Door) -> None:
        client = await door.connect()
        wrong = b"HEAD /v2/repository/index HTTP/1.1\r\n\r\n"
        client.send(READY.replace(b"GET", b"HEAD").replace(b"/health/ready", b""), wrong, LAST)
        answer = await client.rest()
        assert [line.split()[1] for line in answer.split(b"\r\n") if line.startswith(b"HTTP/")] == [
            b"200",
            b"405",
            b"200",
        ]
        assert b"{" not in answer

    on_door(scenario)


def test_http_1_0_is_answered_in_kind(on_door):
    async def scenario(door: Door) -> None:
        client = await door.connect()
        keep = READY.replace(b"1.1", b"1.0").replace(b"Host: x", b"Connection: keep-alive")
        client.send(keep, READY.replace(b"1.1", b"1.0"))
        answer = await client.rest()
        assert answer.count(b"HTTP/1.0 200 OK\r\n") == 2
        assert answer.count(b"Connection: keep-alive\r\n") == answer.count(b"Connection: close\r\n") == 1

    on_door(scenario)


@pytest.mark.parametrize("size", [40_000, 300_000])
def test_large_answers_are_compressed_and_the_connection_goes_on(on_door, size):
    async def scenario(door: Door) -> None:
        client = await door.connect()
        body = json.dumps({"inputs": [{"name": "INPUT0", "shape": [size], "datatype": "INT8", "data": [1] * size}]})
        client.send(infer("Accept-Encoding: gzip", body=body.encode()), infer())
        status, headers, _ = await client.answer()
        assert (status, headers["Content-Encoding"], headers["Vary"]) == (200, "gzip", "Accept-Encoding")
        assert (await client.answer())[0] == 200

    on_door(scenario)


def test_stop_closes_idle_connections_at_once_and_lets_a_body_under_way_arrive(on_door):
    async def scenario(door: Door) -> None:
        idle, half, sending = [await door.connect() for _ in range(3)]
        idle.send(READY)
        assert (await idle.answer())[0] == 200
        request = infer("Expect: 100-continue")
        half.send(b"GET /v2/hea")
        sending.send(request[: -len(BODY)])
        assert (
            await asyncio.wait_for(sending.reader.readuntil(b"\r\n\r\n"), SECONDS) == b"HTTP/1.1 100 Continue\r\n\r\n"
        )
        stopping = asyncio.create_task(door.gateway.stop(30))
        assert await idle.rest() == await half.rest() == b""
        assert not stopping.done()
        sending.send(BODY)
        status, headers, _ = await sending.answer()
        assert (status, headers["Connection"]) == (200, "close")
        await asyncio.wait_for(stopping, SECONDS)

    on_door(scenario)


def test_small_answers_leave_without_delay(on_door):
    async def scenario(door: Door) -> None:
        client = await door.connect()
        client.send(READY)
        await client.answer()
        assert door.gateway._connections is not None
        (connection,) = door.gateway._connections.open
        sock = connection._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)

    on_door(scenario)


def test_one_connection_too_many_is_told_so_and_closed_and_there_is_room_again_once_another_goes(on_door):
    async def scenario(door: Door) -> None:
        held = [await door.connect() for _ in range(3)]
        for client in held:
            client.send(READY)
            assert (await client.answer())[0] == 200
        for ahead in (b"", READY):  # whether it asks before it looks, or not
            refused = await door.connect()
            refused.send(ahead)
            status, headers, body = await refused.answer()
            assert (status, headers["Connection"], headers["Retry-After"]) == (503, "close", "1")
            assert json.loads(body) == {"error": "the server has 3 connections, and takes no more"}
            assert await refused.rest() == b""
            refused.writer.close()
        held[0].send(READY)
        assert (await held[0].answer())[0] == 200, "those that are open go on"
        held.pop().writer.close()
        async with asyncio.timeout(SECONDS):
            while True:
                client = await door.connect()
                client.send(LAST)
                if (await client.answer())[0] == 200:
                    break
                client.writer.close()
                await client.writer.wait_closed()

    on_door(scenario, max_connections=3)


def test_a_flood_of_connections_takes_no_more_descriptors_than_the_limit_and_a_few(on_door):
    async def scenario(door: Door) -> None:
        before = open_descriptors()
        clients = [await door.connect() for _ in range(120)]
        ends = await asyncio.gather(*(client.rest() for client in clients[2:]), return_exceptions=True)
        assert sum(isinstance(end, bytes) and end.startswith(b"HTTP/1.1 503") for end in ends) >= 60
        assert sum(isinstance(end, ConnectionResetError) or end == b"" for end in ends) >= 50, (
            "told nothing, but closed"
        )
        assert open_descriptors() - before < 120 + 2 + 64 + 8
        clients[0].send(READY)
        assert (await clients[0].answer())[0] == 200

    on_door(scenario, max_connections=2)


def test_a_body_that_comes_drop_by_drop_ends_however_long_it_could_go_on(on_door):
    async def scenario(door: Door) -> None:
        client = await door.connect()
        client.send(b"POST /v2/models/echo/infer HTTP/1.1\r\nContent-Length: 100000\r\n\r\n{")
        answer = asyncio.create_task(client.answer())
        while not answer.done():
            client.send(b" ")
            await asyncio.sleep(0.05)
        status, headers, body = await answer
        assert (status, headers["Connection"]) == (408, "close")
        assert json.loads(body) == {"error": "the body came more slowly than 256 bytes a second"}

    on_door(scenario, body_idle_timeout=0.3)


@pytest.mark.parametrize("size", [2_000, 200_000])
def test_a_body_may_take_long_as_long_as_it_is_fast_enough_on_average(on_door, size):
    async def scenario(door: Door) -> None:
        client = await door.connect()
        request = infer(body=BODY.ljust(size))
        for i in range(0, len(request), len(request) // 10):
            client.send(request[i : i + len(request) // 10])
            await asyncio.sleep(0.05)
        assert (await client.answer())[0] == 200
        client.send(READY)
        assert (await client.answer())[0] == 200

    on_door(scenario, body_idle_timeout=0.3, min_body_rate=2000)


def test_no_more_is_taken_of_what_is_sent_ahead_than_two_reads_in_bytes_and_in_requests(on_door):
    async def scenario(door: Door) -> None:
        client = await door.connect()
        client.send(infer(model="slow"))
        await asyncio.wait_for(door.data.slow_began.wait(), SECONDS)
        small = b"GET / HTTP/1.1\r\n\r\n"
        for _ in range(256):
            client.send(small * 1024)  # 4.6 MB
        await asyncio.sleep(0.2)
        assert door.gateway._connections is not None
        (connection,) = door.gateway._connections.open
        assert len(connection._pending) <= 2 * 65536
        assert len(connection._reader.ready) <= 65536 // len(small)

    on_door(scenario)
