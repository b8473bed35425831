"""Sends the parts of many streams, each at its time, from one thread: an engine that schedules requests by itself.

It knows streams and times, and not what is in them.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Final

from headrace_backends.api import Batch, BatchRequest, StreamResponse, send_many
from headrace_backends.identity.streams import Part
from headrace_protocol.errors import InferError, cancelled, internal

MAX_STREAMS: Final = 4096
"""Streams open at once; `play` waits for one to end before it takes another."""


class _Stream:
    __slots__ = ("part", "parts", "request")

    def __init__(self, request: BatchRequest, parts: Iterator[Part]) -> None:
        self.request = request
        self.parts = parts
        self.part: Part | None = None


class StreamPlayer:
    """Owns the streams given to `play` and the thread that sends them, which begins with the first."""

    def __init__(self) -> None:
        self._changed: Final = threading.Condition()
        """Guards what follows, up to the thread."""
        self._new: list[_Stream] = []
        self._open = 0
        self._woken = False
        self._ended = False
        self._thread: threading.Thread | None = None
        self._order: Final = itertools.count()
        """Tells streams apart that are due at the same moment. This and the rest belong to the thread."""
        self._waiting: list[tuple[float, int, _Stream]] = []
        """A heap: when the next part is due, and of which stream."""
        self._held: list[_Stream] = []
        """Streams whose part is due while their clients read too slowly."""

    def play(self, batch: Batch, request: BatchRequest, parts: Iterator[Part]) -> None:
        """Take a stream over, the request being deferred. Waits while there are MAX_STREAMS."""
        batch.on_cancel(self._wake)
        batch.on_flow(self._wake)
        request.defer()
        with self._changed:
            self._changed.wait_for(lambda: self._open < MAX_STREAMS)
            self._open += 1
            self._new.append(_Stream(request, parts))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="identity-streams", daemon=True)
                self._thread.start()
        self._wake()

    def wait_for(self, batch: Batch) -> None:
        """Wait until every stream of the batch has ended."""
        with self._changed:
            self._changed.wait_for(lambda: not batch.open)

    def stop(self) -> None:
        """End the thread; no stream is open any more."""
        with self._changed:
            self._ended = True
        self._wake()
        if self._thread is not None:
            self._thread.join()

    def _wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            new, woken = taken
            now = time.monotonic()
            for stream in new:
                self._advance(stream, now)
            if woken:
                self._look_again(now)
            self._send_due(now)

    def _take(self) -> tuple[list[_Stream], bool] | None:
        """Sleep until there is something to do; return the new streams and whether some stream may have changed."""
        with self._changed:
            left_s = self._waiting[0][0] - time.monotonic() if self._waiting else None
            self._changed.wait_for(lambda: self._woken or self._ended, left_s)
            woken, self._woken = self._woken, False
            new, self._new = self._new, []
            return None if self._ended else (new, woken)

    def _advance(self, stream: _Stream, now: float) -> None:
        """Have the next part of a stream sent when it is due."""
        try:
            stream.part = next(stream.parts)
        except InferError as error:
            self._end(stream, error)
        except Exception as error:
            self._end(stream, internal(f"the stream failed: {type(error).__name__}: {error}"))
        else:
            heapq.heappush(self._waiting, (now + stream.part.after_s, next(self._order), stream))

    def _look_again(self, now: float) -> None:
        """Drop the streams that were cancelled; those that were held back are due."""
        entries = self._waiting + [(now, next(self._order), stream) for stream in self._held]
        self._held = []
        self._waiting = []
        for entry in entries:
            if entry[2].request.cancelled:
                self._end(entry[2], cancelled())
            else:
                self._waiting.append(entry)
        heapq.heapify(self._waiting)

    def _send_due(self, now: float) -> None:
        """Send, in one frame, what is due of the streams that are not held back."""
        due: list[tuple[_Stream, Part]] = []
        while self._waiting and self._waiting[0][0] <= now:
            stream = heapq.heappop(self._waiting)[2]
            if stream.request.paused and not stream.request.cancelled:
                self._held.append(stream)
            elif stream.part is not None:
                due.append((stream, stream.part))
        try:
            send_many([StreamResponse(stream.request, part.outputs, None, part.final) for stream, part in due])
        except InferError as error:
            for stream, _ in due:
                self._end(stream, error)
            return
        for stream, part in due:
            if part.final:
                self._forget()
            else:
                self._advance(stream, now)

    def _end(self, stream: _Stream, error: InferError) -> None:
        stream.request.fail(error)
        self._forget()

    def _forget(self) -> None:
        with self._changed:
            self._open -= 1
            self._changed.notify_all()
