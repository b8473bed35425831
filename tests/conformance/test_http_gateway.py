"""The HTTP door on a real socket, over planes that echo: what any client of KServe v2 sees of it."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import struct
import zlib
from collections.abc import AsyncIterator

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from echo_planes import EchoDataPlane, NotingControlPlane
from headrace.gateway.http.app import HttpGateway, HttpSettings
from headrace.types import OutputTensor
from headrace_protocol import datatype as dt
from headrace_protocol.errors import ErrorCode, InferError

HEADER_LENGTH = "Inference-Header-Content-Length"
SETTINGS = HttpSettings(
    address="127.0.0.1",
    port=0,
    max_input_size=1 << 19,
    max_body_size=1 << 20,
    body_idle_timeout=0.3,
    header_forward_pattern="^x-",
)
GOOD = {"inputs": [{"name": "INPUT0", "shape": [4], "datatype": "FP32", "data": [1, 2, 3, 4.5]}]}


class Door:
    """A started gateway, what lies behind it, and a client that decodes nothing by itself."""

    def __init__(self, settings: HttpSettings) -> None:
        self.data = EchoDataPlane()
        self.control = NotingControlPlane()
        self.gateway = HttpGateway(self.data, self.control, settings)
        self.port = 0
        self.client: aiohttp.ClientSession

    async def ask(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, dict, bytes]:
        if isinstance(body, (dict, list)):
            body = json.dumps(body).encode()
        fields = {"Accept-Encoding": "identity"} | {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.client.request(method, path, data=body, headers=fields) as response:
            return response.status, dict(response.headers), await response.read()

    async def infer(self, body: object, model: str = "echo", **headers: str) -> tuple[int, dict, bytes]:
        return await self.ask("POST", f"/v2/models/{model}/infer", body, **headers)

    async def raw(self, *parts: bytes) -> bytes:
        """Send bytes as they are; return everything until the server closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
            return await asyncio.wait_for(reader.read(), 10)
        finally:
            writer.close()

    async def is_well(self) -> bool:
        return (await self.infer(GOOD))[0] == 200


@pytest_asyncio.fixture
async def door() -> AsyncIterator[Door]:
    door = Door(SETTINGS)
    door.port = await door.gateway.start()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{door.port}", auto_decompress=False) as door.client:
        yield door
    await door.gateway.stop(1)


def error_of(body: bytes) -> str:
    decoded = json.loads(body)
    assert list(decoded) == ["error"]
    return decoded["error"]


# --- health, metadata, lists --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready"])
async def test_health_is_told_by_the_status_with_an_empty_body(door, path):
    assert (await door.ask("GET", path))[::2] == (200, b"")
    door.data.is_live = door.data.is_ready = False
    assert (await door.ask("GET", path))[::2] == (400, b"")
    door.data.is_exiting = True
    status, _, body = await door.ask("GET", path)
    assert status == 503
    assert "exiting" in error_of(body)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v2/models/echo/ready", 200),
        ("/v2/models/echo/versions/1/ready", 200),
        ("/v2/models/nope/ready", 404),
        ("/v2/models/echo/versions/99/ready", 404),
        ("/v2/models/loading/ready", 503),
        ("/v2/models/name%20with%20%C3%A9/ready", 200),
    ],
)
async def test_readiness_of_a_model(door, path, status):
    got, _, body = await door.ask("GET", path)
    assert got == status
    assert (body == b"") == (status == 200)


async def test_metadata(door):
    assert json.loads((await door.ask("GET", "/v2?ignored=1"))[2]) == {
        "name": "echo",
        "version": "1.0",
        "extensions": ["binary_tensor_data"],
    }
    metadata = json.loads((await door.ask("GET", "/v2/models/echo"))[2])
    assert metadata["inputs"] == [{"name": "INPUT0", "datatype": "FP32", "shape": [-1, 4]}]
    assert metadata["versions"] == ["1"]


async def test_configuration_and_statistics_are_json_with_every_default(door):
    config = json.loads((await door.ask("GET", "/v2/models/echo/config"))[2])
    assert (config["name"], config["max_batch_size"], config["input"]) == ("echo", 8, [])
    stats = json.loads((await door.ask("GET", "/v2/models/stats"))[2])["model_stats"]
    assert [entry["name"] for entry in stats] == ["echo", "slow"]
    assert stats[0]["inference_count"] == 2**40
    one = json.loads((await door.ask("GET", "/v2/models/echo/versions/1/stats"))[2])["model_stats"]
    assert [entry["name"] for entry in one] == ["echo"]


async def test_the_index_has_only_what_is_known(door):
    everything = json.loads((await door.ask("POST", "/v2/repository/index"))[2])
    assert everything[0] == {"name": "echo", "version": "1", "state": "READY"}
    assert everything[2] == {"name": "bad", "version": "1", "state": "UNAVAILABLE", "reason": "no file"}
    assert everything[3] == {"name": "new"}
    assert len(json.loads((await door.ask("POST", "/v2/repository/any/index", {"ready": True}))[2])) == 2
    assert json.loads((await door.ask("GET", "/v2/models"))[2]) == {"models": ["echo"]}


async def test_load_and_unload_reach_the_control_plane(door):
    body = {"parameters": {"config": "{}", "file:1/m": base64.b64encode(b"\0model").decode()}}
    assert (await door.ask("POST", "/v2/repository/models/m/load", body))[::2] == (200, b"")
    assert (await door.ask("POST", "/v2/repository/models/m/unload"))[::2] == (200, b"")
    assert door.control.calls == [("load", "m", {"config": "{}", "file:1/m": b"\0model"}), ("unload", "m", False)]
    status, _, answer = await door.ask("POST", "/v2/repository/models/missing/load")
    assert (status, error_of(answer)) == (404, "model 'missing' is in no repository")
    assert (await door.ask("POST", "/v2/repository/r/models/m/load"))[0] == 501
    assert (await door.ask("POST", "/v2/repository/models/..%2Fm/load"))[0] == 400


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/", 404, None),
        ("GET", "/v2/nothing", 404, None),
        ("POST", "/v2/models/echo/frobnicate", 404, None),
        ("GET", "/v2/models/echo/infer", 405, "POST"),
        ("DELETE", "/v2", 405, "GET"),
        ("POST", "/v2/health/live", 405, "GET"),
        ("GET", "/v2/repository/index", 405, "POST"),
        ("POST", "/v2/models/echo/generate", 501, None),
        ("GET", "/v2/systemsharedmemory/status", 501, None),
        ("POST", "/v2/trace/setting", 501, None),
        ("GET", "/v2/logging", 501, None),
        ("GET", "/v2/models/echo/versions/one", 400, None),
    ],
)
async def test_what_cannot_be_asked_here_gets_a_json_error(door, method, path, status, allow):
    got, headers, body = await door.ask(method, path)
    assert got == status
    assert headers.get("Allow") == allow
    assert headers["Content-Type"] == "application/json"
    assert error_of(body)


# --- inference ----------------------------------------------------------------------------------------------------


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


# --- compression --------------------------------------------------------------------------------------------------

LONG = {"inputs": [{"name": "INPUT0", "shape": [1000], "datatype": "INT32", "data": [7] * 1000}]}


@pytest.mark.parametrize(
    ("accept", "coding"),
    [
        ("gzip", "gzip"),
        ("gzip, deflate", "gzip"),
        ("deflate", "deflate"),
        ("gzip;q=0", None),
        ("identity", None),
        ("br", None),
    ],
)
async def test_an_answer_is_encoded_if_and_only_if_it_says_so(door, accept, coding):
    status, headers, body = await door.infer(LONG, Accept_Encoding=accept)
    assert status == 200
    assert headers.get("Content-Encoding") == coding
    text = {"gzip": gzip.decompress, "deflate": zlib.decompress, None: bytes}[coding](body)
    assert json.loads(text)["outputs"][0]["data"] == [7] * 1000


async def test_the_header_length_counts_the_json_before_compression(door):
    status, headers, body = await door.infer(
        LONG | {"parameters": {"binary_data_output": True}}, Accept_Encoding="gzip"
    )
    assert (status, headers["Content-Encoding"]) == (200, "gzip")
    plain = gzip.decompress(body)
    size = int(headers[HEADER_LENGTH])
    assert json.loads(plain[:size])["outputs"][0]["parameters"] == {"binary_data_size": 4000}
    assert plain[size:] == struct.pack("<i", 7) * 1000


async def test_errors_are_encoded_as_asked_too(door):
    bad = {"inputs": [{"name": "N" * 2000, "shape": [1], "datatype": "INT8", "data": [300]}]}
    status, headers, body = await door.infer(bad, Accept_Encoding="gzip")
    assert (status, headers["Content-Encoding"]) == (400, "gzip")
    assert "got 300" in error_of(gzip.decompress(body))
    assert "Content-Encoding" not in (await door.infer({}, Accept_Encoding="gzip"))[1]


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress, lambda data: zlib.compress(data)[2:-4]])
async def test_compressed_requests_are_read_with_their_binary_part(door, pack):
    head = {"inputs": [{"name": "INPUT0", "shape": [4], "datatype": "UINT8", "parameters": {"binary_data_size": 4}}]}
    text = json.dumps(head).encode()
    coding = "gzip" if pack is gzip.compress else "deflate"
    status, _, body = await door.infer(
        pack(text + b"\1\2\3\4"), Content_Encoding=coding, **{HEADER_LENGTH: str(len(text))}
    )
    assert status == 200
    assert json.loads(body)["outputs"][0]["data"] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("coding", "body", "status"),
    [
        ("br", b"x", 415),
        ("gzip, gzip", gzip.compress(gzip.compress(b"{}")), 415),
        ("gzip", gzip.compress(json.dumps(GOOD).encode())[:-3], 400),
        ("gzip", gzip.compress(json.dumps(GOOD).encode()) + b"garbage", 400),
        ("gzip", json.dumps(GOOD).encode(), 400),
        ("gzip", gzip.compress(bytes(50 << 20)), 413),
        ("deflate", zlib.compress(bytes(50 << 20)), 413),
    ],
)
async def test_bad_compressed_bodies_are_refused_and_the_server_stays_well(door, coding, body, status):
    got, headers, answer = await door.infer(body, Content_Encoding=coding)
    assert got == status
    assert error_of(answer)
    assert headers.get("Accept-Encoding") == ("gzip, deflate" if status == 415 else None)
    assert await door.is_well()


# --- limits and malformed HTTP ------------------------------------------------------------------------------------


def post(*headers: str, path: str = "/v2/models/echo/infer", body: bytes = b"") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@pytest.mark.parametrize("headers", [(), ("Expect: 100-continue",)])
async def test_an_announced_body_over_the_limit_is_refused_unread_and_the_connection_closed(door, headers):
    answer = await door.raw(post("Content-Length: 524289", *headers))
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"Connection: close" in answer
    assert b"the limit for this request is 524288 bytes" in answer
    assert await door.is_well()


async def test_a_binary_section_may_pass_the_input_limit_but_not_the_body_limit(door):
    elements = 3 << 18
    tensor = {"name": "INPUT0", "shape": [elements], "datatype": "UINT8", "parameters": {"binary_data_size": elements}}
    text = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    status, headers, body = await door.infer(text + bytes(elements), **{HEADER_LENGTH: str(len(text))})
    assert (status, len(body) - int(headers[HEADER_LENGTH])) == (200, elements)
    answer = await door.raw(post("Content-Length: 1048577", f"{HEADER_LENGTH}: {len(text)}"))
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"the limit for this request is 1048576 bytes" in answer


async def test_a_chunked_body_is_bounded_while_it_is_read(door):
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    answer = await door.raw(post("Transfer-Encoding: chunked"), chunk * 17)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert await door.is_well()


async def test_a_chunked_body_is_read(door):
    text = json.dumps(GOOD).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in text) + b"0\r\n\r\n"
    answer = await door.raw(post("Transfer-Encoding: chunked", "Connection: close"), chunks)
    assert answer.startswith(b"HTTP/1.1 200 ")


async def test_expect_100_continue_is_answered_before_the_body(door):
    text = json.dumps(GOOD).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    writer.write(post(f"Content-Length: {len(text)}", "Expect: 100-continue", "Connection: close"))
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5) == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(text)
    assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_a_client_that_pauses_in_its_body_is_let_go(door):
    answer = await door.raw(post("Content-Length: 100"), b'{"inputs"')
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert await door.is_well()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /v2 HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 20000 + b"\r\n\r\n", 431),
        (b"GET /" + b"a" * 20000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
        (b"GET /v2 HTTP/1.1\r\n" + b"".join(b"X-%d: 1\r\n" % i for i in range(200)) + b"\r\n", 431),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"NONSENSE\r\n\r\n", 400),
        (post("Content-Length: -5"), 400),
        (post("Content-Length: 5", "Content-Length: 6", body=b"abcde"), 400),
        (post("Content-Length: 5", "Transfer-Encoding: chunked"), 400),
        (post("Expect: a miracle", "Content-Length: 3"), 417),
    ],
)
async def test_malformed_http_gets_a_json_error_and_the_server_stays_well(door, request_bytes, status):
    answer = await door.raw(request_bytes)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert int(head.split()[1]) == status
    assert error_of(body)
    assert await door.is_well()


async def test_malformed_chunks_get_400(door):
    answer = await door.raw(post("Transfer-Encoding: chunked"), b"zz\r\nnot a chunk\r\n")
    assert answer.split()[1] == b"400"
    assert await door.is_well()


async def test_pipelined_requests_are_answered_in_order(door):
    bodies = [json.dumps({"id": str(i), **GOOD}).encode() for i in range(5)]
    stream = b"".join(post(f"Content-Length: {len(body)}", body=body) for body in bodies)
    answer = await door.raw(stream + b"GET /nope HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    positions = [answer.index(b'"id":"%d"' % i) for i in range(5)]
    assert positions == sorted(positions)
    assert answer.endswith(b'{"error":"no such path"}')


# --- lifecycle ----------------------------------------------------------------------------------------------------


async def test_a_client_that_disconnects_cancels_its_inference(door):
    body = json.dumps(GOOD).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", door.port)
    writer.write(post(f"Content-Length: {len(body)}", path="/v2/models/slow/infer", body=body))
    await asyncio.wait_for(door.data.slow_began.wait(), 5)
    writer.close()
    await asyncio.wait_for(door.data.cancelled.wait(), 5)
    assert await door.is_well()


async def test_stop_finishes_open_requests_and_takes_no_new_connections(door):
    waiting = asyncio.create_task(door.infer(GOOD, model="slow"))
    await door.data.slow_began.wait()
    stopping = asyncio.create_task(door.gateway.stop(30))
    await asyncio.sleep(0)
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", door.port)
    door.data.release_slow.set()
    status, headers, _ = await waiting
    assert (status, headers["Connection"]) == (200, "close")
    await asyncio.wait_for(stopping, 5)


async def test_stop_cuts_what_outlasts_the_grace(door):
    waiting = asyncio.create_task(door.infer(GOOD, model="slow"))
    await door.data.slow_began.wait()
    await asyncio.wait_for(door.gateway.stop(0.05), 5)
    assert door.data.cancelled.is_set()
    with pytest.raises(aiohttp.ClientError):
        await waiting


async def test_a_taken_port_is_an_error(door):
    second = HttpGateway(door.data, door.control, HttpSettings(address="127.0.0.1", port=door.port))
    with pytest.raises(OSError, match="address already in use"):
        await second.start()


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
