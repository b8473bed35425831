"""ResidencyPolicy under random requests: a reference shell obeys its decisions and checks that each is lawful."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.residency.decisions import (
    Activity,
    Close,
    Evict,
    Load,
    Refuse,
    Reload,
    Reopen,
    Settings,
    Stage,
    Traits,
)
from headrace.residency.policy import ResidencyPolicy

BUDGET = 12
STAY_NS, PATIENCE_NS = 100, 300
COSTS = {"a": 2, "b": 3, "c": 4, "d": 5, "e": 6, "huge": 11, "pin": 3}
ENSEMBLES = {"ab": {"a", "b"}, "abc": {"ab", "c"}}
NAMES = [*COSTS, *ENSEMBLES]
NAME = st.sampled_from(NAMES)


class ResidencyMachine(RuleBasedStateMachine):
    """The reference: stages moved on by decisions alone, requests that wait or run, and memory as it is known."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = ResidencyPolicy(Settings(BUDGET, STAY_NS, PATIENCE_NS))
        for name, cost in COSTS.items():
            self.policy.put(name, Traits(cost, pinned=name == "pin"))
        for name, members in ENSEMBLES.items():
            self.policy.put(name, Traits(0, members=frozenset(members)))
        self.now = 1
        self.stage = dict.fromkeys(NAMES, "absent")
        self.since = dict.fromkeys(NAMES, 0)
        self.used = dict.fromkeys(NAMES, 0)
        self.waiting: dict[str, int] = {}
        self.running: dict[str, int] = {}
        self.sequences: set[str] = set()
        self.closed: set[str] = set()
        self.grown = False

    def activity(self) -> dict[str, Activity]:
        return {
            name: Activity(
                self.used[name], bool(self.running.get(name)) or name in self.sequences, name in self.sequences
            )
            for name in NAMES
            if self.stage[name] == "resident"
        }

    def decide(self) -> None:
        activity = self.activity()
        decisions = self.policy.decide(self.now, activity)
        if any(isinstance(decision, Load | Reload) for decision in decisions):
            assert self.policy.used <= BUDGET, f"{decisions} take {self.policy.used}"
        for decision in decisions:
            self.obey(decision)
        for name in list(self.waiting):
            if self.policy.open(name):
                assert self.stage[name] in ("resident", "reloading")
                self.running[name] = self.running.get(name, 0) + self.waiting.pop(name)
                self.used[name] = self.now
                self.policy.unwant(name)

    def obey(self, decision) -> None:
        name = decision.name
        match decision:
            case Load():
                assert self.stage[name] == "absent", f"{name} is loaded twice"
                for member in ENSEMBLES.get(name, ()):
                    assert self.stage[member] in ("resident", "reloading"), f"{name} is loaded without {member}"
                self.stage[name] = "loading"
            case Reload():
                assert self.stage[name] == "resident"
                self.stage[name] = "reloading"
            case Evict():
                assert self.stage[name] == "resident"
                assert name != "pin", "a pinned model is evicted"
                assert not self.running.get(name), "a model with requests in it is evicted"
                assert name not in self.sequences, "a model with sequences in it is evicted"
                assert self.now - self.since[name] >= STAY_NS, "a model that has just come is evicted"
                for ensemble, members in ENSEMBLES.items():
                    assert name not in members or self.stage[ensemble] in ("absent", "leaving"), "a member is evicted"
                self.stage[name] = "leaving"
                self.closed.discard(name)
            case Close():
                assert name not in self.sequences, "a model with sequences in it is closed"
                assert name != "pin", "a pinned model is closed"
                self.closed.add(name)
            case Reopen():
                self.closed.discard(name)
            case Refuse(_, reason):
                assert str(BUDGET) in reason
                assert sum(COSTS[one] for one in self.policy.closure(name) & COSTS.keys()) + COSTS["pin"] > BUDGET
                self.waiting.pop(name, None)

    # --- what happens -------------------------------------------------------------------------------------------------

    @rule(name=NAME)
    def ask(self, name: str) -> None:
        if self.policy.open(name):
            self.running[name] = self.running.get(name, 0) + 1
            self.used[name] = self.now
        else:
            self.waiting[name] = self.waiting.get(name, 0) + 1
            self.policy.want(name, self.now)
        self.decide()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data) -> None:
        name = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[name]
        self.policy.unwant(name)
        self.decide()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def answer(self, data) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        self.running[name] -= 1
        if not self.running[name]:
            del self.running[name]

    @rule(name=NAME)
    def begin_sequence(self, name: str) -> None:
        if self.policy.open(name) and name not in ENSEMBLES:
            self.sequences.add(name)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end_sequence(self, data) -> None:
        self.sequences.discard(data.draw(st.sampled_from(sorted(self.sequences))))

    @rule(ns=st.sampled_from([1, STAY_NS, PATIENCE_NS, 1000]))
    def pass_time(self, ns: int) -> None:
        self.now += ns
        self.decide()

    @precondition(lambda self: any(stage in ("loading", "reloading") for stage in self.stage.values()))
    @rule(data=st.data(), well=st.booleans())
    def end_load(self, data, well: bool) -> None:
        name = data.draw(st.sampled_from([n for n, stage in self.stage.items() if stage in ("loading", "reloading")]))
        self.end(name, well=well)
        self.decide()

    def end(self, name: str, *, well: bool) -> None:
        if well:
            self.policy.loaded(name, COSTS.get(name, 0), self.now)
            self.stage[name], self.since[name] = "resident", self.now
            return
        self.stage[name] = "resident" if self.stage[name] == "reloading" else "absent"
        for hopeless in self.policy.load_failed(name):
            self.waiting.pop(hopeless, None)

    @precondition(lambda self: "leaving" in self.stage.values())
    @rule(data=st.data())
    def free(self, data) -> None:
        name = data.draw(st.sampled_from([n for n, stage in self.stage.items() if stage == "leaving"]))
        self.policy.freed(name)
        self.stage[name] = "absent"
        self.decide()

    @rule(name=st.sampled_from(list(COSTS)))
    def change(self, name: str) -> None:
        self.policy.outdate(name)
        self.decide()

    # --- what holds ---------------------------------------------------------------------------------------------------

    @invariant()
    def consistent(self) -> None:
        self.policy.check_integrity()
        stages = {name: self.policy.stage(name).name.lower() for name in NAMES}
        assert stages == self.stage
        assert self.policy.used <= BUDGET
        assert self.policy.used == sum(
            COSTS.get(name, 0) * (2 if stage == "reloading" else stage != "absent") for name, stage in stages.items()
        )
        for name in self.closed:
            assert not self.policy.open(name)
        assert all(self.policy.wanted(name) for name in self.waiting), "somebody waits and nobody knows"

    def teardown(self) -> None:
        """Answer every request that waits, once what is in the way has ended."""
        self.sequences.clear()
        for _ in range(200):
            self.running.clear()
            self.now += PATIENCE_NS
            self.decide()
            for name, stage in list(self.stage.items()):
                if stage in ("loading", "reloading"):
                    self.end(name, well=True)
                elif stage == "leaving":
                    self.policy.freed(name)
                    self.stage[name] = "absent"
            if not self.waiting and not any(s in ("loading", "leaving") for s in self.stage.values()):
                break
        assert not self.waiting, f"nobody answers {self.waiting}: {self.stage}"
        self.running.clear()
        self.decide()
        assert not self.policy.wanting or self.policy.names(Stage.RESIDENT)


ResidencyMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestResidency = ResidencyMachine.TestCase
