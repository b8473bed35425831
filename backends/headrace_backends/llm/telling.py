"""Teller: the thread between an engine and the clients of its calls. It sends what steps told, all calls' in one frame.

The engine's thread only puts news into a queue, and goes on with the next step meanwhile. What is told while the server reads
slowly is joined, so that the queue is no longer than what running calls may say.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Final, NamedTuple, Protocol

from headrace_backends.api import StreamResponse, send_many
from headrace_backends.llm.engine import Told
from headrace_backends.llm.open_calls import OpenCall
from headrace_protocol.errors import ErrorCode, ErrorDetail, InferError, cancelled, internal, unavailable

_LOG: Final = logging.getLogger(__name__)
MOST_JOINED: Final = 256
_AGAIN_S: Final = 0.1
"""Seconds until an end that could not be told is told again."""
MAX_CALLS: Final = 16384
"""Calls under way; engines refuse long before, by their own limits."""
_TOO_SLOW: Final = unavailable("the client reads too slowly: more waits for it than may be kept")


class Observer(Protocol):
    """Who counts what is told. Called by the teller's thread."""

    def told(self, news: Sequence[tuple[OpenCall, Told]], now_ns: int) -> None:
        """Take what one step told; the calls have taken it already."""
        ...

    def left(self, call: OpenCall) -> None:
        """Take note that nobody waits for the call any more."""
        ...


class _News(NamedTuple):
    told: Sequence[Told]
    now_ns: int


class Teller:
    """Implements `engine.Listener`. Owns the calls under way, from `add` to their last response."""

    def __init__(
        self,
        abort: Callable[[int], None],
        on_broken: Callable[[InferError], None],
        clock: Callable[[], int] = time.monotonic_ns,
        *,
        most_joined: int = MOST_JOINED,
    ) -> None:
        """`abort` is the engine's; `on_broken` is called last, when every call has been told.

        `most_joined`: so many steps are told at once, if they came before the one before them was told.
        """
        self._abort: Final = abort
        self.observer: Observer | None = None
        """Set before `start`."""
        self._on_broken: Final = on_broken
        self._clock: Final = clock
        self._most_joined: Final = most_joined
        self._calls: Final[dict[int, OpenCall]] = {}
        self._owed: Final[dict[int, OpenCall]] = {}
        """Those of them whose error could not be sent: it is tried again in each round."""
        self._queue: Final[SimpleQueue[_News | OpenCall | InferError | None]] = SimpleQueue()
        self._thread: Final = Thread(target=self._run, name="llm-telling", daemon=True)

    def __len__(self) -> int:
        """Return how many calls are under way."""
        return len(self._calls)

    def calls(self) -> tuple[OpenCall, ...]:
        """Return those under way."""
        return tuple(self._calls.values())

    def start(self) -> None:
        """Begin to tell."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, after what was told so far."""
        self._queue.put(None)
        self._thread.join()

    # Called by other threads.

    def add(self, call: OpenCall) -> None:
        """Take a call over, before the engine gets it. Raises UNAVAILABLE beyond MAX_CALLS."""
        if len(self._calls) >= MAX_CALLS:
            message = f"{MAX_CALLS} requests are under way in this process already"
            raise InferError(ErrorCode.UNAVAILABLE, message, detail=ErrorDetail.QUEUE_FULL)
        self._calls[call.number] = call

    def look(self, call: OpenCall) -> None:
        """Take note that a call's request was cancelled, held back or set free."""
        if call.request.cancelled and call.number in self._calls:
            self._abort(call.number)
        self._queue.put(call)

    def told(self, news: Sequence[Told]) -> None:
        """See `engine.Listener`."""
        self._queue.put(_News(news, self._clock()))

    def broke(self, error: InferError) -> None:
        """See `engine.Listener`."""
        self._queue.put(error)

    # The thread.

    def _run(self) -> None:
        while True:
            try:
                ended = self.round(self._next())
            except Exception as error:
                _LOG.exception("telling failed")
                self._on_broken(internal(f"telling failed: {type(error).__name__}: {error}"))
                return
            if ended:
                return

    def _next(self) -> list[_News | OpenCall | InferError | None]:
        """Wait for what comes next and return it with what has come since; may return nothing while errors are owed."""
        items: list[_News | OpenCall | InferError | None] = []
        with contextlib.suppress(Empty):
            items.append(self._queue.get(timeout=_AGAIN_S if self._owed else None))
            while len(items) < self._most_joined:
                items.append(self._queue.get_nowait())
        return items

    def round(self, items: Iterable[_News | OpenCall | InferError | None]) -> bool:
        """Take what has come, and send what is due; return whether that was the end."""
        touched = dict(self._owed)
        self._owed.clear()
        broken: InferError | None = None
        ended = False
        for item in items:
            if isinstance(item, _News):
                self._take(item, touched)
            elif isinstance(item, OpenCall):
                if item.number in self._calls:
                    touched[item.number] = item
            elif item is None:
                ended = True
            else:
                broken = item
        self._send(touched.values())
        if broken is not None:
            for call in list(self._calls.values()):
                self._end(call, unavailable(f"the model's engine ended: {broken.message}"))
            self._on_broken(broken)
        return ended or broken is not None

    def _take(self, news: _News, touched: dict[int, OpenCall]) -> None:
        seen = []
        for told in news.told:
            call = self._calls.get(told.number)
            if call is not None:
                call.take(told, news.now_ns)
                touched[told.number] = call
                seen.append((call, told))
        if self.observer is not None:
            self.observer.told(seen, news.now_ns)

    def _send(self, calls: Iterable[OpenCall]) -> None:
        now_ns = self._clock()
        parts: list[tuple[OpenCall, StreamResponse]] = []
        for call in calls:
            request = call.request
            if request.cancelled:
                self._left(call)
                self._end(call, cancelled())
            elif call.error is not None:
                self._end(call, call.error)
            elif call.too_much:
                self._give_up(call, _TOO_SLOW)
            elif call.due and not request.paused:
                self._write(call, now_ns, parts)
        if parts:
            self._send_parts(parts)

    def _left(self, call: OpenCall) -> None:
        if self.observer is not None and not call.finished:
            self.observer.left(call)

    def _write(self, call: OpenCall, now_ns: int, parts: list[tuple[OpenCall, StreamResponse]]) -> None:
        final = call.finished
        try:
            response = StreamResponse(call.request, call.response(now_ns), None, final)
            if call.decoupled:
                parts.append((call, response))
            else:
                call.request.respond(response.outputs or {})
                self._forget(call)
        except InferError as error:
            _LOG.warning("call %d cannot be told: %s", call.number, error)
            self._give_up(call, error)
        except Exception as error:
            _LOG.exception("call %d cannot be told", call.number)
            self._give_up(call, internal(f"the answer cannot be told: {type(error).__name__}: {error}"))

    def _send_parts(self, parts: Sequence[tuple[OpenCall, StreamResponse]]) -> None:
        try:
            send_many([response for _, response in parts])
        except InferError:
            for call, response in parts:
                self._send_alone(call, response)
            return
        self._sent(parts)

    def _send_alone(self, call: OpenCall, response: StreamResponse) -> None:
        try:
            send_many([response])
        except InferError as error:
            _LOG.warning("call %d cannot be told: %s", call.number, error)
            self._give_up(call, error)
        else:
            self._sent([(call, response)])

    def _sent(self, parts: Sequence[tuple[OpenCall, StreamResponse]]) -> None:
        for call, response in parts:
            if response.final:
                self._forget(call)

    def _give_up(self, call: OpenCall, error: InferError) -> None:
        """End a call that the engine may be at still."""
        self._abort(call.number)
        self._left(call)
        self._end(call, error)

    def _end(self, call: OpenCall, error: InferError) -> None:
        """End a call with an error: in a later round, where the system has nothing left to send it with."""
        try:
            call.request.fail(error)
        except InferError as failure:
            if failure.code is ErrorCode.UNAVAILABLE:
                call.error = error
                self._owed[call.number] = call
                return  # else it has had its last response
        self._forget(call)

    def _forget(self, call: OpenCall) -> None:
        self._calls.pop(call.number, None)
        call.ended.set()
