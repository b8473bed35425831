"""The clients of the conformance table: the stock ones wherever they can send it, the bare protocol where they cannot.

Both have the same methods and give plain Python values, so that a case need not know through which door it goes. What
the server refuses is raised as `Refused`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import grpc
import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.grpc.service_pb2 as pb
import tritonclient.grpc.service_pb2_grpc as stubs
import tritonclient.http as httpclient
from google.protobuf.json_format import MessageToDict
from tritonclient.utils import InferenceServerException

from conformance.table.cases import Refused
from conformance.table.stock import (
    grpc_answer,
    grpc_input,
    grpc_output,
    http_answer,
    http_input,
    http_output,
    named,
)
from conformance.table.tensors import Answer, Infer, grpc_message, http_body, tensor
from harness import RunningServer

HEADER_LENGTH = "Inference-Header-Content-Length"
ROW = np.arange(16, dtype=np.int32).reshape(1, 16)
GOOD = Infer("simple", [tensor("INPUT0", ROW), tensor("INPUT1", ROW)])
TIMEOUT_S = 20.0


class Ask(ABC):
    """A client of one door of one server. `client` is the stock one."""

    door: str
    client: Any

    def __init__(self, server: RunningServer) -> None:
        self.server = server

    @abstractmethod
    def infer(self, request: Infer) -> Answer:
        """Send it as it says and return what came."""

    @abstractmethod
    def stock(self, call: Callable[[Any], Any]) -> Any:
        """Return what `call` of the stock client gives, as plain values."""

    @abstractmethod
    def model_ready(self, model: str, version: str = "") -> bool: ...

    @abstractmethod
    def close(self) -> None: ...

    def still_well(self) -> None:
        """Assert that the server lives and serves the next good request, through this very client."""
        np.testing.assert_array_equal(self.infer(GOOD).arrays["OUTPUT0"], ROW + ROW)
        assert self.stock(lambda client: client.is_server_live())
        assert self.stock(lambda client: client.is_server_ready())


class HttpAsk(Ask):
    """tritonclient.http and http.client."""

    door = "http"

    def __init__(self, server: RunningServer) -> None:
        super().__init__(server)
        self.client = httpclient.InferenceServerClient(server.http)
        self._connection = http.client.HTTPConnection(server.http, timeout=TIMEOUT_S)

    def stock(self, call: Callable[[Any], Any]) -> Any:
        try:
            return call(self.client)
        except InferenceServerException as error:
            raise _refused(error) from None

    def wire(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """Return the answer of one request written by hand, whatever its status."""
        try:
            self._connection.request(method, path, body, dict(headers or {}))
            answer = self._connection.getresponse()
        except (BrokenPipeError, ConnectionResetError, http.client.RemoteDisconnected):
            self._connection.close()  # the server closed it after an earlier refusal
            self._connection.request(method, path, body, dict(headers or {}))
            answer = self._connection.getresponse()
        return answer, answer.read()

    def call(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
        """Send JSON, or bytes as they are; return the JSON that came (None for an empty body)."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        answer, content = self.wire(method, path, data, headers)
        if answer.status != 200:
            raise Refused(answer.status, told_error(answer, content))
        return json.loads(content) if content else None

    def get(self, path: str, **headers: str) -> Any:
        return self.call("GET", path, None, headers)

    def post(self, path: str, body: Any = b"", **headers: str) -> Any:
        return self.call("POST", path, body, headers)

    def model_ready(self, model: str, version: str = "") -> bool:
        self.get(_model_path(model, version) + "/ready")
        return True

    def infer(self, request: Infer) -> Answer:
        if request.stock:
            inputs = [http_input(one) for one in request.inputs]
            outputs = None if request.outputs is None else [http_output(one) for one in request.outputs]
            return http_answer(
                self.stock(lambda client: client.infer(inputs=inputs, outputs=outputs, **named(request)))
            )
        body, json_size = http_body(request)
        return self.infer_bytes(request.model, body, json_size, request.version)

    def infer_bytes(
        self, model: str, body: bytes, json_size: object = None, version: str = "", **headers: str
    ) -> Answer:
        """POST these bytes as an inference."""
        if json_size is not None:
            headers[HEADER_LENGTH] = str(json_size)
        answer, content = self.wire("POST", _model_path(model, version) + "/infer", body, headers)
        if answer.status != 200:
            raise Refused(answer.status, told_error(answer, content))
        size = answer.headers[HEADER_LENGTH]
        length = None if size is None else int(size)
        return http_answer(self.client.parse_response_body(content, header_length=length))

    def events(self, path: str, body: Any) -> list[Any]:
        """Return what a stream of server-sent events brought."""
        answer, content = self.wire("POST", path, json.dumps(body).encode())
        if answer.status != 200:
            raise Refused(answer.status, told_error(answer, content))
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        pieces = content.decode().split("\n\n")
        assert pieces.pop() == "", "the last event has its end"
        assert all(piece.startswith("data: ") for piece in pieces), pieces
        return [json.loads(piece.removeprefix("data: ")) for piece in pieces]

    def close(self) -> None:
        self.client.close()
        self._connection.close()


class GrpcAsk(Ask):
    """tritonclient.grpc and its generated stub."""

    def __init__(self, server: RunningServer, door: str) -> None:
        super().__init__(server)
        self.door = door
        self.client = grpcclient.InferenceServerClient(server.grpc)
        self.channel = grpc.insecure_channel(server.grpc, options=[("grpc.max_receive_message_length", -1)])
        self.stub = stubs.GRPCInferenceServiceStub(self.channel)

    def stock(self, call: Callable[[Any], Any]) -> Any:
        try:
            answer = call(self.client)
        except InferenceServerException as error:
            raise _refused(error) from None
        return answer

    def wire(self, rpc: str, message: Any, metadata: Sequence[tuple[str, str]] = ()) -> Any:
        """Return the answer of a call written by hand."""
        try:
            return getattr(self.stub, rpc)(message, metadata=metadata, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            raise Refused(error.code().name, error.details() or "") from None

    def call(self, rpc: str, message: Any, metadata: Sequence[tuple[str, str]] = ()) -> Any:
        """As `wire`, and return it as a dictionary."""
        return MessageToDict(self.wire(rpc, message, metadata), preserving_proto_field_name=True)

    def model_ready(self, model: str, version: str = "") -> bool:
        return bool(self.stock(lambda client: client.is_model_ready(model, version)))

    def infer(self, request: Infer) -> Answer:
        if request.stock and not any(one.text for one in request.inputs):
            inputs = [grpc_input(one) for one in request.inputs]
            outputs = None if request.outputs is None else [grpc_output(one) for one in request.outputs]
            return grpc_answer(
                self.stock(lambda client: client.infer(inputs=inputs, outputs=outputs, **named(request)))
            )
        return self.infer_message(grpc_message(request))

    def infer_message(self, message: pb.ModelInferRequest) -> Answer:
        """Send a ModelInferRequest."""
        return grpc_answer(grpcclient.InferResult(self.wire("ModelInfer", message)))

    def stream(self, requests: Sequence[Infer], enable_empty_final_response: bool = False) -> list[Answer | Refused]:
        """Send the requests over a stream of the stock client; return what came, in order, when the stream has ended."""
        came: queue.SimpleQueue[Answer | Refused] = queue.SimpleQueue()

        def receive(result: Any, error: Any) -> None:
            came.put(grpc_answer(result) if error is None else _refused(error))

        with grpcclient.InferenceServerClient(self.server.grpc) as client:
            client.start_stream(receive)
            for request in requests:
                client.async_stream_infer(
                    inputs=[grpc_input(one) for one in request.inputs],
                    outputs=None if request.outputs is None else [grpc_output(one) for one in request.outputs],
                    enable_empty_final_response=enable_empty_final_response,
                    **named(request),
                )
            client.stop_stream()
        return list(_drained(came))

    def stream_messages(
        self, messages: Sequence[pb.ModelInferRequest], metadata: Sequence[tuple[str, str]] = ()
    ) -> list[pb.ModelStreamInferResponse]:
        """Send messages over a stream by hand; return what came before its end. An end with an error is raised."""
        try:
            return list(self.stub.ModelStreamInfer(iter(messages), metadata=metadata, timeout=TIMEOUT_S))
        except grpc.RpcError as error:
            raise Refused(error.code().name, error.details() or "") from None

    def close(self) -> None:
        self.client.close()
        self.channel.close()


@contextlib.contextmanager
def asking(server: RunningServer, door: str) -> Iterator[Any]:
    """Open a client for the length of a block."""
    ask = HttpAsk(server) if door == "http" else GrpcAsk(server, door)
    try:
        yield ask
    finally:
        ask.close()


def told_error(answer: http.client.HTTPResponse, content: bytes) -> str:
    """Return the text of a refusal over HTTP, after a look at its form."""
    assert answer.headers["Content-Type"] == "application/json", answer.headers.items()
    told = json.loads(content)
    assert set(told) == {"error"}, told
    return str(told["error"])


def _drained(came: queue.SimpleQueue[Answer | Refused]) -> Iterator[Answer | Refused]:
    while not came.empty():
        yield came.get()


def _refused(error: InferenceServerException) -> Refused:
    status = str(error.status())
    return Refused(int(status) if status.isdecimal() else status.removeprefix("StatusCode."), error.message())


def _model_path(model: str, version: str) -> str:
    return f"/v2/models/{quote(model, safe='')}" + (f"/versions/{version}" if version else "")
