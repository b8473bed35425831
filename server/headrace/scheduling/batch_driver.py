"""BatchDriver: has batches run in processes and tells each request's outcome by one call, unless it was cancelled.

The half of a driver that knows no scheduler: what it is given to run, it runs, counts and answers.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from headrace.clock import Clock
from headrace.instances.model_process import ModelProcess, ProcessGoneError, Results
from headrace.instances.payload import Payload, UnreadableInputError
from headrace.instances.signature import ModelSignature, PreparedRequest
from headrace.observability.logging import VERBOSE_2
from headrace.observability.statistics import ModelStatistics
from headrace.observability.tracing import trace_end, trace_response
from headrace.scheduling.handing_over import hand_over
from headrace.scheduling.ordering import OrderedRelease
from headrace.scheduling.scheduler import QueuedRequest
from headrace.types import InferenceResponse
from headrace_protocol.arena import ArenaFullError
from headrace_protocol.errors import ErrorCode, FailureReason, InferError, internal, unavailable
from headrace_protocol.messages import BatchDone

_log = logging.getLogger("headrace.scheduling")

Outcome = InferenceResponse | InferError


class Instances(Protocol):
    """Where batches run."""

    def free_process(self) -> ModelProcess | None:
        """Return a process with a free instance, or None."""
        ...

    def busy(self) -> int:
        """Return how many batches run now."""
        ...


class Pending:
    """A request between `submit` and its answer, the last one where it may have several."""

    __slots__ = (
        "batch",
        "done",
        "index",
        "item",
        "prepared",
        "process",
        "responses",
        "result",
        "since_ns",
        "started_ns",
        "state_key",
    )

    def __init__(self, prepared: PreparedRequest, done: Callable[[Outcome], None]) -> None:
        self.prepared = prepared
        self.done: Callable[[Outcome], None] | None = done
        """Who waits for the outcome; None once it was told, or nobody waits any more."""
        self.item: QueuedRequest | None = None
        """None once it is completed: the two hold each other, and a request's memory must not wait for the collector."""
        self.process: ModelProcess | None = None
        self.batch = 0
        self.index = 0
        self.started_ns = 0
        self.result: Outcome | None = None
        self.responses = 0
        """Responses of a decoupled model so far."""
        self.since_ns = 0
        """When the last of them came."""
        self.state_key: int | None = None
        """What the shapes of its sequence's state are since it ran; None = as before."""


class BatchDriver(ABC):
    """Base of the drivers. A subclass says in `_dispatch` what runs where, and calls `_arm` with its times."""

    def __init__(
        self,
        instances: Instances,
        signature: ModelSignature,
        statistics: ModelStatistics,
        clock: Clock,
        ordering: OrderedRelease | None = None,
        *,
        decoupled: bool = False,
    ) -> None:
        self._instances = instances
        self._signature = signature
        self._statistics = statistics
        self._now_ns: Callable[[], int] = clock.now_ns
        self._wall_ns: Callable[[], int] = clock.wall_ns
        self._ordering = ordering
        self._on_response = self._responded if decoupled else None
        self._loop = asyncio.get_running_loop()
        self.limited = False
        """Whether an instance that is free may have to wait for resources."""
        self._dispatch_due = False
        self._last_batch = 0
        """Requests in the last batch: where it was one, waiting for more to arrive in this turn only costs time."""
        self._stalled: list[QueuedRequest] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0

    @abstractmethod
    def cancel(self, pending: Pending) -> None:
        """Nobody waits for this request any more."""

    def flow(self, pending: Pending, *, paused: bool) -> None:
        """Hold the further responses of a running request back, or let them come again."""
        if pending.process is not None:
            pending.process.flow(pending.batch, pending.index, paused=paused)

    def kick(self) -> None:
        """Dispatch once the requests that arrived in this turn of the loop are all in the queue."""
        if not self._dispatch_due:
            self._dispatch_due = True
            self._loop.call_soon(self._dispatch if self._last_batch <= 1 else self._dispatch_next_turn)

    def _dispatch_next_turn(self) -> None:
        """Let the loop look at its sockets once more: where many ask at once, some have by now."""
        self._loop.call_soon(self._dispatch)

    @abstractmethod
    def _dispatch(self) -> None:
        """Hand what is ripe to instances that are free."""

    def _finish_soon(self, pending: Pending, error: InferError) -> None:
        """Complete a request that may be the one whose `submit` is on the stack: not before that returns."""
        self._loop.call_soon(self._finish, pending, error)

    def _fail_soon(self, pendings: list[Pending], error: InferError) -> None:
        self._statistics.pending -= len(pendings)
        for pending in pendings:
            self._finish_soon(pending, error.with_traceback(None))

    def _run(self, process: ModelProcess, batch: list[QueuedRequest], now: int, instance: int | None = None) -> bool:
        """Have a batch run in a free instance of the process, in that one where it is given.

        False: it stays `_stalled` until memory is free. Where the process has ended meanwhile it stays so too.
        """
        pendings: list[Pending] = [item.owner for item in batch]
        payload = Payload(self._signature, [pending.prepared for pending in pendings])
        try:
            number = process.execute(payload, self._done, self._on_response, instance)
        except ArenaFullError as error:
            if self._instances.busy():
                self._stalled = [*batch, *(self._stalled or ())]
                return False
            if len(batch) > 1 and instance is None:  # together they are too large, which is the fault of none
                half = len(batch) // 2
                self._stalled = [*batch[half:], *(self._stalled or ())]
                return self._run(process, batch[:half], now)
            self._fail_soon(pendings, unavailable(f"the tensors do not fit into the model's arena: {error}"))
            return True
        except InferError as error:
            self._fail_soon(pendings, error)
            return True
        except ProcessGoneError:
            self._stalled = [*batch, *(self._stalled or ())]
            return True
        except UnreadableInputError as error:
            del batch[error.index]
            self._statistics.pending -= 1
            self._finish_soon(pendings[error.index], error.error)
            return self._run(process, batch, now, instance) if batch else True
        except Exception:  # a fault of our own: it must not leave requests without an answer
            _log.exception("model %s: a batch could not be handed over", self._signature.name)
            self._fail_soon(pendings, internal("the server failed to hand the request over; its log has the reason"))
            return True
        payload.owners = pendings
        self._last_batch = len(batch)
        self._statistics.pending -= len(batch)
        self._statistics.copied_in += payload.copied_in
        for index, pending in enumerate(pendings):
            pending.process = process
            pending.batch = number
            pending.index = index
            pending.started_ns = now
            if pending.done is None:
                process.cancel(number, index)
        return True

    def _arm(self, expiry_ns: int | None, ripe_ns: int | None, now: int) -> None:
        due = expiry_ns if ripe_ns is None or (expiry_ns is not None and expiry_ns < ripe_ns) else ripe_ns
        if self._timer is not None:
            if due == self._timer_ns:
                return
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._timer_ns = due
            self._timer = self._loop.call_later(max(0, due - now) / 1e9, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        self._dispatch()

    # --- the backend's side ---------------------------------------------------------------------------------------

    def _done(self, payload: Payload, results: Results, done: BatchDone | None) -> None:
        now = self._now_ns()
        statistics = self._statistics
        statistics.copied_out += payload.take_copied_out()
        streams = self._on_response is not None
        if done is not None and _log.isEnabledFor(VERBOSE_2):
            compute_us = (done.compute_input_ns + done.compute_infer_ns + done.compute_output_ns) // 1000
            sizes = (len(payload.owners), payload.rows)
            _log.log(
                VERBOSE_2, "model %s: ran %d requests, %d rows, in %d us", self._signature.name, *sizes, compute_us
            )
        if done is not None and (streams or any(isinstance(result, InferenceResponse) for result in results)):
            statistics.record_execution(
                payload.rows, done.compute_input_ns, done.compute_infer_ns, done.compute_output_ns
            )
        if streams:
            return
        wall_ms = self._wall_ns() // 1_000_000
        for pending, result in zip(payload.owners, results, strict=True):
            pending.process = None
            if result is None:
                outcome: Outcome = InferError(
                    ErrorCode.INTERNAL,
                    f"model '{self._signature.name}' gave no answer to the request",
                    FailureReason.BACKEND,
                )
            else:
                outcome = result
            request = pending.prepared.request
            if request.trace is not None and done is not None:
                request.trace.computed(
                    pending.started_ns, done.compute_input_ns, done.compute_infer_ns, done.compute_output_ns
                )
                request.trace.batched(payload.rows, len(payload.owners), done.batch, now)
            if request.access is not None and done is not None:
                queue_ns = pending.started_ns - pending.item.enqueued_ns
                request.access.timed(queue_ns, now - pending.started_ns, payload.rows)
            if isinstance(outcome, InferenceResponse) and done is not None and pending.done is not None:
                statistics.record_success(
                    pending.prepared.rows,
                    now - request.received_ns,
                    pending.started_ns - pending.item.enqueued_ns,
                    done.compute_input_ns,
                    done.compute_infer_ns,
                    done.compute_output_ns,
                    wall_ms,
                )
                if request.trace is not None:
                    compute_ns = done.compute_input_ns + done.compute_infer_ns + done.compute_output_ns
                    self._exemplify(pending, now, compute_ns, wall_ms)
            self._finish(pending, outcome)

    def _responded(self, payload: Payload, index: int, outcome: Outcome) -> None:
        """Take one response of a decoupled model."""
        pending: Pending = payload.owners[index]
        now = self._now_ns()
        self._statistics.copied_out += payload.take_copied_out()
        self._count_response(pending, outcome, now)
        if isinstance(outcome, InferError) or outcome.final:
            if isinstance(outcome, InferenceResponse) and pending.done is not None:
                self._count_stream(pending, now)
            pending.process = None
            access = pending.prepared.request.access
            if access is not None and pending.item is not None:
                queue_ns = pending.started_ns - pending.item.enqueued_ns
                access.timed(queue_ns, now - pending.started_ns, payload.rows)
            if pending.prepared.request.trace is not None:
                trace = pending.prepared.request.trace
                trace.computed(pending.started_ns, 0, now - pending.started_ns, 0)
                trace.batched(payload.rows, len(payload.owners), 0, now)
            self._complete(pending, outcome)
        elif pending.done is None:
            outcome.release()
        else:
            outcome.id = pending.prepared.request.id
            if pending.prepared.request.trace is not None:
                trace_response(pending.prepared.request.trace, outcome)
            if not hand_over(pending.done, outcome):
                self.cancel(pending)

    def _count_response(self, pending: Pending, outcome: Outcome, now: int) -> None:
        if pending.done is None and not isinstance(outcome, InferError) and not outcome.final:
            return  # it was on its way when the request was cancelled, which counts once, at the end
        statistics = self._statistics
        number = pending.responses
        infer_ns = now - (pending.since_ns or pending.started_ns)
        pending.responses = number + 1
        pending.since_ns = now
        if pending.done is None:
            statistics.record_response_cancel(number, infer_ns)
        elif isinstance(outcome, InferError):
            statistics.record_response_failure(number, infer_ns)
        else:
            statistics.record_response(number, infer_ns, 0, empty=outcome.empty)
            if not number and not outcome.empty:
                statistics.record_first_response(now - pending.prepared.request.received_ns)

    def _count_stream(self, pending: Pending, now: int) -> None:
        """Count a request to a decoupled model that came to its end."""
        assert pending.item is not None
        self._statistics.record_success(
            pending.prepared.rows,
            now - pending.prepared.request.received_ns,
            pending.started_ns - pending.item.enqueued_ns,
            0,
            now - pending.started_ns,
            0,
            self._wall_ns() // 1_000_000,
        )
        if pending.prepared.request.trace is not None:
            self._exemplify(pending, now, now - pending.started_ns, self._wall_ns() // 1_000_000)

    def _exemplify(self, pending: Pending, now: int, compute_ns: int, wall_ms: int) -> None:
        """Have the histograms name the trace of a request."""
        request = pending.prepared.request
        assert pending.item is not None
        assert request.trace is not None
        if request.trace.trace_id:
            queue_ns = pending.started_ns - pending.item.enqueued_ns
            self._statistics.record_exemplar(
                request.trace.trace_id, now - request.received_ns, queue_ns, compute_ns, wall_ms
            )

    def _finish(self, pending: Pending, outcome: Outcome) -> None:
        if self._ordering is None:
            self._complete(pending, outcome)
            return
        pending.result = outcome
        assert pending.item is not None
        for item in self._ordering.complete(pending.item):
            released: Pending = item.owner
            assert released.result is not None
            self._complete(released, released.result)

    def _complete(self, pending: Pending, outcome: Outcome) -> None:
        pending.item = None
        if pending.prepared.regions is not None:
            pending.prepared.regions.drop()
        done, pending.done = pending.done, None
        if pending.prepared.request.trace is not None:
            trace_end(pending.prepared.request.trace, None if done is None else outcome)
        if isinstance(outcome, InferenceResponse):
            if done is None:
                self._statistics.record_failure(FailureReason.CANCELED, self._age(pending))
                outcome.release()
                return
            outcome.id = pending.prepared.request.id
        else:
            self._statistics.record_failure(
                FailureReason.CANCELED if done is None else outcome.reason, self._age(pending)
            )
            if done is None:
                return
            identifier = pending.prepared.request.id[:80]
            _log.debug("model %s: request %r failed: %s", self._signature.name, identifier, outcome)
        hand_over(done, outcome)

    def _age(self, pending: Pending) -> int:
        return self._now_ns() - pending.prepared.request.received_ns
