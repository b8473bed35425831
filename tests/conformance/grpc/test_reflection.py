"""Server reflection, on both transports and in both versions of its protocol."""

import asyncio

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pool import DescriptorPool

from headrace_protocol._generated.reflection_pb2 import (
    ExtensionRequest,
    ServerReflectionRequest,
    ServerReflectionResponse,
)

VERSIONS = ("v1", "v1alpha")
NAMES = ["grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection", "inference.GRPCInferenceService"]


async def ask(door, *questions, version="v1"):
    """Return the answers and the status."""
    path = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
    call = door.channel.stream_stream(path)(timeout=10)
    answers = []
    try:
        for question in questions:
            await call.write(question if isinstance(question, bytes) else question.SerializeToString())
            answers.append(ServerReflectionResponse.FromString(await call.read()))
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass
    return answers, await call.code()


@pytest.mark.parametrize("version", VERSIONS)
async def test_services_are_listed(door, version):
    question = ServerReflectionRequest(host="h", list_services="*")
    (answer,), status = await ask(door, question, version=version)
    assert status is grpc.StatusCode.OK
    assert [one.name for one in answer.list_services_response.service] == NAMES
    assert (answer.valid_host, answer.original_request) == ("h", question)


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_tool_can_build_every_message_from_what_it_is_told(door, version):
    pool = DescriptorPool()
    questions = [ServerReflectionRequest(file_containing_symbol=name) for name in NAMES]
    answers, status = await ask(door, *questions, version=version)
    assert status is grpc.StatusCode.OK
    known = set()
    for answer in answers:
        for data in reversed(answer.file_descriptor_response.file_descriptor_proto):
            file = descriptor_pb2.FileDescriptorProto.FromString(data)
            if file.name not in known:
                known.add(file.name)
                pool.Add(file)
    assert known == {"grpc_service.proto", "model_config.proto", "health.proto", "reflection.proto"}
    infer = pool.FindServiceByName("inference.GRPCInferenceService").methods_by_name["ModelStreamInfer"]
    assert infer.input_type.fields_by_name["raw_input_contents"].number == 7
    assert pool.FindMessageTypeByName("inference.ModelConfig")
    assert pool.FindServiceByName("grpc.health.v1.Health").methods_by_name["Watch"]


@pytest.mark.parametrize(
    "symbol",
    [
        "inference.GRPCInferenceService.ModelInfer",
        "inference.ModelInferRequest",
        "inference.ModelInferRequest.InferInputTensor",
        "inference.ModelInferRequest.id",
    ],
)
async def test_a_file_is_found_by_what_it_declares(door, symbol):
    (answer,), _ = await ask(door, ServerReflectionRequest(file_containing_symbol=symbol))
    first = descriptor_pb2.FileDescriptorProto.FromString(answer.file_descriptor_response.file_descriptor_proto[0])
    assert first.name == "grpc_service.proto"


async def test_a_file_is_found_by_its_name(door):
    (answer,), _ = await ask(door, ServerReflectionRequest(file_by_filename="model_config.proto"))
    (data,) = answer.file_descriptor_response.file_descriptor_proto
    assert descriptor_pb2.FileDescriptorProto.FromString(data).package == "inference"


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ({"file_by_filename": "nope.proto"}, "'nope.proto'"),
        ({"file_by_filename": "../model_config.proto"}, "'../model_config.proto'"),
        ({"file_containing_symbol": "inference.Nope"}, "'inference.Nope'"),
        ({"file_containing_symbol": "inference.GRPCInferenceService.Nope"}, "Nope"),
        ({"file_containing_symbol": ""}, "''"),
        ({"all_extension_numbers_of_type": "inference.Nope"}, "'inference.Nope'"),
        (
            {
                "file_containing_extension": ExtensionRequest(
                    containing_type="inference.ModelConfig", extension_number=5
                )
            },
            "extension 5",
        ),
    ],
)
async def test_what_is_not_there_is_answered_and_the_stream_goes_on(door, question, said):
    answers, status = await ask(door, ServerReflectionRequest(**question), ServerReflectionRequest(list_services=""))
    assert status is grpc.StatusCode.OK
    assert answers[0].error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
    assert said in answers[0].error_response.error_message
    assert [one.name for one in answers[1].list_services_response.service] == NAMES


async def test_messages_have_no_extensions(door):
    (answer,), _ = await ask(door, ServerReflectionRequest(all_extension_numbers_of_type="inference.ModelConfig"))
    response = answer.all_extension_numbers_response
    assert (response.base_type_name, list(response.extension_number)) == ("inference.ModelConfig", [])


async def test_a_question_for_nothing_is_answered_with_an_error(door):
    (answer,), _ = await ask(door, ServerReflectionRequest())
    assert answer.error_response.error_code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


@pytest.mark.parametrize(
    "question", [b"\xff\xff", ServerReflectionRequest(file_by_filename="x" * 70_000)], ids=["malformed", "too long"]
)
async def test_what_is_no_question_ends_the_stream(door, question):
    answers, status = await ask(door, question)
    assert (answers, status) == ([], grpc.StatusCode.INVALID_ARGUMENT)


async def test_reflection_can_be_switched_off(open_door):
    door = await open_door(reflection=False)
    for version in VERSIONS:
        answers, status = await ask(door, ServerReflectionRequest(list_services=""), version=version)
        assert (answers, status) == ([], grpc.StatusCode.UNIMPLEMENTED)
