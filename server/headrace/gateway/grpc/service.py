"""The rpcs of inference.GRPCInferenceService as functions from request bytes to response bytes.

Which server carries them is not known here: a transport looks a method up by its path and maps what it raises.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from headrace.clock import Clock
from headrace.gateway.grpc.codec import decode_infer, encode_infer
from headrace.gateway.grpc.health import CHECK, encode_status
from headrace.gateway.version import parse_version
from headrace.planes import Cancellable, ControlPlane, DataPlane, LoadParameters, Outcome
from headrace.types import InferenceRequest, InferenceResponse
from headrace_protocol._generated import grpc_service_pb2 as pb
from headrace_protocol.errors import InferError, internal, invalid, unavailable, unsupported

SERVICE: Final = "inference.GRPCInferenceService"

Metadata = Iterable[tuple[str, str | bytes]]
Immediate = Callable[[bytes], bytes]
Awaited = Callable[[bytes, Metadata], Awaitable[bytes]]

_Request = TypeVar("_Request", bound=Message)

_log = logging.getLogger(__name__)

_NOT_SERVED: Final = {
    **dict.fromkeys(
        [
            f"{kind}SharedMemory{action}"
            for kind in ("System", "Cuda")
            for action in ("Status", "Register", "Unregister")
        ],
        "shared memory of clients is not served yet",
    ),
    "TraceSetting": "trace settings are not served yet",
    "LogSettings": "log settings are not served yet",
}

MODEL_INFER: Final = f"/{SERVICE}/ModelInfer"
STREAM_NOT_SERVED: Final = "ModelStreamInfer is not served yet: use ModelInfer"


class GrpcService:
    """The handlers, by path. Immediate ones answer at once; awaited ones are to run in a task of their own."""

    def __init__(self, data: DataPlane, control: ControlPlane, clock: Clock, max_message_size: int) -> None:
        self._data = data
        self._control = control
        self._clock = clock
        self._max_message_size = max_message_size
        immediate: dict[str, Immediate] = {
            "ServerLive": self.server_live,
            "ServerReady": self.server_ready,
            "ModelReady": self.model_ready,
            "ServerMetadata": self.server_metadata,
            "ModelMetadata": self.model_metadata,
            "ModelConfig": self.model_config,
            "ModelStatistics": self.model_statistics,
            "RepositoryIndex": self.repository_index,
        }
        for rpc, sentence in _NOT_SERVED.items():
            immediate[rpc] = _refusal(sentence)
        self.immediate: Final = {f"/{SERVICE}/{rpc}": handler for rpc, handler in immediate.items()}
        self.immediate[CHECK] = self.health_check
        self.awaited: Final[dict[str, Awaited]] = {
            MODEL_INFER: self.model_infer,
            f"/{SERVICE}/RepositoryModelLoad": self.repository_model_load,
            f"/{SERVICE}/RepositoryModelUnload": self.repository_model_unload,
        }

    def health_check(self, _data: bytes) -> bytes:
        return encode_status(self._data.ready() and not self._data.exiting())

    def server_live(self, _data: bytes) -> bytes:
        self._refuse_when_exiting()
        return pb.ServerLiveResponse(live=self._data.live()).SerializeToString()

    def server_ready(self, _data: bytes) -> bytes:
        self._refuse_when_exiting()
        return pb.ServerReadyResponse(ready=self._data.ready()).SerializeToString()

    def model_ready(self, data: bytes) -> bytes:
        self._refuse_when_exiting()
        request = _parse(pb.ModelReadyRequest, data)
        ready = self._data.model_ready(request.name, parse_version(request.version))
        return pb.ModelReadyResponse(ready=ready).SerializeToString()

    def server_metadata(self, _data: bytes) -> bytes:
        server = self._data.server_metadata()
        return pb.ServerMetadataResponse(
            name=server.name, version=server.version, extensions=server.extensions
        ).SerializeToString()

    def model_metadata(self, data: bytes) -> bytes:
        request = _parse(pb.ModelMetadataRequest, data)
        model = self._data.model_metadata(request.name, parse_version(request.version))
        response = pb.ModelMetadataResponse(name=model.name, versions=model.versions, platform=model.platform)
        for tensor in model.inputs:
            response.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        for tensor in model.outputs:
            response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        return response.SerializeToString()

    def model_config(self, data: bytes) -> bytes:
        request = _parse(pb.ModelConfigRequest, data)
        config = self._data.model_config(request.name, parse_version(request.version))
        return pb.ModelConfigResponse(config=config).SerializeToString()

    def model_statistics(self, data: bytes) -> bytes:
        request = _parse(pb.ModelStatisticsRequest, data)
        return self._data.statistics(request.name, parse_version(request.version)).SerializeToString()

    def repository_index(self, data: bytes) -> bytes:
        request = _parse(pb.RepositoryIndexRequest, data)
        _refuse_repository(request.repository_name)
        response = pb.RepositoryIndexResponse()
        for entry in self._control.index(ready_only=request.ready):
            response.models.add(name=entry.name, version=entry.version, state=entry.state, reason=entry.reason)
        return response.SerializeToString()

    async def repository_model_load(self, data: bytes, _metadata: Metadata) -> bytes:
        request = _parse(pb.RepositoryModelLoadRequest, data)
        _refuse_repository(request.repository_name)
        parameters: LoadParameters = {}
        for key, parameter in request.parameters.items():
            if key == "config":
                _expect(key, parameter, "string_param")
                parameters[key] = parameter.string_param
            elif key.startswith("file:"):
                _expect(key, parameter, "bytes_param")
                parameters[key] = parameter.bytes_param
            else:
                raise invalid(f"unknown load parameter '{key}', expected 'config' or 'file:<path>'")
        await self._control.load(request.model_name, parameters)
        return b""

    async def repository_model_unload(self, data: bytes, _metadata: Metadata) -> bytes:
        request = _parse(pb.RepositoryModelUnloadRequest, data)
        _refuse_repository(request.repository_name)
        dependents = False
        for key, parameter in request.parameters.items():
            if key != "unload_dependents":
                raise invalid(f"unknown unload parameter '{key}', expected 'unload_dependents'")
            _expect(key, parameter, "bool_param")
            dependents = parameter.bool_param
        await self._control.unload(request.model_name, unload_dependents=dependents)
        return b""

    async def model_infer(self, data: bytes, metadata: Metadata) -> bytes:
        return self.answer_infer(await self._data.infer(self._decode_infer(data, metadata)))

    def begin_infer(self, data: bytes, metadata: Metadata, done: Callable[[Outcome], None]) -> Cancellable:
        """Begin a ModelInfer; a response that `done` gets goes through `answer_infer`. Raises InferError."""
        return self._data.submit(self._decode_infer(data, metadata), done)

    def answer_infer(self, response: InferenceResponse) -> bytes:
        """Return the encoded response, and release it. Raises InferError where it is too large."""
        try:
            return encode_infer(response, self._max_message_size)
        finally:
            response.release()

    def _decode_infer(self, data: bytes, metadata: Metadata) -> InferenceRequest:
        request = decode_infer(data, self._clock.now_ns())
        for key, value in metadata:
            if key == "traceparent" and isinstance(value, str):
                request.trace_context = value
        return request

    def _refuse_when_exiting(self) -> None:
        if self._data.exiting():
            raise unavailable("the server is stopping")


def failure(path: str, error: Exception) -> InferError:
    """Return what the client is told about `error`. Anything but an InferError is our fault, and is logged."""
    if isinstance(error, InferError):
        return error
    _log.error("the handler of %s failed", path, exc_info=error)
    return internal(f"the server failed to answer {path.rsplit('/', 1)[-1]}; its log has the reason")


def _refusal(sentence: str) -> Immediate:
    def refuse(_data: bytes) -> bytes:
        raise unsupported(sentence)

    return refuse


def _parse(kind: type[_Request], data: bytes) -> _Request:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise invalid(f"the request is not a well-formed {kind.DESCRIPTOR.name}: {error}") from None


def _refuse_repository(name: str) -> None:
    if name:
        raise unsupported(f"repository_name '{name}': choosing a repository is not supported, leave it empty")


def _expect(key: str, parameter: pb.ModelRepositoryParameter, kind: str) -> None:
    got = parameter.WhichOneof("parameter_choice")
    if got != kind:
        raise invalid(f"parameter '{key}' takes a {kind}, got {f'a {got}' if got else 'no value'}")
