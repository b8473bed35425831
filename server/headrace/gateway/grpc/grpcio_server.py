"""The handlers on grpcio's asyncio server: the transport that is there everywhere."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final, NoReturn

import grpc
import grpc.aio

from headrace.gateway.grpc.errors import STATUS, details
from headrace.gateway.grpc.service import SERVICE, STREAM_NOT_SERVED, Awaited, GrpcService, Immediate, failure
from headrace.gateway.grpc.settings import GrpcSettings
from headrace_protocol.errors import InferError, unsupported

_COMPRESSION_LEVEL: Final = {"low": 1, "medium": 2, "high": 3}


class GrpcioServer:
    """One grpc.aio server over a service."""

    def __init__(self, service: GrpcService, settings: GrpcSettings) -> None:
        self._service = service
        self._settings = settings
        self._server: Any = None

    async def start(self) -> int:
        """Bind, serve, and return the port. Raises OSError where the port cannot be had."""
        server = grpc.aio.server(options=_options(self._settings))
        handlers = {path: _immediate(path, handler) for path, handler in self._service.immediate.items()}
        handlers |= {path: _awaited(path, handler) for path, handler in self._service.awaited.items()}
        handlers |= stream_handlers()
        add_handlers(server, handlers)
        try:
            port: int = server.add_insecure_port(self._settings.target)
        except RuntimeError as error:
            raise OSError(f"cannot serve gRPC on {self._settings.target}: {error}") from error
        await server.start()
        self._server = server
        return port

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let those in flight end within `grace_s`, then cancel them."""
        if self._server is not None:
            await self._server.stop(grace_s)


class StreamServer:
    """A grpc.aio server for the methods that stream requests, on an abstract Unix socket: the native front passes them on."""

    def __init__(self, settings: GrpcSettings) -> None:
        self._settings = settings
        self._server: Any = None

    async def start(self, name: str) -> None:
        """Serve on the abstract Unix socket `name`."""
        self._server = grpc.aio.server(options=_options(self._settings))
        add_handlers(self._server, stream_handlers())
        self._server.add_insecure_port(f"unix-abstract:{name}")
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """As GrpcioServer.stop."""
        if self._server is not None:
            await self._server.stop(grace_s)


def stream_handlers() -> dict[str, Any]:
    """Return the handlers of methods with streamed requests, by path."""

    async def refuse(_requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        await _abort(context, unsupported(STREAM_NOT_SERVED))
        yield b""

    return {f"/{SERVICE}/ModelStreamInfer": grpc.stream_stream_rpc_method_handler(refuse)}


def add_handlers(server: Any, handlers: Mapping[str, Any]) -> None:
    """Register `handlers`, by path, with a grpc.aio server."""
    services: dict[str, dict[str, Any]] = {}
    for path, handler in handlers.items():
        service, method = path[1:].split("/")
        services.setdefault(service, {})[method] = handler
    for service, methods in services.items():
        server.add_registered_method_handlers(service, methods)


def _immediate(path: str, handler: Immediate) -> Any:
    async def answer(data: bytes, context: Any) -> bytes:
        try:
            return handler(data)
        except Exception as error:
            await _abort(context, failure(path, error))

    return _rpc(answer)


def _awaited(path: str, handler: Awaited) -> Any:
    async def answer(data: bytes, context: Any) -> bytes:
        try:
            return await handler(data, context.invocation_metadata())
        except Exception as error:
            await _abort(context, failure(path, error))

    return _rpc(answer)


def _rpc(answer: Callable[[bytes, Any], Any]) -> Any:
    return grpc.unary_unary_rpc_method_handler(answer)


async def _abort(context: Any, error: InferError) -> NoReturn:
    await context.abort(STATUS[error.code], details(error.message))
    raise AssertionError("abort raises")


def _options(settings: GrpcSettings) -> list[tuple[str, int]]:
    options = [
        ("grpc.so_reuseport", int(settings.reuse_port)),
        ("grpc.max_receive_message_length", settings.max_message_size),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", settings.max_concurrent_streams),
        ("grpc.keepalive_time_ms", settings.keepalive_time_ms),
        ("grpc.keepalive_timeout_ms", settings.keepalive_timeout_ms),
        ("grpc.keepalive_permit_without_calls", int(settings.keepalive_permit_without_calls)),
        ("grpc.http2.max_pings_without_data", settings.max_pings_without_data),
        ("grpc.http2.min_ping_interval_without_data_ms", settings.min_ping_interval_without_data_ms),
        ("grpc.http2.max_ping_strikes", settings.max_ping_strikes),
    ]
    if settings.max_connection_age_ms:
        options.append(("grpc.max_connection_age_ms", settings.max_connection_age_ms))
    if settings.max_connection_age_grace_ms:
        options.append(("grpc.max_connection_age_grace_ms", settings.max_connection_age_grace_ms))
    if settings.compression != "none":
        options.append(("grpc.default_compression_level", _COMPRESSION_LEVEL[settings.compression]))
    return options
