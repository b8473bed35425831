"""Inference over HTTP on a real socket, over planes that echo: what any client of KServe v2 sees of it."""

from __future__ import annotations

import asyncio
import json
import struct

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from headrace.types import OutputTensor
from headrace_protocol import datatype as dt
from headrace_protocol.errors import ErrorCode, InferError
from http_door import GOOD, HEADER_LENGTH, error_of


async def test_json_in_json_out(door):
    status, headers, body = await door.infer({"id": "7", **GOOD}, x_tag="blue", traceparent="00-a-b-01")
    assert status == 200
    assert headers["Content-Type"] == "application/json"
    assert json.loads(body) == {
        "id": "7",
        "model_name": "echo",
        "model_version": "1",
        "parameters": {"x-tag": "blue"},
        "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [4], "data": [1.0, 2.0, 3.0, 4.5]}],
    }
    assert door.data.requests[0].trace_context == "00-a-b-01"
    assert door.data.requests[0].received_ns > 0


@pytest.mark.parametrize("name", ["X-Headrace-Sticky", "x-headrace-sticky"])
async def test_what_keeps_a_caller_with_a_version_reaches_the_data_plane(door, name):
    assert (await door.infer(GOOD, **{name.replace("-", "_"): "caller 7"}))[0] == 200
    assert (await door.infer(GOOD))[0] == 200
    assert [request.sticky for request in door.data.requests] == [b"caller 7", None]


async def test_binary_in_binary_out(door):
    head = json.dumps(
        {
            "inputs": [
                {"name": "INPUT0", "shape": [2], "datatype": "FP16", "parameters": {"binary_data_size": 4}},
                {"name": "INPUT1", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 6}},
            ],
            "outputs": [
                {"name": "OUTPUT1", "parameters": {"binary_data": False}},
                {"name": "OUTPUT0", "parameters": {"binary_data": True}},
            ],
        }
    ).encode()
    tail = b"\x00\x3c\x00\x40" + struct.pack("<I", 2) + b"hi"
    status, headers, body = await door.infer(head + tail, **{HEADER_LENGTH: str(len(head))})
    assert status == 200
    assert headers["Content-Type"] == "application/octet-stream"
    size = int(headers[HEADER_LENGTH])
    outputs = json.loads(body[:size])["outputs"]
    assert [output["name"] for output in outputs] == ["OUTPUT0", "OUTPUT1"]
    assert outputs[1]["data"] == ["hi"]
    assert body[size:] == tail[:4]


async def test_a_raw_request_is_answered_in_binary(door):
    status, headers, body = await door.infer(b"\x01\x02\x03", **{HEADER_LENGTH: "0"})
    assert status == 200
    assert body[int(headers[HEADER_LENGTH]) :] == b"\1\2\3"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (ErrorCode.INVALID_ARG, 400),
        (ErrorCode.NOT_FOUND, 404),
        (ErrorCode.UNAVAILABLE, 503),
        (ErrorCode.UNSUPPORTED, 501),
        (ErrorCode.INTERNAL, 500),
        (ErrorCode.UNKNOWN, 400),
    ],
)
async def test_failures_of_the_data_plane_keep_their_sentence(door, code, status):
    door.data.failure = InferError(code, 'a "sentence" with\nlines')
    got, _, body = await door.infer(GOOD)
    assert (got, error_of(body)) == (status, 'a "sentence" with\nlines')


async def test_a_fault_of_the_server_is_answered_500_and_told_to_the_log_alone(door, caplog):
    status, _, body = await door.infer(GOOD, model="broken")
    assert status == 500
    assert "ZeroDivision" not in error_of(body)
    assert "ZeroDivisionError" in caplog.text
    assert await door.is_well()


async def test_every_answer_is_released_once_also_when_it_cannot_be_written(door):
    assert await door.is_well()
    door.data.override = [OutputTensor("O", dt.BYTES, (1,), dt.encode_bytes([b"\xff"]))]
    status, _, body = await door.infer(GOOD)
    assert status == 400
    assert "binary_data" in error_of(body)
    door.data.override = [OutputTensor("O", dt.FP32, (4,), b"too short")]
    assert (await door.infer(GOOD))[0] == 500
    assert (door.data.answered, door.data.released) == (3, 3)


# --- the stock client ---------------------------------------------------------------------------------------------


async def test_tritonclient_infers_with_every_combination_of_forms(door):
    def session() -> list[object]:
        seen: list[object] = []
        client = triton.InferenceServerClient(f"127.0.0.1:{door.port}")
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("name with é")
        assert not client.is_model_ready("nope")
        assert client.get_model_config("echo")["name"] == "echo"
        assert client.get_inference_statistics()["model_stats"][1]["name"] == "slow"
        assert len(client.get_model_repository_index()) == 4
        client.load_model("m", config="{}", files={"file:1/m": b"\0"})
        client.unload_model("m")
        texts = np.array([["a\u00e9", ""], ["[", '"']], dtype=np.object_)
        numbers = np.arange(4, dtype=np.int64).reshape(2, 2) * 2**60
        for binary_in in (True, False):
            for binary_out in (True, False, None):
                for compression in (None, "gzip", "deflate"):
                    inputs = [
                        triton.InferInput("INPUT0", [2, 2], "INT64"),
                        triton.InferInput("INPUT1", [2, 2], "BYTES"),
                    ]
                    inputs[0].set_data_from_numpy(numbers, binary_data=binary_in)
                    inputs[1].set_data_from_numpy(texts, binary_data=binary_in)
                    names = ("OUTPUT1", "OUTPUT0")
                    result = client.infer(
                        "echo",
                        inputs,
                        outputs=None
                        if binary_out is None
                        else [triton.InferRequestedOutput(name, binary_data=binary_out) for name in names],
                        request_id="r",
                        sequence_id=5,
                        sequence_start=True,
                        priority=2,
                        timeout=1000,
                        parameters={"mine": 1},
                        request_compression_algorithm=compression,
                        response_compression_algorithm=compression,
                    )
                    assert result.get_response()["id"] == "r"
                    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), numbers)
                    seen.append([as_text(element) for element in result.as_numpy("OUTPUT1").reshape(-1)])
        with pytest.raises(InferenceServerException) as caught:
            client.infer("nope", inputs)
        assert caught.value.status() == "404"
        assert "nope" in caught.value.message()
        client.close()
        return seen

    seen = await asyncio.to_thread(session)
    assert seen == [["aé", "", "[", '"']] * 18
    request = door.data.requests[0]
    assert (request.correlation_id, request.priority, request.timeout_us) == (5, 2, 1000)
    assert request.parameters == {"mine": 1}
    assert door.control.calls == [("load", "m", {"config": "{}", "file:1/m": b"\0"}), ("unload", "m", False)]


def as_text(element: bytes | str) -> str:
    return element.decode() if isinstance(element, bytes) else element
