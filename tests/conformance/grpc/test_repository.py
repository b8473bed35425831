"""The repository API over gRPC, on both transports."""

import grpc
import grpc.aio
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
from tritonclient.utils import InferenceServerException

from headrace_protocol._generated import grpc_service_pb2 as pb


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
        ("RepositoryModelLoad", "version", {"bool_param": True}),
        ("RepositoryModelUnload", "version", {}),
    ],
)
async def test_bad_repository_parameters_are_refused_before_anything_happens(door, rpc, key, value):
    request = getattr(pb, f"{rpc}Request")(model_name="m", parameters={key: pb.ModelRepositoryParameter(**value)})
    code, text = await door.status(rpc, request)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert f"'{key}'" in text
    assert door.control.calls == []


@pytest.mark.parametrize("value", [{"int64_param": 3}, {"string_param": "3"}])
async def test_one_version_is_loaded_and_unloaded_by_its_number(door, value):
    parameters = {"version": pb.ModelRepositoryParameter(**value)}
    for verb in ("Load", "Unload"):
        rpc = f"RepositoryModel{verb}"
        await door.call(rpc, getattr(pb, f"{rpc}Request")(model_name="m", parameters=parameters))
    assert door.control.calls == [("load", "m", {"version": 3}), ("unload", "m", False, 3)]


@pytest.mark.parametrize("text", ["0", "-1", "three", ""])
async def test_what_is_no_version_is_refused(door, text):
    parameters = {"version": pb.ModelRepositoryParameter(string_param=text)}
    request = pb.RepositoryModelUnloadRequest(model_name="m", parameters=parameters)
    code, said = await door.status("RepositoryModelUnload", request)
    assert (code, "version" in said) == (grpc.StatusCode.INVALID_ARGUMENT, True)


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
