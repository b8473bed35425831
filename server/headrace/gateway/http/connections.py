"""All connections of the HTTP door: what they share, and their common end."""

from __future__ import annotations

import asyncio
import logging
import resource
from math import inf
from typing import Final

from headrace.gateway.http.answer import Answer
from headrace.gateway.http.connection import LINGER, READ_SIZE, Connection
from headrace.gateway.http.errors import error_body
from headrace.gateway.http.reader import Admit, headers_to_read
from headrace.gateway.http.settings import HttpSettings

_log: Final = logging.getLogger(__name__)
_REFUSED_AT_ONCE: Final = 64
_WARN_EVERY_S: Final = 60.0
_LEAST: Final = 64
"""Connections that are taken however few descriptors there are."""
_MOST: Final = 1 << 20


def default_max_connections() -> int:
    """Return half of the descriptors that this process may have; models, regions and other doors need the rest."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if files == resource.RLIM_INFINITY else max(_LEAST, min(_MOST, files // 2))


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
        self.most: Final = settings.max_connections or default_max_connections()
        text = f"the server has {self.most} connections, and takes no more"
        self._refusal: Final = Answer(error_body(text), 503, headers={"Retry-After": "1"}, close=True)
        self._warn_at = -inf
        self.refused = 0
        """Connections that were one too many, since the start."""

    def __call__(self) -> Connection:
        return Connection(self)

    def opened(self, connection: Connection) -> None:
        self.open.add(connection)
        if len(self.open) > self.most:
            self._refuse(connection)
            return
        if self.stopping:
            connection.close_when_idle()

    def closed(self, connection: Connection) -> None:
        self.open.discard(connection)
        if self.stopping and not self.open:
            self._all_closed.set()

    def _refuse(self, connection: Connection) -> None:
        """Tell the client, unless so many are being told already that telling would take the descriptors of others."""
        self.refused += 1
        now = self.loop.time()
        if now >= self._warn_at:
            self._warn_at = now + _WARN_EVERY_S
            _log.warning("HTTP connections are refused: %d are open, the limit (--http-max-connections)", self.most)
        if len(self.open) > self.most + _REFUSED_AT_ONCE:
            connection.drop()
        else:
            connection.refuse(self._refusal)

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
