"""How many loads run at once, how often one is tried, and that an ensemble waits for its members."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Generic

from headrace.repository.model_config import ConfigError
from headrace.repository.sources import M, ModelLoader, ModelSource
from headrace_protocol.errors import InferError

_log = logging.getLogger(__name__)


class BoundedLoader(Generic[M]):
    """A ModelLoader around another."""

    def __init__(
        self,
        loader: ModelLoader[M],
        concurrency: int,
        retries: int,
        await_members: Callable[[ModelSource], Awaitable[None]],
    ) -> None:
        self._loader = loader
        self._slots = asyncio.Semaphore(concurrency)
        self._retries = retries
        self._await_members = await_members

    async def load(self, source: ModelSource, version: int) -> M:
        """Load when it is this one's turn."""
        if source.members:
            await self._await_members(source)  # without a slot, which the members may need
        async with self._slots:
            for retries_left in range(self._retries, 0, -1):
                try:
                    return await self._loader.load(source, version)
                except (InferError, ConfigError) as error:
                    _log.warning("%r version %d: %s; %d retries left", source.name, version, error, retries_left)
            return await self._loader.load(source, version)

    async def unload(self, model: M) -> None:
        """Unload at once: it frees what loads may wait for."""
        await self._loader.unload(model)

    async def resize(self, model: M, source: ModelSource) -> bool:
        """Change instances when it is this one's turn: it is as much work as a load."""
        async with self._slots:
            return await self._loader.resize(model, source)
