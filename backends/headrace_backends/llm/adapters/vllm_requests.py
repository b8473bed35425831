"""Requests of vLLM's that belong together: they enter one after the other, and what has not ended at the end is aborted.

Knows AsyncLLM by what it is asked (`add_request`, `abort`), and nothing of calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Final, Self


class Requests:
    """An asynchronous context; belongs to one task."""

    def __init__(self, engine: Any) -> None:
        self._engine: Final = engine
        self._collectors: Final[list[Any]] = []
        self._open: Final[set[int]] = set()
        self._pumps: Final[list[asyncio.Task[None]]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pump in self._pumps:
            pump.cancel()
        left = [self._collectors[at].request_id for at in sorted(self._open)]
        if left and not self._engine.errored:
            await self._engine.abort(left, internal=True)

    async def add(self, name: str, prompt: Any, params: Any, **more: Any) -> None:
        """Have vLLM take a request. Raises its errors."""
        collector = await self._engine.add_request(name, prompt, params, **more)
        self._open.add(len(self._collectors))
        self._collectors.append(collector)

    async def outputs(self) -> AsyncIterator[tuple[int, Any]]:
        """Yield what is new of each, with its place among those added, until all have ended. Raises vLLM's errors."""
        if len(self._collectors) == 1:
            while self._open:
                yield 0, await self._next(0)
            return
        arrived: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        for at in range(len(self._collectors)):
            self._pumps.append(asyncio.get_running_loop().create_task(self._pump(at, arrived)))
        for _ in range(len(self._pumps)):
            while (entry := await arrived.get())[1] is not None:
                yield entry
        for pump in self._pumps:
            await pump

    async def _pump(self, at: int, arrived: asyncio.Queue[tuple[int, Any]]) -> None:
        try:
            while at in self._open:
                arrived.put_nowait((at, await self._next(at)))
        finally:
            arrived.put_nowait((at, None))

    async def _next(self, at: int) -> Any:
        output = await self._collectors[at].get()
        if output.finished:
            self._open.discard(at)
        return output
