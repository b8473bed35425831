"""ModelProcess: one backend process that serves one model version, from its start to its end.

It owns the child, the channel, the arena and the table of running batches, and it never restarts: when the process
is gone its batches have failed, its arena is thrown away, and a new ModelProcess takes its place (supervisor).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Final

from headrace.instances.arenas import ArenaTable
from headrace.instances.channel import BackendChannel
from headrace.instances.gate import Gate
from headrace.instances.payload import Payload
from headrace.instances.process import Child
from headrace.instances.regions import Attachments
from headrace.instances.services import ModelServices
from headrace.observability.trace import Trace
from headrace.types import InferenceResponse
from headrace_protocol.arena import Arena
from headrace_protocol.errors import ErrorCode, FailureReason, InferError, unavailable
from headrace_protocol.framing import server_framer
from headrace_protocol.messages import (
    BatchDone,
    Cancel,
    EndSequences,
    Error,
    Execute,
    Finalize,
    Flow,
    Initialize,
    Log,
    Ping,
    Pong,
    Ready,
    Responses,
    Service,
    ToBackend,
    ToServer,
)

STOP_GRACE_S: Final = 5.0
"""Seconds a backend has for its finalize before it is killed."""

Results = Sequence[InferenceResponse | InferError | None]
OnDone = Callable[[Payload, Results, BatchDone | None], None]
"""Called once a batch is over: what each request gets, and the timings (None where the process died)."""
OnResponse = Callable[[Payload, int, InferenceResponse | InferError], None]
"""Called for each response of a decoupled model, with the index of its request; an error is a request's last."""


class ProcessGoneError(Exception):
    """The process ended just as it was to be given a batch, which can run in another one."""


class _Running:
    __slots__ = ("executed", "instance", "on_done", "on_response", "open", "payload", "refused", "results")

    def __init__(self, payload: Payload, instance: int, on_done: OnDone, on_response: OnResponse | None) -> None:
        self.payload = payload
        self.instance = instance
        self.on_done = on_done
        self.on_response = on_response
        """There for decoupled models alone."""
        self.results: list[InferenceResponse | InferError | None] | None = None
        self.open: set[int] = set() if on_response is None else set(range(len(payload.requests)))
        """Requests of a decoupled model that have not had their last response."""
        self.refused: set[int] = set()
        """Those of them that got an error of ours: what the backend still sends to them goes nowhere."""
        self.executed = False
        """Whether its slot is free again, though some of its requests may be open still."""


class ModelProcess:
    """Takes batches while `free` has an instance. Not started: construct, then `initialize`."""

    def __init__(
        self,
        child: Child,
        arena_bytes: int,
        on_slot_free: Callable[[], None],
        on_ended: Callable[[str], None],
        on_log: Callable[[str, str], None],
        services: ModelServices | None = None,
        arenas: ArenaTable | None = None,
    ) -> None:
        try:
            self._arena = Arena.create(arena_bytes)
        except OSError:
            child.kill()
            child.socket.close()
            raise
        self._arenas = arenas
        if arenas is not None:
            arenas.add(self._arena)
        self.pid = child.pid
        self.free: list[int] = []
        """Instances that run nothing now."""
        self.slots = 0
        """How many instances it has, free or not."""
        self.gate: Gate | None = None
        """What a batch has to pass, where executions are limited by resources."""
        self.last_pong: int = 0
        self.model_ready = True
        """Whether the model itself says that it can serve."""
        self._child = child
        self._running: dict[int, _Running] = {}
        self._next_batch = 1
        self._on_slot_free = on_slot_free
        self._on_ended = on_ended
        self._on_log = on_log
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._over = False
        self._stopping = False
        self._channel = BackendChannel(child.socket, server_framer(), self._on_frame, self._on_closed)
        self._attachments = Attachments(self._channel.send)
        self._services = None if services is None else services.of_process(self)
        if self._services is not None:
            self._channel.on_drained = self._services.flush

    async def initialize(self, message: Initialize, timeout_s: float) -> Ready:
        """Load the model. Raises InferError with the backend's reason; the process is ended then."""
        try:
            self._channel.send([message], [self._arena.fd])
        except OSError as error:
            self.kill()
            raise unavailable(f"a backend process cannot be given its memory: {error.strerror}") from None
        try:
            async with asyncio.timeout(timeout_s):
                ready = await self._ready
        except TimeoutError:
            self.kill()
            raise InferError(ErrorCode.UNAVAILABLE, f"the model was not loaded within {timeout_s:g} s") from None
        except asyncio.CancelledError:
            self.kill()
            raise
        if ready.error is not None:
            await self.stop()
            code = ErrorCode.__members__.get(ready.error.code, ErrorCode.INTERNAL)
            raise InferError(code, ready.error.message)
        self.free = list(range(max(1, min(ready.concurrency, len(message.instances)))))
        self.free.reverse()
        self.slots = len(self.free)
        return ready

    @property
    def busy(self) -> int:
        """How many batches hold memory now."""
        return len(self._running)

    def execute(
        self, payload: Payload, on_done: OnDone, on_response: OnResponse | None = None, instance: int | None = None
    ) -> int:
        """Run a batch in a free instance, or in `instance`, which is free; return its number.

        Raises as Payload.gather, ProcessGoneError, and UNAVAILABLE where descriptors have run out; nothing is taken then.
        With `on_response` (decoupled models) every response is told by that, and `on_done` gets no results.
        """
        if self._over:
            raise ProcessGoneError
        batch = self._next_batch
        if instance is None:
            instance = self.free[-1]
        if payload.in_place is not None:
            self._give_regions(payload)
        self._send_batch(payload, payload.gather(self._arena, batch, instance))
        self.free.remove(instance)
        self._next_batch = batch + 1
        self._running[batch] = _Running(payload, instance, on_done, on_response)
        if self.gate is not None:
            self.gate.enter()
        return batch

    def _send_batch(self, payload: Payload, command: Execute) -> None:
        channel = self._channel
        try:
            channel.send([command])
        except OSError as error:
            payload.release()
            raise unavailable(f"the batch cannot be handed to its backend process: {error.strerror}") from None
        if channel.closed:
            self.free = []
            payload.release()
            raise ProcessGoneError

    def _give_regions(self, payload: Payload) -> None:
        assert payload.in_place is not None
        try:
            self._attachments.attach(payload.in_place.regions)
        except OSError:  # out of descriptors: the tensors are copied, then
            payload.in_place = None

    def cancel(self, batch: int, request: int) -> None:
        """Tell the backend that nobody waits for a request of a running batch any more."""
        if batch in self._running:
            self._channel.send([Cancel(batch, request)])

    def flow(self, batch: int, request: int, *, paused: bool) -> None:
        """Tell the backend to hold a request's responses back, or to go on."""
        if batch in self._running:
            self._channel.send([Flow(batch, request, paused)])

    def executes(self, batch: int) -> bool:
        """Return whether a batch of this number occupies an instance."""
        running = self._running.get(batch)
        return running is not None and not running.executed

    def trace_of(self, batch: int) -> Trace | None:
        """Return the trace of a request of a batch that runs; None where none is traced, or it does not run."""
        running = self._running.get(batch)
        if running is None:
            return None
        traces = (owner.prepared.request.trace for owner in running.payload.owners)
        return next((trace for trace in traces if trace is not None), None)

    @property
    def reading(self) -> bool:
        """Whether nothing that was sent waits here for the process to read."""
        return self._channel.drained

    def send(self, messages: Sequence[ToBackend], descriptors: Sequence[int] = ()) -> None:
        """Send a frame that concerns no batch; the descriptors stay the caller's."""
        self._channel.send(messages, descriptors)

    def end_sequences(self, numbers: Sequence[int]) -> None:
        """Tell the backend of sequences that get no further request."""
        self._channel.send([EndSequences(tuple(numbers))])

    def ping(self, nonce: int) -> None:
        """Ask for a sign of life; `last_pong` becomes `nonce`."""
        self._channel.send([Ping(nonce)])

    def trim(self) -> None:
        """Give idle arena memory back to the system."""
        if not self._over and not self._running:
            self._arena.trim()

    def kill(self) -> None:
        """End the process at once."""
        self._child.kill()

    def abort(self, reason: str) -> None:
        """End the process at once and fail what runs in it; the owner is not told, and `stop` follows."""
        self._stopping = True
        self._child.kill()
        self._end(reason)

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Let the backend finalize, then make sure it is gone. Returns once it was reaped."""
        self._stopping = True
        self._channel.send([Finalize()])
        try:
            async with asyncio.timeout(grace_s):
                await self._child.wait()
        except TimeoutError:
            self._child.kill()
            await self._child.wait()
        finally:
            self._end("the model was unloaded")

    async def ended(self) -> str:
        """Return how the process ended, once it has."""
        return await self._child.wait()

    # --- what the backend says ------------------------------------------------------------------------------------

    def _on_frame(self, messages: list[ToServer], descriptors: list[int]) -> None:
        try:
            for message in messages:
                if type(message) is Responses:
                    self._on_responses(message, descriptors)
                elif type(message) is BatchDone:
                    self._on_batch_done(message)
                elif type(message) is Log:
                    self._on_log(message.level, message.text)
                elif type(message) is Pong:
                    self.last_pong = message.nonce
                    self.model_ready = message.ready
                elif type(message) is Ready:
                    if self._ready.done():
                        raise InferError(ErrorCode.INTERNAL, "a second Ready")
                    self._ready.set_result(message)
                elif isinstance(message, Service):
                    self._asked(message, descriptors)
        except InferError as error:
            self._nonsense(error.message)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _asked(self, message: Service, descriptors: list[int]) -> None:
        if self._services is None:
            raise InferError(ErrorCode.INTERNAL, f"{type(message).__name__}, though it may ask nothing")
        self._services.take(message, descriptors)

    def _on_responses(self, message: Responses, descriptors: list[int]) -> None:
        running = self._running.get(message.batch)
        if running is None:
            raise InferError(ErrorCode.INTERNAL, f"responses for the batch {message.batch}, which does not run")
        if message.states:
            running.payload.state_keys.update(message.states)
        if running.on_response is not None:
            self._on_streamed(message, running, descriptors)
            return
        results = running.payload.scatter(message.batched, message.responses, descriptors)
        if descriptors and message.batched:
            spilled = sum(tensor.ref.nbytes + 64 for tensor in message.batched)
            running.payload.signature.learn_output(running.payload.rows, spilled)
        if running.results is None:
            running.results = results
            return
        for index, result in enumerate(results):
            if result is not None:
                previous = running.results[index]
                if isinstance(previous, InferenceResponse):
                    previous.release()
                running.results[index] = result

    def _on_streamed(self, message: Responses, running: _Running, descriptors: list[int]) -> None:
        assert running.on_response is not None
        if message.batched is not None:
            raise InferError(ErrorCode.INTERNAL, "a decoupled model answered a whole batch at once")
        for index, outcome, last in running.payload.stream(message.responses, descriptors):
            known = index in running.open
            if last:
                running.open.discard(index)
            if not known or index in running.refused:
                if isinstance(outcome, InferenceResponse):
                    outcome.release()
                if not known:
                    raise InferError(ErrorCode.INTERNAL, f"a response after the last one of request {index}")
                continue
            if isinstance(outcome, InferError) and not last:
                running.refused.add(index)
                self.cancel(message.batch, index)
            running.on_response(running.payload, index, outcome)
        if running.executed and not running.open:
            del self._running[message.batch]
            running.payload.release()
            self._on_slot_free()  # its memory is free: a batch may wait for that

    def _on_batch_done(self, message: BatchDone) -> None:
        running = self._running.get(message.batch)
        if running is None or running.executed:
            raise InferError(ErrorCode.INTERNAL, f"the end of the batch {message.batch}, which does not run")
        self.free.append(running.instance)
        running.executed = True
        if self.gate is not None:
            self.gate.leave()
        if running.open:
            running.on_done(running.payload, (), message)
            self._on_slot_free()
            return
        del self._running[message.batch]
        if running.on_response is not None:
            running.on_done(running.payload, (), message)
            running.payload.release()
            self._on_slot_free()
            return
        results = running.results
        if results is None:
            results = [None] * len(running.payload.requests)
        running.on_done(running.payload, results, message)
        running.payload.release()
        self._on_slot_free()

    def _nonsense(self, what: str) -> None:
        self._channel.fail(f"the backend process sent nonsense: {what}")

    def _on_closed(self, reason: str) -> None:
        self._child.kill()
        self._end(reason)

    def _end(self, reason: str) -> None:
        if self._over:
            return
        self._over = True
        self._channel.close()
        if self._services is not None:
            self._services.close()
        self.free = []
        if not self._ready.done():
            self._ready.set_result(_died(reason))
        running, self._running = self._running, {}
        if self._arenas is not None:
            self._arenas.remove(self._arena)
        self._arena.close()
        self._attachments.close()
        what = "the request was cut off" if self._stopping else "the backend process failed while it ran this request"
        for entry in running.values():
            if self.gate is not None and not entry.executed:
                self.gate.leave()
            error = InferError(ErrorCode.UNAVAILABLE, f"{what}: {reason}", FailureReason.BACKEND)
            if entry.on_response is not None:
                for index in sorted(entry.open - entry.refused):
                    entry.on_response(entry.payload, index, error)
                if not entry.executed:
                    entry.on_done(entry.payload, (), None)
            else:
                for result in entry.results or ():
                    if isinstance(result, InferenceResponse):
                        result.release()
                entry.on_done(entry.payload, [error] * len(entry.payload.requests), None)
            entry.payload.release()
        if not self._stopping:
            self._on_ended(reason)


def _died(reason: str) -> Ready:
    return Ready(error=Error("UNAVAILABLE", f"the backend process ended while loading: {reason}"))
