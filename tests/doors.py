"""One way to ask a running server over HTTP and over gRPC: what came of a request is told in the same words.

A door is a client with connections of its own. Cancelling a task that awaits `infer` is what a client does that goes
away: over HTTP its connection closes, over gRPC its call is cancelled.
"""

from __future__ import annotations

import asyncio
import json
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp
import grpc
import grpc.aio
import numpy as np

from harness import RunningServer
from headrace_protocol._generated import grpc_service_pb2 as pb

DOORS = ("http", "grpc")
_CODES = {
    200: "OK",
    400: "INVALID_ARGUMENT",
    404: "NOT_FOUND",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
}
_TYPES = {"float32": "FP32", "int32": "INT32", "object": "BYTES"}
_SERVICE = "/inference.GRPCInferenceService/"
_LENGTH = struct.Struct("<I")

Parameters = Mapping[str, str | int | bool]


@dataclass(frozen=True)
class Outcome:
    """What came of one request. `code` is gRPC's name for it; GONE stands for a connection that broke."""

    code: str
    text: str = ""
    version: str = ""
    outputs: Mapping[str, np.ndarray] = field(default_factory=dict)
    started: float = 0.0
    ended: float = 0.0

    @property
    def ok(self) -> bool:
        return self.code == "OK"

    @property
    def seconds(self) -> float:
        return self.ended - self.started

    @property
    def array(self) -> np.ndarray:
        """OUTPUT0 of an answer."""
        assert self.ok, self
        return self.outputs["OUTPUT0"]


class Door(ABC):
    """A client; opened and closed by `async with`."""

    async def infer(
        self,
        model: str,
        array: np.ndarray,
        *,
        version: str = "",
        parameters: Parameters | None = None,
        timeout: float = 60.0,
    ) -> Outcome:
        """Send `array` as INPUT0 and tell what came of it. Raises TimeoutError once the client's deadline is over."""
        started = time.monotonic()
        code, text, served, outputs = await self._infer(model, array, version, parameters or {}, timeout)
        return Outcome(code, text, served, outputs, started, time.monotonic())

    @abstractmethod
    async def _infer(
        self, model: str, array: np.ndarray, version: str, parameters: Parameters, timeout: float
    ) -> tuple[str, str, str, dict[str, np.ndarray]]: ...

    @abstractmethod
    async def control(self, verb: str, model: str) -> Outcome:
        """Load or unload a model by the repository API."""

    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> Door:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class HttpDoor(Door):
    """KServe v2 over HTTP, tensors in the binary tail."""

    def __init__(self, address: str) -> None:
        self._session = aiohttp.ClientSession(f"http://{address}", connector=aiohttp.TCPConnector(limit=0))

    async def _infer(
        self, model: str, array: np.ndarray, version: str, parameters: Parameters, timeout: float
    ) -> tuple[str, str, str, dict[str, np.ndarray]]:
        data = to_wire(array)
        tensor = {
            "name": "INPUT0",
            "shape": array.shape,
            "datatype": _TYPES[array.dtype.name],
            "parameters": {"binary_data_size": len(data)},
        }
        head = json.dumps({"inputs": [tensor], "parameters": {**parameters, "binary_data_output": True}}).encode()
        path = f"/v2/models/{model}" + (f"/versions/{version}" if version else "") + "/infer"
        try:
            async with self._session.post(
                path,
                data=head + data,
                headers={"Inference-Header-Content-Length": str(len(head))},
                timeout=aiohttp.ClientTimeout(timeout),
            ) as answer:
                body = await answer.read()
        except aiohttp.ClientConnectionError as error:
            return "GONE", repr(error), "", {}
        if answer.status != 200:
            return _CODES[answer.status], json.loads(body)["error"], "", {}
        size = int(answer.headers["Inference-Header-Content-Length"])
        told = json.loads(body[:size])
        outputs = {}
        for output in told["outputs"]:
            end = size + output["parameters"]["binary_data_size"]
            outputs[output["name"]] = from_wire(output["datatype"], output["shape"], body[size:end])
            size = end
        return "OK", "", told["model_version"], outputs

    async def control(self, verb: str, model: str) -> Outcome:
        started = time.monotonic()
        async with self._session.post(f"/v2/repository/models/{model}/{verb}") as answer:
            text = await answer.text()
        return Outcome(_CODES[answer.status], text, started=started, ended=time.monotonic())

    async def close(self) -> None:
        await self._session.close()


class GrpcDoor(Door):
    """KServe v2 over gRPC, tensors raw."""

    def __init__(self, address: str) -> None:
        # A channel of its own pool: another one to the same address would else share, and keep, its back-off.
        self._channel = grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._call = self._channel.unary_unary(
            f"{_SERVICE}ModelInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelInferResponse.FromString,
        )

    async def __aenter__(self) -> Door:
        async with asyncio.timeout(30):
            await self._channel.channel_ready()  # calls made while it connects would not arrive in order
        return self

    async def _infer(
        self, model: str, array: np.ndarray, version: str, parameters: Parameters, timeout: float
    ) -> tuple[str, str, str, dict[str, np.ndarray]]:
        request = pb.ModelInferRequest(
            model_name=model, model_version=version, raw_input_contents=[bytes(to_wire(array))]
        )
        request.inputs.add(name="INPUT0", datatype=_TYPES[array.dtype.name], shape=array.shape)
        for key, value in parameters.items():
            kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
            setattr(request.parameters[key], kind, value)
        try:
            answer = await self._call(request, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TimeoutError from error
            return error.code().name, error.details() or "", "", {}
        outputs = {
            output.name: from_wire(output.datatype, output.shape, raw)
            for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)
        }
        return "OK", "", answer.model_version, outputs

    async def control(self, verb: str, model: str) -> Outcome:
        kind = {"load": pb.RepositoryModelLoadRequest, "unload": pb.RepositoryModelUnloadRequest}[verb]
        call = self._channel.unary_unary(
            f"{_SERVICE}RepositoryModel{verb.capitalize()}", request_serializer=kind.SerializeToString
        )
        started = time.monotonic()
        try:
            await call(kind(model_name=model))
        except grpc.aio.AioRpcError as error:
            return Outcome(error.code().name, error.details() or "", started=started, ended=time.monotonic())
        return Outcome("OK", started=started, ended=time.monotonic())

    async def close(self) -> None:
        await self._channel.close()


def open_door(server: RunningServer, door: str) -> Door:
    """Return a new client of the server; "grpcio" is the gRPC door too, for servers that run that transport."""
    return HttpDoor(server.http) if door == "http" else GrpcDoor(server.grpc)


def to_wire(array: np.ndarray) -> bytes:
    """Return the little-endian bytes of an array; BYTES are an array of objects."""
    if array.dtype == object:
        return b"".join(_LENGTH.pack(len(item)) + item for item in array.ravel())
    return array.tobytes()


def from_wire(datatype: str, shape: Sequence[int], data: bytes) -> np.ndarray:
    """The inverse of to_wire."""
    if datatype != "BYTES":
        name = next(name for name, known in _TYPES.items() if known == datatype)
        return np.frombuffer(data, name).reshape(tuple(shape))
    items = []
    at = 0
    while at < len(data):
        (size,) = _LENGTH.unpack_from(data, at)
        items.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    array = np.empty(len(items), object)
    array[:] = items
    return array.reshape(tuple(shape))


class SteadyLoad:
    """Asks for one model from both doors for as long as it is entered, and keeps every outcome."""

    def __init__(
        self,
        server: RunningServer,
        model: str,
        array: np.ndarray,
        *,
        version: str = "",
        clients: int = 2,
        pause: float = 0.01,
    ) -> None:
        self.outcomes: list[Outcome] = []
        self._server = server
        self._model = model
        self._array = array
        self._version = version
        self._clients = clients
        self._pause = pause
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._grew = asyncio.Condition()

    async def __aenter__(self) -> SteadyLoad:
        self._tasks = [asyncio.create_task(self._ask(door)) for door in DOORS for _ in range(self._clients)]
        await self.more(2 * len(self._tasks))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping.set()
        await asyncio.gather(*self._tasks)

    async def more(self, count: int = 20) -> list[Outcome]:
        """Wait for this many outcomes that began after now; return them."""
        now = time.monotonic()
        async with self._grew:
            async with asyncio.timeout(30):
                await self._grew.wait_for(lambda: sum(o.started >= now for o in self.outcomes) >= count)
        return [outcome for outcome in self.outcomes if outcome.started >= now]

    def failures(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.ok]

    async def _ask(self, kind: str) -> None:
        async with open_door(self._server, kind) as door:
            while not self._stopping.is_set():
                outcome = await door.infer(self._model, self._array, version=self._version)
                async with self._grew:
                    self.outcomes.append(outcome)
                    self._grew.notify_all()
                await asyncio.sleep(self._pause)
