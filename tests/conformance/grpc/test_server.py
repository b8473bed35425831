"""The start and end of the gRPC gateway, where it listens, and which transport carries it."""

import asyncio
import socket

import grpc
import grpc.aio
import pytest

from grpc_doors import INFERENCE, EchoData, RecordingControl, infer_request
from headrace.gateway.grpc.settings import GrpcSettings
from headrace.gateway.grpc.transport import GrpcGateway, choose_transport
from headrace_protocol._generated import grpc_service_pb2 as pb
from headrace_protocol.errors import InferError


async def test_an_unknown_method_is_unimplemented(door):
    assert (await door.status("Nope"))[0] is grpc.StatusCode.UNIMPLEMENTED


async def test_stop_lets_a_call_in_flight_end(door):
    call = asyncio.ensure_future(door.call("ModelInfer", infer_request("held")))
    await asyncio.wait_for(door.data.entered.wait(), 5)
    stop = asyncio.ensure_future(door.gateway.stop(5))
    door.data.let_go.set()
    assert pb.ModelInferResponse.FromString(await call).model_name == "held"
    await asyncio.wait_for(stop, 3)


async def test_stop_cancels_what_outlives_the_grace(door):
    call = asyncio.ensure_future(door.call("ModelInfer", infer_request("hang")))
    await asyncio.wait_for(door.data.entered.wait(), 5)
    await asyncio.wait_for(door.gateway.stop(0.05), 3)
    assert door.data.cancelled.is_set()
    with pytest.raises(grpc.aio.AioRpcError):
        await call


async def test_stop_is_idempotent_and_fine_before_start(door, transport):
    await door.gateway.stop(0)
    await door.gateway.stop(0)
    await GrpcGateway(EchoData(), RecordingControl(), GrpcSettings("127.0.0.1", 0, transport)).stop(0)


async def test_a_taken_port_is_an_error_that_names_it(door, open_door):
    with pytest.raises(OSError, match=f"127.0.0.1:{door.port}.*in use"):
        await open_door(port=door.port)
    with pytest.raises(OSError, match=str(door.port)):
        await open_door(address="0.0.0.0", port=door.port)
    assert await door.call("ServerLive")


async def test_a_port_taken_by_another_kind_of_server_is_an_error(open_door):
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(OSError, match="in use"):
        await open_door(port=other.getsockname()[1])


async def test_an_address_that_is_not_ours_is_an_error(open_door):
    with pytest.raises(OSError, match="192.0.2.1"):
        await open_door(address="192.0.2.1")


async def test_two_servers_may_share_a_port_when_both_ask(open_door):
    first = await open_door(reuse_port=True)
    second = await open_door(reuse_port=True, port=first.port)
    assert second.port == first.port


async def test_a_port_can_be_taken_again_at_once(door, open_door):
    await door.call("ServerLive")
    await door.gateway.stop(0)
    again = await open_door(port=door.port)
    assert await again.call("ServerLive")


async def test_the_server_listens_on_ipv6(open_door):
    door = await open_door(address="::1")
    async with grpc.aio.insecure_channel(f"[::1]:{door.port}") as channel:
        assert await channel.unary_unary(INFERENCE + "ServerLive")(b"")


def test_auto_takes_the_native_transport_where_it_can_do_what_is_asked():
    assert choose_transport(GrpcSettings()) == "pygrpc-native"
    assert choose_transport(GrpcSettings(compression="low")) == "grpcio"
    assert choose_transport(GrpcSettings(max_connection_age_ms=1000)) == "grpcio"
    assert choose_transport(GrpcSettings(max_message_size=1 << 20)) == "grpcio"


def test_the_native_transport_is_refused_what_it_cannot_do():
    with pytest.raises(InferError, match="compress"):
        choose_transport(GrpcSettings(transport="pygrpc-native", compression="high"))
