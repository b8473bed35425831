"""SchedulerDriver: the asyncio shell around a pure scheduler, one a model version.

It feeds requests in, hands ripe batches to free instances, obeys the scheduler's times, and tells each request's outcome
by one call, unless it was cancelled. It decides nothing about batching.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from headrace.clock import Clock
from headrace.instances.model_process import ModelProcess
from headrace.instances.signature import ModelSignature, PreparedRequest
from headrace.observability.statistics import ModelStatistics
from headrace.observability.trace import QUEUE_START, REQUEST_END
from headrace.scheduling.batch_driver import BatchDriver, Instances, Outcome, Pending
from headrace.scheduling.ordering import OrderedRelease
from headrace.scheduling.scheduler import QueuedRequest, Scheduler
from headrace_protocol.errors import ErrorCode, FailureReason, InferError, unavailable


class Driver(Protocol):
    """What answers the requests to a model. What `submit` returns stands for the request in the other calls."""

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        ...

    def submit(self, prepared: PreparedRequest, done: Callable[[Outcome], None]) -> Any:
        """Begin a request; see SchedulerDriver.submit. `done` is not called before it returns."""
        ...

    def cancel(self, pending: Any) -> None:
        """Nobody waits for this request any more; its `done` is not called. Does nothing once it is over."""
        ...

    def flow(self, pending: Any, *, paused: bool) -> None:
        """Hold the further responses of a request back, or let them come again."""
        ...

    def kick(self) -> None:
        """Look again: an instance may be free."""
        ...

    def fail_waiting(self, error: InferError) -> None:
        """Answer every waiting request with `error`."""
        ...


class SchedulerDriver(BatchDriver):
    """Owned by a served model; stopped with `fail_waiting` once nobody submits any more."""

    def __init__(
        self,
        scheduler: Scheduler,
        instances: Instances,
        signature: ModelSignature,
        statistics: ModelStatistics,
        clock: Clock,
        ordering: OrderedRelease | None = None,
        *,
        decoupled: bool = False,
    ) -> None:
        super().__init__(instances, signature, statistics, clock, ordering, decoupled=decoupled)
        self._scheduler = scheduler

    @property
    def waiting(self) -> int:
        """How many requests wait for an instance."""
        return self._scheduler.waiting + (len(self._stalled) if self._stalled else 0)

    def submit(self, prepared: PreparedRequest, done: Callable[[Outcome], None]) -> Pending:
        """Queue a request; `done` is called once with its outcome, unless it is cancelled first.

        Where the model is decoupled it is called for every response; the last is an error or `final`. `done` runs on the
        loop and should be quick; where it raises, the request is over, and it is called once more, with an error. Raises
        InferError UNAVAILABLE where the queue is full.
        """
        now = self._now_ns()
        pending = Pending(prepared, done)
        request = prepared.request
        item = QueuedRequest(pending, prepared.rows, prepared.shape_key, request.priority, request.timeout_us)
        pending.item = item
        if request.trace is not None:
            request.trace.mark(QUEUE_START, now)
        try:
            self._enqueue(item, now)
        except InferError as error:
            if request.trace is not None:
                request.trace.mark(REQUEST_END)
            self._statistics.record_failure(error.reason, now - request.received_ns)
            raise
        if self._ordering is not None:
            self._ordering.admit(item)
        self._statistics.pending += 1
        if self._last_batch == 1 and not self._dispatch_due and self._instances.free_process() is not None:
            self._dispatch()
        else:
            self.kick()
        return pending

    def cancel(self, pending: Pending) -> None:
        """Nobody waits for this request any more: out of the queue, or the backend is told."""
        item = pending.item
        if pending.done is None or item is None:
            return
        pending.done = None
        if pending.process is not None:
            pending.process.cancel(pending.batch, pending.index)
        elif self._scheduler.cancel(item):
            self._statistics.pending -= 1
            self._finish(pending, InferError(ErrorCode.CANCELLED, "the request was cancelled", FailureReason.CANCELED))
            self.kick()

    def fail_waiting(self, error: InferError) -> None:
        """Answer every waiting request with `error`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        stalled, self._stalled = self._stalled or [], None
        for item in [*stalled, *self._scheduler.drain()]:
            self._statistics.pending -= 1
            self._finish(item.owner, error)

    def _enqueue(self, item: QueuedRequest, now: int) -> None:
        try:
            self._scheduler.enqueue(item, now)
        except InferError:
            if not self._dispatch_due:
                raise
            # Those that came in this turn of the loop are in the queue though an instance is free for them.
            self._dispatch()
            self._scheduler.enqueue(item, self._now_ns())

    def _dispatch(self) -> None:
        self._dispatch_due = False
        now = self._now_ns()
        scheduler = self._scheduler
        expiry = scheduler.next_expiry_ns()
        if expiry is not None and expiry <= now:
            self._expire(now)
        ripe_ns: int | None = None
        while (process := self._instances.free_process()) is not None:
            batch = self._stalled or scheduler.next_batch(now)
            if batch is None:
                ripe_ns = scheduler.ripe_at_ns()
                break
            self._stalled = None
            if not self._run(process, batch, now):
                break
        else:
            if self.limited:  # what is ripe already runs when the resources come; what will be has to say so then
                ripe_ns = scheduler.ripe_at_ns()
                ripe_ns = None if ripe_ns is None or ripe_ns <= now else ripe_ns
        self._arm(scheduler.next_expiry_ns(), ripe_ns, now)

    def ripe(self, process: ModelProcess) -> bool:  # noqa: ARG002 - any process will do
        """Return whether there is a batch that a free instance of this process would run now."""
        ripe_ns = self._scheduler.ripe_at_ns()
        return self._stalled is not None or (ripe_ns is not None and ripe_ns <= self._now_ns())

    def _expire(self, now: int) -> None:
        for item in self._scheduler.expire(now):
            self._statistics.pending -= 1
            waited_ms = (now - item.enqueued_ns) // 1_000_000
            error = unavailable(
                f"the request waited {waited_ms} ms for model '{self._signature.name}', longer than its timeout",
                FailureReason.REJECTED,
            )
            self._finish_soon(item.owner, error)
