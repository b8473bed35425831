"""The HTTP gateway: listens on the port and puts endpoints, admission and connections together."""

from __future__ import annotations

import asyncio
from typing import Final

from headrace.clock import Clock, SystemClock
from headrace.gateway.http.admission import Admission
from headrace.gateway.http.connection import Connections
from headrace.gateway.http.control_endpoints import ControlEndpoints
from headrace.gateway.http.endpoints import DataEndpoints
from headrace.gateway.http.generate import GenerateEndpoints
from headrace.gateway.http.openapi.endpoint import DocumentEndpoint
from headrace.gateway.http.settings import HttpSettings
from headrace.planes import ControlPlane, DataPlane

__all__ = ["HttpGateway", "HttpSettings"]

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
            **DocumentEndpoint(settings.restricted).handlers,
        }
        self._settings = settings
        self._admission = Admission(settings, handlers)
        self._listener: asyncio.Server | None = None
        self._connections: Connections | None = None

    async def start(self) -> int:
        """Listen; return the bound port. Raises OSError, naming address and port, where they cannot be had."""
        loop = asyncio.get_running_loop()
        settings = self._settings
        self._connections = Connections(settings, self._admission.admit, loop)
        try:
            self._listener = await loop.create_server(
                self._connections,
                settings.address,
                settings.port,
                backlog=settings.backlog,
                reuse_port=settings.reuse_port or None,
            )
        except OSError as error:
            where = f"{settings.address}:{settings.port}"
            raise OSError(error.errno, f"cannot serve HTTP on {where}: {error.strerror or error}") from error
        port: int = self._listener.sockets[0].getsockname()[1]
        return port

    async def stop(self, grace_s: float) -> None:
        """Accept no more connections, let open requests finish for `grace_s` seconds, then cut what is left."""
        if self._listener is None or self._connections is None:
            return
        self._listener.close()
        await self._connections.stop(max(grace_s, _LAST_WRITES))
        self._listener = self._connections = None
