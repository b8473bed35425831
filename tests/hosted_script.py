"""The scripted engine as a process of its own serves it: what `engine_host` runs in tests."""

from __future__ import annotations

import asyncio
import threading

from headrace_backends.llm.adapters.hosted_wire import Abort, Broken, Closing, News, Opened, Submit
from scripted_engine import ScriptedEngine


class _Teller:
    """Passes on what the engine tells."""

    def __init__(self, link) -> None:
        self._link = link
        self._lock = threading.Lock()
        self.engine = None

    def told(self, news) -> None:
        with self._lock:
            self._link.send(News(news, self.engine.stats()))

    def broke(self, error) -> None:
        with self._lock:
            self._link.send(Broken(error))


async def serve(link) -> None:
    if link.opening.arguments.get("explode"):
        raise RuntimeError("the script cannot be loaded")
    ended = asyncio.Event()
    teller = _Teller(link)
    engine = teller.engine = ScriptedEngine(link.opening.arguments)
    engine.open(teller)
    link.send(Opened(engine.card, ""))

    def take(message) -> None:
        if isinstance(message, Submit):
            engine.submit(message.call)
        elif isinstance(message, Abort):
            engine.abort(message.number)
        elif isinstance(message, Closing):
            ended.set()

    link.listen(take)
    await ended.wait()
