"""How a stream ends, on both transports, and what bounds it while it lasts."""

import asyncio
import gc

import grpc
import grpc.aio
import pytest

from grpc_doors import StreamClient, infer_request, stream_data, stream_ids
from headrace.gateway.grpc.stream_ledger import MAX_REQUESTS, StreamRequest
from headrace.types import InferenceRequest


async def test_a_cancelled_stream_cancels_everything_in_it(door):
    client = StreamClient(door)
    await client.send(
        infer_request("stream", id="a"),
        infer_request("held", id="b"),
        infer_request("hang", id="c"),
        infer_request(id="d"),
    )
    a, b = await door.data.begun(2)
    a.send(b"1")
    await client.receive(1)
    client.call.cancel()
    async with asyncio.timeout(5):
        await a.cancelled.wait()
        await b.cancelled.wait()
        await door.data.cancelled.wait()
    a.send(b"late")
    assert a.unread == 0
    assert await door.call("ModelInfer", infer_request())


async def test_a_passed_deadline_cancels_everything_in_it(door):
    client = StreamClient(door, timeout=0.3)
    await client.send(infer_request("stream", id="a"))
    (a,) = await door.data.begun()
    assert await client.status() is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(a.cancelled.wait(), 5)


async def test_a_closed_connection_cancels_everything_in_it(door):
    client = StreamClient(door)
    await client.send(infer_request("stream", id="a"))
    (a,) = await door.data.begun()
    await door.channel.close()
    await asyncio.wait_for(a.cancelled.wait(), 5)


async def test_one_cancelled_stream_leaves_the_others_alone(door):
    gone, stays = StreamClient(door), StreamClient(door)
    await gone.send(infer_request("stream", id="a"))
    await stays.send(infer_request("stream", id="b"))
    a, b = await door.data.begun(2)
    gone.call.cancel()
    await asyncio.wait_for(door.data.streams["a"].cancelled.wait(), 5)
    door.data.streams["b"].send(b"x", final=True)
    answers, status = await stays.end()
    assert (stream_ids(answers), status) == (["b"], grpc.StatusCode.OK)
    assert not door.data.streams["b"].cancelled.is_set()


async def test_requests_above_the_bound_wait_in_the_transport(door):
    client = StreamClient(door)
    sending = asyncio.ensure_future(
        client.send(*(infer_request("stream", id=str(n)) for n in range(MAX_REQUESTS + 10)))
    )
    await door.data.begun(MAX_REQUESTS)
    await asyncio.sleep(0.1)
    assert len(door.data.streams) == MAX_REQUESTS
    for number in range(10):
        door.data.streams[str(number)].send(None)
    await door.data.begun(MAX_REQUESTS + 10)
    await sending
    for number in range(10, MAX_REQUESTS + 10):
        door.data.streams[str(number)].send(None)
    assert await client.end() == ([], grpc.StatusCode.OK)


async def test_responses_that_the_client_does_not_read_stay_unread(door):
    """What the model may count on: a response is released when its bytes have left."""
    client = StreamClient(door)
    await client.send(infer_request("stream", id="a"))
    (a,) = await door.data.begun()
    for _ in range(64):
        a.send(bytes(1 << 20))
    await client.receive(1)
    await asyncio.sleep(0.2)
    assert 16 < a.unread < 64
    a.send(b"", final=True)
    answers, status = await client.end()
    assert (len(answers), status, a.unread) == (64, grpc.StatusCode.OK, 0)


async def test_a_stop_ends_idle_streams_at_once(door):
    client = StreamClient(door)
    await client.send(infer_request(id="1"))
    assert stream_ids(await client.receive(1)) == ["1"]
    await asyncio.wait_for(door.gateway.stop(5), 3)
    assert await client.status() is grpc.StatusCode.UNAVAILABLE


async def test_a_stop_lets_a_stream_finish_what_it_has_begun(door):
    client = StreamClient(door)
    await client.send(infer_request("stream", id="a"))
    (a,) = await door.data.begun()
    stop = asyncio.ensure_future(door.gateway.stop(5))
    await asyncio.sleep(0.05)
    a.send(b"1")
    a.send(b"2", final=True)
    assert stream_data(await client.receive()) == [b"1", b"2"]
    assert await client.status() is grpc.StatusCode.UNAVAILABLE
    await asyncio.wait_for(stop, 3)


async def test_a_stop_cancels_what_outlives_the_grace(door):
    client = StreamClient(door)
    await client.send(infer_request("stream", id="a"))
    (a,) = await door.data.begun()
    await asyncio.wait_for(door.gateway.stop(0.1), 3)
    assert a.cancelled.is_set()
    assert await client.status() is not grpc.StatusCode.OK


@pytest.mark.parametrize("kind", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_compressed_requests_of_a_stream_are_understood(door, kind):
    client = StreamClient(door, compression=kind)
    await client.send(infer_request(data=bytes(100_000)))
    answers, status = await client.end()
    assert (stream_data(answers), status) == ([bytes(100_000)], grpc.StatusCode.OK)


@pytest.mark.parametrize("transport", ["grpcio"], indirect=True)
async def test_messages_above_the_limit_end_the_stream(open_door):
    """A bomb too: what counts is the size after decompression."""
    door = await open_door(max_message_size=100_000)
    for data, kind in ((100_001, grpc.Compression.NoCompression), (50_000_000, grpc.Compression.Gzip)):
        client, before = StreamClient(door, compression=kind), len(door.data.streams)
        await client.send(infer_request("stream", id=str(data)))
        running = (await door.data.begun(before + 1))[-1]
        await client.send(infer_request(data=bytes(data)))
        await client.receive()
        assert await client.status() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await asyncio.wait_for(running.cancelled.wait(), 5)
    assert await door.call("ModelInfer", infer_request())


async def test_what_is_answered_is_freed_without_the_collector(door):
    """Requests are large; the collector may come late."""
    gc.collect()
    gc.disable()
    try:
        client = StreamClient(door)
        await client.send(
            infer_request(id="good"),
            infer_request("missing", id="unknown"),
            infer_request("NOT_FOUND", id="fails"),
            infer_request("huge", id="not to be written"),
            infer_request("stream", id="stream"),
            infer_request("stream", id="left open"),
        )
        await door.data.begun(2)
        door.data.streams["stream"].send(b"1")
        door.data.streams["stream"].send(None)
        assert len(await client.receive(5)) == 5
        client.call.cancel()
        await asyncio.wait_for(door.data.streams["left open"].cancelled.wait(), 5)
        door.data.streams.clear()
        door.data.requests.clear()
        async with asyncio.timeout(5):
            while alive := [one for one in gc.get_objects() if type(one) in (StreamRequest, InferenceRequest)]:
                del alive
                await asyncio.sleep(0.01)
    finally:
        gc.enable()
