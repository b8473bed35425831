"""All connections of the HTTP door: what they share, and their common end."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from headrace.gateway.http.connection import LINGER, READ_SIZE, Connection
from headrace.gateway.http.reader import Admit, headers_to_read
from headrace.gateway.http.settings import HttpSettings

_log: Final = logging.getLogger(__name__)


class Connections:
    """Implements connection.Peers. The protocol factory of the listening socket."""

    def __init__(self, settings: HttpSettings, admit: Admit, loop: asyncio.AbstractEventLoop) -> None:
        self.settings = settings
        self.admit = admit
        self.loop = loop
        self.read = headers_to_read(settings)
        self.scratch = memoryview(bytearray(READ_SIZE))
        self.open: Final[set[Connection]] = set()
        self.stopping = False
        self.leaving = False
        """Whether each answer asks its client to come back by another connection, which may be to another server."""
        self._all_closed = asyncio.Event()

    def __call__(self) -> Connection:
        return Connection(self)

    def opened(self, connection: Connection) -> None:
        self.open.add(connection)
        if self.stopping:
            connection.close_when_idle()

    def closed(self, connection: Connection) -> None:
        self.open.discard(connection)
        if self.stopping and not self.open:
            self._all_closed.set()

    async def stop(self, grace_s: float) -> None:
        """Close idle connections, let the others finish for `grace_s` seconds, then cut what is left."""
        self.stopping = True
        for connection in list(self.open):
            connection.close_when_idle()
        if await self._emptied(grace_s):
            return
        _log.warning("%d HTTP connections are cut: not finished within %s s", len(self.open), grace_s)
        tasks = [task for connection in list(self.open) if (task := connection.cut()) is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=LINGER)
        await self._emptied(LINGER)

    async def _emptied(self, seconds: float) -> bool:
        if self.open:
            try:
                await asyncio.wait_for(self._all_closed.wait(), seconds)
            except TimeoutError:
                return False
        return True
