"""JSON that is nested too deep is refused at every door that takes JSON, in words, and the server and its models go on."""

from __future__ import annotations

import http.client
import json

import grpc
import numpy as np
import pytest
import tritonclient.grpc

import scripted_engine
from clients import infer
from harness import running
from headrace_protocol._generated import grpc_service_pb2 as pb
from repositories import add_identity

HERE = '"HERE"'
CHAT = {"model": "writer", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": "HERE"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"properties": "HERE"}}}
CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "HERE"}'}}
TENSOR = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}
OVER_HTTP = {
    "infer parameters": ("/v2/models/m/infer", {"inputs": [TENSOR], "parameters": {"a": "HERE"}}),
    "infer data": ("/v2/models/m/infer", {"inputs": [{**TENSOR, "data": "HERE"}]}),
    "generate": ("/v2/models/m/generate", {"INPUT0": "HERE"}),
    "generate of a language model": ("/v2/models/writer/generate", {"text_input": "x", "parameters": "HERE"}),
    "chat": ("/v1/chat/completions", {**CHAT, "messages": "HERE"}),
    "chat tools": ("/v1/chat/completions", {**CHAT, "tools": [TOOL]}),
    "chat schema": ("/v1/chat/completions", {**CHAT, "response_format": SCHEMA}),
    "chat arguments": ("/v1/chat/completions", {**CHAT, "messages": [{"role": "assistant", "tool_calls": [CALLED]}]}),
    "completions": ("/v1/completions", {"model": "writer", "prompt": "HERE"}),
    "responses": ("/v1/responses", {"model": "writer", "input": "HERE"}),
    "messages": ("/v1/messages", {**CHAT, "tools": [{"name": "f", "input_schema": {"properties": "HERE"}}]}),
    "load": ("/v2/repository/models/m/load", {"parameters": {"a": "HERE"}}),
    "load config": ("/v2/repository/models/m/load", {"parameters": {"config": '{"parameters": "HERE"}'}}),
    "index": ("/v2/repository/index", {"ready": "HERE"}),
    "trace settings": ("/v2/trace/setting", {"trace_level": "HERE"}),
    "log settings": ("/v2/logging", {"log_info": "HERE"}),
    "shared memory": ("/v2/systemsharedmemory/region/r/register", {"key": "HERE"}),
}
SERVICE = "/inference.GRPCInferenceService/"
DEPTHS = (101, 5_000, 200_000)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deep")
    add_identity(folder / "models", "m")
    scripted_engine.add_model(folder / "models", "writer")
    flags = ("--model-control-mode=explicit", "--load-model=*", "--allow-client-shm=true")
    with running(folder / "models", *flags, env=scripted_engine.installed(folder / "site")) as server:
        before = {process.pid for process in server.backends()}
        yield server
        assert infer(server, "m", ("INPUT0", "FP32", [1, 1], [1]))[0] == 200
        assert {process.pid for process in server.backends()} == before, "no model was lost"


def deep(value: object, depth: int, brackets: str) -> bytes:
    """Return JSON with so many levels in place of "HERE", also where that stands in a text within the JSON."""
    opening, closing = ('{"a":', "}") if brackets == "objects" else ("[", "]")
    nested = opening * depth + "1" + closing * depth
    text = json.dumps(value)
    if json.dumps(HERE)[1:-1] in text:
        return text.replace(json.dumps(HERE)[1:-1], json.dumps(nested)[1:-1]).encode()
    assert HERE in text
    return text.replace(HERE, nested).encode()


@pytest.mark.parametrize("brackets", ["arrays", "objects"])
@pytest.mark.parametrize("what", OVER_HTTP)
def test_deep_json_is_refused_over_http(server, what, brackets):
    path, value = OVER_HTTP[what]
    host, port = server.http.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    for depth in DEPTHS:
        connection.request("POST", path, deep(value, depth, brackets), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        body = answer.read().decode()
        assert answer.status == 400, (depth, answer.status, body[:300])
    connection.close()


def load(channel, depth: int) -> None:
    config = deep({"parameters": "HERE"}, depth, "objects").decode()
    request = pb.RepositoryModelLoadRequest(model_name="m")
    request.parameters["config"].string_param = config
    unary = channel.unary_unary(
        f"{SERVICE}RepositoryModelLoad",
        request_serializer=pb.RepositoryModelLoadRequest.SerializeToString,
        response_deserializer=pb.RepositoryModelLoadResponse.FromString,
    )
    unary(request, timeout=30)


def sampling(channel, depth: int) -> None:
    request = pb.ModelInferRequest(model_name="writer")
    values = {"text_input": b"x", "sampling_parameters": deep({"stop": "HERE"}, depth, "arrays")}
    for name, value in values.items():
        tensor = request.inputs.add(name=name, datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(value)
    tell(channel, request)


def parameter(channel, depth: int) -> None:
    request = pb.ModelInferRequest(model_name="writer")
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(b"x")
    request.parameters["temperature"].string_param = "[" * depth + "]" * depth
    tell(channel, request)


def tell(channel, request: pb.ModelInferRequest) -> None:
    """Ask a language model, whose answers come over the stream."""
    stream = channel.stream_stream(
        f"{SERVICE}ModelStreamInfer",
        request_serializer=pb.ModelInferRequest.SerializeToString,
        response_deserializer=pb.ModelStreamInferResponse.FromString,
    )
    for response in stream(iter([request]), timeout=30):
        if response.error_message:
            raise Refused(response.error_message)


class Refused(Exception):  # noqa: N818  # what the stream says of a request
    pass


@pytest.mark.parametrize("ask", [load, sampling, parameter])
def test_deep_json_in_texts_is_refused_over_grpc(server, ask):
    with grpc.insecure_channel(server.grpc) as channel:
        for depth in DEPTHS:
            with pytest.raises((grpc.RpcError, Refused)) as caught:
                ask(channel, depth)
            assert "recursion" not in str(caught.value).lower(), "it was looked at before it was read"
            if isinstance(caught.value, grpc.RpcError):
                assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, caught.value


def test_what_is_not_too_deep_is_taken(server):
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        given = tritonclient.grpc.InferInput("INPUT0", [1, 1], "FP32")
        given.set_data_from_numpy(np.ones((1, 1), np.float32))
        assert client.infer("m", [given]).as_numpy("OUTPUT0").item() == 1
    host, port = server.http.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    body = deep({**CHAT, "tools": [TOOL]}, 40, "objects")
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert "nested deeper" not in answer.read().decode()
    connection.close()
