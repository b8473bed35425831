"""The gRPC gateway as clients meet it, on both transports, over a data plane that echoes."""

import asyncio
import logging
import socket

import grpc
import grpc.aio
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
from tritonclient.utils import InferenceServerException

from echo_planes import SubmitsByInfer
from headrace.gateway.grpc.settings import GrpcSettings
from headrace.gateway.grpc.transport import GrpcGateway, choose_transport
from headrace.types import (
    IndexEntry,
    InferenceResponse,
    ModelMetadata,
    OutputTensor,
    ServerMetadata,
    TensorMetadata,
)
from headrace_protocol import datatype as dt
from headrace_protocol._generated import grpc_service_pb2 as pb
from headrace_protocol._generated import model_config_pb2
from headrace_protocol.errors import ErrorCode, InferError, invalid, not_found

INFERENCE = "/inference.GRPCInferenceService/"
TRANSPORTS = ("grpcio", "pygrpc-native")


class EchoData(SubmitsByInfer):
    """OUTPUTi = INPUTi. Model `hang` waits until it is cancelled, `held` until `let_go`; others fail as named."""

    def __init__(self):
        self.is_live = True
        self.is_exiting = False
        self.is_ready = True
        self.requests = []
        self.released = 0
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.let_go = asyncio.Event()

    def live(self):
        return self.is_live

    def exiting(self):
        return self.is_exiting

    def ready(self):
        return self.is_ready

    def model_ready(self, name, version):
        self._known(name, version)
        return name != "loading"

    def server_metadata(self):
        return ServerMetadata("headrace", "0.1", ("parameters", "statistics"))

    def model_metadata(self, name, version):
        self._known(name, version)
        return ModelMetadata(
            name,
            ("1", "2"),
            "echo",
            (TensorMetadata("INPUT0", "FP32", (-1, 4)),),
            (TensorMetadata("OUTPUT0", "BYTES", (-1,)),),
        )

    def model_config(self, name, version):
        self._known(name, version)
        return model_config_pb2.ModelConfig(name=name, max_batch_size=8)

    def statistics(self, name, version):
        return pb.ModelStatisticsResponse(
            model_stats=[pb.ModelStatistics(name=name or "all", version=str(version), inference_count=5)]
        )

    async def infer(self, request):
        self.requests.append(request)
        self.entered.set()
        match request.model_name:
            case "hang":
                await self._hang()
            case "held":
                await self.let_go.wait()
            case "boom":
                raise RuntimeError("a secret of ours")
            case "long":
                raise invalid("é" * 100_000)
            case name if name in ErrorCode.__members__:
                raise InferError(ErrorCode[name], f"planned {name} é\n\0 😀")
        times = 2 if request.model_name == "double" else 1
        outputs = [
            OutputTensor(one.name.replace("INPUT", "OUTPUT"), one.datatype, one.shape, bytes(one.data) * times)
            for one in request.inputs
        ]
        response = InferenceResponse(request.model_name, 1, outputs, request.parameters, self._count_release)
        response.id = request.id
        if request.model_name == "huge":
            response.parameters = {"too big": 2**64}
        return response

    async def _hang(self):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    def _count_release(self):
        self.released += 1

    def _known(self, name, version):
        if name == "missing":
            raise not_found(f"model '{name}' does not exist")
        if version not in (-1, 1, 2):
            raise not_found(f"model '{name}' has no version {version}")


class RecordingControl:
    def __init__(self):
        self.calls = []

    def index(self, *, ready_only):
        entries = [IndexEntry("a", "1", "READY"), IndexEntry("b", "1", "UNAVAILABLE", "unloaded"), IndexEntry("c")]
        return [entry for entry in entries if entry.state == "READY" or not ready_only]

    async def load(self, name, parameters):
        self.calls.append(("load", name, parameters))
        if name == "broken":
            raise invalid("model 'broken': version 1 cannot be loaded")

    async def unload(self, name, *, unload_dependents):
        self.calls.append(("unload", name, unload_dependents))


class Door:
    """A running gateway, its planes, and a raw channel to it."""

    def __init__(self, gateway, data, control, port):
        self.gateway, self.data, self.control, self.port = gateway, data, control, port
        self.address = f"127.0.0.1:{port}"
        self.channel = grpc.aio.insecure_channel(
            self.address,
            options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)],
        )

    def call(self, rpc, request=b"", **options):
        path = rpc if rpc.startswith("/") else INFERENCE + rpc
        data = request if isinstance(request, bytes) else request.SerializeToString()
        return self.channel.unary_unary(path)(data, **options)

    async def status(self, rpc, request=b"", **options):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.call(rpc, request, **options)
        return caught.value.code(), caught.value.details()


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return request.param


@pytest.fixture
async def open_door(transport):
    doors = []

    async def open_one(**settings):
        data, control = EchoData(), RecordingControl()
        values = {"address": "127.0.0.1", "port": 0, "transport": transport} | settings
        gateway = GrpcGateway(data, control, GrpcSettings(**values))
        port = await gateway.start()
        doors.append(Door(gateway, data, control, port))
        return doors[-1]

    yield open_one
    for door in doors:
        await door.channel.close()
        await door.gateway.stop()


@pytest.fixture
async def door(open_door):
    return await open_door()


def infer_request(model="echo", data=b"abcd", **fields):
    values = {
        "model_name": model,
        "inputs": [pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="UINT8", shape=[len(data)])],
        "raw_input_contents": [data],
    }
    return pb.ModelInferRequest(**(values | fields))


async def test_live_and_ready_tell_what_the_data_plane_says(door):
    assert pb.ServerLiveResponse.FromString(await door.call("ServerLive")).live
    assert pb.ServerReadyResponse.FromString(await door.call("ServerReady")).ready
    door.data.is_live = door.data.is_ready = False
    assert not pb.ServerLiveResponse.FromString(await door.call("ServerLive")).live
    assert not pb.ServerReadyResponse.FromString(await door.call("ServerReady")).ready


async def test_model_ready_is_false_for_a_model_that_loads(door):
    response = await door.call("ModelReady", pb.ModelReadyRequest(name="loading"))
    assert not pb.ModelReadyResponse.FromString(response).ready


async def test_model_ready_of_an_unknown_model_is_not_found(door):
    assert await door.status("ModelReady", pb.ModelReadyRequest(name="missing")) == (
        grpc.StatusCode.NOT_FOUND,
        "model 'missing' does not exist",
    )


@pytest.mark.parametrize("rpc", ["ServerLive", "ServerReady", "ModelReady"])
async def test_health_of_an_exiting_server_is_unavailable(door, rpc):
    door.data.is_exiting = True
    assert (await door.status(rpc))[0] is grpc.StatusCode.UNAVAILABLE


async def test_the_standard_health_service_mirrors_ready(door):
    check = "/grpc.health.v1.Health/Check"
    assert await door.call(check, b"\x0a\x01x") == b"\x08\x01"
    door.data.is_ready = False
    assert await door.call(check) == b"\x08\x02"
    door.data.is_ready, door.data.is_exiting = True, True
    assert await door.call(check) == b"\x08\x02"


async def test_server_metadata(door):
    response = pb.ServerMetadataResponse.FromString(await door.call("ServerMetadata"))
    assert (response.name, response.version, list(response.extensions)) == (
        "headrace",
        "0.1",
        ["parameters", "statistics"],
    )


async def test_model_metadata(door):
    request = pb.ModelMetadataRequest(name="m", version="2")
    response = pb.ModelMetadataResponse.FromString(await door.call("ModelMetadata", request))
    assert (response.name, list(response.versions), response.platform) == ("m", ["1", "2"], "echo")
    tensors = [(one.name, one.datatype, list(one.shape)) for one in (*response.inputs, *response.outputs)]
    assert tensors == [("INPUT0", "FP32", [-1, 4]), ("OUTPUT0", "BYTES", [-1])]


async def test_model_config_is_the_whole_message(door):
    response = await door.call("ModelConfig", pb.ModelConfigRequest(name="m"))
    config = pb.ModelConfigResponse.FromString(response).config
    assert (config.name, config.max_batch_size) == ("m", 8)


async def test_statistics_of_one_model_and_of_all(door):
    for name, version, expected in (("m", "1", ("m", "1")), ("", "", ("all", "-1"))):
        response = await door.call("ModelStatistics", pb.ModelStatisticsRequest(name=name, version=version))
        (one,) = pb.ModelStatisticsResponse.FromString(response).model_stats
        assert (one.name, one.version) == expected


@pytest.mark.parametrize("rpc", ["ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics", "ModelInfer"])
async def test_a_bad_version_is_the_clients_mistake(door, rpc):
    field = "model_name" if rpc == "ModelInfer" else "name"
    request = getattr(pb, f"{rpc}Request")(**{field: "m", ("model_" if rpc == "ModelInfer" else "") + "version": "v1"})
    code, text = await door.status(rpc, request)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "v1" in text


async def test_the_index_lists_all_or_ready_models(door):
    for ready, expected in ((False, ["a", "b", "c"]), (True, ["a"])):
        response = await door.call("RepositoryIndex", pb.RepositoryIndexRequest(ready=ready))
        assert [one.name for one in pb.RepositoryIndexResponse.FromString(response).models] == expected


@pytest.mark.parametrize("rpc", ["RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"])
async def test_choosing_a_repository_is_not_supported(door, rpc):
    code, text = await door.status(rpc, getattr(pb, f"{rpc}Request")(repository_name="other"))
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert "other" in text


@pytest.mark.parametrize(
    ("rpc", "key", "value"),
    [
        ("RepositoryModelLoad", "config", {"bytes_param": b"{}"}),
        ("RepositoryModelLoad", "file:1/m", {"string_param": "x"}),
        ("RepositoryModelLoad", "other", {"bool_param": True}),
        ("RepositoryModelUnload", "unload_dependents", {"int64_param": 1}),
        ("RepositoryModelUnload", "unload_dependents", {}),
        ("RepositoryModelUnload", "other", {"bool_param": True}),
    ],
)
async def test_bad_repository_parameters_are_refused_before_anything_happens(door, rpc, key, value):
    request = getattr(pb, f"{rpc}Request")(model_name="m", parameters={key: pb.ModelRepositoryParameter(**value)})
    code, text = await door.status(rpc, request)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert f"'{key}'" in text
    assert door.control.calls == []


async def test_an_inference_is_answered_with_raw_contents_and_released_once(door):
    response = pb.ModelInferResponse.FromString(await door.call("ModelInfer", infer_request(id="7")))
    assert (response.model_name, response.model_version, response.id) == ("echo", "1", "7")
    assert [(one.name, one.datatype, list(one.shape)) for one in response.outputs] == [("OUTPUT0", "UINT8", [4])]
    assert list(response.raw_output_contents) == [b"abcd"]
    assert door.data.released == 1


async def test_a_large_tensor_comes_back_byte_for_byte(door):
    data = np.random.default_rng(1).bytes(20_000_000)
    response = pb.ModelInferResponse.FromString(await door.call("ModelInfer", infer_request(data=data)))
    assert response.raw_output_contents[0] == data


async def test_a_compressed_request_is_understood(door):
    response = await door.call("ModelInfer", infer_request(data=bytes(10_000)), compression=grpc.Compression.Gzip)
    assert pb.ModelInferResponse.FromString(response).raw_output_contents[0] == bytes(10_000)


async def test_the_trace_context_reaches_the_data_plane(door):
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await door.call("ModelInfer", infer_request(), metadata=(("traceparent", parent), ("other", "x")))
    assert door.data.requests[0].trace_context == parent


@pytest.mark.parametrize("code", ErrorCode)
async def test_each_error_code_becomes_its_status_with_the_sentence_unchanged(door, code):
    status, text = await door.status("ModelInfer", infer_request(code.name))
    expected = {"INVALID_ARG": "INVALID_ARGUMENT", "UNSUPPORTED": "UNIMPLEMENTED"}.get(code.name, code.name)
    assert status is grpc.StatusCode[expected]
    assert text == f"planned {code.name} é\n\0 😀"


async def test_an_unexpected_exception_is_internal_and_tells_nothing(door, caplog):
    with caplog.at_level(logging.ERROR):
        status, text = await door.status("ModelInfer", infer_request("boom"))
    assert status is grpc.StatusCode.INTERNAL
    assert "secret" not in text
    assert "Traceback" not in text
    assert "a secret of ours" in caplog.text


async def test_a_very_long_sentence_still_arrives(door):
    status, text = await door.status("ModelInfer", infer_request("long"))
    assert status is grpc.StatusCode.INVALID_ARGUMENT
    assert text.startswith("éé")


async def test_a_response_that_cannot_be_encoded_is_released(door):
    status, _ = await door.status("ModelInfer", infer_request("huge"))
    assert status is grpc.StatusCode.INTERNAL
    assert door.data.released == 1


async def test_a_malformed_request_touches_nobody_else(door):
    status, text = await door.status("ModelInfer", b"\xff\xff\xff")
    assert status is grpc.StatusCode.INVALID_ARGUMENT
    assert "ModelInferRequest" in text
    assert await door.call("ModelInfer", infer_request())


@pytest.mark.parametrize(
    "rpc",
    [
        "SystemSharedMemoryStatus",
        "SystemSharedMemoryRegister",
        "SystemSharedMemoryUnregister",
        "CudaSharedMemoryStatus",
        "CudaSharedMemoryRegister",
        "CudaSharedMemoryUnregister",
        "TraceSetting",
        "LogSettings",
    ],
)
async def test_rpcs_not_served_yet_say_so(door, rpc):
    status, text = await door.status(rpc)
    assert status is grpc.StatusCode.UNIMPLEMENTED
    assert "not served yet" in text


async def test_an_unknown_method_is_unimplemented(door):
    assert (await door.status("Nope"))[0] is grpc.StatusCode.UNIMPLEMENTED
    assert (await door.status("/grpc.health.v1.Health/Watch"))[0] is grpc.StatusCode.UNIMPLEMENTED


async def test_streamed_inference_is_unimplemented_before_the_client_ends_its_stream(door):
    stream = door.channel.stream_stream(INFERENCE + "ModelStreamInfer")()
    assert await asyncio.wait_for(stream.code(), 5) is grpc.StatusCode.UNIMPLEMENTED
    assert "ModelStreamInfer" in await stream.details()


async def test_a_cancelled_call_cancels_the_inference_at_once(door):
    call = door.call("ModelInfer", infer_request("hang"))
    sent = asyncio.ensure_future(call)
    await asyncio.wait_for(door.data.entered.wait(), 5)
    call.cancel()
    await asyncio.wait_for(door.data.cancelled.wait(), 0.1)
    with pytest.raises(asyncio.CancelledError):
        await sent
    assert await door.call("ModelInfer", infer_request())


async def test_a_passed_deadline_cancels_the_inference_at_once(door):
    status, _ = await door.status("ModelInfer", infer_request("hang"), timeout=0.2)
    assert status is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(door.data.cancelled.wait(), 0.1)


async def test_a_closed_connection_cancels_the_inference(door):
    call = asyncio.ensure_future(door.call("ModelInfer", infer_request("hang")))
    await asyncio.wait_for(door.data.entered.wait(), 5)
    await door.channel.close()
    await asyncio.wait_for(door.data.cancelled.wait(), 5)
    with pytest.raises((asyncio.CancelledError, grpc.RpcError)):
        await call


async def test_one_cancelled_call_leaves_the_others_alone(door):
    calls = [asyncio.ensure_future(door.call("ModelInfer", infer_request("held", id=str(i)))) for i in range(8)]
    gone = door.call("ModelInfer", infer_request("hang"))
    waiter = asyncio.ensure_future(gone)
    await asyncio.wait_for(door.data.entered.wait(), 5)
    gone.cancel()
    door.data.let_go.set()
    answers = await asyncio.gather(*calls)
    assert [pb.ModelInferResponse.FromString(one).id for one in answers] == [str(i) for i in range(8)]
    with pytest.raises(asyncio.CancelledError):
        await waiter


async def test_many_calls_at_once_get_their_own_answers(door):
    async def one(i):
        data = str(i).encode() * (1 + i % 50)
        response = pb.ModelInferResponse.FromString(await door.call("ModelInfer", infer_request(data=data, id=str(i))))
        return response.id == str(i) and response.raw_output_contents[0] == data

    assert all(await asyncio.gather(*(one(i) for i in range(300))))
    assert door.data.released == 300


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


@pytest.mark.parametrize("transport", ["grpcio"], indirect=True)
async def test_messages_above_the_limit_are_refused_either_way(open_door):
    """A bomb too: what counts is the size after decompression."""
    door = await open_door(max_message_size=100_000)
    status, _ = await door.status("ModelInfer", infer_request(data=bytes(100_001)))
    assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
    bomb = infer_request(data=bytes(5_000_000))
    status, _ = await door.status("ModelInfer", bomb, compression=grpc.Compression.Gzip)
    assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
    status, text = await door.status("ModelInfer", infer_request("double", data=bytes(60_000)))
    assert status is grpc.StatusCode.INVALID_ARGUMENT
    assert "above the 100000" in text
    assert door.data.released == 1


@pytest.mark.parametrize("level", ["low", "medium", "high"])
@pytest.mark.parametrize("transport", ["grpcio"], indirect=True)
async def test_responses_are_compressed_when_asked(open_door, level):
    door = await open_door(compression=level)
    counted = 0

    async def forward(reader, writer, count):
        nonlocal counted
        while data := await reader.read(65536):
            counted += len(data) * count
            writer.write(data)
        writer.close()
        await writer.wait_closed()

    closed = asyncio.Event()

    async def relay(reader, writer):
        upstream = await asyncio.open_connection("127.0.0.1", door.port)
        await asyncio.gather(forward(reader, upstream[1], 0), forward(upstream[0], writer, 1))
        closed.set()

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            data = infer_request(data=bytes(1_000_000)).SerializeToString()
            answer = await channel.unary_unary(INFERENCE + "ModelInfer")(data)
        await asyncio.wait_for(closed.wait(), 5)
    assert pb.ModelInferResponse.FromString(answer).raw_output_contents[0] == bytes(1_000_000)
    assert counted < 100_000


async def test_a_tritonclient_of_each_kind_gets_its_tensors_back(door):
    words = np.array([["a", "é"], ["", "x\0y"]], dtype=object)
    numbers = np.arange(6, dtype=np.int64).reshape(2, 3)

    def tensors(module):
        inputs = [module.InferInput("INPUT0", [2, 2], "BYTES"), module.InferInput("INPUT1", [2, 3], "INT64")]
        inputs[0].set_data_from_numpy(words)
        inputs[1].set_data_from_numpy(numbers)
        return inputs

    def check(result):
        assert [one.decode() for one in result.as_numpy("OUTPUT0").reshape(-1)] == list(words.reshape(-1))
        np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), numbers)
        assert result.get_response().id == "1"

    def synchronous():
        with tritonclient.grpc.InferenceServerClient(door.address) as client:
            assert client.is_server_live()
            assert client.is_server_ready()
            assert client.is_model_ready("echo")
            check(client.infer("echo", tensors(tritonclient.grpc), request_id="1", parameters={"k": 1}))

    await asyncio.to_thread(synchronous)
    async with tritonclient.grpc.aio.InferenceServerClient(door.address) as client:
        check(
            await client.infer(
                "echo",
                tensors(tritonclient.grpc.aio),
                request_id="1",
                sequence_id=5,
                sequence_start=True,
                priority=2,
                timeout=1000,
            )
        )
    last = door.data.requests[-1]
    assert (last.correlation_id, last.flags, last.priority, last.timeout_us) == (5, 1, 2, 1000)


async def test_tritonclient_manages_models(door):
    async with tritonclient.grpc.aio.InferenceServerClient(door.address) as client:
        await client.load_model("m", config='{"a":1}', files={"file:1/model.x": b"\0\1"})
        await client.unload_model("m", unload_dependents=True)
        index = await client.get_model_repository_index()
        metadata = await client.get_model_metadata("m", as_json=True)
        config = await client.get_model_config("m", as_json=True)
        statistics = await client.get_inference_statistics("m", as_json=True)
    assert door.control.calls == [
        ("load", "m", {"config": '{"a":1}', "file:1/model.x": b"\0\1"}),
        ("unload", "m", True),
    ]
    assert [(one.name, one.state, one.reason) for one in index.models][:2] == [
        ("a", "READY", ""),
        ("b", "UNAVAILABLE", "unloaded"),
    ]
    assert metadata["platform"] == "echo"
    assert config["config"]["max_batch_size"] == 8
    assert statistics["model_stats"][0]["inference_count"] == "5"


async def test_tritonclient_sees_our_sentence_and_status(door):
    async with tritonclient.grpc.aio.InferenceServerClient(door.address) as client:
        with pytest.raises(InferenceServerException) as caught:
            await client.load_model("broken")
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
        assert caught.value.message() == "model 'broken': version 1 cannot be loaded"


@pytest.mark.parametrize("datatype", [one for one in dt.ALL if one is not dt.BYTES], ids=lambda one: one.name)
async def test_every_datatype_passes_raw(door, datatype):
    data = bytes(range(datatype.itemsize * 2))
    request = infer_request(
        inputs=[pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype=datatype.name, shape=[2])],
        raw_input_contents=[data],
    )
    response = pb.ModelInferResponse.FromString(await door.call("ModelInfer", request))
    assert (response.outputs[0].datatype, response.raw_output_contents[0]) == (datatype.name, data)
