"""The standard gRPC health service: the state of this server, once (Check) or with every change of it (Watch).

The server as a whole and its inference service have the same state, that of ServerReady; it has no other services.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from google.protobuf.message import DecodeError

from headrace.gateway.grpc.paths import SERVICE
from headrace_protocol._generated.health_pb2 import HealthCheckRequest, HealthCheckResponse
from headrace_protocol.errors import invalid, not_found, unavailable

SERVICES: Final = ("", SERVICE)
MAX_WATCHERS: Final = 1024
INTERVAL_S: Final = 0.25
"""How soon a watcher is told of a change, at the latest. Nothing is looked at while nobody watches."""


def _encode(status: int) -> bytes:
    return HealthCheckResponse(status=status).SerializeToString()  # type: ignore[arg-type]


_STATUS: Final = {
    True: _encode(HealthCheckResponse.SERVING),
    False: _encode(HealthCheckResponse.NOT_SERVING),
    None: _encode(HealthCheckResponse.SERVICE_UNKNOWN),
}


class Health:
    """Answers both rpcs. `serving` tells the state now."""

    def __init__(self, serving: Callable[[], bool], interval_s: float = INTERVAL_S) -> None:
        self._serving = serving
        self._interval_s = interval_s
        self._watchers = 0
        self._state = False
        """What the poller saw last."""
        self._changed = asyncio.Event()
        """Set, and replaced by a new one, at each change."""
        self._poller: asyncio.Task[None] | None = None
        self._stopped = False

    def check(self, data: bytes) -> bytes:
        """Return the state of the service that an encoded request names. Raises NOT_FOUND, INVALID_ARG."""
        service = _service(data)
        if service not in SERVICES:
            raise not_found(f"service '{service[:200]}' is not one of this server's, which is {SERVICE}")
        return _STATUS[self._serving()]

    async def watch(self, data: bytes, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Write the state now and after every change, the newest one alone where the client reads too slowly.

        Raises UNAVAILABLE when the server stops, and where there are too many watchers already.
        """
        known = _service(data) in SERVICES
        if self._watchers >= MAX_WATCHERS:
            raise unavailable(f"{MAX_WATCHERS} calls watch the health of this server already")
        self._enter()
        try:
            told = b""
            while True:
                changed = self._changed
                status = _STATUS[self._state if known else None]
                if status != told:
                    await write(status)
                    told = status
                if self._stopped:
                    raise unavailable("the server is stopping")
                await changed.wait()
        finally:
            self._leave()

    def stop(self) -> None:
        """End every Watch, after a last word that the server does not serve."""
        self._stopped = True
        self._set(state=False)

    def _enter(self) -> None:
        self._watchers += 1
        if self._poller is None and not self._stopped:
            self._state = self._serving()
            self._poller = asyncio.get_running_loop().create_task(self._poll())

    def _leave(self) -> None:
        self._watchers -= 1
        if not self._watchers and self._poller is not None:
            self._poller.cancel()
            self._poller = None

    async def _poll(self) -> None:
        while not self._stopped:
            await asyncio.sleep(self._interval_s)
            if (state := self._serving()) != self._state and not self._stopped:
                self._set(state=state)

    def _set(self, *, state: bool) -> None:
        self._state = state
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _service(data: bytes) -> str:
    try:
        return HealthCheckRequest.FromString(data).service
    except DecodeError as error:
        raise invalid(f"the request is not a well-formed HealthCheckRequest: {error}") from None
