"""The start and end of the gRPC gateway, where it listens, and which transport carries it."""

import asyncio
import contextlib
import pathlib
import socket
import stat

import grpc
import grpc.aio
import pytest
import tritonclient.grpc

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


def test_auto_takes_grpcio_where_pings_are_limited():
    assert choose_transport(GrpcSettings(max_ping_strikes=0)) == "grpcio"
    with pytest.raises(InferError, match="pings"):
        choose_transport(GrpcSettings(transport="pygrpc-native", max_pings_without_data=5))


@pytest.mark.parametrize("address", ["::", "[::]"])
async def test_the_ipv6_wildcard_takes_ipv4_too(open_door, address):
    door = await open_door(address=address)
    for host in ("[::1]", "127.0.0.1"):
        async with grpc.aio.insecure_channel(f"{host}:{door.port}") as channel:
            assert await channel.unary_unary(INFERENCE + "ServerLive")(b"", timeout=5)


async def test_an_ipv6_address_may_stand_in_brackets(open_door):
    door = await open_door(address="[::1]")
    async with grpc.aio.insecure_channel(f"[::1]:{door.port}") as channel:
        assert await channel.unary_unary(INFERENCE + "ServerLive")(b"", timeout=5)


@pytest.mark.parametrize("form", ["unix:{}", "unix://{}"])
async def test_the_server_listens_on_a_unix_socket_that_owner_and_group_may_use(open_door, tmp_path, form):
    path = tmp_path / "s"
    door = await open_door(address=form.format(path))
    assert door.port == 0
    assert stat.S_IMODE(path.lstat().st_mode) == 0o660

    def live():
        with tritonclient.grpc.InferenceServerClient(f"unix:{path}") as client:
            return client.is_server_live()

    assert await asyncio.to_thread(live)
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        call = channel.stream_stream(INFERENCE + "ModelStreamInfer")()
        await call.write(infer_request().SerializeToString())
        assert await call.read()
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK
    await door.gateway.stop(0)
    assert [*tmp_path.iterdir()] == []


async def test_a_unix_socket_that_a_dead_server_left_is_replaced(open_door, tmp_path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "s"))
    await open_door(address=f"unix:{tmp_path}/s")
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
        assert await channel.unary_unary(INFERENCE + "ServerLive")(b"", timeout=5)


async def test_a_unix_socket_that_is_served_is_an_error_and_stays(open_door, tmp_path):
    await open_door(address=f"unix:{tmp_path}/s")
    with pytest.raises(OSError, match=f"unix:{tmp_path}/s.*already"):
        await open_door(address=f"unix:{tmp_path}/s")
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
        assert await channel.unary_unary(INFERENCE + "ServerLive")(b"", timeout=5)


async def test_a_file_that_is_no_socket_is_an_error_and_stays(open_door, tmp_path):
    (tmp_path / "s").write_text("precious")
    with pytest.raises(OSError, match="no socket"):
        await open_door(address=f"unix:{tmp_path}/s")
    assert (tmp_path / "s").read_text() == "precious"


async def test_a_unix_socket_in_a_folder_that_is_not_there_is_an_error(open_door, tmp_path):
    with pytest.raises(OSError, match="unix:"):
        await open_door(address=f"unix:{tmp_path}/no/s")


async def test_no_socket_of_a_server_on_a_unix_socket_is_open_to_other_users(open_door, tmp_path):
    """What is behind the native front could be used around the mode of the file."""
    await open_door(address=f"unix:{tmp_path}/s")
    assert {stat.S_IMODE(path.lstat().st_mode) for path in tmp_path.iterdir()} == {0o660}
    assert own_abstract_sockets() == []


async def test_no_file_is_made_for_a_server_on_a_port(door, transport):
    """A killed server would leave it behind."""
    assert len(own_abstract_sockets()) == (transport == "pygrpc-native")


def own_abstract_sockets():
    """Return the names of the abstract sockets that this process listens on."""
    inodes = set()
    for descriptor in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            inodes.add(str(descriptor.stat().st_ino))
    rows = [line.split() for line in pathlib.Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [row[7] for row in rows if row[6] in inodes and row[3] == "00010000" and row[7:] and row[7].startswith("@")]


@pytest.mark.parametrize("transport", ["pygrpc-native"], indirect=True)
async def test_a_start_that_fails_half_way_leaves_no_socket(open_door, tmp_path):
    (tmp_path / "s.streams").write_text("precious")
    with pytest.raises(OSError, match="no socket"):
        await open_door(address=f"unix:{tmp_path}/s")
    assert [path.name for path in tmp_path.iterdir()] == ["s.streams"]
