"""ModelInfer as clients meet it, on both transports, over a data plane that echoes."""

import asyncio
import logging

import grpc
import grpc.aio
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio

from grpc_doors import infer_request
from headrace_protocol import datatype as dt
from headrace_protocol._generated import grpc_service_pb2 as pb
from headrace_protocol.errors import ErrorCode


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


async def test_what_keeps_a_caller_with_a_version_reaches_the_data_plane(door):
    await door.call("ModelInfer", infer_request(), metadata=(("x-headrace-sticky", "caller 7"), ("other", "x")))
    await door.call("ModelInfer", infer_request())
    assert [request.sticky for request in door.data.requests] == ["caller 7", None]


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


@pytest.mark.parametrize("datatype", [one for one in dt.ALL if one is not dt.BYTES], ids=lambda one: one.name)
async def test_every_datatype_passes_raw(door, datatype):
    data = bytes(range(datatype.itemsize * 2))
    request = infer_request(
        inputs=[pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype=datatype.name, shape=[2])],
        raw_input_contents=[data],
    )
    response = pb.ModelInferResponse.FromString(await door.call("ModelInfer", request))
    assert (response.outputs[0].datatype, response.raw_output_contents[0]) == (datatype.name, data)
