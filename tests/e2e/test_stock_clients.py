"""tritonclient in its four forms gets right answers from the sample repository, as `make serve` runs it."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpcaio
import tritonclient.http as httpclient
import tritonclient.http.aio as httpaio
from sklearn.datasets import load_digits
from tritonclient.utils import InferenceServerException

from harness import RunningServer, running
from repositories import SAMPLES

ARRAYS = {
    "BOOL": np.array([True, False, True]),
    "UINT8": np.array([0, 255], np.uint8),
    "UINT16": np.array([0, 65535], np.uint16),
    "UINT32": np.array([0, 2**32 - 1], np.uint32),
    "UINT64": np.array([0, 2**64 - 1], np.uint64),
    "INT8": np.array([-128, 127], np.int8),
    "INT16": np.array([-32768, 32767], np.int16),
    "INT32": np.array([-(2**31), 2**31 - 1], np.int32),
    "INT64": np.array([-(2**63), 2**63 - 1], np.int64),
    "FP16": np.array([0.5, -65504.0], np.float16),
    "FP32": np.array([1.5, -0.0, np.inf, np.nan], np.float32),
    "FP64": np.array([1e300, -1e-300], np.float64),
    "BYTES": np.array([b"", b"\xff\x00raw", "안녕 🙂".encode()], object),
    "BF16": np.array([0.5, -2.0], ml_dtypes.bfloat16),
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(SAMPLES) as started:
        yield started


def check_add_sub(result, a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), a + b)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), a - b)


def add_sub_inputs(module, a: np.ndarray, b: np.ndarray, **how):
    inputs = [module.InferInput("INPUT0", a.shape, "INT32"), module.InferInput("INPUT1", b.shape, "INT32")]
    inputs[0].set_data_from_numpy(a, **how)
    inputs[1].set_data_from_numpy(b, **how)
    return inputs


A = np.arange(32, dtype=np.int32).reshape(2, 16)
B = np.full((2, 16), 7, np.int32)


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_http_adds_and_subtracts(server: RunningServer, binary_in: bool, binary_out: bool) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        outputs = [httpclient.InferRequestedOutput(f"OUTPUT{i}", binary_data=binary_out) for i in (0, 1)]
        inputs = add_sub_inputs(httpclient, A, B, binary_data=binary_in)
        result = client.infer("simple", inputs, outputs=outputs, request_id="7")
        check_add_sub(result, A, B)
        assert result.get_response()["id"] == "7"


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_http_compression_both_ways(server: RunningServer, algorithm: str) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        result = client.infer(
            "simple",
            add_sub_inputs(httpclient, A, B),
            request_compression_algorithm=algorithm,
            response_compression_algorithm=algorithm,
        )
        check_add_sub(result, A, B)


def test_grpc_adds_and_subtracts(server: RunningServer) -> None:
    with grpcclient.InferenceServerClient(server.grpc) as client:
        result = client.infer("simple", add_sub_inputs(grpcclient, A, B), request_id="8")
        check_add_sub(result, A, B)
        assert result.get_response().id == "8"


def test_grpc_compressed_requests(server: RunningServer) -> None:
    with grpcclient.InferenceServerClient(server.grpc) as client:
        result = client.infer("simple", add_sub_inputs(grpcclient, A, B), compression_algorithm="gzip")
        check_add_sub(result, A, B)


def test_grpc_deflate_needs_the_grpcio_transport() -> None:
    with (
        running(SAMPLES, "--grpc-transport=grpcio") as server,
        grpcclient.InferenceServerClient(server.grpc) as client,
    ):
        result = client.infer("simple", add_sub_inputs(grpcclient, A, B), compression_algorithm="deflate")
        check_add_sub(result, A, B)


async def test_http_aio_answers_many_at_once(server: RunningServer) -> None:
    async with httpaio.InferenceServerClient(server.http) as client:
        results = await asyncio.gather(
            *[client.infer("simple", add_sub_inputs(httpclient, A * i, B)) for i in range(20)]
        )
    for i, result in enumerate(results):
        check_add_sub(result, A * i, B)


async def test_grpc_aio_answers_many_at_once(server: RunningServer) -> None:
    async with grpcaio.InferenceServerClient(server.grpc) as client:
        results = await asyncio.gather(
            *[client.infer("simple", add_sub_inputs(grpcclient, A * i, B)) for i in range(20)]
        )
    for i, result in enumerate(results):
        check_add_sub(result, A * i, B)


def same(datatype: str, got: np.ndarray, sent: np.ndarray) -> None:
    assert got.shape == sent.shape
    if datatype == "BYTES":
        assert [x if isinstance(x, bytes) else x.encode() for x in got] == list(sent)
    else:
        np.testing.assert_array_equal(got, sent)


@pytest.mark.parametrize("datatype", ARRAYS)
def test_every_datatype_in_binary_over_http(server: RunningServer, datatype: str) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        tensor = httpclient.InferInput(f"INPUT_{datatype}", ARRAYS[datatype].shape, datatype)
        tensor.set_data_from_numpy(ARRAYS[datatype])
        result = client.infer("identity", [tensor])
        same(datatype, result.as_numpy(f"OUTPUT_{datatype}"), ARRAYS[datatype])


@pytest.mark.parametrize("datatype", [name for name in ARRAYS if name not in ("FP16", "BF16", "BYTES")])
def test_every_datatype_with_a_json_form_over_http(server: RunningServer, datatype: str) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        tensor = httpclient.InferInput(f"INPUT_{datatype}", ARRAYS[datatype].shape, datatype)
        tensor.set_data_from_numpy(ARRAYS[datatype], binary_data=False)
        output = httpclient.InferRequestedOutput(f"OUTPUT_{datatype}", binary_data=False)
        result = client.infer("identity", [tensor], outputs=[output])
        same(datatype, result.as_numpy(f"OUTPUT_{datatype}"), ARRAYS[datatype])


def test_strings_in_json(server: RunningServer) -> None:
    texts = ["", "안녕 🙂", 'quote " and \\ and \x00']
    body = {"inputs": [{"name": "INPUT_BYTES", "shape": [3], "datatype": "BYTES", "data": texts}]}
    answer = post(server, "identity", body)
    assert answer["outputs"][0]["data"] == texts


@pytest.mark.parametrize("datatype", ARRAYS)
def test_every_datatype_over_grpc(server: RunningServer, datatype: str) -> None:
    with grpcclient.InferenceServerClient(server.grpc) as client:
        tensor = grpcclient.InferInput(f"INPUT_{datatype}", ARRAYS[datatype].shape, datatype)
        tensor.set_data_from_numpy(ARRAYS[datatype])
        result = client.infer("identity", [tensor])
        same(datatype, result.as_numpy(f"OUTPUT_{datatype}"), ARRAYS[datatype])


def post(server: RunningServer, model: str, body: dict) -> dict:
    request = urllib.request.Request(f"http://{server.http}/v2/models/{model}/infer", json.dumps(body).encode())
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def test_digits_are_recognised_and_labelled(server: RunningServer) -> None:
    images, labels = load_digits(return_X_y=True)
    names = (SAMPLES / "digits" / "labels.txt").read_text().split()
    with httpclient.InferenceServerClient(server.http) as client:
        tensor = httpclient.InferInput("image", (32, 64), "FP32")
        tensor.set_data_from_numpy(images[-32:].astype(np.float32))
        output = httpclient.InferRequestedOutput("scores", class_count=2)
        classes = client.infer("digits", [tensor], outputs=[output]).as_numpy("scores")
    assert classes.shape == (32, 2)
    first = [element.decode().split(":") for element in classes[:, 0]]
    right = sum(
        int(index) == want and name == names[want] for (_, index, name), want in zip(first, labels[-32:], strict=True)
    )
    assert right >= 30
    for best, second in classes:
        assert float(best.split(b":")[0]) >= float(second.split(b":")[0])


def test_metadata_says_what_the_configuration_says(server: RunningServer) -> None:
    with httpclient.InferenceServerClient(server.http) as http, grpcclient.InferenceServerClient(server.grpc) as grpc:
        over_http = http.get_model_metadata("simple")
        over_grpc = grpc.get_model_metadata("simple", as_json=True)
        assert over_http["inputs"][0] == {"name": "INPUT0", "datatype": "INT32", "shape": [-1, 16]}
        assert over_grpc["inputs"][0] == {"name": "INPUT0", "datatype": "INT32", "shape": ["-1", "16"]}
        assert over_http["versions"] == over_grpc["versions"] == ["1"]
        config = http.get_model_config("simple")
        assert (config["max_batch_size"], config["backend"]) == (8, "onnxruntime")
        assert grpc.get_model_config("simple").config.max_batch_size == 8
        assert http.get_server_metadata()["name"] == grpc.get_server_metadata().name
        assert http.is_server_live()
        assert grpc.is_server_ready()
        assert http.is_model_ready("simple", "1")
        assert not http.is_model_ready("simple", "2")


def test_statistics_count_each_request_exactly(server: RunningServer) -> None:
    with httpclient.InferenceServerClient(server.http) as http, grpcclient.InferenceServerClient(server.grpc) as grpc:
        before = http.get_inference_statistics("simple")["model_stats"][0]
        for _ in range(5):
            grpc.infer("simple", add_sub_inputs(grpcclient, A, B))
        after = http.get_inference_statistics("simple")["model_stats"][0]
        assert after["inference_count"] - before["inference_count"] == 10
        assert after["inference_stats"]["success"]["count"] - before["inference_stats"]["success"]["count"] == 5
        same_numbers = grpc.get_inference_statistics("simple").model_stats[0]
        assert same_numbers.inference_count == after["inference_count"]


@pytest.mark.parametrize(
    ("model", "version", "code", "status"),
    [
        ("nobody", "", "NOT_FOUND", "404"),
        ("simple", "9", "NOT_FOUND", "404"),
        ("simple", "x", "INVALID_ARGUMENT", "400"),
    ],
)
def test_unknown_models_and_versions_have_the_same_meaning_at_both_doors(
    server: RunningServer, model: str, version: str, code: str, status: str
) -> None:
    with httpclient.InferenceServerClient(server.http) as http, grpcclient.InferenceServerClient(server.grpc) as grpc:
        with pytest.raises(InferenceServerException) as over_grpc:
            grpc.infer(model, add_sub_inputs(grpcclient, A, B), model_version=version)
        assert over_grpc.value.status() == f"StatusCode.{code}"
        with pytest.raises(InferenceServerException) as over_http:
            http.infer(model, add_sub_inputs(httpclient, A, B), model_version=version)
        assert over_http.value.status() == status
