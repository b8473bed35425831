"""The handlers on grpcio's asyncio server: the transport that is there everywhere."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, NoReturn

import grpc
import grpc.aio

from headrace.gateway.grpc import reflection
from headrace.gateway.grpc.access import Guard
from headrace.gateway.grpc.binding import claimed
from headrace.gateway.grpc.errors import details, status_of
from headrace.gateway.grpc.paths import MODEL_STREAM_INFER, REFLECTION, WATCH
from headrace.gateway.grpc.service import Awaited, GrpcService, Immediate, failure
from headrace.gateway.grpc.settings import GrpcSettings
from headrace.gateway.tls import Certificates, Pem
from headrace.gateway.unix_socket import UnixSocket
from headrace_protocol.errors import InferError

_COMPRESSION_LEVEL: Final = {"low": 1, "medium": 2, "high": 3}


class GrpcioServer:
    """One grpc.aio server over a service, on a port or the Unix socket `file`."""

    def __init__(
        self,
        service: GrpcService,
        settings: GrpcSettings,
        file: UnixSocket | None,
        certificates: Certificates | None = None,
    ) -> None:
        self._service = service
        self._file = file
        self._settings = settings
        self._certificates = certificates
        self._server: Any = None

    async def start(self) -> int:
        """Bind, serve, and return the port. Raises OSError where the port cannot be had."""
        service = self._service
        server = grpc.aio.server(options=_options(self._settings))
        guard = service.guards.get
        handlers = {path: _immediate(path, handler, guard(path)) for path, handler in service.immediate.items()}
        handlers |= {path: _awaited(path, handler, guard(path)) for path, handler in service.awaited.items()}
        handlers |= stream_handlers(service, self._settings)
        add_handlers(server, handlers)
        try:
            with claimed(self._file):
                port = self._bind(server)
        except RuntimeError as error:
            raise OSError(f"cannot serve gRPC on {self._settings.target}: {error}") from error
        await server.start()
        self._server = server
        return port

    def _bind(self, server: Any) -> int:
        target = self._settings.target
        if self._certificates is None:
            return int(server.add_insecure_port(target))
        return int(server.add_secure_port(target, _credentials(self._certificates)))

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let those in flight end within `grace_s`, then cancel them."""
        if self._server is not None:
            self._service.stop_streams()
            await self._server.stop(grace_s)


class StreamServer:
    """A grpc.aio server for the methods that stream, on a Unix socket: the native front passes them on.

    The socket is `file`, or without one an abstract one, which has no file that a killed server would leave behind, but
    which every user of the machine may use: good for a front on a port, which they may use too.
    """

    def __init__(self, service: GrpcService, settings: GrpcSettings, file: UnixSocket | None) -> None:
        self._service = service
        self._settings = settings
        self._file = file
        self._server: Any = None

    async def start(self) -> str:
        """Serve, and return the path, which begins with a NUL where the socket is abstract. Raises OSError."""
        server = grpc.aio.server(options=_options(self._settings))
        add_handlers(server, stream_handlers(self._service, self._settings))
        if self._file is None:
            name = f"headrace-grpc-{secrets.token_hex(16)}"
            server.add_insecure_port(f"unix-abstract:{name}")
            path = f"\0{name}"
        else:
            path = self._file.path
            with claimed(self._file):
                server.add_insecure_port(f"unix:{path}")
        await server.start()
        self._server = server
        return path

    async def stop(self, grace_s: float) -> None:
        """As GrpcioServer.stop."""
        if self._server is not None:
            self._service.stop_streams()
            await self._server.stop(grace_s)
        if self._file is not None:
            self._file.remove()


def stream_handlers(service: GrpcService, settings: GrpcSettings) -> dict[str, Any]:
    """Return the handlers of methods with streamed requests or responses, by path."""
    guard = service.guards.get

    async def infer(context: Any) -> None:
        await service.model_stream_infer(context.invocation_metadata(), partial(_read, context), context.write)

    async def reflect(context: Any) -> None:
        while (data := await _read(context)) is not None:
            await context.write(reflection.answer(data))

    async def watch(data: bytes, context: Any) -> None:
        await service.health.watch(data, context.write)

    async def serve_watch(data: bytes, context: Any) -> None:
        await _serve(WATCH, partial(watch, data), guard(WATCH), context)

    handlers = {
        MODEL_STREAM_INFER: _stream(MODEL_STREAM_INFER, infer, guard(MODEL_STREAM_INFER)),
        WATCH: grpc.unary_stream_rpc_method_handler(serve_watch),
    }
    if settings.reflection:
        handlers |= {path: _stream(path, reflect, None) for path in REFLECTION}
    return handlers


async def _read(context: Any) -> bytes | None:
    """Return the next message of a client, None once it has sent its last."""
    data = await context.read()
    return None if data is grpc.aio.EOF else data


async def _serve(path: str, handler: Callable[[Any], Awaitable[None]], guard: Guard | None, context: Any) -> None:
    try:
        if guard is not None:
            guard(context.invocation_metadata())
        await handler(context)
    except Exception as error:
        await _abort(context, failure(path, error))


def _stream(path: str, handler: Callable[[Any], Awaitable[None]], guard: Guard | None) -> Any:
    async def serve(_requests: object, context: Any) -> None:
        await _serve(path, handler, guard, context)

    return grpc.stream_stream_rpc_method_handler(serve)


def add_handlers(server: Any, handlers: Mapping[str, Any]) -> None:
    """Register `handlers`, by path, with a grpc.aio server."""
    services: dict[str, dict[str, Any]] = {}
    for path, handler in handlers.items():
        service, method = path[1:].split("/")
        services.setdefault(service, {})[method] = handler
    for service, methods in services.items():
        server.add_registered_method_handlers(service, methods)


def _immediate(path: str, handler: Immediate, guard: Guard | None) -> Any:
    async def answer(data: bytes, context: Any) -> bytes:
        try:
            if guard is not None:
                guard(context.invocation_metadata())
            return handler(data)
        except Exception as error:
            await _abort(context, failure(path, error))

    return _rpc(answer)


def _awaited(path: str, handler: Awaited, guard: Guard | None) -> Any:
    async def answer(data: bytes, context: Any) -> bytes:
        try:
            if guard is not None:
                guard(context.invocation_metadata())
            return await handler(data, context.invocation_metadata())
        except Exception as error:
            await _abort(context, failure(path, error))

    return _rpc(answer)


def _rpc(answer: Callable[[bytes, Any], Any]) -> Any:
    return grpc.unary_unary_rpc_method_handler(answer)


async def _abort(context: Any, error: InferError) -> NoReturn:
    await context.abort(status_of(error), details(error.message))
    raise AssertionError("abort raises")


def _credentials(certificates: Certificates) -> Any:
    """Return credentials that show the newest certificate in each handshake."""
    shown = certificates.pem

    def configuration(pem: Pem) -> Any:
        pair = (pem.key, pem.certificate)
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=pem.client_authority)

    def newest() -> Any:
        nonlocal shown
        if certificates.pem is shown:
            return None
        shown = certificates.pem
        return configuration(shown)

    return grpc.dynamic_ssl_server_credentials(configuration(shown), newest, certificates.mutual)


def _options(settings: GrpcSettings) -> list[tuple[str, int]]:
    options = [
        ("grpc.so_reuseport", int(settings.reuse_port)),
        ("grpc.max_receive_message_length", settings.max_message_size),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", settings.max_concurrent_streams),
        ("grpc.keepalive_time_ms", settings.keepalive_time_ms),
        ("grpc.keepalive_timeout_ms", settings.keepalive_timeout_ms),
        ("grpc.http2.ping_timeout_ms", settings.keepalive_timeout_ms),  # else a minute, whatever the line before says
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
