"""The rpcs of inference.GRPCInferenceService as functions from request bytes to response bytes.

Which server carries them is not known here: a transport looks a method up by its path and maps what it raises.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final

from headrace.clock import Clock
from headrace.gateway.grpc.access import Guard, caller_of, guards
from headrace.gateway.grpc.health import Health
from headrace.gateway.grpc.memory_service import MemoryService
from headrace.gateway.grpc.paths import CHECK, METHOD, MODEL_INFER, Metadata
from headrace.gateway.grpc.request_codec import decode_infer
from headrace.gateway.grpc.request_parsing import parse
from headrace.gateway.grpc.response_codec import encode_infer
from headrace.gateway.grpc.settings import GrpcSettings
from headrace.gateway.grpc.settings_service import SettingsService
from headrace.gateway.grpc.stream import InferStream, Read, Write, trace_received
from headrace.gateway.header_forward import compile_pattern, forward
from headrace.gateway.version import named_version, parse_version
from headrace.observability.trace import GRPC_SEND_END, GRPC_SEND_START
from headrace.planes import Cancellable, ControlPlane, DataPlane, LoadParameters, Outcome
from headrace.types import InferenceRequest, InferenceResponse
from headrace_protocol._generated import grpc_service_pb2 as pb
from headrace_protocol.errors import InferError, internal, invalid, unavailable, unsupported

Immediate = Callable[[bytes], bytes]
Awaited = Callable[[bytes, Metadata], Awaitable[bytes]]

_log = logging.getLogger(__name__)

_STATUS_ERRORS: Final = "triton_grpc_error"
"""Metadata by which a client asks that the first failure of a stream ends it with a gRPC status."""


class GrpcService:
    """The handlers, by path. Immediate ones answer at once; awaited ones are to run in a task of their own."""

    def __init__(self, data: DataPlane, control: ControlPlane, clock: Clock, settings: GrpcSettings) -> None:
        self._data = data
        self._control = control
        self._clock = clock
        self._max_message_size = settings.max_message_size
        self._forwarded = compile_pattern(settings.header_forward_pattern)
        self._gatekeeper = settings.gatekeeper
        self._sticky = settings.sticky_header
        self._streams: set[InferStream] = set()
        self.health: Final = Health(lambda: data.ready() and not data.exiting())
        self.guards: Final[Mapping[str, Guard]] = guards(settings.restricted, settings.gatekeeper)
        """Of the restricted rpcs, by path: a transport calls them with a call's metadata before anything else."""
        immediate: dict[str, Immediate] = {
            "ServerLive": self.server_live,
            "ServerReady": self.server_ready,
            "ModelReady": self.model_ready,
            "ServerMetadata": self.server_metadata,
            "ModelMetadata": self.model_metadata,
            "ModelConfig": self.model_config,
            "ModelStatistics": self.model_statistics,
            "RepositoryIndex": self.repository_index,
            **SettingsService(control).handlers,
            **MemoryService(control).handlers,
        }
        self.immediate: Final = {METHOD + rpc: handler for rpc, handler in immediate.items()}
        self.immediate[CHECK] = self.health.check
        self.awaited: Final[dict[str, Awaited]] = {
            MODEL_INFER: self.model_infer,
            f"{METHOD}RepositoryModelLoad": self.repository_model_load,
            f"{METHOD}RepositoryModelUnload": self.repository_model_unload,
        }

    def server_live(self, _data: bytes) -> bytes:
        self._refuse_when_exiting()
        return pb.ServerLiveResponse(live=self._data.live()).SerializeToString()

    def server_ready(self, _data: bytes) -> bytes:
        self._refuse_when_exiting()
        return pb.ServerReadyResponse(ready=self._data.ready()).SerializeToString()

    def model_ready(self, data: bytes) -> bytes:
        self._refuse_when_exiting()
        request = parse(pb.ModelReadyRequest, data)
        ready = self._data.model_ready(request.name, parse_version(request.version))
        return pb.ModelReadyResponse(ready=ready).SerializeToString()

    def server_metadata(self, _data: bytes) -> bytes:
        server = self._data.server_metadata()
        return pb.ServerMetadataResponse(
            name=server.name, version=server.version, extensions=server.extensions
        ).SerializeToString()

    def model_metadata(self, data: bytes) -> bytes:
        request = parse(pb.ModelMetadataRequest, data)
        model = self._data.model_metadata(request.name, parse_version(request.version))
        response = pb.ModelMetadataResponse(name=model.name, versions=model.versions, platform=model.platform)
        for tensor in model.inputs:
            response.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        for tensor in model.outputs:
            response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        return response.SerializeToString()

    def model_config(self, data: bytes) -> bytes:
        request = parse(pb.ModelConfigRequest, data)
        config = self._data.model_config(request.name, parse_version(request.version))
        return pb.ModelConfigResponse(config=config).SerializeToString()

    def model_statistics(self, data: bytes) -> bytes:
        request = parse(pb.ModelStatisticsRequest, data)
        return self._data.statistics(request.name, parse_version(request.version)).SerializeToString()

    def repository_index(self, data: bytes) -> bytes:
        request = parse(pb.RepositoryIndexRequest, data)
        _refuse_repository(request.repository_name)
        response = pb.RepositoryIndexResponse()
        for entry in self._control.index(ready_only=request.ready):
            response.models.add(name=entry.name, version=entry.version, state=entry.state, reason=entry.reason)
        return response.SerializeToString()

    async def repository_model_load(self, data: bytes, _metadata: Metadata) -> bytes:
        request = parse(pb.RepositoryModelLoadRequest, data)
        _refuse_repository(request.repository_name)
        parameters: LoadParameters = {}
        for key, parameter in request.parameters.items():
            if key == "config":
                _expect(key, parameter, "string_param")
                parameters[key] = parameter.string_param
            elif key.startswith("file:"):
                _expect(key, parameter, "bytes_param")
                parameters[key] = parameter.bytes_param
            elif key == "version":
                parameters[key] = _version(parameter)
            else:
                raise invalid(f"unknown load parameter '{key}', expected 'config', 'version' or 'file:<path>'")
        await self._control.load(request.model_name, parameters)
        return b""

    async def repository_model_unload(self, data: bytes, _metadata: Metadata) -> bytes:
        request = parse(pb.RepositoryModelUnloadRequest, data)
        _refuse_repository(request.repository_name)
        dependents, version = False, None
        for key, parameter in request.parameters.items():
            if key == "version":
                version = _version(parameter)
            elif key == "unload_dependents":
                _expect(key, parameter, "bool_param")
                dependents = parameter.bool_param
            else:
                raise invalid(f"unknown unload parameter '{key}', expected 'unload_dependents' or 'version'")
        await self._control.unload(request.model_name, unload_dependents=dependents, version=version)
        return b""

    async def model_infer(self, data: bytes, metadata: Metadata) -> bytes:
        request = self._decode_infer(data, metadata)
        received_ns = request.received_ns
        inferring = self._data.infer(request)
        del request  # the traceback of an error keeps this frame, which must not keep the request's memory
        response = await inferring
        if response.trace is not None:
            trace_received(response.trace, received_ns)
        answer = self.answer_infer(response)
        if response.trace is not None:
            response.trace.mark(GRPC_SEND_END)  # grpc.aio does not tell when it has sent it
        return answer

    def begin_infer(self, data: bytes, metadata: Metadata, done: Callable[[Outcome], None]) -> Cancellable:
        """Begin a ModelInfer; a response that `done` gets goes through `answer_infer`. Raises InferError."""
        request = self._decode_infer(data, metadata)
        under_way = self._data.submit(request, done)
        if request.trace is not None:
            trace_received(request.trace, request.received_ns)
        return under_way

    def answer_infer(self, response: InferenceResponse) -> bytes:
        """Return the encoded response, and release it. Raises InferError where it is too large."""
        try:
            data = encode_infer(response, self._max_message_size)
        finally:
            response.release()
        if response.trace is not None:
            response.trace.mark(GRPC_SEND_START)
        return data

    async def model_stream_infer(self, metadata: Metadata, read: Read, write: Write) -> None:
        """Serve one stream to its end. Raises InferError where the call shall end with a status."""
        metadata = tuple(metadata)
        stream = InferStream(
            self._data,
            self._clock.now_ns,
            partial(self._annotate, metadata=metadata),
            self._max_message_size,
            status_errors=any(key == _STATUS_ERRORS and value == "true" for key, value in metadata),
        )
        self._streams.add(stream)
        try:
            await stream.run(read, write)
        finally:
            self._streams.discard(stream)

    def stop_streams(self) -> None:
        """Read no more from any stream; each ends UNAVAILABLE once what is under way in it is answered."""
        for stream in self._streams:
            stream.stop()
        self.health.stop()

    def _decode_infer(self, data: bytes, metadata: Metadata) -> InferenceRequest:
        request = decode_infer(data, self._clock.now_ns())
        self._annotate(request, metadata)
        return request

    def _annotate(self, request: InferenceRequest, metadata: Metadata) -> None:
        if self._gatekeeper is not None:
            request.caller = self._gatekeeper.asking(caller_of(self._gatekeeper, metadata), request.model_name)
        for key, value in metadata:
            if key == "traceparent" and isinstance(value, str):
                request.trace_context = value
            elif key == self._sticky:
                request.sticky = value
        if self._forwarded is not None:
            forward(request, metadata, self._forwarded)

    def _refuse_when_exiting(self) -> None:
        if self._data.exiting():
            raise unavailable("the server is stopping")


def failure(path: str, error: Exception) -> InferError:
    """Return what the client is told about `error`. Anything but an InferError is our fault, and is logged."""
    if isinstance(error, InferError):
        return error
    _log.error("the handler of %s failed", path, exc_info=error)
    return internal(f"the server failed to answer {path.rsplit('/', 1)[-1]}; its log has the reason")


def _refuse_repository(name: str) -> None:
    if name:
        raise unsupported(f"repository_name '{name}': choosing a repository is not supported, leave it empty")


def _version(parameter: pb.ModelRepositoryParameter) -> int:
    if parameter.WhichOneof("parameter_choice") == "string_param":
        return named_version(parameter.string_param)
    _expect("version", parameter, "int64_param")
    return named_version(str(parameter.int64_param))


def _expect(key: str, parameter: pb.ModelRepositoryParameter, kind: str) -> None:
    got = parameter.WhichOneof("parameter_choice")
    if got != kind:
        raise invalid(f"parameter '{key}' takes a {kind}, got {f'a {got}' if got else 'no value'}")
