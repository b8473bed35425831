"""What the HTTP door does not take: bodies above a limit, pauses, what is no HTTP. And its start and stop."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from headrace.gateway.http.app import HttpGateway, HttpSettings
from http_door import GOOD, HEADER_LENGTH, error_of


def post(*headers: str, path: str = "/v2/models/echo/infer", body: bytes = b"") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@pytest.mark.parametrize("headers", [(), ("Expect: 100-continue",)])
async def test_an_announced_body_over_the_limit_is_refused_unread_and_the_connection_closed(door, headers):
    answer = await door.raw(post("Content-Length: 524289", *headers))
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"Connection: close" in answer
    assert b"the limit for this request is 524288 bytes" in answer
    assert await door.is_well()


async def test_a_binary_section_may_pass_the_input_limit_but_not_the_body_limit(door):
    elements = 3 << 18
    tensor = {"name": "INPUT0", "shape": [elements], "datatype": "UINT8", "parameters": {"binary_data_size": elements}}
    text = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    status, headers, body = await door.infer(text + bytes(elements), **{HEADER_LENGTH: str(len(text))})
    assert (status, len(body) - int(headers[HEADER_LENGTH])) == (200, elements)
    answer = await door.raw(post("Content-Length: 1048577", f"{HEADER_LENGTH}: {len(text)}"))
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"the limit for this request is 1048576 bytes" in answer


async def test_a_chunked_body_is_bounded_while_it_is_read(door):
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    answer = await door.raw(post("Transfer-Encoding: chunked"), chunk * 17)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert await door.is_well()


async def test_a_chunked_body_is_read(door):
    text = json.dumps(GOOD).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in text) + b"0\r\n\r\n"
    answer = await door.raw(post("Transfer-Encoding: chunked", "Connection: close"), chunks)
    assert answer.startswith(b"HTTP/1.1 200 ")


async def test_expect_100_continue_is_answered_before_the_body(door):
    text = json.dumps(GOOD).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    writer.write(post(f"Content-Length: {len(text)}", "Expect: 100-continue", "Connection: close"))
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5) == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(text)
    assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_a_client_that_pauses_in_its_body_is_let_go(door):
    answer = await door.raw(post("Content-Length: 100"), b'{"inputs"')
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert await door.is_well()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /v2 HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 20000 + b"\r\n\r\n", 431),
        (b"GET /" + b"a" * 20000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
        (b"GET /v2 HTTP/1.1\r\n" + b"".join(b"X-%d: 1\r\n" % i for i in range(200)) + b"\r\n", 431),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"NONSENSE\r\n\r\n", 400),
        (post("Content-Length: -5"), 400),
        (post("Content-Length: 5", "Content-Length: 6", body=b"abcde"), 400),
        (post("Content-Length: 5", "Transfer-Encoding: chunked"), 400),
        (post("Expect: a miracle", "Content-Length: 3"), 417),
    ],
)
async def test_malformed_http_gets_a_json_error_and_the_server_stays_well(door, request_bytes, status):
    answer = await door.raw(request_bytes)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert int(head.split()[1]) == status
    assert error_of(body)
    assert await door.is_well()


async def test_malformed_chunks_get_400(door):
    answer = await door.raw(post("Transfer-Encoding: chunked"), b"zz\r\nnot a chunk\r\n")
    assert answer.split()[1] == b"400"
    assert await door.is_well()


async def test_pipelined_requests_are_answered_in_order(door):
    bodies = [json.dumps({"id": str(i), **GOOD}).encode() for i in range(5)]
    stream = b"".join(post(f"Content-Length: {len(body)}", body=body) for body in bodies)
    answer = await door.raw(stream + b"GET /nope HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    positions = [answer.index(b'"id":"%d"' % i) for i in range(5)]
    assert positions == sorted(positions)
    assert answer.endswith(b'{"error":"no such path"}')


async def test_a_client_that_disconnects_cancels_its_inference(door):
    body = json.dumps(GOOD).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", door.port)
    writer.write(post(f"Content-Length: {len(body)}", path="/v2/models/slow/infer", body=body))
    await asyncio.wait_for(door.data.slow_began.wait(), 5)
    writer.close()
    await asyncio.wait_for(door.data.cancelled.wait(), 5)
    assert await door.is_well()


async def test_stop_finishes_open_requests_and_takes_no_new_connections(door):
    waiting = asyncio.create_task(door.infer(GOOD, model="slow"))
    await door.data.slow_began.wait()
    stopping = asyncio.create_task(door.gateway.stop(30))
    await asyncio.sleep(0)
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", door.port)
    door.data.release_slow.set()
    status, headers, _ = await waiting
    assert (status, headers["Connection"]) == (200, "close")
    await asyncio.wait_for(stopping, 5)


async def test_stop_cuts_what_outlasts_the_grace(door):
    waiting = asyncio.create_task(door.infer(GOOD, model="slow"))
    await door.data.slow_began.wait()
    await asyncio.wait_for(door.gateway.stop(0.05), 5)
    assert door.data.cancelled.is_set()
    with pytest.raises(aiohttp.ClientError):
        await waiting


async def test_a_taken_port_is_an_error(door):
    second = HttpGateway(door.data, door.control, HttpSettings(address="127.0.0.1", port=door.port))
    with pytest.raises(OSError, match="address already in use"):
        await second.start()
