"""The handlers on pygrpc-native: HTTP/2 and gRPC framing in its own threads, calls handed to the loop in batches.

One thread of ours waits for events and wakes the event loop once a batch. Methods that stream requests are passed on
by the native front to a grpcio server behind it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from functools import partial
from typing import Any, Final

from pygrpc_native import EVENT_CALL, NativeGrpcFront

from headrace.gateway.grpc.binding import claimed
from headrace.gateway.grpc.errors import RESOURCE_EXHAUSTED, details, status_of
from headrace.gateway.grpc.grpcio_server import StreamServer
from headrace.gateway.grpc.paths import MODEL_INFER, Metadata
from headrace.gateway.grpc.service import Awaited, GrpcService, Immediate, failure
from headrace.gateway.grpc.settings import GrpcSettings
from headrace.gateway.unix_socket import UnixSocket
from headrace.observability.trace import GRPC_SEND_END
from headrace.planes import Cancellable, Outcome
from headrace_protocol.errors import InferError, cancelled, unavailable

_log = logging.getLogger(__name__)

_BATCH: Final = 64
_MAX_FAULTS: Final = 8
_IO_THREADS: Final = 2
_STREAMS: Final = ".streams"
"""Added to the path of a Unix socket, for that of the server behind the front: whoever may use one may use the other."""
_LAST_WRITES: Final = 0.2
"""Seconds that the front's threads get, at a stop, to write what it was given: it does not tell when it has."""

Event = tuple[int, int, int, bytes | None, bytes | str | None, Any]


class NativeServer:
    """One native front over a service, on a port or the Unix socket `file`."""

    def __init__(self, service: GrpcService, settings: GrpcSettings, file: UnixSocket | None) -> None:
        self._settings = settings
        self._file = file
        self._service = service
        self._methods: list[tuple[str, Immediate | None, Awaited | None]] = [
            *((path, handler, None) for path, handler in service.immediate.items()),
            *((path, None, handler) for path, handler in service.awaited.items()),
        ]
        self._infer: Final = [path for path, _, _ in self._methods].index(MODEL_INFER)
        self._guards: Final = [service.guards.get(path) for path, _, _ in self._methods] if service.guards else None
        """By method; None where nothing is restricted."""
        self._front: Any = None
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread
        self._streams = StreamServer(service, settings, None if file is None else UnixSocket(file.path + _STREAMS))
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._inferences: dict[int, Cancellable] = {}
        """ModelInfer calls under way: they need no task of their own."""
        self._inferred = asyncio.Event()
        self._stopping = False

    async def start(self) -> int:
        """Bind, serve, and return the port. Raises OSError where the port cannot be had."""
        settings = self._settings
        self._loop = asyncio.get_running_loop()
        with claimed(self._file):
            front = NativeGrpcFront(
                settings.target,
                [(path, False) for path, _, _ in self._methods],
                io_threads=_IO_THREADS,
                call_details=True,
                keepalive_time_ms=settings.keepalive_time_ms,
                keepalive_timeout_ms=settings.keepalive_timeout_ms,
                keepalive_permit_without_calls=settings.keepalive_permit_without_calls,
                max_concurrent_streams=settings.max_concurrent_streams,
                reuse_port=settings.reuse_port,
            )
        self._front = front
        try:
            front.set_fallback(await self._streams.start())
        except BaseException:
            front.close()
            raise
        front.start()
        self._thread = threading.Thread(target=self._receive, name="grpc-receive", daemon=True)
        self._thread.start()
        port: int = front.bound_port
        return port

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let those in flight end within `grace_s`, then cancel them."""
        if self._front is None or self._stopping:
            return
        self._stopping = True
        streams = asyncio.ensure_future(self._streams.stop(grace_s))
        tasks: list[asyncio.Future[Any]] = list(self._tasks.values())
        if self._inferences:
            tasks.append(asyncio.ensure_future(self._inferred.wait()))
        if tasks and grace_s > 0:
            await asyncio.wait(tasks, timeout=grace_s)
        for task in tasks:
            task.cancel()
        for call_id in list(self._inferences):
            self._inferences.pop(call_id).cancel()
            self._fail(call_id, unavailable("the server is stopping"))
        await asyncio.gather(*tasks, return_exceptions=True)
        await streams
        await asyncio.sleep(min(grace_s, _LAST_WRITES))
        await self._loop.run_in_executor(None, self._front.close)
        await self._loop.run_in_executor(None, self._thread.join)

    def _receive(self) -> None:
        """Run in the thread: wait for events, hand each batch to the loop."""
        wake, take = self._loop.call_soon_threadsafe, self._take
        while (events := self._next_batch()) is not None:
            try:
                wake(take, events)
            except RuntimeError:  # the loop was closed without stop()
                self._front.close()
                return
            del events  # the requests in it must not live until the next batch

    def _next_batch(self) -> list[Event] | None:
        """Return the next events, None once the front is closed.

        A message for which there is no memory makes the front panic. Its batch is lost; the server goes on. A front
        that does nothing but panic is closed, so that clients are refused instead of waiting.
        """
        for _ in range(_MAX_FAULTS):
            try:
                events: list[Event] | None = self._front.recv_batch_details(_BATCH)
                return events
            except BaseException:
                _log.critical("the native gRPC front failed; calls it held are lost", exc_info=True)
        self._front.close()
        return None

    def _take(self, events: list[Event]) -> None:
        for kind, call_id, method, payload, _, call in events:
            if kind != EVENT_CALL:
                self._cancel(call_id)
                continue
            assert payload is not None
            if len(payload) > self._settings.max_message_size:
                self._front.fail(
                    call_id,
                    RESOURCE_EXHAUSTED,
                    f"the message has {len(payload)} bytes, above the {self._settings.max_message_size} allowed",
                )
                continue
            if self._stopping:
                self._fail(call_id, unavailable("the server is stopping"))
                continue
            if self._guards is not None and (guard := self._guards[method]) is not None:
                try:
                    guard(call[0])
                except InferError as error:
                    self._fail(call_id, error)
                    continue
            if method == self._infer:
                self._begin_infer(call_id, payload, call[0])
                continue
            path, immediate, awaited = self._methods[method]
            if awaited is not None:
                coroutine = self._answer(call_id, path, awaited, payload, call[0])
                self._tasks[call_id] = self._loop.create_task(coroutine)
                continue
            assert immediate is not None
            try:
                self._front.respond(call_id, immediate(payload))
            except Exception as error:
                self._fail(call_id, failure(path, error))

    def _begin_infer(self, call_id: int, payload: bytes, metadata: Metadata) -> None:
        try:
            inference = self._service.begin_infer(payload, metadata, partial(self._end_infer, call_id))
        except Exception as error:
            self._fail(call_id, failure(MODEL_INFER, error))
        else:
            self._inferences[call_id] = inference

    def _end_infer(self, call_id: int, outcome: Outcome) -> None:
        self._forget(call_id)
        if isinstance(outcome, InferError):
            self._fail(call_id, outcome)
            return
        try:
            answer = self._service.answer_infer(outcome)
        except Exception as error:
            self._fail(call_id, failure(MODEL_INFER, error))
        else:
            self._front.respond(call_id, answer)
            if outcome.trace is not None:
                outcome.trace.mark(GRPC_SEND_END)

    def _forget(self, call_id: int) -> Cancellable | None:
        inference = self._inferences.pop(call_id, None)
        if self._stopping and not self._inferences:
            self._inferred.set()
        return inference

    async def _answer(self, call_id: int, path: str, handler: Awaited, payload: bytes, metadata: Metadata) -> None:
        try:
            self._front.respond(call_id, await handler(payload, metadata))
        except asyncio.CancelledError:
            # To a client that has gone this says nothing; one that has not must not wait for ever.
            self._fail(call_id, unavailable("the server is stopping") if self._stopping else cancelled())
            raise
        except Exception as error:
            self._fail(call_id, failure(path, error))
        finally:
            self._tasks.pop(call_id, None)

    def _cancel(self, call_id: int) -> None:
        """Cancel a call whose client left or whose deadline passed."""
        inference = self._forget(call_id)
        if inference is not None:
            inference.cancel()
            self._fail(call_id, cancelled())  # to a client that has gone this says nothing
            return
        task = self._tasks.get(call_id)
        if task is not None:
            task.cancel()
            # A task cancelled before its first step never reaches its own `finally`.
            task.add_done_callback(lambda _: self._tasks.pop(call_id, None))

    def _fail(self, call_id: int, error: InferError) -> None:
        self._front.fail(call_id, status_of(error).value[0], details(error.message))
