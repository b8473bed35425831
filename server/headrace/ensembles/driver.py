"""EnsembleDriver: answers the requests to an ensemble by way of its members, and counts them.

It stands where other models have a scheduler; nothing waits here, for the queues are the members'.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from headrace.clock import Clock
from headrace.ensembles.access import MemberAccess
from headrace.ensembles.request import EnsembleRequest
from headrace.instances.arenas import ArenaTable
from headrace.instances.signature import ModelSignature, PreparedRequest
from headrace.observability.statistics import ModelStatistics
from headrace.observability.trace import REQUEST_END
from headrace.observability.tracing import trace_end, trace_response
from headrace.repository.ensemble_config import Ensemble
from headrace.scheduling.batch_driver import Outcome
from headrace.scheduling.ensemble_plan import EnsemblePlan
from headrace.scheduling.handing_over import hand_over
from headrace.types import InferenceResponse
from headrace_protocol.errors import FailureReason, InferError

_log = logging.getLogger("headrace.ensembles")


class Planner(Protocol):
    """Who knows how the members stand."""

    def plan(self) -> EnsemblePlan:
        """Return the plan for the members as they are now. Raises UNAVAILABLE where they do not fit."""
        ...


class EnsembleDriver:
    """Implements scheduling.driver.Driver. Owned by an EnsembleModel."""

    waiting = 0
    """Requests wait in the queues of the members, not here."""

    def __init__(
        self,
        ensemble: Ensemble,
        planner: Planner,
        signature: ModelSignature,
        statistics: ModelStatistics,
        access: MemberAccess,
        arenas: ArenaTable,
        clock: Clock,
    ) -> None:
        self._ensemble = ensemble
        self._planner = planner
        self._signature = signature
        self._statistics = statistics
        self._access = access
        self._arenas = arenas
        self._clock = clock
        self._requests: set[EnsembleRequest] = set()

    def submit(self, prepared: PreparedRequest, done: Callable[[Outcome], None]) -> EnsembleRequest:
        """Begin a request; see SchedulerDriver.submit."""
        request = EnsembleRequest(
            prepared, self._signature, self._ensemble, self._access, self._arenas, self._clock, self._told
        )
        request.done = done
        try:
            plan = self._planner.plan()
            given = tuple(tensor.name for tensor in prepared.inputs if tensor is not None)
            request.begin(plan, plan.select(prepared.wanted, given))
        except InferError as error:
            if prepared.request.trace is not None:
                prepared.request.trace.mark(REQUEST_END)
            self._statistics.record_failure(FailureReason.OTHER, self._age(request))
            raise error.with_traceback(None) from None
        self._requests.add(request)
        return request

    def cancel(self, pending: EnsembleRequest) -> None:
        """Nobody waits for this request any more: its steps are cancelled."""
        if pending.done is None:
            return
        pending.cancel()
        self._count(pending, None)
        self._over(pending, None)

    def flow(self, pending: EnsembleRequest, *, paused: bool) -> None:
        """Hold the further responses of a request back, or let them come again."""
        pending.flow(paused=paused)

    def kick(self) -> None:
        """Nothing waits here."""

    def fail_waiting(self, error: InferError) -> None:
        """End every request with `error`: the ensemble is taken down."""
        for request in list(self._requests):
            request.fail(error)

    def _told(self, request: EnsembleRequest, outcome: Outcome) -> None:
        """Hand over what a request gave."""
        done = request.done
        assert done is not None, "nobody waits for it"
        self._count(request, outcome)
        if isinstance(outcome, InferError):
            identifier = request.prepared.request.id[:80]
            _log.debug("model %s: request %r failed: %s", self._signature.name, identifier, outcome)
        else:
            outcome.id = request.prepared.request.id
            self._statistics.copied_out += sum(len(output.data) for output in outcome.outputs)
        if isinstance(outcome, InferError) or outcome.final:
            request.done = None
            self._over(request, outcome)
        elif request.prepared.request.trace is not None:
            trace_response(request.prepared.request.trace, outcome)
        if not hand_over(done, outcome):
            self.cancel(request)

    def _over(self, request: EnsembleRequest, outcome: Outcome | None) -> None:
        self._requests.discard(request)
        if request.prepared.regions is not None:
            request.prepared.regions.drop()
        if request.prepared.request.trace is not None:
            trace_end(request.prepared.request.trace, outcome)

    # --- counting -------------------------------------------------------------------------------------------------

    def _count(self, request: EnsembleRequest, outcome: Outcome | None) -> None:
        """Count a response, and the request with its last; None = it was cancelled."""
        statistics, now = self._statistics, self._clock.now_ns()
        if statistics.streamed:
            self._count_response(request, outcome, now)
        if outcome is None:
            statistics.record_failure(FailureReason.CANCELED, self._age(request))
        elif isinstance(outcome, InferError):
            statistics.record_failure(FailureReason.OTHER, self._age(request))
        elif outcome.final:
            # What its members queued and computed is counted with them; here it is all one, so that nothing counts twice.
            rows, took_ns = request.prepared.rows, now - request.started_ns
            statistics.record_execution(rows, 0, took_ns, 0)
            wall_ms = self._clock.wall_ns() // 1_000_000
            statistics.record_success(rows, self._age(request), 0, 0, took_ns, 0, wall_ms)
            trace = request.prepared.request.trace
            if trace is not None and trace.trace_id:
                statistics.record_exemplar(trace.trace_id, self._age(request), 0, took_ns, wall_ms)

    def _count_response(self, request: EnsembleRequest, outcome: Outcome | None, now: int) -> None:
        number, took_ns = request.responses, now - request.since_ns
        request.responses += 1
        request.since_ns = now
        if outcome is None:
            self._statistics.record_response_cancel(number, took_ns)
        elif isinstance(outcome, InferenceResponse):
            self._statistics.record_response(number, took_ns, 0, empty=outcome.empty)
            if not number and not outcome.empty:
                self._statistics.record_first_response(self._age(request))
        else:
            self._statistics.record_response_failure(number, took_ns)

    def _age(self, request: EnsembleRequest) -> int:
        return self._clock.now_ns() - request.prepared.request.received_ns
