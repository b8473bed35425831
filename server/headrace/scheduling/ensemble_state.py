"""What an EnsembleRun knows of one request: what has come so far, what waits for what, and what is still needed.

Plain records; what happens to them is decided in ensemble_run.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from headrace.scheduling.ensemble_plan import PlannedStep
from headrace_protocol.errors import InferError


class Held:
    """A source, and by how many it is still needed."""

    __slots__ = ("source", "uses")

    def __init__(self, source: Hashable) -> None:
        self.source = source
        self.uses = 0


class Scope:
    """All that happens as often as one decoupled step responds; ROOT: once."""

    __slots__ = ("count", "full", "live", "number", "places", "undelivered")

    def __init__(self, number: int, places: list[int]) -> None:
        self.number = number
        self.places = places
        """Steps that run in it, as places in the selection."""
        self.count = 0
        self.live: dict[int, Node] = {}
        """Nodes that are not complete, in order."""
        self.undelivered: dict[int, Node] = {}
        """Nodes of a scope with outputs of the ensemble, in order."""
        self.full = False


class Node:
    """One of the times that a scope happens: a response of its decoupled step."""

    __slots__ = ("delivered", "index", "nbytes", "parent", "pending", "run", "scope", "todo", "values")

    def __init__(self, scope: Scope, run: StepRun | None, nbytes: int, *, delivers: bool) -> None:
        self.scope = scope
        self.index = scope.count
        self.run = run
        self.parent = run.node if run is not None else None
        self.nbytes = nbytes
        self.values: dict[int, tuple[Held, str] | None] = {}
        """Tensors that are there, and those that will never be (None)."""
        self.pending = set(scope.places)
        """Steps of which it is not known yet whether they run."""
        self.todo = len(scope.places)
        """Steps that are not over."""
        self.delivered = not delivers
        scope.count += 1
        scope.live[self.index] = self


class StepState:
    """A step of the selection over all nodes of its scope."""

    __slots__ = ("cursor", "limit", "place", "plan", "ready", "running")

    def __init__(self, place: int, plan: PlannedStep, limit: int) -> None:
        self.place = place
        self.plan = plan
        self.limit = limit
        """Requests at once; 0 = any number."""
        self.running = 0
        self.cursor = 0
        """The node that is next."""
        self.ready: dict[int, Node | None] = {}
        """Nodes it can run for; None = one that it leaves out."""

    @property
    def blocked(self) -> bool:
        return 0 < self.limit <= self.running and self.ready.get(self.cursor) is not None


class StepRun:
    """A step under way for a node."""

    __slots__ = (
        "attempt",
        "deadline_ns",
        "live",
        "live_bytes",
        "node",
        "number",
        "over",
        "paused",
        "responses",
        "step",
    )

    def __init__(self, number: int, step: StepState, node: Node, attempt: int) -> None:
        self.number = number
        self.step = step
        self.node = node
        self.attempt = attempt
        self.deadline_ns = 0
        self.responses = 0
        self.live = 0
        """Its nodes that are not complete."""
        self.live_bytes = 0
        self.over = False
        self.paused = False


class Failure:
    """What a request is to fail of, and behind which nodes: those that come before it are delivered first."""

    __slots__ = ("_where", "error")

    def __init__(self, error: InferError, node: Node) -> None:
        """Place it at `node`, for which a step has failed."""
        self.error = error
        self._where: dict[int, int] = {}
        """For each scope on the way to the place, ROOT apart, the index of the node."""
        at = node
        while at.parent is not None:
            self._where[at.scope.number] = at.index
            at = at.parent

    def comes_after(self, scope: Scope) -> None:
        """Put it behind the nodes of a scope whose decoupled step has failed."""
        self._where[scope.number] = scope.count

    @property
    def within_a_stream(self) -> bool:
        """Whether anything may come before it."""
        return bool(self._where)

    def is_after(self, node: Node) -> bool:
        """Return whether `node` comes before it."""
        at: Node | None = node
        while at is not None:
            if at.scope.number in self._where:
                return at.index < self._where[at.scope.number]
            at = at.parent
        return False

    def is_due(self, scopes: Mapping[int, Scope]) -> bool:
        """Return whether all that comes before it is complete."""
        return all(next(iter(scopes[number].live), index) >= index for number, index in self._where.items())
