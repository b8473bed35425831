"""SequenceDriver: the asyncio shell around the sequence batcher, in the place of SchedulerDriver.

Sequences are bound to instances, so it gives each free instance what is ripe for that one, ends the sequences of an
instance whose process has gone, and tells processes of sequences that end unseen by them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.clock import Clock
from headrace.instances.model_process import ModelProcess, Results
from headrace.instances.payload import Payload, RescheduledError
from headrace.instances.signature import ModelSignature, PreparedRequest, SequencePlace
from headrace.observability.statistics import ModelStatistics
from headrace.observability.trace import QUEUE_START, REQUEST_END
from headrace.scheduling.batch_driver import BatchDriver, Instances, Outcome, Pending
from headrace.scheduling.ordering import OrderedRelease
from headrace.scheduling.scheduler import QueuedRequest
from headrace.scheduling.sequence import SequenceBatcher
from headrace.scheduling.sequence_parts import SequenceItem
from headrace_protocol.errors import ErrorCode, FailureReason, InferError, cancelled, unavailable
from headrace_protocol.messages import BatchDone

_log = logging.getLogger("headrace.scheduling")


class Host(Protocol):
    """What keeps a process alive."""

    @property
    def process(self) -> ModelProcess | None:
        """The process now; another one after a death, None between."""
        ...


@dataclass(slots=True)
class InstancePlace:
    """An instance: number `slot` of whatever process `host` has."""

    host: Host
    slot: int
    process: ModelProcess | None = None
    """The process in which the sequences of this instance are."""
    held: list[QueuedRequest] | None = None
    """A batch of it that waits for memory."""


class SequenceDriver(BatchDriver):
    """Owned by a served model; stopped with `fail_waiting` once nobody submits any more."""

    def __init__(
        self,
        batcher: SequenceBatcher,
        places: Sequence[InstancePlace],
        instances: Instances,
        signature: ModelSignature,
        statistics: ModelStatistics,
        clock: Clock,
        ordering: OrderedRelease | None = None,
        *,
        decoupled: bool = False,
        iterative: bool = False,
    ) -> None:
        """`places` are numbered as the batcher's instances; it and this release answers by the same `ordering`."""
        super().__init__(instances, signature, statistics, clock, ordering, decoupled=decoupled)
        self._batcher = batcher
        self._places = places
        self._iterative = iterative
        self._occupied = False
        self.on_occupied: Callable[[bool], None] | None = None
        """Told whenever there is a first sequence, or none any more."""

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return self._batcher.waiting + sum(len(place.held) for place in self._places if place.held)

    @property
    def active(self) -> int:
        """How many sequences have a slot."""
        return self._batcher.active

    @property
    def backlog(self) -> int:
        """How many sequences wait for a slot."""
        return self._batcher.backlog

    def holds(self, correlation_id: int | str) -> bool:
        """Return whether a request without the start flag would find its sequence here."""
        return self._batcher.holds(correlation_id)

    def submit(self, prepared: PreparedRequest, done: Callable[[Outcome], None]) -> Pending:
        """Queue a request; see SchedulerDriver.submit. Raises INVALID_ARG too, where it is of no sequence."""
        now = self._now_ns()
        pending = Pending(prepared, done)
        request = prepared.request
        item = SequenceItem(
            pending, prepared.rows, prepared.shape_key, request.correlation_id, request.flags, request.timeout_us
        )
        pending.item = item
        if request.trace is not None:
            request.trace.mark(QUEUE_START, now)
        self._follow(now)
        restarts = self._batcher.restarts
        try:
            self._enqueue(item, now)
        except InferError as error:
            if request.trace is not None:
                request.trace.mark(REQUEST_END)
            if error.code is not ErrorCode.INVALID_ARG:
                self._statistics.record_failure(error.reason, now - request.received_ns)
            raise
        if self._batcher.restarts != restarts:
            _log.debug("model %s: sequence %r was started again", self._signature.name, item.correlation_id)
        self._statistics.pending += 1
        self._tell_occupied()
        self.kick()
        return pending

    def cancel(self, pending: Pending) -> None:
        """Nobody waits for this request any more: its sequence ends, and what waits of it is cancelled too."""
        item = pending.item
        if pending.done is None or not isinstance(item, SequenceItem):
            return
        pending.done = None
        if pending.process is not None:
            pending.process.cancel(pending.batch, pending.index)
        for removed in self._batcher.cancel(item, self._now_ns()):
            self._statistics.pending -= 1
            if removed is item:
                self._finish(pending, cancelled())
            else:
                self._finish_soon(removed.owner, cancelled("another request of the same sequence was cancelled"))
        self._tell_occupied()
        self.kick()

    def fail_waiting(self, error: InferError) -> None:
        """Answer every waiting request with `error`, and end all sequences."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        drained: list[QueuedRequest] = [*self._batcher.drain(self._now_ns())]
        for place in self._places:
            drained += place.held or ()
            place.held = None
        for item in drained:
            self._statistics.pending -= 1
            self._finish(item.owner, error)
        self._tell_occupied()

    def _enqueue(self, item: SequenceItem, now: int) -> None:
        try:
            self._batcher.enqueue(item, now)
        except InferError as error:
            if not self._dispatch_due or error.code is ErrorCode.INVALID_ARG:
                raise
            # Those that came in this turn of the loop are in the queue though an instance is free for them.
            self._dispatch()
            self._batcher.enqueue(item, self._now_ns())

    def _tell_occupied(self) -> None:
        occupied = self._batcher.active > 0 or self._batcher.backlog > 0
        if occupied is not self._occupied:
            self._occupied = occupied
            if self.on_occupied is not None:
                self.on_occupied(occupied)

    # --- the loop's side ------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        self._dispatch_due = False
        now = self._now_ns()
        self._follow(now)
        expiry = self._batcher.next_expiry_ns()
        if expiry is not None and expiry <= now:
            self._expire(now)
        self._tell_ended()
        ripe_ns: int | None = None
        for number, place in enumerate(self._places):
            process = place.process
            while process is not None and place.slot in process.free:
                if process.gate is not None and not process.gate.open:
                    ripe = self._batcher.ripe_at_ns(number)
                    if ripe is not None and ripe > now and (ripe_ns is None or ripe < ripe_ns):
                        ripe_ns = ripe
                    break
                batch: list[QueuedRequest] | None = place.held or self._next_batch(number, now)
                place.held = None
                if batch is None:
                    ripe = self._batcher.ripe_at_ns(number)
                    ripe_ns = ripe if ripe_ns is None or (ripe is not None and ripe < ripe_ns) else ripe_ns
                    break
                self._run(process, batch, now, place.slot)
                place.held, self._stalled = self._stalled, None
                if place.held:
                    break
        self._tell_occupied()
        self._arm(self._batcher.next_expiry_ns(), ripe_ns, now)

    def ripe(self, process: ModelProcess) -> bool:
        """Return whether there is a batch that a free instance of this process would run now."""
        now = self._now_ns()
        for number, place in enumerate(self._places):
            if place.process is process and place.slot in process.free:
                ripe_ns = self._batcher.ripe_at_ns(number)
                if place.held or (ripe_ns is not None and ripe_ns <= now):
                    return True
        return False

    def _next_batch(self, number: int, now: int) -> list[QueuedRequest] | None:
        batch = self._batcher.next_batch(number, now)
        if batch is None:
            return None
        for item in batch:
            sequence = item.sequence
            assert sequence is not None
            assert sequence.line.slot is not None
            place = SequencePlace(sequence.number, sequence.line.slot.number, item.correlation_id, item.flags)
            pending: Pending = item.owner
            pending.prepared.sequence = place
        return [*batch]

    def _expire(self, now: int) -> None:
        for item in self._batcher.expire(now):
            self._statistics.pending -= 1
            waited_ms = (now - item.arrived_ns) // 1_000_000
            error = unavailable(
                f"sequence {item.correlation_id!r} waited for a free slot of model '{self._signature.name}' for longer "
                f"than the timeout of one of its requests; this one has waited {waited_ms} ms",
                FailureReason.REJECTED,
            )
            self._finish_soon(item.owner, error)

    def _follow(self, now: int) -> None:
        """Take note of processes that have gone and come."""
        for number, place in enumerate(self._places):
            process = place.host.process
            if process is place.process:
                continue
            if place.process is not None:
                self._lose(number, place, now)
            place.process = process
            if process is not None:
                self._batcher.instance_up(number, now)

    def _lose(self, number: int, place: InstancePlace, now: int) -> None:
        lost: list[QueuedRequest] = [*self._batcher.instance_lost(number, now), *(place.held or ())]
        place.held = None
        error = unavailable(
            f"the backend process of model '{self._signature.name}' that held the sequence has ended: start it again",
            FailureReason.BACKEND,
        )
        for item in lost:
            self._statistics.pending -= 1
            self._finish_soon(item.owner, error)

    def _tell_ended(self) -> None:
        """Tell processes which sequences are over, before they are given others."""
        told: dict[int, list[int]] = {}
        for number, sequence in self._batcher.take_ended():
            told.setdefault(number, []).append(sequence)
        for number, sequences in told.items():
            process = self._places[number].process
            if process is not None:
                process.end_sequences(sequences)

    # --- the backend's side ---------------------------------------------------------------------------------------

    def _done(self, payload: Payload, results: Results, done: BatchDone | None) -> None:
        for index, key in payload.state_keys.items():
            if 0 <= index < len(payload.owners):
                payload.owners[index].state_key = key
        if self._iterative and self._on_response is None:
            kept = []
            for pending, result in zip(payload.owners, results, strict=True):
                if not (isinstance(result, RescheduledError) and self._reschedule(pending)):
                    kept.append((pending, result))
            if not kept and done is not None:
                self._statistics.record_execution(
                    payload.rows, done.compute_input_ns, done.compute_infer_ns, done.compute_output_ns
                )
            payload.owners, results = [pending for pending, _ in kept], [result for _, result in kept]
        super()._done(payload, results, done)
        self._tell_occupied()

    def _responded(self, payload: Payload, index: int, outcome: Outcome) -> None:
        pending: Pending = payload.owners[index]
        if index in payload.state_keys:
            pending.state_key = payload.state_keys[index]
        if self._iterative and isinstance(outcome, RescheduledError) and self._reschedule(pending):
            self._statistics.copied_out += payload.take_copied_out()
            self.kick()
            return
        item = pending.item
        super()._responded(payload, index, outcome)
        if pending.item is None and item is not None:
            self._over(item, pending)

    def _reschedule(self, pending: Pending) -> bool:
        """Let a request wait for another execution; False where nobody waits for its answer."""
        item = pending.item
        if pending.done is None or not isinstance(item, SequenceItem) or item.sequence is None:
            return False
        pending.process = None
        pending.batch = 0
        self._batcher.reschedule(item, self._now_ns(), pending.state_key)
        pending.state_key = None
        self._statistics.pending += 1
        return True

    def _finish(self, pending: Pending, outcome: Outcome) -> None:
        item = pending.item
        assert item is not None
        self._over(item, pending)
        if self._ordering is not None and item in self._ordering:
            super()._finish(pending, outcome)
        else:
            self._complete(pending, outcome)

    def _over(self, item: QueuedRequest, pending: Pending) -> None:
        """Let the sequence go on, if the request was handed out."""
        assert isinstance(item, SequenceItem)
        if item.sequence is not None:
            self._batcher.done(item, self._now_ns(), reached=pending.batch > 0, state_key=pending.state_key)
            self.kick()
