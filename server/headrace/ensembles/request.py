"""EnsembleRequest: one request to an ensemble under way. It obeys its run, and tells it what becomes of the steps.

The shell around scheduling/ensemble_run.py: it decides nothing about the order of things. Owned by the EnsembleDriver.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

from headrace.clock import Clock
from headrace.ensembles.access import MemberAccess
from headrace.ensembles.sources import Source, StepMemory, of_request, of_response
from headrace.instances.arenas import ArenaTable
from headrace.instances.loaded_model import LoadedModel
from headrace.instances.regions import Slice, deliver
from headrace.instances.signature import ModelSignature, PreparedRequest
from headrace.repository.ensemble_config import Ensemble
from headrace.scheduling.batch_driver import Outcome
from headrace.scheduling.ensemble_decisions import (
    CancelStep,
    Decision,
    Deliver,
    Fail,
    HoldStep,
    Release,
    StartStep,
    Take,
)
from headrace.scheduling.ensemble_plan import ROOT, EnsemblePlan, Selection
from headrace.scheduling.ensemble_run import EnsembleRun
from headrace.types import InferenceRequest, InferenceResponse, InputTensor, OutputTensor, Parameter, RequestedOutput
from headrace_protocol.errors import InferError, internal
from headrace_protocol.tensor import Tensor, TensorRef

_log = logging.getLogger("headrace.ensembles")

_NOWHERE: Final = TensorRef(0, 0)
Told = Callable[["EnsembleRequest", Outcome], None]


class EnsembleRequest:
    """Constructed, then `begin`; `told` gets every response, the last being `final` or an error, unless `cancel` came."""

    def __init__(
        self,
        prepared: PreparedRequest,
        signature: ModelSignature,
        ensemble: Ensemble,
        access: MemberAccess,
        arenas: ArenaTable,
        clock: Clock,
        told: Told,
    ) -> None:
        self.prepared = prepared
        self.done: Callable[[Outcome], None] | None = None
        """Who waits for the outcome; None once it was told, or nobody waits any more."""
        self.responses = 0
        self.started_ns = clock.now_ns()
        self.since_ns = self.started_ns
        """When the last response came."""
        self._signature = signature
        self._ensemble = ensemble
        self._access = access
        self._arenas = arenas
        self._now_ns = clock.now_ns
        self._told = told
        self._run: EnsembleRun | None = None
        self._leases: dict[int, LoadedModel] = {}
        """By step."""
        self._steps: dict[int, tuple[LoadedModel, Any]] = {}
        """The steps under way, each with what its model's driver calls it."""
        self._todo: deque[Decision] = deque()
        self._obeying = False
        self._outputs_at: dict[int, dict[str, Slice]] = {}
        """By step, the outputs of its model whose place is the client's memory."""
        self._timer: asyncio.TimerHandle | None = None
        self._begun = False
        self._early: InferError | None = None
        """What came of it before `begin` returned."""

    def begin(self, plan: EnsemblePlan, selection: Selection) -> None:
        """Lease the members and start the first steps. Raises InferError where nothing comes of it; nothing is held then."""
        try:
            for step in selection.steps:
                self._lease(step.number, step.model)
            self._place_outputs(selection)
            self._run = EnsembleRun(plan, selection)
            source = of_request(self.prepared, self._signature)
            self._obey(self._run.start(source, 0, self._now_ns()))
            if self._early is not None:
                raise self._early
        except InferError:
            self._end()
            raise
        self._begun = True

    def cancel(self) -> None:
        """Nobody waits any more: every step under way is cancelled, and all memory let go of."""
        self.done = None
        if self._run is not None:
            self._obey(self._run.cancel())
            self._end()

    def fail(self, error: InferError) -> None:
        """End it with an error from outside: the ensemble is taken down."""
        if self._run is not None:
            decisions = self._run.cancel()
            self._obey([*decisions, Fail(error)])

    def flow(self, *, paused: bool) -> None:
        """Hold the client's responses back, or let them come again."""
        if self._run is not None:
            self._obey(self._run.flow(self._now_ns(), paused=paused))

    # --- decisions ------------------------------------------------------------------------------------------------

    def _obey(self, decisions: Iterable[Decision]) -> None:
        """Carry decisions out in order, and those that come of it; what calls back while that goes on only adds to them."""
        self._todo.extend(decisions)
        if self._obeying:
            return
        self._obeying = True
        try:
            while self._todo:
                self._carry_out(self._todo.popleft())
        finally:
            self._obeying = False
        self._arm()

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case StartStep():
                self._start(decision)
            case CancelStep(number):
                model, pending = self._steps.pop(number, (None, None))
                if model is not None:
                    model.driver.cancel(pending)
            case HoldStep(number, paused):
                if number in self._steps:
                    model, pending = self._steps[number]
                    model.driver.flow(pending, paused=paused)
            case Deliver(outputs, final):
                self._deliver(outputs, final=final)
            case Release(source):
                assert isinstance(source, Source)
                source.drop()
            case Fail(error):
                self._tell(error)

    def _start(self, decision: StartStep) -> None:
        step = decision.step
        model = self._leases[step.number]
        request = self._request(step.model, self._ensemble.steps[step.number].model_version)
        request.received_ns = self._now_ns()
        request.outputs = [RequestedOutput(output.name) for output in step.outputs]
        places: dict[str, Slice] = {}
        for take in decision.inputs:
            tensor = _tensor(take)
            request.inputs.append(InputTensor(take.name, tensor.datatype, tensor.shape, tensor.data, tensor.region))
            if tensor.place is not None:
                places[take.name] = tensor.place
        sources = {id(take.source): take.source for take in decision.inputs}
        memory = StepMemory(places, self._outputs_at.get(step.number, {}), sources.values())  # type: ignore[arg-type]
        done = partial(self._on_outcome, decision.run)
        try:
            pending = self._access.begin(model, request, memory, self.prepared.request.trace, done)
        except Exception as error:  # whatever it is: the request must have an answer, and let go of its members
            memory.drop()
            if self._run is not None:
                self._todo.extend(self._run.failed(decision.run, _refusal(error, step.model), self._now_ns()))
            return
        self._steps[decision.run] = (model, pending)

    def _request(self, model: str, version: int) -> InferenceRequest:
        """Return a step's request without its tensors: what it has of the client's."""
        original = self.prepared.request
        request = InferenceRequest(model, version)
        request.nested = True
        request.id = original.id
        request.parameters = original.parameters
        request.priority = original.priority
        request.timeout_us = original.timeout_us
        request.correlation_id = original.correlation_id
        request.flags = original.flags
        return request

    def _lease(self, number: int, model: str) -> None:
        try:
            self._leases[number] = self._access.lease(self._request(model, self._ensemble.steps[number].model_version))
        except InferError as error:
            text = f"in ensemble '{self._signature.name}', step model '{model}': {error.message}"
            raise InferError(error.code, text) from None

    def _place_outputs(self, selection: Selection) -> None:
        """Have steps write straight to the client's memory what nobody else reads."""
        regions = self.prepared.regions
        if regions is None or not regions.outputs or ROOT not in selection.groups:
            return
        wanted = {output.tensor: output.name for output in selection.outputs if not selection.readers[output.tensor]}
        for step in selection.steps:
            for output in step.outputs:
                place = regions.outputs.get(wanted.get(output.tensor, ""))
                if place is not None:
                    self._outputs_at.setdefault(step.number, {})[output.name] = place

    # --- what becomes of the steps --------------------------------------------------------------------------------

    def _on_outcome(self, number: int, outcome: Outcome) -> None:
        if self._run is None or number not in self._steps:
            if isinstance(outcome, InferenceResponse):
                outcome.release()
            return
        now = self._now_ns()
        last = isinstance(outcome, InferError) or outcome.final
        if last:
            del self._steps[number]
        if isinstance(outcome, InferError):
            self._obey(self._run.failed(number, outcome, now))
            return
        if outcome.empty:
            outcome.release()
            self._obey(self._run.ended(number, now))
            return
        source = of_response(outcome, self._arenas)
        names = source.tensors.keys()
        self._obey(self._run.responded(number, source, names, source.nbytes, now, final=outcome.final))

    def _arm(self) -> None:
        """Have the run look at its time limits when the next is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        expiry = self._run.next_expiry_ns() if self._run is not None else None
        if expiry is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0, expiry - self._now_ns()) / 1e9, self._expired)

    def _expired(self) -> None:
        self._timer = None
        if self._run is not None:
            self._obey(self._run.expire(self._now_ns()))

    # --- what the client gets -------------------------------------------------------------------------------------

    def _deliver(self, takes: tuple[Take, ...], *, final: bool) -> None:
        if self.done is None:
            return
        try:
            response = self._response(takes)
        except InferError as error:
            self._refuse(error.with_traceback(None))
            return
        response.final = final
        response.empty = final and not takes
        self._tell(response)

    def _response(self, takes: tuple[Take, ...]) -> InferenceResponse:
        signature = self._signature
        streams = self._run is not None and self._run.streams
        rows = self.prepared.rows if signature.batches and not streams else None
        outputs = [_output(signature, take, rows) for take in takes]
        regions = self.prepared.regions
        if regions is not None:
            regions.check()
            deliver(regions, [output for output in outputs if not output.in_region])
        sources: dict[int, Source] = {}
        parameters: dict[str, Parameter] = {}
        for take in takes:
            assert isinstance(take.source, Source)
            if id(take.source) not in sources:
                sources[id(take.source)] = take.source
                take.source.hold()
                parameters.update(take.source.parameters or {})
        return InferenceResponse(
            signature.name, signature.version, outputs, parameters or None, partial(_drop, list(sources.values()))
        )

    def _refuse(self, error: InferError) -> None:
        """End it for an answer that is no good."""
        assert self._run is not None
        text = f"in ensemble '{self._signature.name}': {error.message}"
        self._todo = deque(decision for decision in self._todo if not isinstance(decision, Deliver | StartStep))
        self._todo.extend([*self._run.cancel(), Fail(InferError(error.code, text, error.reason))])

    def _tell(self, outcome: Outcome) -> None:
        if self.done is None:
            return
        if isinstance(outcome, InferError) or outcome.final:
            self._end()
        if self._begun:
            self._told(self, outcome)
        else:
            assert isinstance(outcome, InferError), "a step has answered before it was begun"
            self._early = outcome

    def _end(self) -> None:
        """Let go of the members and of the run; what the steps still hold is theirs."""
        self._run = None
        leases, self._leases = self._leases, {}
        for model in leases.values():
            self._access.give_back(model)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _refusal(error: Exception, model: str) -> InferError:
    """Return why a step cannot begin, without the frames that hold the request; a fault of our own goes to the log."""
    if isinstance(error, InferError):
        return error.with_traceback(None)
    _log.error("a step of model %s could not begin", model, exc_info=error)
    return internal("the server failed to begin it; its log has the reason")


def _tensor(take: Take) -> Any:
    assert isinstance(take.source, Source)
    return take.source.tensors[take.of]


def _drop(sources: Iterable[Source]) -> None:
    for source in sources:
        source.drop()


def _output(signature: ModelSignature, take: Take, rows: int | None) -> OutputTensor:
    """Return an output as the client gets it. Raises INTERNAL where a member gave another shape than the ensemble says."""
    tensor = _tensor(take)
    declared = Tensor(take.name, tensor.datatype.name, tensor.shape, _NOWHERE)
    plan = signature.output(declared)
    shape = plan.client_shape(declared, rows)
    return OutputTensor(take.name, tensor.datatype, shape, tensor.data, tensor.in_region)
