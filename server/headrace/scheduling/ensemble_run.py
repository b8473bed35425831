"""EnsembleRun: one request on its way through an ensemble, decided. Events in, decisions out.

Pure: it starts nothing, waits for nothing, and is told the time. What it passes on are *sources*, which it never looks
into: the request, and each response of a step. It tells when nothing of a source will be needed any more.

Rules. A step starts as soon as its tensors are there, for one thing after another in the order in which they came. What
is delivered keeps that order too. Decoupled steps behind another decoupled step run one at a time. An error ends the
request, after what came before it was delivered. A decoupled step is held back while what it gave is not used up.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from typing import Final

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
from headrace.scheduling.ensemble_plan import ROOT, EnsembleOutput, EnsemblePlan, PlannedStep, Selection
from headrace.scheduling.ensemble_state import Failure, Held, Node, Scope, StepRun, StepState
from headrace_protocol.errors import ErrorCode, InferError, internal, unavailable

MAX_LIVE: Final = 128
"""Responses of one decoupled step that are under way, above which it is held back until half are."""
MAX_LIVE_BYTES: Final = 16 << 20
_MAY_PASS: Final = frozenset({ErrorCode.UNAVAILABLE, ErrorCode.INTERNAL, ErrorCode.UNKNOWN})
"""Failures after which a step is tried again, where it has retries."""


class EnsembleRun:
    """Begin with `start`. Every event returns the decisions that follow; after Fail, or a final Deliver, it is over."""

    def __init__(self, plan: EnsemblePlan, selection: Selection) -> None:
        self._name = plan.name
        self._selection = selection
        self._groups = selection.groups
        self._steps = []
        for place, planned in enumerate(selection.steps):
            one_at_a_time = planned.decoupled and planned.scope != ROOT
            self._steps.append(StepState(place, planned, 1 if one_at_a_time else plan.max_inflight))
        self._scopes = {number: Scope(number, []) for number in selection.scopes}
        for step in self._steps:
            self._scopes[step.plan.scope].places.append(step.place)
        self._runs: dict[int, StepRun] = {}
        self._last_run = 0
        self._held: dict[Hashable, Held] = {}
        self._failure: Failure | None = None
        """What it is to fail of, once what comes before is complete."""
        self._paused = False
        self._answered = False
        self._over = False
        self._touched: dict[int, None] = {}
        """Places of the steps that may have something to start."""
        self._todo: list[Decision] = []

    @property
    def streams(self) -> bool:
        """Whether it may have any number of responses."""
        return ROOT not in self._groups

    @property
    def over(self) -> bool:
        """Whether the client has been given its last."""
        return self._over

    # Events

    def start(self, source: Hashable, nbytes: int, now_ns: int) -> list[Decision]:
        """Begin, with the request as the source of the inputs."""
        node = self._root = Node(self._scopes[ROOT], None, nbytes, delivers=ROOT in self._groups)
        if ROOT in self._groups:
            self._scopes[ROOT].undelivered[0] = node
        tensors = [(name, tensor) for name, tensor in self._selection.inputs]
        self._arrive(node, source, tensors, {name for name, _ in tensors})
        return self._settle(now_ns)

    def responded(
        self, run: int, source: Hashable, names: Collection[str], nbytes: int, now_ns: int, *, final: bool
    ) -> list[Decision]:
        """Note a response of a step, with these outputs of its model."""
        entry = self._runs[run]
        plan = entry.step.plan
        tensors = [(output.name, output.tensor) for output in plan.outputs]
        if not plan.decoupled:
            missing = [name for name, _ in tensors if name not in names]
            if missing or not final:
                self._todo.append(Release(source))
                what = f"it gave no output '{missing[0]}'" if missing else "it has become decoupled meanwhile"
                if not final:
                    self._todo.append(CancelStep(run))
                return self._fail_run(entry, internal(what), now_ns)
            self._end_run(entry)
            self._arrive(entry.node, source, tensors, names)
            self._conclude(entry.step, entry.node)
        else:
            self._arm(entry, now_ns)
            self._grow(entry, source, tensors, names, nbytes)
            if final:
                self._end_stream(entry)
        return self._settle(now_ns)

    def ended(self, run: int, now_ns: int) -> list[Decision]:
        """Note the end of a decoupled step that comes without a response."""
        entry = self._runs[run]
        if not entry.step.plan.decoupled:
            return self._fail_run(entry, internal("it ended without a response"), now_ns)
        self._end_stream(entry)
        return self._settle(now_ns)

    def failed(self, run: int, error: InferError, now_ns: int) -> list[Decision]:
        """Note the failure of a step, its last."""
        return self._fail_run(self._runs[run], error, now_ns)

    def expire(self, now_ns: int) -> list[Decision]:
        """Fail the steps whose time is over."""
        for entry in [entry for entry in self._runs.values() if 0 < entry.deadline_ns <= now_ns]:
            if entry.number in self._runs:
                self._todo.append(CancelStep(entry.number))
                waited_ms = entry.step.plan.timeout_ns // 1_000_000
                self._failed(entry, unavailable(f"no answer within the {waited_ms} ms that the step has"), now_ns)
        return self._settle(now_ns)

    def next_expiry_ns(self) -> int | None:
        """When `expire` has something to do; None = never, as things stand."""
        return min((run.deadline_ns for run in self._runs.values() if run.deadline_ns), default=None)

    def flow(self, now_ns: int, *, paused: bool) -> list[Decision]:
        """Note that the client reads too slowly, or has caught up."""
        self._paused = paused
        return self._settle(now_ns)

    def cancel(self) -> list[Decision]:
        """Note that nobody waits any more."""
        if not self._over:
            self._close()
        return self._take()

    # Tensors

    def _arrive(
        self,
        node: Node,
        source: Hashable,
        tensors: Iterable[tuple[str, int]],
        names: Collection[str],
    ) -> None:
        """Take over those tensors of a source that somebody needs, and let go on what waited for them."""
        held = Held(source)
        group = self._groups.get(node.scope.number, ())
        arrived = []
        for name, tensor in tensors:
            arrived.append(tensor)
            if name not in names:
                node.values[tensor] = None
                continue
            node.values[tensor] = (held, name)
            held.uses += len([r for r in self._selection.readers[tensor] if r in node.pending])
            held.uses += any(output.tensor == tensor for output in group)
            held.uses += tensor in self._selection.lasting
        if held.uses:
            self._held[source] = held
        else:
            self._todo.append(Release(source))
        for tensor in arrived:
            self._consider_readers(tensor, node)

    def _grow(
        self,
        entry: StepRun,
        source: Hashable,
        tensors: list[tuple[str, int]],
        names: Collection[str],
        nbytes: int,
    ) -> None:
        """Make the node of a response of a decoupled step."""
        scope = self._scopes[entry.step.plan.child]
        delivers = scope.number in self._groups
        node = Node(scope, entry, nbytes, delivers=delivers)
        if delivers:
            scope.undelivered[node.index] = node
        entry.responses += 1
        entry.live += 1
        entry.live_bytes += nbytes
        self._arrive(node, source, tensors, names)
        self._complete(node)

    def _use(self, value: tuple[Held, str] | None) -> None:
        """Note that one who needed a tensor has done with it."""
        if value is None:
            return
        held, _ = value
        held.uses -= 1
        if not held.uses:
            del self._held[held.source]
            self._todo.append(Release(held.source))

    def _value(self, node: Node, tensor: int) -> tuple[Held, str] | None:
        return self._home(node, tensor).values[tensor]

    def _there(self, node: Node, tensor: int) -> bool:
        return tensor in self._home(node, tensor).values

    def _home(self, node: Node, tensor: int) -> Node:
        return node if self._selection.homes[tensor] == node.scope.number else self._root

    # Steps

    def _consider_readers(self, tensor: int, node: Node) -> None:
        """Look at the steps that read a tensor of a node, of which it is now known whether it is there."""
        for place in self._selection.readers[tensor]:
            step = self._steps[place]
            scope = self._scopes[step.plan.scope]
            for reader in [node] if scope is node.scope else list(scope.live.values()):
                self._consider(step, reader)

    def _consider(self, step: StepState, node: Node) -> None:
        """Decide whether a step can run for a node, or never will."""
        if step.place not in node.pending:
            return
        self._touched[step.place] = None
        inputs = step.plan.inputs
        there = [one for one in inputs if self._there(node, one.tensor)]
        given = [one for one in there if self._value(node, one.tensor) is not None]
        if any(one.required for one in there if self._value(node, one.tensor) is None) or (
            len(there) == len(inputs) and not given
        ):
            node.pending.discard(step.place)
            step.ready[node.index] = None
            if not step.plan.decoupled:
                for output in step.plan.outputs:
                    node.values[output.tensor] = None
                for output in step.plan.outputs:
                    self._consider_readers(output.tensor, node)
            self._conclude(step, node)
        elif len(there) == len(inputs):
            node.pending.discard(step.place)
            step.ready[node.index] = node

    def _pump(self, step: StepState, now_ns: int) -> None:
        """Start what can start, in order."""
        while step.cursor in step.ready:
            node = step.ready[step.cursor]
            if node is not None and 0 < step.limit <= step.running:
                return
            del step.ready[step.cursor]
            step.cursor += 1
            if node is not None and self._goes_on(node, step.plan):
                self._start(step, node, 0, now_ns)

    def _start(self, step: StepState, node: Node, attempt: int, now_ns: int) -> None:
        self._last_run += 1
        run = self._runs[self._last_run] = StepRun(self._last_run, step, node, attempt)
        step.running += 1
        self._arm(run, now_ns)
        takes = []
        for one in step.plan.inputs:
            value = self._value(node, one.tensor)
            if value is not None:
                takes.append(Take(one.name, value[0].source, value[1]))
        self._todo.append(StartStep(run.number, step.plan, tuple(takes)))

    def _arm(self, run: StepRun, now_ns: int) -> None:
        timeout_ns = run.step.plan.timeout_ns
        run.deadline_ns = now_ns + timeout_ns if timeout_ns else 0

    def _end_run(self, run: StepRun) -> None:
        del self._runs[run.number]
        run.step.running -= 1
        self._touched[run.step.place] = None

    def _end_stream(self, run: StepRun) -> None:
        self._end_run(run)
        run.over = True
        if not run.live:
            self._conclude(run.step, run.node)

    def _conclude(self, step: StepState, node: Node) -> None:
        """Note that a step is over for a node, with all that came of it."""
        for tensor in dict.fromkeys(one.tensor for one in step.plan.inputs):
            if self._selection.homes[tensor] == node.scope.number and tensor in node.values:
                self._use(node.values[tensor])
        node.todo -= 1
        self._complete(node)

    def _complete(self, node: Node) -> None:
        """Take a node out once nothing of it is left to do."""
        if node.todo or not node.delivered or node.index not in node.scope.live:
            return
        del node.scope.live[node.index]
        run = node.run
        if run is None:
            return
        run.live -= 1
        run.live_bytes -= node.nbytes
        if run.over and not run.live:
            self._conclude(run.step, run.node)

    # Failures

    def _fail_run(self, run: StepRun, error: InferError, now_ns: int) -> list[Decision]:
        self._failed(run, error, now_ns)
        return self._settle(now_ns)

    def _failed(self, run: StepRun, error: InferError, now_ns: int) -> None:
        self._end_run(run)
        plan = run.step.plan
        if run.attempt < plan.retries and not run.responses and error.code in _MAY_PASS:
            self._start(run.step, run.node, run.attempt + 1, now_ns)
            return
        message = f"in ensemble '{self._name}', step model '{plan.model}': {error.message}"
        self._failure = Failure(InferError(error.code, message), run.node)
        if plan.decoupled:
            self._failure.comes_after(self._scopes[plan.child])
        for other in list(self._runs.values()):
            if not self._goes_on(other.node, other.step.plan):
                self._todo.append(CancelStep(other.number))
                self._end_run(other)

    def _goes_on(self, node: Node, step: PlannedStep | None = None) -> bool:
        """Return whether a node comes before the failure, if there is one, or a step is of use to such nodes."""
        if self._failure is None or self._failure.is_after(node):
            return True
        useful = step is not None and not step.decoupled and self._failure.within_a_stream
        return useful and node is self._root

    # The end of every event

    def _settle(self, now_ns: int) -> list[Decision]:
        touched, self._touched = self._touched, {}
        for place in touched:
            self._pump(self._steps[place], now_ns)
        for scope in self._groups:
            self._deliver(self._scopes[scope])
        if self._failure is not None and self._failure.is_due(self._scopes):
            self._close()
            self._todo.append(Fail(self._failure.error))
        elif self._failure is None and not self._scopes[ROOT].live:
            self._finish()
        else:
            self._hold()
        return self._take()

    def _deliver(self, scope: Scope) -> None:
        group = self._groups[scope.number]
        while scope.undelivered:
            node = next(iter(scope.undelivered.values()))
            if not self._goes_on(node) or not all(self._there(node, output.tensor) for output in group):
                return
            del scope.undelivered[node.index]
            own = [output for output in group if self._selection.homes[output.tensor] == scope.number]
            if any(node.values[output.tensor] is not None for output in own):
                self._answered = True
                self._todo.append(Deliver(self._takes(node, group), final=False))
            for output in own:
                self._use(node.values[output.tensor])
            node.delivered = True
            self._complete(node)

    def _takes(self, node: Node, group: Iterable[EnsembleOutput]) -> tuple[Take, ...]:
        takes = []
        for output in group:
            value = self._value(node, output.tensor)
            if value is not None:
                takes.append(Take(output.name, value[0].source, value[1]))
        return tuple(takes)

    def _finish(self) -> None:
        """Make the last response final; where it has gone already, add one that says so."""
        once = [o for o in self._selection.outputs if self._selection.homes[o.tensor] == ROOT]
        last = next((at for at in range(len(self._todo) - 1, -1, -1) if isinstance(self._todo[at], Deliver)), None)
        if last is not None:
            delivered = self._todo[last]
            assert isinstance(delivered, Deliver)
            self._todo[last] = Deliver(delivered.outputs, final=True)
        else:
            # A stream without a response still gives what does not depend on it.
            rest = () if self._answered else self._takes(self._root, once)
            self._todo.append(Deliver(rest, final=True))
        self._close()

    def _close(self) -> None:
        self._over = True
        for run in self._runs:
            self._todo.append(CancelStep(run))
        self._runs.clear()
        for source in self._held:
            self._todo.append(Release(source))
        self._held.clear()
        for scope in self._scopes.values():  # they and their nodes hold each other
            scope.live.clear()
            scope.undelivered.clear()

    def _hold(self) -> None:
        """Hold back the decoupled steps that are too far ahead."""
        for run in self._runs.values():
            if not run.step.plan.decoupled:
                continue
            scope = self._scopes[run.step.plan.child]
            share = 2 if scope.full else 1
            scope.full = run.live * share >= MAX_LIVE or run.live_bytes * share >= MAX_LIVE_BYTES
            paused = self._paused or scope.full or any(self._steps[place].blocked for place in scope.places)
            if paused != run.paused:
                run.paused = paused
                self._todo.append(HoldStep(run.number, paused))

    def _take(self) -> list[Decision]:
        todo, self._todo = self._todo, []
        return todo

    # For tests

    def check_integrity(self) -> None:
        """Assert what holds between events."""
        assert not self._todo
        if self._over:
            assert not self._runs
            assert not self._held
            return
        for step in self._steps:
            assert step.running == sum(run.step is step for run in self._runs.values())
            assert not step.limit or step.running <= step.limit
        for scope in self._scopes.values():
            for node in scope.live.values():
                assert 0 <= node.todo <= len(scope.places)
                assert node.todo or not node.delivered
            assert scope.undelivered.keys() <= scope.live.keys()
        assert all(held.uses > 0 for held in self._held.values())
        assert self._runs, "it waits for nothing, and is not over"
