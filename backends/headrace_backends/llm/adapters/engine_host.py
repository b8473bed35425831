"""The main program of an engine's own process: it serves one model to the backend process that started it.

`python -m headrace_backends.llm.adapters.engine_host MODULE FD`: the module's `serve(link)` is a coroutine that loads and
serves. This process ends, with all that the engine has started, when the socket does: nobody else would end them.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import select
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Final

from headrace_backends.llm.adapters.hosted_wire import TO_HOST, Broken, FromHost, Opening, ToHost, frame, read_frame
from headrace_backends.llm.adapters.process_group import kill_members
from headrace_protocol.errors import InferError, internal


class Link:
    """The socket, as a coroutine sees it."""

    def __init__(self, connection: socket.socket, opening: Opening) -> None:
        self.opening: Final = opening
        self._connection: Final = connection

    def send(self, message: FromHost) -> None:
        """Write a message. The other side always reads, so this does not last."""
        self._connection.sendall(frame(message))

    def listen(self, take: Callable[[ToHost], None]) -> None:
        """Have each message taken on the running loop, in order."""
        loop = asyncio.get_running_loop()

        def read() -> None:
            while (data := read_frame(self._connection)) is not None:
                loop.call_soon_threadsafe(take, TO_HOST.decode(data))

        threading.Thread(target=read, name="headrace-engine-calls", daemon=True).start()


def main() -> None:
    """Serve; does not return before the end."""
    module, descriptor = sys.argv[1:]
    os.dup2(2, 1)
    connection = socket.socket(fileno=int(descriptor))
    connection.set_inheritable(False)
    data = read_frame(connection)
    if data is None:
        return
    opening = TO_HOST.decode(data)
    assert isinstance(opening, Opening)
    threading.Thread(target=_watch, args=(connection,), name="headrace-engine-watch", daemon=True).start()
    link = Link(connection, opening)
    try:
        asyncio.run(importlib.import_module(module).serve(link))
    except InferError as error:
        link.send(Broken(error))
    except Exception as error:
        traceback.print_exc()
        link.send(Broken(internal(f"{type(error).__name__}: {error}")))
    _end_all()


def _watch(connection: socket.socket) -> None:
    """End with the backend process, also while a model is loaded and nobody reads."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    poll.poll()
    _end_all()


def _end_all() -> None:
    """End with the group of this process, if it is the first of one.

    Not by the engine's own means: those take seconds, and what it shares is removed all the same (`process_group`).
    """
    if os.getpgrp() == os.getpid():
        kill_members(os.getpid(), spare=os.getpid())
    os._exit(1)


if __name__ == "__main__":
    main()
