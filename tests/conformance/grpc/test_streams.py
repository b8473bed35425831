"""ModelStreamInfer as clients meet it, on both transports: what is answered, and in which order."""

import asyncio
import logging
import queue

import grpc
import grpc.aio
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from grpc_doors import StreamClient, infer_request, is_final, stream_data, stream_ids
from headrace_protocol._generated import grpc_service_pb2 as pb
from headrace_protocol.errors import ErrorCode, InferError


async def test_ordinary_requests_of_any_number_are_answered_in_order_and_the_stream_ends_well(door):
    client = StreamClient(door)
    await client.send(*(infer_request(id=str(n), data=b"%d" % n) for n in range(100)))
    answers, status = await client.end()
    assert status is grpc.StatusCode.OK
    assert stream_ids(answers) == [str(n) for n in range(100)]
    assert stream_data(answers) == [b"%d" % n for n in range(100)]
    assert all(is_final(answer) and not answer.error_message for answer in answers)
    assert {(one.infer_response.model_name, one.infer_response.model_version) for one in answers} == {("echo", "1")}
    assert door.data.released == 100


async def test_a_slow_ordinary_request_holds_back_those_behind_it_but_no_decoupled_one(door):
    client = StreamClient(door)
    await client.send(
        infer_request("held", id="slow"),
        infer_request(id="quick"),
        infer_request("missing", id="unknown"),
        infer_request("stream", id="d"),
    )
    await door.data.begun(2)
    streams = door.data.streams
    streams["d"].send(b"1")
    assert stream_ids(await client.receive(1)) == ["d"]
    streams["slow"].send(b"s", final=True)
    assert stream_ids(await client.receive(3)) == ["slow", "quick", "unknown"]
    streams["d"].send(b"2", final=True)
    answers, status = await client.end()
    assert (stream_ids(answers), status) == (["d"], grpc.StatusCode.OK)


async def test_responses_of_decoupled_models_interleave_and_the_last_one_says_so(door):
    client = StreamClient(door)
    await client.send(infer_request("stream_a", id="a"), infer_request("stream_b", id="b"))
    await door.data.begun(2)
    a, b = door.data.streams["a"], door.data.streams["b"]
    for call, data, last in ((b, b"1", False), (a, b"2", False), (b, b"3", True), (a, b"4", True)):
        call.send(data, final=last)
    answers, status = await client.end()
    assert status is grpc.StatusCode.OK
    assert list(zip(stream_ids(answers), stream_data(answers), map(is_final, answers), strict=True)) == [
        ("b", b"1", False),
        ("a", b"2", False),
        ("b", b"3", True),
        ("a", b"4", True),
    ]
    assert (a.unread, b.unread) == (0, 0)


async def test_an_empty_end_is_told_only_where_the_client_asked(door):
    client = StreamClient(door)
    asked = {"triton_enable_empty_final_response": pb.InferParameter(bool_param=True)}
    await client.send(
        infer_request("stream", id="a"), infer_request("stream", id="b", model_version="", parameters=asked)
    )
    for call in await door.data.begun(2):
        call.send(b"x")
        call.send(None)
    answers, status = await client.end()
    assert status is grpc.StatusCode.OK
    assert sorted(zip(stream_ids(answers), map(is_final, answers), strict=True)) == [
        ("a", False),
        ("b", False),
        ("b", True),
    ]
    end = answers[-1].infer_response
    assert (end.model_name, end.model_version, list(end.outputs), list(end.raw_output_contents)) == (
        "stream",
        "",
        [],
        [],
    )
    assert [call.unread for call in door.data.streams.values()] == [0, 0]


BAD = {
    "unknown model": (infer_request("missing", id="7", model_version="3"), "unknown", ("7", "missing", "3")),
    "version no number": (infer_request(id="7", model_version="v1"), "v1", ("7", "echo", "v1")),
    "negative dimension": (
        infer_request(id="7", inputs=[pb.ModelInferRequest.InferInputTensor(name="X", datatype="UINT8", shape=[-4])]),
        "'X'",
        ("7", "echo", ""),
    ),
    "fails": (infer_request("UNAVAILABLE", id="7"), "planned UNAVAILABLE", ("7", "UNAVAILABLE", "")),
    "our own fault": (infer_request("boom", id="7"), "its log has the reason", ("7", "boom", "")),
    "answer that cannot be written": (infer_request("huge", id="7"), "'too big'", ("7", "huge", "")),
    "no message": (b"\xff\xff\xff", "ModelInferRequest", ("", "", "")),
}


@pytest.mark.parametrize(("request_", "said", "named"), BAD.values(), ids=BAD.keys())
async def test_a_failure_is_told_in_its_turn_and_the_stream_goes_on(door, caplog, request_, said, named):
    client = StreamClient(door)
    with caplog.at_level(logging.CRITICAL):
        await client.send(infer_request(id="before"), request_, infer_request(id="after"))
        answers, status = await client.end()
    assert status is grpc.StatusCode.OK
    assert stream_ids(answers) == ["before", named[0], "after"]
    failure = answers[1]
    assert said in failure.error_message
    told = failure.infer_response
    assert (told.id, told.model_name, told.model_version) == named
    assert not told.parameters
    assert not told.outputs
    assert "secret" not in failure.error_message


async def test_every_message_is_answered_once_whatever_it_holds(door, caplog):
    """Good messages with a few bytes changed; afterwards a good one is served."""
    rng = np.random.default_rng(3)
    good = infer_request(id="x", data=bytes(range(40)), parameters={"k": pb.InferParameter(int64_param=1)})
    messages = []
    for _ in range(400):
        data = bytearray(good.SerializeToString())
        for place in rng.integers(0, len(data), rng.integers(1, 4)):
            data[place] = rng.integers(0, 256)
        messages.append(bytes(data[: rng.integers(1, len(data) + 1)] if rng.integers(0, 4) == 0 else data))
    client = StreamClient(door)
    with caplog.at_level(logging.CRITICAL):
        await client.send(*messages, infer_request(id="last"))
        answers, status = await client.end()
    assert (len(answers), status) == (401, grpc.StatusCode.OK)
    assert 50 < sum(bool(answer.error_message) for answer in answers) < 400
    assert not any("its log has the reason" in answer.error_message for answer in answers)
    assert (answers[-1].infer_response.id, answers[-1].error_message) == ("last", "")


async def test_a_failure_in_the_middle_ends_that_request_alone(door):
    client = StreamClient(door)
    await client.send(infer_request("stream", id="a"), infer_request("stream", id="b"))
    a, b = await door.data.begun(2)
    a.send(b"1")
    a.fail(InferError(ErrorCode.INTERNAL, "planned"))
    b.send(b"2", final=True)
    answers, status = await client.end()
    assert status is grpc.StatusCode.OK
    assert [(one.infer_response.id, one.error_message) for one in answers] == [("a", ""), ("a", "planned"), ("b", "")]


@pytest.mark.parametrize("transport", ["grpcio"], indirect=True)
async def test_an_answer_that_cannot_be_written_cancels_the_rest_of_its_request(open_door):
    door = await open_door(max_message_size=10_000)
    client = StreamClient(door)
    await client.send(infer_request("stream", id="a"), infer_request(id="b"))
    (a,) = await door.data.begun()
    a.send(b"1")
    a.send(bytes(20_000))
    a.send(b"3")
    await asyncio.wait_for(a.cancelled.wait(), 5)
    answers, status = await client.end()
    assert status is grpc.StatusCode.OK
    assert sorted((one.infer_response.id, "above the 10000" in one.error_message) for one in answers) == [
        ("a", False),
        ("a", True),
        ("b", False),
    ]
    assert a.unread == 0


@pytest.mark.parametrize("code", [ErrorCode.NOT_FOUND, ErrorCode.INVALID_ARG, ErrorCode.UNSUPPORTED])
async def test_a_client_that_asks_for_status_errors_gets_the_first_one_and_the_rest_is_cancelled(door, code):
    client = StreamClient(door, metadata=(("triton_grpc_error", "true"),))
    await client.send(infer_request(id="1"), infer_request("stream", id="s"))
    (running,) = await door.data.begun()
    running.send(b"x")
    assert sorted(stream_ids(await client.receive(2))) == ["1", "s"]
    await client.send(infer_request(code.name, id="2"))
    assert await client.receive() == []
    expected = {"INVALID_ARG": "INVALID_ARGUMENT", "UNSUPPORTED": "UNIMPLEMENTED"}.get(code.name, code.name)
    assert await client.status() is grpc.StatusCode[expected]
    assert (await client.call.details()).startswith(f"planned {code.name} é")
    await asyncio.wait_for(running.cancelled.wait(), 5)


async def test_a_malformed_message_is_a_status_too_where_the_client_asks(door):
    client = StreamClient(door, metadata=(("triton_grpc_error", "true"),))
    await client.send(b"\xff\xff\xff")
    assert await client.receive() == []
    assert await client.status() is grpc.StatusCode.INVALID_ARGUMENT


async def test_only_true_asks_for_status_errors(door):
    client = StreamClient(door, metadata=(("triton_grpc_error", "false"),))
    await client.send(infer_request("missing"))
    answers, status = await client.end()
    assert (len(answers), status) == (1, grpc.StatusCode.OK)


async def test_metadata_of_the_stream_belong_to_each_of_its_requests(open_door):
    door = await open_door(header_forward_pattern="^x-")
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    client = StreamClient(door, metadata=(("traceparent", parent), ("x-tenant", "a"), ("other", "b")))
    await client.send(infer_request(id="1"), infer_request(id="2", parameters={"k": pb.InferParameter(int64_param=1)}))
    await client.end()
    assert [(one.trace_context, one.parameters) for one in door.data.requests] == [
        (parent, {"x-tenant": "a"}),
        (parent, {"k": 1, "x-tenant": "a"}),
    ]


async def test_a_large_tensor_comes_back_byte_for_byte(door):
    data = np.random.default_rng(2).bytes(20_000_000)
    client = StreamClient(door)
    await client.send(infer_request(data=data))
    answers, status = await client.end()
    assert status is grpc.StatusCode.OK
    assert stream_data(answers) == [data]


async def test_tritonclient_streams(door):
    """The stock client: ordinary and failing requests, ids, and the flag of the last response."""

    def run():
        outcomes = queue.Queue()
        tensor = tritonclient.grpc.InferInput("INPUT0", [2, 2], "INT64")
        tensor.set_data_from_numpy(np.arange(4, dtype=np.int64).reshape(2, 2))
        with tritonclient.grpc.InferenceServerClient(door.address) as client:
            client.start_stream(lambda result, error: outcomes.put(error or result))
            for number in range(5):
                client.async_stream_infer("missing" if number == 2 else "echo", [tensor], request_id=str(number))
            got = [outcomes.get(timeout=10) for _ in range(5)]
            client.stop_stream()
        return got

    got = await asyncio.to_thread(run)
    failure = got.pop(2)
    assert isinstance(failure, InferenceServerException)
    assert "missing" in failure.message()
    for number, result in zip((0, 1, 3, 4), got, strict=True):
        assert result.get_response().id == str(number)
        assert result.get_response().parameters["triton_final_response"].bool_param
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), np.arange(4).reshape(2, 2))
