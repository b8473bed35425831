"""Whatever the graph, and in whatever order its steps answer: an ensemble gives each tensor once, in order, and lets go.

Steps answer at random: with any number of responses where they are decoupled, with some of their outputs, late, not at
all. A source is named by the step that made it and by its path: the places of the responses that it descends from.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.scheduling.ensemble_decisions import (
    CancelStep,
    Deliver,
    Fail,
    HoldStep,
    Release,
    StartStep,
    Take,
)
from headrace.scheduling.ensemble_plan import ROOT, EnsembleOutput, EnsemblePlan, PlannedStep, StepInput, StepOutput
from headrace.scheduling.ensemble_run import EnsembleRun
from headrace_protocol.errors import InferError, invalid, unavailable

REQUEST = -1
RARELY = st.integers(0, 7).map(lambda number: number == 7)


class Source(NamedTuple):
    """What a step, or the request, gave."""

    step: int
    path: tuple[int, ...]
    number: int


class Asked:
    """A step under way."""

    def __init__(self, start: StartStep) -> None:
        self.step = start.step
        paths = [take.source.path for take in start.inputs]
        self.path = max(paths, key=len)
        assert all(path in ((), self.path) for path in paths), "it reads tensors of different responses"
        self.responses = 0
        self.paused = False


def drawn(rng: Random) -> EnsemblePlan:
    """Return a graph of up to eight steps; each reads tensors of one scope and of ROOT."""
    homes = [ROOT] * rng.randint(1, 3)
    inputs = [(f"in{tensor}", tensor) for tensor in range(len(homes))]
    steps = []
    for number in range(rng.randint(2, 8)):
        scope = rng.choice(sorted(set(homes)))
        own = [tensor for tensor, home in enumerate(homes) if home == scope]
        readable = own + [tensor for tensor, home in enumerate(homes) if home == ROOT]
        first = rng.choice(own)  # required, so that what a step reads tells for which response it runs
        read = {first, *(rng.choice(readable) for _ in range(rng.randint(0, 3)))}
        given = tuple(StepInput(f"i{t}", t, required=t == first or rng.random() < 0.5) for t in sorted(read))
        child = number + 1 if rng.random() < 0.35 else scope
        written = tuple(StepOutput(f"o{t}", t) for t in range(len(homes), len(homes) + rng.randint(1, 2)))
        homes += [child] * len(written)
        steps.append(PlannedStep(number, f"m{number}", given, written, scope, child, 0, rng.choice([0, 0, 1])))
    made = list(range(len(inputs), len(homes)))
    wanted = [EnsembleOutput(f"out{t}", t) for t in sorted(rng.sample(made, min(len(made), rng.randint(1, 3))))]
    return EnsemblePlan("e", inputs, wanted, steps, homes, rng.choice([0, 0, 1, 2]))


class EnsembleMachine(RuleBasedStateMachine):
    """Answers the steps of one request."""

    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed: int) -> None:
        self.rng = Random(seed)
        plan = drawn(self.rng)
        names = [name for name, _ in plan.inputs]
        some = tuple(sorted(self.rng.sample(names, self.rng.randint(1, len(names)))))
        self.now = 0
        self.asked: dict[int, Asked] = {}
        self.sources: set[Source] = set()
        self.released: set[Source] = set()
        self.delivered: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
        self.started: dict[int, list[tuple[int, ...]]] = {}
        self.tried: set[tuple[int, tuple[int, ...]]] = set()
        self.made: dict[int, int] = {}
        self.partial = False
        self.failed = self.cancelled = False
        self.final = False
        try:
            self.selection = plan.select(None, some)
        except InferError:
            self.selection = plan.select(None, tuple(names))
        self.run = EnsembleRun(plan, self.selection)
        source = self.source(REQUEST, ())
        self.obey(self.run.start(source, 8, self.now))

    def source(self, step: int, path: tuple[int, ...]) -> Source:
        source = Source(step, path, len(self.sources))
        self.sources.add(source)
        return source

    def check(self, take: Take) -> None:
        assert take.source in self.sources
        assert take.source not in self.released, "it was let go of before"

    def obey(self, decisions: list) -> None:
        for decision in decisions:
            assert not self.final or isinstance(decision, Release | CancelStep), f"{decision} after the last"
            match decision:
                case StartStep(run, step, inputs):
                    for take in inputs:
                        self.check(take)
                    asked = self.asked[run] = Asked(decision)
                    again = (step.number, asked.path) in self.tried
                    self.tried.add((step.number, asked.path))
                    if not again:
                        earlier = self.started.setdefault(step.number, [])
                        assert not earlier or earlier[-1] < asked.path, "steps start in order"
                        earlier.append(asked.path)
                case CancelStep(run):
                    del self.asked[run]
                case HoldStep(run, paused):
                    assert self.asked[run].step.decoupled
                    assert self.asked[run].paused != paused
                    self.asked[run].paused = paused
                case Deliver(outputs, final):
                    for take in outputs:
                        self.check(take)
                    if outputs:
                        path = max((take.source.path for take in outputs), key=len)
                        assert all(take.source.path in ((), path) for take in outputs)
                        group = tuple(sorted(take.name for take in outputs))
                        self.delivered.setdefault(group, []).append(path)
                    if final:
                        assert not self.asked, "it is over before its steps are"
                        self.final = True
                case Release(source):
                    assert source not in self.released
                    self.released.add(source)
                case Fail():
                    self.failed = self.final = True

    @property
    def going(self) -> bool:
        return hasattr(self, "run") and not self.final and not self.cancelled

    def pick(self) -> tuple[int, Asked]:
        run = self.rng.choice(sorted(self.asked))
        return run, self.asked[run]

    @precondition(lambda self: self.going and self.asked)
    @rule(final=RARELY, part=RARELY)
    def respond(self, final: bool, part: bool) -> None:
        run, asked = self.pick()
        names = {output.name for output in asked.step.outputs}
        if asked.step.decoupled:
            path = (*asked.path, self.made.get(asked.step.number, 0))
            self.made[asked.step.number] = self.made.get(asked.step.number, 0) + 1
            asked.responses += 1
            if part:
                names = {name for name in sorted(names) if self.rng.random() < 0.5}
                self.partial = True
        else:
            path, final = asked.path, True
        if final:
            del self.asked[run]
        source = self.source(asked.step.number, path)
        self.obey(self.run.responded(run, source, names, 1 << 20, self.now, final=final))

    @precondition(lambda self: self.going and self.asked)
    @rule(really=RARELY)
    def end(self, really: bool) -> None:
        run, asked = self.pick()
        if really and asked.step.decoupled:
            del self.asked[run]
            self.obey(self.run.ended(run, self.now))

    @precondition(lambda self: self.going and self.asked)
    @rule(passing=st.booleans(), really=RARELY)
    def fail(self, passing: bool, really: bool) -> None:
        if not really:
            return
        run, _ = self.pick()
        del self.asked[run]
        self.obey(self.run.failed(run, unavailable("busy") if passing else invalid("bad"), self.now))

    @precondition(lambda self: self.going)
    @rule(paused=st.booleans())
    def flow(self, paused: bool) -> None:
        self.obey(self.run.flow(self.now, paused=paused))

    @precondition(lambda self: not self.going)
    @rule()
    def wait(self) -> None:
        """Let nothing happen."""

    @precondition(lambda self: self.going)
    @rule(really=RARELY)
    def cancel(self, really: bool) -> None:
        if not really:
            return
        self.cancelled = True
        self.obey(self.run.cancel())

    @invariant()
    def it_holds_together(self) -> None:
        if not hasattr(self, "run"):
            return
        self.run.check_integrity()
        assert self.run.over == (self.final or self.cancelled)
        for paths in self.delivered.values():
            assert paths == sorted(set(paths)), "responses keep their order, and none comes twice"
        if self.run.over:
            assert self.released == self.sources, "it holds on to what nobody needs"
            assert not self.asked

    def teardown(self) -> None:
        """Answer all that is left; it must come to its end, by itself."""
        if not self.going:
            return
        if self.run is not None and not self.failed:
            self.obey(self.run.flow(self.now, paused=False))
        for _ in range(10_000):
            if self.final:
                break
            run, asked = min(self.asked.items())
            if asked.step.decoupled:
                del self.asked[run]
                self.obey(self.run.ended(run, self.now))
            else:
                del self.asked[run]
                names = {output.name for output in asked.step.outputs}
                source = self.source(asked.step.number, asked.path)
                self.obey(self.run.responded(run, source, names, 8, self.now, final=True))
        self.it_holds_together()
        if not self.failed and not self.partial:
            self.everything_was_delivered()

    def everything_was_delivered(self) -> None:
        for scope, group in self.selection.groups.items():
            if scope == ROOT:
                assert sum(map(len, self.delivered.values())) == 1
                continue
            step = next(step for step in self.selection.steps if step.child == scope)
            name = next(o.name for o in group if self.selection.homes[o.tensor] == scope)
            paths = [path for names, paths in self.delivered.items() if name in names for path in paths]
            assert len(paths) == self.made.get(step.number, 0)


TestEnsembleMachine = EnsembleMachine.TestCase
TestEnsembleMachine.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
