"""The gRPC gateway: which server carries the service, and its start and stop."""

from __future__ import annotations

import importlib.util
import socket
from typing import Literal, Protocol

from headrace.clock import Clock, SystemClock
from headrace.gateway.address import host, unix_path
from headrace.gateway.grpc.grpcio_server import GrpcioServer
from headrace.gateway.grpc.service import GrpcService
from headrace.gateway.grpc.settings import INT32_MAX, GrpcSettings
from headrace.gateway.tls import Certificates
from headrace.gateway.unix_socket import UnixSocket
from headrace.planes import ControlPlane, DataPlane
from headrace_protocol.errors import invalid


class Server(Protocol):
    """What a transport is."""

    async def start(self) -> int: ...

    async def stop(self, grace_s: float) -> None: ...


class GrpcGateway:
    """KServe v2 over gRPC. Owns its server and port between start and stop."""

    def __init__(
        self, data: DataPlane, control: ControlPlane, settings: GrpcSettings, clock: Clock | None = None
    ) -> None:
        self.transport = choose_transport(settings)
        self._settings = settings
        path = unix_path(settings.address)
        self._file = None if path is None else UnixSocket(path)
        self._service = GrpcService(data, control, clock or SystemClock(), settings)
        self._server: Server | None = None
        self.certificates: Certificates | None = None
        """Once it is started, and serves TLS."""

    async def start(self) -> int:
        """Serve, and return the port, 0 on a Unix socket. Raises OSError, naming the address, where it cannot be had."""
        try:
            if self._file is None:
                _check_free(self._settings)
            if self._settings.tls is not None:
                self.certificates = Certificates(self._settings.tls)
            server = _server(self.transport, self._service, self._settings, self._file, self.certificates)
            port = await server.start()
            self._server = server
            return port if self._file is None else 0
        except OSError as error:
            if self._file is not None:
                self._file.remove()
            reason = error.strerror or str(error)
            raise OSError(error.errno, f"cannot serve gRPC on {self._settings.target}: {reason}") from error

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuse new calls, let those in flight end within `grace_s` seconds, cancel the rest, close the port."""
        if self._server is not None:
            await self._server.stop(grace_s)
        if self._file is not None:
            self._file.remove()


def choose_transport(settings: GrpcSettings) -> Literal["grpcio", "pygrpc-native"]:
    """Return the transport that `settings` ask for; for "auto" the native one where it can do all that is asked.

    Raises InferError INVALID_ARG where the native one is asked for and cannot.
    """
    if settings.transport == "grpcio":
        return "grpcio"
    obstacle = _native_obstacle(settings)
    if settings.transport == "auto":
        return "grpcio" if obstacle else "pygrpc-native"
    if obstacle:
        raise invalid(f"gRPC transport pygrpc-native: {obstacle}; use transport grpcio or auto")
    return "pygrpc-native"


def _native_obstacle(settings: GrpcSettings) -> str | None:
    """Return why the native transport cannot serve `settings`, or None."""
    if importlib.util.find_spec("pygrpc_native") is None:
        return "the package pygrpc-native is not installed"
    if settings.tls is not None:
        return "it cannot serve TLS"
    if settings.compression != "none":
        return "it cannot compress responses"
    if settings.max_connection_age_ms:
        return "it cannot close connections by age"
    if settings.limits_pings:
        return "it does not limit the pings of clients"
    if settings.max_message_size < INT32_MAX:
        return "it decompresses messages of any size, so it cannot hold a smaller limit"
    return None


def _server(
    transport: str,
    service: GrpcService,
    settings: GrpcSettings,
    file: UnixSocket | None,
    certificates: Certificates | None,
) -> Server:
    if transport == "grpcio":
        return GrpcioServer(service, settings, file, certificates)
    from headrace.gateway.grpc.native_server import NativeServer

    return NativeServer(service, settings, file)


def _check_free(settings: GrpcSettings) -> None:
    """Raise OSError where another process listens on the port.

    grpcio alone does not tell: it is content when one of the addresses behind a name or a wildcard is free.
    """
    if settings.reuse_port:
        return
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host(settings.address), settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
