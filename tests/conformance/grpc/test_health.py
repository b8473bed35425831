"""The standard health service, on both transports."""

import asyncio

import grpc
import grpc.aio
import pytest

from headrace.gateway.grpc import health
from headrace_protocol._generated.health_pb2 import HealthCheckRequest, HealthCheckResponse

CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
SERVICES = ("", "inference.GRPCInferenceService")


def about(service):
    return HealthCheckRequest(service=service).SerializeToString()


async def check(door, service=""):
    return HealthCheckResponse.FromString(await door.call(CHECK, about(service))).status


async def told(call):
    async with asyncio.timeout(5):
        return HealthCheckResponse.FromString(await call.read()).status


def watch(door, service="", **options):
    return door.channel.unary_stream(WATCH)(about(service), **options)


@pytest.mark.parametrize("service", SERVICES)
async def test_a_check_mirrors_ready(door, service):
    assert await check(door, service) == SERVING
    door.data.is_ready = False
    assert await check(door, service) == NOT_SERVING
    door.data.is_ready, door.data.is_exiting = True, True
    assert await check(door, service) == NOT_SERVING


async def test_a_check_of_an_unknown_service_is_not_found(door):
    status, text = await door.status(CHECK, about("nope.Service"))
    assert status is grpc.StatusCode.NOT_FOUND
    assert "'nope.Service'" in text


async def test_a_malformed_check_is_refused(door):
    assert (await door.status(CHECK, b"\xff\xff"))[0] is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("service", SERVICES)
async def test_a_watch_tells_the_state_and_every_change(door, service):
    call = watch(door, service)
    assert await told(call) == SERVING
    door.data.is_ready = False
    assert await told(call) == NOT_SERVING
    door.data.is_ready = True
    assert await told(call) == SERVING
    call.cancel()


async def test_a_watch_of_an_unknown_service_says_so_and_stays_open(door):
    call = watch(door, "nope", timeout=0.6)
    assert await told(call) == HealthCheckResponse.SERVICE_UNKNOWN
    door.data.is_ready = False
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_watch_ends_with_the_server_after_a_last_word(door):
    call = watch(door)
    assert await told(call) == SERVING
    await asyncio.wait_for(door.gateway.stop(5), 3)
    assert await told(call) == NOT_SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_watchers_are_bounded_and_make_room_when_they_leave(door, monkeypatch):
    monkeypatch.setattr(health, "MAX_WATCHERS", 2)
    calls = [watch(door), watch(door)]
    assert [await told(call) for call in calls] == [SERVING, SERVING]
    refused = watch(door)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await refused.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    calls[0].cancel()
    async with asyncio.timeout(5):
        while True:
            try:
                assert await told(watch(door)) == SERVING
                break
            except grpc.aio.AioRpcError:  # the server has not heard of the cancel yet
                await asyncio.sleep(0.01)
    calls[1].cancel()


async def test_nothing_is_looked_at_while_nobody_watches():
    looked = []

    async def write(status):
        looked.append(status)
        raise ConnectionError("gone")

    service = health.Health(lambda: bool(looked.append("look")) or True, interval_s=0)
    with pytest.raises(ConnectionError):
        await service.watch(b"", write)
    assert looked == ["look", b"\x08\x01"]
    await asyncio.sleep(0.01)
    assert len(looked) == 2


async def test_a_slow_watcher_is_told_the_newest_state_alone():
    state, written, began, go = [True], [], asyncio.Event(), asyncio.Event()

    async def write(status):
        written.append(status)
        began.set()
        await go.wait()

    service = health.Health(lambda: state[0], interval_s=0)
    task = asyncio.ensure_future(service.watch(b"", write))
    await began.wait()
    for new in (False, True, False):
        state[0] = new
        await asyncio.sleep(0.01)
    go.set()
    await asyncio.sleep(0.01)
    assert written == [b"\x08\x01", b"\x08\x02"]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
