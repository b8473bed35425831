"""The client of `headrace infer`, against small servers of its own over HTTP and gRPC."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import numpy as np
import pytest

from headrace.cli import main
from headrace.client.transport import connect
from headrace.client.values import WireTensor, make_input, show
from headrace.types import TensorMetadata
from headrace_protocol import datatype as dt
from headrace_protocol._generated import grpc_service_pb2 as pb
from headrace_protocol.errors import InferError

INPUTS = [("x", "FP32", [-1, 3]), ("text", "BYTES", [-1, 1])]


def wire(metadata_type: str, shape: tuple[int, ...], text: str) -> tuple[tuple[int, ...], list[Any]]:
    """Return shape and elements of the input that `text` makes."""
    tensor = make_input(TensorMetadata("x", metadata_type, shape), text)
    array = dt.to_numpy(dt.BY_NAME[metadata_type], tensor.shape, tensor.data)
    return tensor.shape, array.reshape(-1).tolist()


def refusal(metadata_type: str, text: str, shape: tuple[int, ...] = (-1,)) -> str:
    with pytest.raises(InferError) as caught:
        make_input(TensorMetadata("x", metadata_type, shape), text)
    return caught.value.message


@pytest.mark.parametrize(
    ("datatype", "text", "elements"),
    [
        ("INT8", "[-128, 127]", [-128, 127]),
        ("UINT64", "[18446744073709551615]", [18446744073709551615]),
        ("INT64", "[-9223372036854775808]", [-9223372036854775808]),
        ("FP32", "[1, 2.5, NaN]", pytest.approx([1, 2.5, float("nan")], nan_ok=True)),
        ("FP16", "[0.5]", [0.5]),
        ("BOOL", "[true, false]", [True, False]),
        ("BYTES", '["a", "ü", ""]', [b"a", "ü".encode(), b""]),
        ("BF16", "[1.0]", [0x3F80]),
        ("INT32", "[]", []),
    ],
)
def test_json_becomes_the_models_datatype(datatype, text, elements):
    assert wire(datatype, (-1,), text)[1] == elements


@pytest.mark.parametrize("text", ["hello world", "[1", "5", "true", "{}"])
def test_plain_text_is_one_element_of_bytes(text):
    assert wire("BYTES", (-1, 1), text) == ((1, 1), [text.encode()])


def test_a_lone_number_takes_the_rank_that_is_wanted():
    assert wire("FP32", (-1, 1), "7") == ((1, 1), [7.0])


def test_a_missing_batch_dimension_is_added_and_told():
    tensor = make_input(TensorMetadata("x", "FP32", (-1, 3)), "[1, 2, 3]")
    assert tensor.shape == (1, 3)
    assert tensor.note == "added the batch dimension: [3] became [1, 3]"
    assert make_input(TensorMetadata("x", "FP32", (-1, 3)), "[[1, 2, 3]]").note == ""


def test_no_dimension_is_added_where_the_first_is_fixed():
    assert make_input(TensorMetadata("x", "FP32", (1, 3)), "[1, 2, 3]").shape == (3,)


@pytest.mark.parametrize(
    ("datatype", "text", "problem"),
    [
        ("INT8", "[128]", "expected integers from -128 to 127, got 128"),
        ("UINT8", "[-1]", "expected integers from 0 to 255, got -1"),
        ("INT32", "[1.5]", "expected integers, got floating point"),
        ("INT32", "[true]", "expected numbers, got true and false"),
        ("FP32", '["a"]', "expected numbers, got texts"),
        ("FP16", "[1e6]", "expected numbers that fit float16, got 1000000.0"),
        ("BOOL", "[1]", "expected true and false, got integers"),
        ("BYTES", "[1]", "expected texts, got int"),
        ("BYTES", '[["a"], ["b", "c"]]', "expected rows of equal length"),
        ("FP32", "[[1], [1, 2]]", "inhomogeneous"),
        ("FP32", "hello", "expected JSON or @file, got 'hello'"),
        ("FP32", "@/does/not/exist.npy", "No such file"),
        ("FP32", "@data.bin", "expected a .npy or .json file"),
        ("NOPE", "[1]", "unknown datatype 'NOPE'"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_the_inputs_name(datatype, text, problem):
    message = refusal(datatype, text)
    assert message.startswith("input 'x'")
    assert problem in message


def test_files_are_read(tmp_path):
    np.save(tmp_path / "a.npy", np.array([[1.0, 2.0]], dtype=np.float64))
    (tmp_path / "a.json").write_text("[[1, 2]]")
    (tmp_path / "a.jpg").write_bytes(b"\xff\xd8")
    assert wire("FP32", (-1, 2), f"@{tmp_path}/a.npy") == ((1, 2), [1.0, 2.0])
    assert wire("INT32", (-1, 2), f"@{tmp_path}/a.json") == ((1, 2), [1, 2])
    assert wire("BYTES", (1,), f"@{tmp_path}/a.jpg") == ((1,), [b"\xff\xd8"])


def test_a_numpy_file_of_objects_is_refused_not_unpickled(tmp_path):
    np.save(tmp_path / "a.npy", np.array([{}], dtype=object), allow_pickle=True)
    assert "allow_pickle" in refusal("BYTES", f"@{tmp_path}/a.npy")


def test_numpy_strings_become_bytes(tmp_path):
    np.save(tmp_path / "a.npy", np.array([["a", "bc"]]))
    assert wire("BYTES", (-1, 2), f"@{tmp_path}/a.npy") == ((1, 2), [b"a", b"bc"])


def test_outputs_are_shown_with_name_datatype_and_shape():
    tensor = WireTensor("y", "FP32", (1, 2), np.array([1, 2.5], np.float32).tobytes())
    assert show(tensor) == "y  FP32  [1, 2]\n[[1. , 2.5]]"


def test_texts_in_outputs_cannot_steer_the_terminal():
    tensor = WireTensor("y", "BYTES", (2,), dt.encode_bytes([b"\x1b[2J", "ü\xff".encode("latin-1")]))
    shown = show(tensor)
    assert "\x1b" not in shown
    assert "[2J" in shown
    assert "\\\\xff" in shown


def test_bf16_outputs_are_shown_as_numbers():
    assert show(WireTensor("y", "BF16", (1,), b"\x80\x3f")).endswith("[1.]")


def test_an_output_whose_bytes_do_not_fit_its_shape_is_refused():
    with pytest.raises(InferError, match="output 'y': shape"):
        show(WireTensor("y", "FP32", (3,), b"\0" * 4))


class Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.request_json: dict[str, Any] = {}
        self.request_path = ""
        self.answer_json_data = False


class Handler(BaseHTTPRequestHandler):
    server: Http

    def log_message(self, *args: object) -> None:
        pass

    def answer(self, status: int, body: bytes, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if length is not None:
            self.send_header("Inference-Header-Content-Length", str(length))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if "/missing" in self.path:
            self.answer(404, json.dumps({"error": "there is no model 'missing'\x1b[2J"}).encode())
        elif "/odd" in self.path:
            self.answer(200, b"not json")
        else:
            inputs = [{"name": name, "datatype": kind, "shape": shape} for name, kind, shape in INPUTS]
            self.answer(200, json.dumps({"name": "m", "inputs": inputs}).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        length = int(self.headers["Inference-Header-Content-Length"])
        request = json.loads(body[:length])
        self.server.request_json, self.server.request_path = request, self.path
        if "/broken/" in self.path:
            self.answer(503, b"")
            return
        outputs: list[dict[str, Any]] = []
        tail, offset = b"", length
        for tensor in request["inputs"]:
            size = tensor["parameters"]["binary_data_size"]
            data, offset = body[offset : offset + size], offset + size
            output = {"name": f"out_{tensor['name']}", "datatype": tensor["datatype"], "shape": tensor["shape"]}
            if self.server.answer_json_data:
                elements = dt.to_numpy(dt.BY_NAME[tensor["datatype"]], [-1], data).tolist()
                outputs.append(output | {"data": elements})
            else:
                outputs.append(output | {"parameters": {"binary_data_size": size}})
                tail += data
        document = {"model_name": "m", "model_version": "4", "outputs": outputs, "parameters": {"took": 3}}
        if "id" in request:
            document["id"] = request["id"]
        header = json.dumps(document).encode()
        self.answer(200, header + tail, len(header))


@pytest.fixture
def http() -> Iterator[Http]:
    with Http() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def url_of(server: Http) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def test_infer_over_http_prints_the_answer(http, capsys):
    words = ["infer", "m", "--url", url_of(http), "--input", "x=[1, 2, 3]", "--input", "text=hello", "--id", "7"]
    assert main(words) == 0
    output = capsys.readouterr()
    assert output.out == (
        "model m, version 4, id 7\nparameter took = 3\n\n"
        "out_x  FP32  [1, 3]\n[[1., 2., 3.]]\n\n"
        'out_text  BYTES  [1, 1]\n[["hello"]]\n'
    )
    assert output.err == "input x: added the batch dimension: [3] became [1, 3]\n"


def test_what_is_asked_over_http_reaches_the_server(http):
    main(
        [
            *("infer", "a/b", "--version", "3", "--url", url_of(http), "--input", "x=[[1, 2, 3]]"),
            *("--output", "y:classification=2", "--output", "z", "--parameter", "n=5", "--parameter", "s=word"),
        ]
    )
    assert http.request_path == "/v2/models/a%2Fb/versions/3/infer"
    assert http.request_json["outputs"] == [
        {"name": "y", "parameters": {"binary_data": True, "classification": 2}},
        {"name": "z", "parameters": {"binary_data": True}},
    ]
    assert http.request_json["parameters"] == {"n": 5, "s": "word"}


def test_every_output_is_asked_for_in_binary_where_none_is_named(http):
    main(["infer", "m", "--url", url_of(http), "--input", "x=[1, 2, 3]"])
    assert http.request_json["parameters"] == {"binary_data_output": True}
    assert "outputs" not in http.request_json


def test_outputs_that_come_as_json_are_understood_too(http, capsys):
    http.answer_json_data = True
    http_words = ["infer", "m", "--url", url_of(http), "--input", "x=[1, 2, 3]"]
    assert main(http_words) == 0
    assert "[[1., 2., 3.]]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing", "--input", "x=1"], "the server says: there is no model 'missing'\\x1b[2J (HTTP 404)"),
        (["broken", "--input", "x=[1, 2, 3]"], "the server says: no explanation (HTTP 503)"),
        (["odd", "--input", "x=1"], "the server's answer is no JSON"),
        (["m", "--input", "y=1"], "model 'm' has no input 'y'; its inputs are x (FP32 [-1, 3]), text (BYTES [-1, 1])"),
        (["m", "--input", "x"], "--input: expected name=value, got 'x'"),
        (["m", "--output", "y:classification=0"], "--output: expected y:classification=<number of classes>"),
        (["m", "--input", "x=word"], "input 'x' (FP32 [-1, 3]): expected JSON or @file, got 'word'"),
    ],
)
def test_what_goes_wrong_is_told_on_stderr_with_status_1(http, capsys, words, message):
    assert main(["infer", *words, "--url", url_of(http)]) == 1
    output = capsys.readouterr()
    assert message in output.err
    assert "Traceback" not in output.err
    assert output.out == ""


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_server_that_is_not_there_is_told_with_its_address(capsys, scheme):
    assert main(["infer", "m", "--url", f"{scheme}://127.0.0.1:1", "--input", "x=1"]) == 1
    assert f"{scheme}://127.0.0.1:1: " in capsys.readouterr().err


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:notaport"])
def test_a_url_of_no_use_is_refused(url):
    with pytest.raises(InferError, match="--url"):
        connect(url, 1)


class Service(grpc.GenericRpcHandler):
    """ModelMetadata and ModelInfer over generic handlers; the answer echoes the request."""

    def __init__(self) -> None:
        self.seen = pb.ModelInferRequest()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if details.method == "/inference.GRPCInferenceService/ModelMetadata":
            return grpc.unary_unary_rpc_method_handler(
                self.metadata, pb.ModelMetadataRequest.FromString, pb.ModelMetadataResponse.SerializeToString
            )
        return grpc.unary_unary_rpc_method_handler(
            self.infer, pb.ModelInferRequest.FromString, pb.ModelInferResponse.SerializeToString
        )

    def metadata(self, request: pb.ModelMetadataRequest, context: grpc.ServicerContext) -> pb.ModelMetadataResponse:
        if request.name == "missing":
            context.abort(grpc.StatusCode.NOT_FOUND, "there is no model 'missing'")
        response = pb.ModelMetadataResponse(name=request.name)
        for name, kind, shape in INPUTS:
            response.inputs.add(name=name, datatype=kind, shape=shape)
        return response

    def infer(self, request: pb.ModelInferRequest, context: grpc.ServicerContext) -> pb.ModelInferResponse:
        self.seen = request
        response = pb.ModelInferResponse(model_name=request.model_name, model_version="4", id=request.id)
        response.parameters["took"].int64_param = 3
        for tensor, data in zip(request.inputs, request.raw_input_contents, strict=True):
            response.outputs.add(name=f"out_{tensor.name}", datatype=tensor.datatype, shape=tensor.shape)
            response.raw_output_contents.append(data)
        return response


@pytest.fixture
def service() -> Iterator[tuple[str, Service]]:
    service = Service()
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, handlers=[service])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"grpc://127.0.0.1:{port}", service
        server.stop(None).wait()


def test_infer_over_grpc_prints_the_answer(service, capsys):
    url, _ = service
    assert main(["infer", "m", "--url", url, "--input", "x=[1, 2, 3]", "--input", "text=hello", "--id", "7"]) == 0
    assert capsys.readouterr().out == (
        "model m, version 4, id 7\nparameter took = 3\n\n"
        "out_x  FP32  [1, 3]\n[[1., 2., 3.]]\n\n"
        'out_text  BYTES  [1, 1]\n[["hello"]]\n'
    )


def test_what_is_asked_over_grpc_reaches_the_server(service):
    url, seen = service
    main(
        [
            *(
                "infer",
                "m",
                "--version",
                "3",
                "--url",
                url,
                "--input",
                "x=[[1, 2, 3]]",
                "--output",
                "y:classification=2",
            ),
            *("--parameter", "n=5", "--parameter", "s=word", "--parameter", "b=true", "--parameter", "d=0.5"),
        ]
    )
    request = seen.seen
    assert request.model_version == "3"
    assert request.outputs[0].parameters["classification"].int64_param == 2
    assert request.parameters["n"].int64_param == 5
    assert request.parameters["s"].string_param == "word"
    assert request.parameters["b"].bool_param
    assert request.parameters["d"].double_param == 0.5


def test_an_error_over_grpc_shows_the_servers_message(service, capsys):
    url, _ = service
    assert main(["infer", "missing", "--url", url, "--input", "x=1"]) == 1
    assert capsys.readouterr().err == "the server says: there is no model 'missing' (gRPC NOT_FOUND)\n"
