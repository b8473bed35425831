"""The HTTP gateway: listens on the port and puts endpoints, admission and connections together."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Final

from headrace.clock import Clock, SystemClock
from headrace.gateway.address import host, unix_path, where
from headrace.gateway.http.admission import Admission
from headrace.gateway.http.connections import Connections
from headrace.gateway.http.control_endpoints import ControlEndpoints
from headrace.gateway.http.endpoints import DataEndpoints
from headrace.gateway.http.generate import GenerateEndpoints
from headrace.gateway.http.openai.endpoints import OpenAIEndpoints
from headrace.gateway.http.openapi.endpoint import DocumentEndpoint
from headrace.gateway.http.settings import HttpSettings
from headrace.gateway.tls import HANDSHAKE_S, Certificates
from headrace.gateway.unix_socket import UnixSocket
from headrace.planes import ControlPlane, DataPlane

__all__ = ["HttpGateway", "HttpSettings"]

_ANY_IPV6: Final = "::"
"""Where one listens for IPv6, and for IPv4 too."""
_LAST_WRITES: Final = 0.1
"""Seconds that connections get at least to write out answers, also where the grace of a stop is used up."""


class HttpGateway:
    """The HTTP door. Constructing is not starting: `start` opens the port, `stop` closes it."""

    def __init__(
        self, data: DataPlane, control: ControlPlane, settings: HttpSettings, clock: Clock | None = None
    ) -> None:
        clock = clock or SystemClock()
        handlers = {
            **DataEndpoints(data, settings, clock).handlers,
            **GenerateEndpoints(data, settings, clock).handlers,
            **ControlEndpoints(control).handlers,
            **OpenAIEndpoints(data, clock).handlers,
            **DocumentEndpoint(settings.restricted).handlers,
        }
        self._settings = settings
        self._admission = Admission(settings, handlers)
        self._listener: asyncio.Server | None = None
        self._connections: Connections | None = None
        self._unix_socket: UnixSocket | None = None
        self.certificates: Certificates | None = None
        """Once it is started, and serves TLS."""

    async def start(self) -> int:
        """Listen; return the bound port, 0 for a Unix socket. Raises OSError, naming the place, where it is not to be had."""
        loop = asyncio.get_running_loop()
        settings = self._settings
        self._connections = Connections(settings, self._admission.admit, loop)
        try:
            if settings.tls is not None:
                self.certificates = Certificates(settings.tls)
            self._listener = await self._listen(loop, self._connections)
        except OSError as error:
            place = where(settings.address, settings.port)
            raise OSError(error.errno, f"cannot serve HTTP on {place}: {error.strerror or error}") from error
        if self._unix_socket is not None:
            return 0
        port: int = self._listener.sockets[0].getsockname()[1]
        return port

    async def _listen(self, loop: asyncio.AbstractEventLoop, connections: Connections) -> asyncio.Server:
        settings = self._settings
        tls: dict[str, Any] = {}
        if self.certificates is not None:
            tls = {"ssl": self.certificates.context, "ssl_handshake_timeout": HANDSHAKE_S}
        path = unix_path(settings.address)
        if path is not None:
            unix_socket = UnixSocket(path)
            listener = await loop.create_unix_server(
                connections, sock=unix_socket.listen(settings.backlog), backlog=settings.backlog, **tls
            )
            self._unix_socket = unix_socket
            return listener
        address = host(settings.address)
        if address == _ANY_IPV6 and socket.has_dualstack_ipv6():
            sock = socket.create_server(
                (address, settings.port),
                family=socket.AF_INET6,
                backlog=settings.backlog,
                reuse_port=settings.reuse_port,
                dualstack_ipv6=True,
            )
            return await loop.create_server(connections, sock=sock, backlog=settings.backlog, **tls)
        reuse = settings.reuse_port or None
        return await loop.create_server(
            connections, address, settings.port, backlog=settings.backlog, reuse_port=reuse, **tls
        )

    @property
    def connections(self) -> tuple[int, int, int]:
        """How many connections are open, may be, and were refused since the start."""
        found = self._connections
        return (0, 0, 0) if found is None else (len(found.open), found.most, found.refused)

    def leave(self) -> None:
        """Ask clients to go: each connection ends with its next answer. New ones are taken still."""
        if self._connections is not None:
            self._connections.leaving = True

    def refuse(self) -> None:
        """Take no more connections; those that are open stay."""
        if self._listener is not None:
            self._listener.close()

    async def stop(self, grace_s: float) -> None:
        """Accept no more connections, let open requests finish for `grace_s` seconds, then cut what is left."""
        if self._listener is None or self._connections is None:
            return
        self._listener.close()
        if self._unix_socket is not None:
            self._unix_socket.remove()
            self._unix_socket = None
        await self._connections.stop(max(grace_s, _LAST_WRITES))
        self._listener = self._connections = None
