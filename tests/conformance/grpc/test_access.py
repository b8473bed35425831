"""Restricted protocols and forwarded metadata, on both transports."""

import grpc
import grpc.aio
import pytest
import tritonclient.grpc.aio
from tritonclient.utils import InferenceServerException

from grpc_doors import INFERENCE, infer_request
from headrace.gateway.grpc.access import KIND
from headrace.gateway.restricted import HTTP_ALONE, KINDS, by_kind, parse_group
from headrace_protocol._generated import grpc_service_pb2 as pb
from headrace_protocol._generated.grpc_service_pb2 import DESCRIPTOR

SHOWN = (("triton-grpc-protocol-key", "s3cret"),)
WRONG = {
    "nothing": (),
    "another value": (("triton-grpc-protocol-key", "s3creT"),),
    "a longer value": (("triton-grpc-protocol-key", "s3cretx"),),
    "without the prefix": (("key", "s3cret"),),
    "another key": (("triton-grpc-protocol-other", "s3cret"),),
}


def restricted(*groups):
    return by_kind(parse_group(group) for group in groups)


async def outcome(door, path, metadata):
    """Return the status of a call and its sentence."""
    if path.endswith("ModelStreamInfer"):
        call = door.channel.stream_stream(path)(metadata=metadata, timeout=5)
        await call.done_writing()
        return await call.code(), await call.details()
    try:
        if path.endswith("Watch"):
            call = door.channel.unary_stream(path)(b"", metadata=metadata, timeout=5)
            assert await call.read()
            call.cancel()
        else:
            await door.call(path, metadata=metadata, timeout=5)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details()
    return grpc.StatusCode.OK, ""


def test_every_rpc_is_of_a_kind_and_every_kind_has_one():
    rpcs = DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    assert {path for path in KIND if path.startswith(INFERENCE)} == {INFERENCE + rpc for rpc in rpcs}
    assert set(KIND.values()) == set(KINDS) - set(HTTP_ALONE)


async def test_every_restricted_rpc_takes_the_header_and_is_refused_without(open_door):
    door = await open_door(restricted=restricted(f"{','.join(KINDS)}:key=s3cret"))
    for path in KIND:
        status, text = await outcome(door, path, ())
        assert (path, status) == (path, grpc.StatusCode.UNAVAILABLE)
        assert "restricted" in text
        assert "'triton-grpc-protocol-key'" in text
        assert "s3cret" not in text
        assert "restricted" not in (await outcome(door, path, SHOWN))[1], path


@pytest.mark.parametrize("metadata", WRONG.values(), ids=WRONG.keys())
async def test_only_the_right_value_of_the_right_header_admits(open_door, metadata):
    door = await open_door(restricted=restricted("inference,health:key=s3cret"))
    for path in ("ModelInfer", "ModelStreamInfer", "ServerLive"):
        assert (await outcome(door, INFERENCE + path, metadata))[0] is grpc.StatusCode.UNAVAILABLE
    assert (await outcome(door, "/grpc.health.v1.Health/Check", metadata))[0] is grpc.StatusCode.UNAVAILABLE
    assert door.data.requests == []


async def test_one_right_value_among_several_admits(open_door):
    door = await open_door(restricted=restricted("inference:key=s3cret"))
    metadata = (("triton-grpc-protocol-key", "no"), *SHOWN)
    assert await door.call("ModelInfer", infer_request(), metadata=metadata)


async def test_groups_have_headers_of_their_own_and_other_kinds_are_open(open_door):
    door = await open_door(restricted=restricted("inference:a=1", "model-repository:B=2"))
    a, b = (("triton-grpc-protocol-a", "1"),), (("triton-grpc-protocol-b", "2"),)
    assert await door.call("ModelInfer", infer_request(), metadata=a)
    assert (await door.status("ModelInfer", infer_request(), metadata=b))[0] is grpc.StatusCode.UNAVAILABLE
    assert await door.call("RepositoryIndex", metadata=b)
    assert (await door.status("RepositoryIndex", metadata=a))[0] is grpc.StatusCode.UNAVAILABLE
    assert await door.call("ServerLive")


async def test_tritonclient_shows_the_header(open_door):
    door = await open_door(restricted=restricted("health:key=s3cret"))
    async with tritonclient.grpc.aio.InferenceServerClient(door.address) as client:
        assert await client.is_server_live(headers=dict(SHOWN))
        with pytest.raises(InferenceServerException, match="restricted") as caught:
            await client.is_server_live()
        assert caught.value.status() == "StatusCode.UNAVAILABLE"


async def test_matching_metadata_become_parameters(open_door):
    door = await open_door(header_forward_pattern="^x-|EXTRA")
    metadata = (("x-tenant", "a"), ("my-extra", "b"), ("x-bin", b"\xc3\xa9"), ("other", "c"))
    await door.call("ModelInfer", infer_request(), metadata=metadata)
    assert door.data.requests[0].parameters == {"x-tenant": "a", "my-extra": "b", "x-bin": "é"}


async def test_no_metadata_become_parameters_unless_asked(door):
    await door.call("ModelInfer", infer_request(), metadata=(("x-tenant", "a"),))
    assert door.data.requests[0].parameters is None


async def test_a_reserved_name_is_not_forwarded(open_door):
    door = await open_door(header_forward_pattern="prio|triton")
    for name in ("priority", "triton_x"):
        status, text = await door.status("ModelInfer", infer_request(), metadata=((name, "1"),))
        assert status is grpc.StatusCode.INVALID_ARGUMENT
        assert f"'{name}'" in text


async def test_metadata_are_forwarded_to_no_other_call(open_door):
    door = await open_door(header_forward_pattern=".*")
    assert await door.call("ServerLive", metadata=(("priority", "1"),))
    assert await door.call("ModelMetadata", pb.ModelMetadataRequest(name="m"), metadata=(("priority", "1"),))
