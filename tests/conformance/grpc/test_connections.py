"""What a connection of the gRPC door is kept alive by, and what travels on it compressed."""

import asyncio
import contextlib
import struct

import grpc
import grpc.aio
import pytest

from grpc_doors import INFERENCE, infer_request
from headrace_protocol._generated import grpc_service_pb2 as pb

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, ACK = 4, 6, 1


def frame(kind, flags=0, payload=b""):
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + bytes(4) + payload


async def read_frame(reader):
    """Return kind, flags and payload of the next frame, None at the end of the connection."""
    try:
        head = await reader.readexactly(9)
        return head[3], head[4], await reader.readexactly(int.from_bytes(head[:3]))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def pings(door, seconds, *, answer):
    """Connect without a call; return how many pings came within `seconds`, and whether the server closed it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    writer.write(PREFACE + frame(SETTINGS))
    count = 0
    try:
        async with asyncio.timeout(seconds):
            while (got := await read_frame(reader)) is not None:
                kind, flags, payload = got
                if kind == SETTINGS and not flags & ACK:
                    writer.write(frame(SETTINGS, ACK))
                if kind == PING and not flags & ACK:
                    count += 1
                    if answer:
                        writer.write(frame(PING, ACK, payload))
    except TimeoutError:
        return count, False
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return count, True


async def test_an_idle_connection_is_pinged_where_that_is_permitted(open_door):
    door = await open_door(keepalive_time_ms=50, keepalive_timeout_ms=5000, keepalive_permit_without_calls=True)
    count, closed = await pings(door, 1.0, answer=True)
    assert count > 1
    assert not closed


async def test_an_idle_connection_is_not_pinged_otherwise(open_door):
    door = await open_door(keepalive_time_ms=50, keepalive_timeout_ms=5000)
    assert await pings(door, 0.5, answer=True) == (0, False)


async def test_a_connection_whose_client_answers_no_ping_is_closed(open_door):
    door = await open_door(keepalive_time_ms=50, keepalive_timeout_ms=100, keepalive_permit_without_calls=True)
    _, closed = await pings(door, 2.0, answer=False)
    assert closed


class Relay:
    """Stands between a client and the door, and counts the bytes of the answers."""

    def __init__(self, door):
        self._door = door
        self.answered = 0

    async def __aenter__(self):
        self._writers = []
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for writer in self._writers:
            writer.close()
            await writer.wait_closed()
        await asyncio.wait_for(self._served, 5)

    async def _serve(self, reader, writer):
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._door.port)
        self._writers += writer, server_writer
        self._served = asyncio.ensure_future(
            asyncio.gather(self._forward(reader, server_writer, 0), self._forward(server_reader, writer, 1))
        )

    async def _forward(self, reader, writer, count):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                self.answered += len(data) * count
                writer.write(data)
        writer.close()


@pytest.mark.parametrize("level", ["low", "medium", "high"])
@pytest.mark.parametrize("transport", ["grpcio"], indirect=True)
@pytest.mark.parametrize("rpc", ["ModelInfer", "ModelStreamInfer"])
async def test_responses_are_compressed_when_asked(open_door, level, rpc):
    door = await open_door(compression=level)
    request = infer_request(data=bytes(1_000_000)).SerializeToString()
    async with Relay(door) as relay, grpc.aio.insecure_channel(relay.address) as channel:
        if rpc == "ModelInfer":
            answer = pb.ModelInferResponse.FromString(await channel.unary_unary(INFERENCE + rpc)(request))
        else:
            call = channel.stream_stream(INFERENCE + rpc)()
            await call.write(request)
            answer = pb.ModelStreamInferResponse.FromString(await call.read()).infer_response
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.OK
    assert answer.raw_output_contents[0] == bytes(1_000_000)
    assert relay.answered < 100_000
