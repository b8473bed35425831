"""ModelLifecycle under random events: a reference shell obeys its decisions and checks that each is lawful."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.repository.lifecycle import (
    UNLOADED,
    CancelLoad,
    Free,
    ModelLifecycle,
    Promote,
    Settled,
    StartDrain,
    StartLoad,
    VersionState,
)

WANTED = st.dictionaries(st.integers(1, 3), st.sampled_from("ab"), min_size=1)


@dataclass
class Copy:
    version: int
    content: str
    stage: str = "loading"


class LifecycleMachine(RuleBasedStateMachine):
    """The reference: copies by token, moved on by decisions alone, and operations that settle once each."""

    def __init__(self) -> None:
        super().__init__()
        self.lifecycle = ModelLifecycle()
        self.copies: dict[int, Copy] = {}
        self.open: dict[int, dict[int, str]] = {}
        """Operations that have not settled, with what they want."""
        self.settled: set[int] = set()
        self.ever_started: set[int] = set()
        self.ended: set[int] = set()

    def of_stage(self, *stages: str) -> list[int]:
        return sorted(token for token, copy in self.copies.items() if copy.stage in stages)

    def serving(self) -> dict[int, str]:
        return {copy.version: copy.content for copy in self.copies.values() if copy.stage == "serving"}

    def move(self, token: int, before: tuple[str, ...], after: str) -> None:
        copy = self.copies[token]
        assert copy.stage in before, f"{copy} was moved to {after}"
        copy.stage = after

    def end(self, token: int) -> None:
        assert token not in self.ended, "a copy ended twice"
        self.ended.add(token)
        del self.copies[token]

    def obey(self, decisions, wanted=None, unloading=False) -> None:
        before = self.serving()
        settled = [decision for decision in decisions if isinstance(decision, Settled)]
        done = [decision for decision in settled if not decision.superseded and not decision.reason]
        for decision in decisions:
            match decision:
                case StartLoad(token, version):
                    assert token not in self.ever_started, "a token was used twice"
                    assert wanted is not None
                    self.ever_started.add(token)
                    self.copies[token] = Copy(version, wanted[version])
                case CancelLoad(token):
                    self.move(token, ("loading",), "abandoned")
                case Promote(token, version):
                    assert done, "promoted without an operation that succeeds"
                    assert self.copies[token].version == version
                    self.move(token, ("staged",), "serving")
                case StartDrain(token):
                    assert done, "taken out of service without an operation that succeeds"
                    self.move(token, ("serving",), "draining")
                case Free(token):
                    self.move(token, ("staged", "drained"), "freeing")
                case Settled(operation):
                    assert operation in self.open, "settled twice, or never begun"
                    assert operation not in self.settled
                    self.settled.add(operation)
        promised = [self.open.pop(decision.operation) for decision in settled]
        if not done:
            assert self.serving() == before, "an operation that did not succeed changed what serves"
        elif not unloading:
            assert self.serving() == promised[settled.index(done[0])], "what was asked for is not what serves"
        versions = [copy.version for copy in self.copies.values() if copy.stage == "serving"]
        assert len(versions) == len(set(versions)), "two copies of one version serve"

    @rule(wanted=WANTED)
    def desire(self, wanted) -> None:
        self.begin(wanted, set())

    @precondition(lambda self: self.of_stage("serving"))
    @rule(data=st.data())
    def desire_the_same_again_with_some_lost(self, data) -> None:
        lost = data.draw(st.sets(st.sampled_from(self.of_stage("serving"))))
        self.begin(self.serving(), lost)

    @precondition(lambda self: self.of_stage("loading"))
    @rule()
    def everything_loads(self) -> None:
        for token in self.of_stage("loading"):
            self.copies[token].stage = "staged"
            self.obey(self.lifecycle.load_succeeded(token))
        assert self.serving()

    def begin(self, wanted, lost) -> None:
        kept = {
            copy.version
            for token, copy in self.copies.items()
            if copy.stage == "serving" and token not in lost and wanted.get(copy.version) == copy.content
        }
        under_way = {self.copies[token].version for token in self.of_stage("loading", "staged")}
        operation, decisions = self.lifecycle.desire(wanted, lost)
        started = {decision.version for decision in decisions if isinstance(decision, StartLoad)}
        assert not started & kept, "an unchanged version was touched"
        if operation in self.open:
            assert self.open[operation] == wanted
            assert decisions == []
        else:
            assert started | under_way >= wanted.keys() - kept, "a version that is lost or changed was left as it is"
        self.open[operation] = dict(wanted)
        self.obey(decisions, wanted)

    @rule(reason=st.sampled_from(["no version", "bad configuration"]))
    def refuse(self, reason) -> None:
        operation, decisions = self.lifecycle.refuse(reason)
        self.open[operation] = {}
        self.obey(decisions)
        assert operation in self.settled
        assert self.lifecycle.failure == reason

    @rule()
    def unload(self) -> None:
        operation, decisions = self.lifecycle.unload()
        self.open[operation] = {}
        self.obey(decisions, unloading=True)
        assert self.serving() == {}
        assert all(status.reason in {UNLOADED, "replaced"} for status in self.lifecycle.statuses().values())

    @precondition(lambda self: self.of_stage("loading", "abandoned"))
    @rule(data=st.data())
    def load_succeeds(self, data) -> None:
        token = data.draw(st.sampled_from(self.of_stage("loading", "abandoned")))
        wanted = self.copies[token].stage == "loading"
        self.copies[token].stage = "staged"
        decisions = self.lifecycle.load_succeeded(token)
        assert wanted or decisions == [Free(token)], "a superseded load had a say"
        self.obey(decisions)

    @precondition(lambda self: self.of_stage("loading", "abandoned"))
    @rule(data=st.data())
    def load_fails(self, data) -> None:
        token = data.draw(st.sampled_from(self.of_stage("loading", "abandoned")))
        copy = self.copies[token]
        self.end(token)
        decisions = self.lifecycle.load_failed(token, "no such file")
        self.obey(decisions)
        if copy.stage == "abandoned":
            assert decisions == [], "a superseded load had a say"
            return
        assert isinstance(decisions[-1], Settled)
        assert "no such file" in decisions[-1].reason
        assert "no such file" in self.lifecycle.statuses()[copy.version].reason
        assert not self.of_stage("staged", "loading"), "something of a failed operation was kept"

    @precondition(lambda self: self.of_stage("draining"))
    @rule(data=st.data())
    def drains(self, data) -> None:
        token = data.draw(st.sampled_from(self.of_stage("draining")))
        self.copies[token].stage = "drained"
        self.obey(self.lifecycle.drained(token))
        assert self.copies[token].stage == "freeing"

    @precondition(lambda self: self.of_stage("freeing"))
    @rule(data=st.data())
    def is_freed(self, data) -> None:
        token = data.draw(st.sampled_from(self.of_stage("freeing")))
        self.end(token)
        self.obey(self.lifecycle.freed(token))

    @invariant()
    def the_lifecycle_agrees_with_the_reference(self) -> None:
        self.lifecycle.check_integrity()
        served = {copy.version: token for token, copy in self.copies.items() if copy.stage == "serving"}
        assert self.lifecycle.serving() == served
        assert len(self.open) <= 1, "two operations are under way"
        assert self.lifecycle.loading == bool(self.open)
        assert self.lifecycle.idle == (not self.copies)
        for version, status in self.lifecycle.statuses().items():
            assert (status.state is VersionState.READY) == (version in served)
        for token in self.of_stage("loading"):
            assert self.lifecycle.statuses()[self.copies[token].version].state in {
                VersionState.LOADING,
                VersionState.READY,
            }

    def teardown(self) -> None:
        """Let everything come to its end: nothing may be left."""
        for token in self.of_stage("loading", "abandoned"):
            self.copies[token].stage = "staged"
            self.obey(self.lifecycle.load_succeeded(token))
        operation, decisions = self.lifecycle.unload()
        self.open[operation] = {}
        self.obey(decisions, unloading=True)
        for token in self.of_stage("draining"):
            self.copies[token].stage = "drained"
            self.obey(self.lifecycle.drained(token))
        for token in self.of_stage("freeing"):
            self.end(token)
            self.obey(self.lifecycle.freed(token))
        assert self.copies == {}
        assert self.open == {}
        assert self.lifecycle.idle
        assert self.ended == self.ever_started


TestLifecycle = LifecycleMachine.TestCase
TestLifecycle.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
