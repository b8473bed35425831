"""The event loop of a model whose code is asynchronous: a thread of its own, from the first coroutine to the end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class EventLoop:
    """Runs coroutines of any thread in one of its own. Started by constructing it, ended by `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="headrace-model-loop", daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Begin a coroutine. Callable by every thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self, limit_s: float) -> None:
        """Cancel what still runs, and end the thread; wait for that no longer than `limit_s`."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(limit_s)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()
