"""A client's connection: one request after the other, answers in the order of their requests, and every wait bounded.

It decides nothing about requests: the reader makes them, the endpoints answer them. One class is long because what a
connection waits for, writes and may still read is one state, which every event of its transport moves.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Coroutine
from functools import partial
from math import inf
from time import monotonic_ns
from typing import Final, Protocol, cast

from headrace.gateway.http.answer import Answer
from headrace.gateway.http.compression import Coding, compress
from headrace.gateway.http.deadline import Deadline
from headrace.gateway.http.errors import failure
from headrace.gateway.http.outlet import ConnectionOutlet
from headrace.gateway.http.reader import Admit, RequestReader
from headrace.gateway.http.request import (
    ACCEPT_ENCODING,
    Begin,
    HttpRequest,
    Service,
    Stream,
    Streaming,
)
from headrace.gateway.http.routes import Route
from headrace.gateway.http.settings import HttpSettings
from headrace.gateway.http.wire import CONTINUE, head_of, negotiate
from headrace.observability.trace import HTTP_SEND_END, HTTP_SEND_START
from headrace.planes import Cancellable

READ_SIZE: Final = 65536
"""Bytes received, and parsed, at once; large bodies aside."""
_MAX_PENDING: Final = 65536
"""Bytes taken while a request runs; with more the client has to wait."""
LINGER: Final = 1.0
"""Seconds for which what nobody reads is drained after the last answer, so that the client gets to see it."""
_JOIN_BELOW: Final = 16384
"""Smaller bodies are joined with the head, which costs less than a vectored write."""
_COMPRESS_INLINE: Final = 65536
"""Answers up to this size are compressed in place; larger ones in a thread."""
_INFLATE_INLINE: Final = 2048
"""Compressed bodies up to this size are inflated in place: they cannot make more than about 2 MB."""


class Peers(Protocol):
    """All connections of the door, as one of them sees them."""

    settings: HttpSettings
    admit: Admit
    read: frozenset[bytes]
    """The headers that are read."""
    loop: asyncio.AbstractEventLoop
    scratch: memoryview
    """What any of them receives into; consumed before the next one receives."""
    stopping: bool
    """Whether they end with the answers that are due."""
    leaving: bool
    """Whether each of them ends with the next answer."""

    def opened(self, connection: Connection) -> None: ...

    def closed(self, connection: Connection) -> None: ...


class Connection(asyncio.BufferedProtocol):
    """One connection. At most one of its requests runs; it owns that request's task, where it needs one."""

    __slots__ = (
        "_active",
        "_advancing",
        "_all",
        "_body_until",
        "_deadline",
        "_ending",
        "_in_head",
        "_lingering",
        "_loop",
        "_pending",
        "_rate_counts",
        "_reader",
        "_reading_paused",
        "_scratch",
        "_stream",
        "_task",
        "_transport",
        "_under_way",
        "_unsent",
        "writing_paused",
    )

    def __init__(self, connections: Peers) -> None:
        self._all = connections
        self._loop = connections.loop
        self._scratch = connections.scratch
        self._reader = RequestReader(connections.settings, connections.admit, connections.read)
        self._transport: asyncio.Transport
        self._task: asyncio.Task[None] | None = None
        self._under_way: Cancellable | None = None
        """The request that runs, where it needs no task."""
        self._stream: Streaming | None = None
        """The same, where its answer comes in pieces."""
        self._active = False
        """Whether a request runs: its answer is still to be written."""
        self._advancing = False
        self._ending = False
        """Whether the last answer is written."""
        self._lingering = False
        self._pending = bytearray()
        """What came while a request ran, not parsed yet."""
        self._in_head = False
        """Whether the deadline is that of a head: it has to be complete by then, not only to go on."""
        self._reading_paused = self.writing_paused = False
        self._unsent = 0
        """Bytes that the client had not taken when that was last looked at."""
        self._deadline = Deadline(connections.loop, self._on_deadline)
        """When the client has taken too long to do what it has to do next."""

    # --- the protocol of the transport --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # TCP_NODELAY is set by the event loop
        self._deadline.set(self._all.settings.keepalive_timeout)
        self._rate_counts = False
        """Whether it is the rate of the body that the deadline holds the client to, not a pause."""
        self._body_until = inf
        self._all.opened(self)

    def connection_lost(self, _exc: Exception | None) -> None:
        self._ending = True
        self._cancel()
        self._deadline.close()
        self._reader.release()
        self._pending.clear()
        self._all.closed(self)

    def get_buffer(self, _sizehint: int) -> memoryview:
        room = self._reader.room
        return self._scratch if room is None else room

    def buffer_updated(self, nbytes: int) -> None:
        reader = self._reader
        if self._body_until < inf:
            self._body_until += nbytes / self._all.settings.min_body_rate
        if reader.room is not None:
            reader.filled(nbytes)
        elif self._ending or reader.ended:
            reader.surplus = True
            return
        elif self._active or reader.ready or self._pending:
            self._pending += self._scratch[:nbytes]
            if len(self._pending) > _MAX_PENDING and not self._reading_paused:
                self._reading_paused = True
                self._transport.pause_reading()
            return
        else:
            if not reader.in_message:
                reader.began_ns = monotonic_ns()
            reader.feed(self._scratch[:nbytes])
        self._advance()

    def eof_received(self) -> None:
        """End with the client: one that sends no more is taken not to wait for its answer either."""
        self._ending = True
        self._cancel()
        self._await_taking()  # the transport closes itself once it has written everything

    def pause_writing(self) -> None:
        self.writing_paused = True
        self._await_taking()

    def resume_writing(self) -> None:
        self.writing_paused = False
        if self._stream is not None:
            self._stream.resume()
        self._advance()

    # --- stopping -----------------------------------------------------------------------------------------------------

    @property
    def stopping(self) -> bool:
        """Whether the connection ends with the answers that are due."""
        return self._all.stopping

    @property
    def leaving(self) -> bool:
        """Whether the next answer has to be the connection's last."""
        return self._all.stopping or self._all.leaving

    def close_when_idle(self) -> None:
        """Close now where no request is under way, otherwise after the answers that are due."""
        reader = self._reader
        if not (self._active or reader.ready or reader.in_body or self._ending):
            self._close()

    def refuse(self, answer: Answer) -> None:
        """Answer before anything was asked, and close."""
        self._transport.write(head_of(answer, old=False, keep_alive=False) + answer.body)
        self._end(linger=True)

    def drop(self) -> None:
        """Close without a word."""
        self._ending = True
        self._transport.abort()

    def cut(self) -> asyncio.Task[None] | None:
        """End at once; return the task of a request that was running, which is cancelled."""
        task = self._task if self._active else None
        self._ending = True
        self._cancel()
        self._transport.abort()
        return task

    # --- one request after the other ----------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Begin the next request where it is there and its turn; otherwise say for how long it is waited for."""
        if self._advancing:
            return
        self._advancing = True
        ready = self._reader.ready
        while not (self._active or self.writing_paused or self._ending):
            if ready:
                self._begin(ready.popleft())
            elif self._pending and self._reader.room is None:
                self._feed_pending()
            else:
                self._await_client()
                break
        else:
            if not (self.writing_paused or self._ending):
                self._deadline.at = inf
        self._advancing = False

    def _feed_pending(self) -> None:
        reader = self._reader
        if reader.ended:
            reader.surplus = True
            self._pending.clear()
            return
        if not reader.in_message:
            reader.began_ns = monotonic_ns()
        piece = bytes(self._pending[:READ_SIZE])
        del self._pending[:READ_SIZE]
        reader.feed(piece)
        if reader.room is not None and self._pending:
            count = min(len(reader.room), len(self._pending))
            reader.room[:count] = self._pending[:count]
            del self._pending[:count]
            reader.filled(count)

    def _await_client(self) -> None:
        reader = self._reader
        settings = self._all.settings
        if self._reading_paused:
            self._reading_paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()
        if not reader.in_message:
            self._body_until = inf
            self._rate_counts = False
            self._deadline.set(settings.keepalive_timeout)
        elif reader.in_body:
            if reader.wants_continue:
                reader.wants_continue = False
                self._transport.write(CONTINUE)
            self._await_body(settings)
        elif not self._in_head:
            self._in_head = True
            self._deadline.set(settings.body_idle_timeout)

    def _await_body(self, settings: HttpSettings) -> None:
        """Give the client time for its next bytes, and for all of them no more than the least rate takes."""
        seconds = settings.body_idle_timeout
        if settings.min_body_rate:
            now = self._loop.time()
            if self._body_until == inf:
                self._body_until = now + seconds
            self._rate_counts = self._body_until < now + seconds
            seconds = max(0.0, min(seconds, self._body_until - now))
        self._deadline.set(seconds)

    def _await_taking(self) -> None:
        """Give the client time to take some of what was written."""
        self._in_head = False
        self._unsent = self._transport.get_write_buffer_size()
        self._deadline.set(self._all.settings.write_idle_timeout)

    def _begin(self, request: HttpRequest) -> None:
        self._in_head = False
        self._body_until = inf
        target = request.target
        if request.early is not None:
            self._answer(request, request.early)
            return
        assert target is not None
        if request.coding is not Coding.IDENTITY:
            self._inflate(request)
            return
        if target.begin is not None:
            self._begin_without_task(request, target.begin, target.route)
        elif target.reply is not None:
            try:
                answer = target.reply(request, target.route)
            except Exception as error:
                answer = failure(error, request.url)
            self._answer(request, answer)
        elif target.stream is not None:
            self._begin_stream(request, target.stream, target.route)
        else:
            assert target.service is not None
            self._start(self._run(request, target.service, target.route))

    def _begin_without_task(self, request: HttpRequest, begin: Begin, route: Route) -> None:
        try:
            self._under_way = begin(request, route, partial(self.finished, request))
        except Exception as error:
            self._answer(request, failure(error, request.url))
        else:
            self._active = True

    def _begin_stream(self, request: HttpRequest, stream: Stream, route: Route) -> None:
        try:
            self._under_way = self._stream = stream(request, route, ConnectionOutlet(self, request))
        except Exception as error:
            self._answer(request, failure(error, request.url))
        else:
            self._active = True

    def _inflate(self, request: HttpRequest) -> None:
        """Take the coding off the request's body, then begin it."""
        if len(request.body) > _INFLATE_INLINE:
            self._start(self._run_inflation(request))
            return
        try:
            request.inflate(self._all.settings.max_input_size)
        except Exception as error:
            self._answer(request, failure(error, request.url))
        else:
            self._begin(request)

    def finished(self, request: HttpRequest, result: Answer | Exception) -> None:
        """Write the whole answer of a request that was begun, and go on; nothing where it has one."""
        if request.answered:
            return
        self._under_way = self._stream = None
        self._active = False
        self._answer(request, result if isinstance(result, Answer) else failure(result, request.url))
        self._advance()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        self._active = True
        if sys.version_info >= (3, 12):
            self._task = asyncio.Task(work, loop=self._loop, name="http", eager_start=True)
        else:
            self._task = asyncio.Task(work, loop=self._loop, name="http")

    async def _run(self, request: HttpRequest, service: Service, route: Route) -> None:
        try:
            try:
                answer = await service(request, route)
            except Exception as error:
                answer = failure(error, request.url)
            self._active = False
            self._answer(request, answer)
            self._advance()
        except BaseException:  # cancelled, or a fault of this very class: nothing more can be said here
            self._transport.abort()
            raise

    async def _run_inflation(self, request: HttpRequest) -> None:
        try:
            try:
                await asyncio.to_thread(request.inflate, self._all.settings.max_input_size)
            except Exception as error:
                self._active = False
                self._answer(request, failure(error, request.url))
            else:
                self._active = False
                self._begin(request)
            self._advance()
        except BaseException:
            self._transport.abort()
            raise

    async def _run_compression(self, request: HttpRequest, answer: Answer, coding: Coding) -> None:
        try:
            answer.body = await asyncio.to_thread(compress, answer.body, coding)
            self._active = False
            self._write(request, answer)
            self._advance()
        except BaseException:
            self._transport.abort()
            raise

    # --- answers ------------------------------------------------------------------------------------------------------

    def _answer(self, request: HttpRequest, answer: Answer) -> None:
        if (
            len(answer.body) >= self._all.settings.min_compress_size
            and ACCEPT_ENCODING in request.fields
            and (request.target is None or request.target.codings)
        ):
            coding = negotiate(request, answer)
            if coding is not Coding.IDENTITY:
                if len(answer.body) > _COMPRESS_INLINE:
                    request.answered = True
                    self._start(self._run_compression(request, answer, coding))
                    return
                answer.body = compress(answer.body, coding)
        self._write(request, answer)

    def _write(self, request: HttpRequest, answer: Answer) -> None:
        if self._ending or self._transport.is_closing():
            return
        keep_alive = request.keep_alive and not answer.close and not self.leaving
        head = head_of(answer, old=request.old, keep_alive=keep_alive)
        body = answer.body if request.method != b"HEAD" else b""
        if request.trace is not None:
            request.trace.mark(HTTP_SEND_START)
        request.answered = True
        if len(body) < _JOIN_BELOW:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        if request.trace is not None:
            request.trace.mark(HTTP_SEND_END)
        if not keep_alive:
            self._end(linger=not request.whole or self._reader.surplus or bool(self._pending))

    def write(self, data: bytes) -> None:
        """Write a part of an answer that comes in pieces."""
        if not (self._ending or self._transport.is_closing()):
            self._transport.write(data)

    def streamed(self, *, keep_alive: bool) -> None:
        """Go on after the last piece of an answer."""
        self._under_way = self._stream = None
        self._active = False
        if not self._ending and (self.stopping or not keep_alive):
            self._end(linger=self._reader.surplus or bool(self._pending))
        self._advance()

    def _end(self, *, linger: bool) -> None:
        self._ending = True
        if linger:
            self._lingering = True
            self._pending.clear()
            if self._transport.can_write_eof():  # TLS has no end in one direction alone
                self._transport.write_eof()
            if self._reading_paused:
                self._transport.resume_reading()
            self._deadline.set(LINGER)
        else:
            self._close()

    def _close(self) -> None:
        self._ending = True
        self._await_taking()
        self._transport.close()

    def _cancel(self) -> None:
        under_way, self._under_way = self._under_way, None
        self._stream = None
        if under_way is not None:
            under_way.cancel()
        elif self._active and self._task is not None:
            self._task.cancel()

    # --- time ---------------------------------------------------------------------------------------------------------

    def _on_deadline(self) -> None:
        reader = self._reader
        if self._lingering:
            self._lingering = False
            self._close()
        elif self._ending or self.writing_paused:
            if 0 < self._transport.get_write_buffer_size() < self._unsent:
                self._await_taking()
            else:
                self._transport.abort()
        elif reader.in_message:
            seconds = self._all.settings.body_idle_timeout
            if reader.in_body and self._rate_counts:
                rate = self._all.settings.min_body_rate
                reader.time_out(f"the body came more slowly than {rate} bytes a second")
            elif reader.in_body:
                reader.time_out(f"no byte of the body came for {seconds} seconds")
            else:
                reader.time_out(f"the head of the request was not complete after {seconds} seconds")
            self._advance()
        else:
            self._close()
