"""The two ways to a server: KServe v2 over HTTP (binary tensors) and over gRPC. Both ask for metadata and infer."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

import numpy as np

from headrace.client.values import WireTensor
from headrace.types import Parameter, TensorMetadata
from headrace_protocol import datatype as dt
from headrace_protocol.errors import ErrorCode, InferError, internal, invalid, unavailable

_SERVICE = "/inference.GRPCInferenceService/"
_LARGEST_MESSAGE = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Call:
    """What is asked of a model. `outputs` maps a name to the number of classes wanted, 0 for the tensor."""

    model: str
    version: str
    inputs: Sequence[WireTensor]
    outputs: Mapping[str, int] = field(default_factory=dict)
    id: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    model: str
    version: str
    id: str
    outputs: Sequence[WireTensor]
    parameters: Mapping[str, object] = field(default_factory=dict)


class Transport(Protocol):
    """A connection to a server. Both calls raise InferError with the server's own words."""

    def inputs(self, model: str, version: str) -> list[TensorMetadata]:
        """Return the model's inputs as its metadata tells them."""
        ...

    def infer(self, call: Call) -> Answer: ...

    def close(self) -> None: ...


def connect(url: str, timeout: float) -> Transport:
    """Return the transport that the URL's scheme names: http, https or grpc."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError as error:
        raise invalid(f"--url {url!r}: {error}") from error
    if not parts.hostname or parts.scheme not in {"http", "https", "grpc"}:
        raise invalid(f"--url: expected http://host:port or grpc://host:port, got {url!r}")
    if parts.scheme == "grpc":
        return GrpcTransport(f"{parts.netloc}" if port else f"{parts.netloc}:8001", timeout)
    connection = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    default = 443 if parts.scheme == "https" else 8000
    return HttpTransport(connection(parts.hostname, port or default, timeout=timeout), parts.path.rstrip("/"), url)


def _version_path(model: str, version: str) -> str:
    path = f"/v2/models/{quote(model, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


class HttpTransport:
    """KServe v2 over HTTP, tensors in binary."""

    def __init__(self, connection: http.client.HTTPConnection, prefix: str, url: str) -> None:
        self._connection = connection
        self._prefix = prefix
        self._url = url

    def inputs(self, model: str, version: str) -> list[TensorMetadata]:
        """See Transport."""
        _, body = self._request("GET", _version_path(model, version), b"", {})
        document = _json(body)
        try:
            return [TensorMetadata(i["name"], i["datatype"], tuple(i["shape"])) for i in document["inputs"]]
        except (KeyError, TypeError) as error:
            raise internal(f"{self._url} answered metadata without usable inputs: {error!r}") from error

    def infer(self, call: Call) -> Answer:
        """See Transport."""
        header = json.dumps(_http_request(call), separators=(",", ":")).encode()
        body = b"".join([header, *(tensor.data for tensor in call.inputs)])
        headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(header))}
        length, answer = self._request("POST", f"{_version_path(call.model, call.version)}/infer", body, headers)
        document = _json(answer[:length])
        try:
            return Answer(
                str(document.get("model_name", "")),
                str(document.get("model_version", "")),
                str(document.get("id", "")),
                _http_outputs(document["outputs"], answer[length:]),
                document.get("parameters") or {},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise internal(f"{self._url} answered what is no inference response: {error!r}") from error

    def close(self) -> None:
        """See Transport."""
        self._connection.close()

    def _request(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        """Return the length of the answer's JSON part and the answer; raise what the server says is wrong."""
        try:
            self._connection.request(method, self._prefix + path, body=body or None, headers=headers)
            response = self._connection.getresponse()
            answer = response.read()
            length = int(response.headers.get("Inference-Header-Content-Length", len(answer)))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise unavailable(f"no answer from {self._url}: {str(error) or type(error).__name__}") from error
        if response.status == http.HTTPStatus.OK:
            return length, answer
        try:
            message = str(json.loads(answer)["error"])
        except (ValueError, KeyError, TypeError):
            message = answer[:500].decode("utf-8", errors="replace") or "no explanation"
        code = ErrorCode.INVALID_ARG if response.status < http.HTTPStatus.INTERNAL_SERVER_ERROR else ErrorCode.INTERNAL
        raise InferError(code, f"the server says: {message} (HTTP {response.status})")


def _http_request(call: Call) -> dict[str, object]:
    document: dict[str, object] = {
        "inputs": [
            {
                "name": tensor.name,
                "datatype": tensor.datatype,
                "shape": list(tensor.shape),
                "parameters": {"binary_data_size": len(tensor.data)},
            }
            for tensor in call.inputs
        ]
    }
    if call.id:
        document["id"] = call.id
    parameters: dict[str, object] = dict(call.parameters)
    if call.outputs:
        document["outputs"] = [
            {"name": name, "parameters": {"binary_data": True} | ({"classification": classes} if classes else {})}
            for name, classes in call.outputs.items()
        ]
    else:
        parameters["binary_data_output"] = True
    if parameters:
        document["parameters"] = parameters
    return document


def _http_outputs(outputs: list[dict[str, Any]], tail: bytes) -> list[WireTensor]:
    found: list[WireTensor] = []
    for output in outputs:
        shape, name, datatype = tuple(output["shape"]), str(output["name"]), str(output["datatype"])
        if "data" in output:
            kind = dt.BY_NAME[datatype]
            array = np.empty(len(output["data"]), dtype=np.object_)
            array[:] = output["data"]
            data = bytes(dt.from_numpy(array if kind is dt.BYTES else array.astype(kind.numpy), kind))
        else:
            size = int(output["parameters"]["binary_data_size"])
            data, tail = tail[:size], tail[size:]
        found.append(WireTensor(name, datatype, shape, data))
    return found


def _json(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except ValueError as error:
        raise internal(f"the server's answer is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise internal("the server's answer is no JSON object")
    return document


class GrpcTransport:
    """KServe v2 over gRPC."""

    def __init__(self, target: str, timeout: float) -> None:
        import grpc

        sizes = [
            ("grpc.max_receive_message_length", _LARGEST_MESSAGE),
            ("grpc.max_send_message_length", _LARGEST_MESSAGE),
        ]
        self._target = target
        self._timeout = timeout
        self._channel = grpc.insecure_channel(target, options=sizes)

    def inputs(self, model: str, version: str) -> list[TensorMetadata]:
        """See Transport."""
        from headrace_protocol._generated import grpc_service_pb2 as pb

        request = pb.ModelMetadataRequest(name=model, version=version)
        response = self._call("ModelMetadata", request, pb.ModelMetadataResponse)
        return [TensorMetadata(i.name, i.datatype, tuple(i.shape)) for i in response.inputs]

    def infer(self, call: Call) -> Answer:
        """See Transport."""
        from headrace_protocol._generated import grpc_service_pb2 as pb

        request = pb.ModelInferRequest(model_name=call.model, model_version=call.version, id=call.id)
        for tensor in call.inputs:
            request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            request.raw_input_contents.append(tensor.data)
        for name, classes in call.outputs.items():
            output = request.outputs.add(name=name)
            if classes:
                output.parameters["classification"].int64_param = classes
        for key, value in call.parameters.items():
            _set_parameter(request.parameters[key], value)
        response = self._call("ModelInfer", request, pb.ModelInferResponse)
        if len(response.outputs) != len(response.raw_output_contents):
            raise internal(f"grpc://{self._target} answered without the raw contents of its outputs")
        outputs = [
            WireTensor(output.name, output.datatype, tuple(output.shape), data)
            for output, data in zip(response.outputs, response.raw_output_contents, strict=True)
        ]
        parameters = {key: _get_parameter(value) for key, value in response.parameters.items()}
        return Answer(response.model_name, response.model_version, response.id, outputs, parameters)

    def close(self) -> None:
        """See Transport."""
        self._channel.close()

    def _call(self, method: str, request: Any, response: Any) -> Any:
        import grpc

        call = self._channel.unary_unary(
            _SERVICE + method,
            request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,
        )
        try:
            return call(request, timeout=self._timeout)
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
            if code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
                raise unavailable(f"grpc://{self._target}: {details} ({code.name})") from error
            raise invalid(f"the server says: {details} (gRPC {code.name})") from error


def _set_parameter(target: Any, value: Parameter) -> None:
    if isinstance(value, bool):
        target.bool_param = value
    elif isinstance(value, int):
        target.int64_param = value
    elif isinstance(value, float):
        target.double_param = value
    else:
        target.string_param = value


def _get_parameter(parameter: Any) -> object:
    values = {
        "bool_param": parameter.bool_param,
        "int64_param": parameter.int64_param,
        "string_param": parameter.string_param,
        "double_param": parameter.double_param,
        "uint64_param": parameter.uint64_param,
    }
    return values.get(parameter.WhichOneof("parameter_choice"))
