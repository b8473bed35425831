"""Health and metadata over gRPC, on both transports."""

import grpc
import grpc.aio
import pytest

from headrace_protocol._generated import grpc_service_pb2 as pb


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
