"""Whatever asks for resources and when: never more than there are, nobody waits for ever, and shares are as promised."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.repository.model_config import Need
from headrace.scheduling.rate_limiter import GLOBAL, Claim, RateLimiter

NAMES = ("a", "b")
LIMITS = {("a", None): 3, ("b", 0): 2, ("b", 1): 4}


class Model:
    """Somebody with batches to run."""

    def __init__(self, instances: int) -> None:
        self.instances = instances
        self.batches = 0
        self.running = 0
        self.woken = False
        self.claim: Claim | None = None
        self.passed: dict[Model, int] = {}
        """While it waits: how often each other one that wants the same began."""

    def wants(self) -> bool:
        return self.batches > 0 and self.running < self.instances

    def wake(self) -> None:
        self.woken = True


class Limiter(RuleBasedStateMachine):
    @initialize(given=st.booleans())
    def start(self, given: bool) -> None:
        self.limits = LIMITS if given else {}
        self.limiter = RateLimiter(self.limits)
        self.models: list[Model] = []

    @precondition(lambda self: len(self.models) < 6)
    @rule(
        a=st.integers(0, 3),
        b=st.integers(0, 2),
        device=st.integers(0, 1),
        priority=st.integers(1, 3),
        instances=st.integers(1, 3),
    )
    def load(self, a: int, b: int, device: int, priority: int, instances: int) -> None:
        model = Model(instances)
        needs = [Need("a", a, everywhere=True)] * (a > 0) + [Need("b", b)] * (b > 0)
        model.claim = self.limiter.join(needs, device, priority, model.wants, model.wake)
        self.models.append(model)

    @precondition(lambda self: self.models)
    @rule(data=st.data(), batches=st.integers(1, 5))
    def submit(self, data: st.DataObject, batches: int) -> None:
        model = data.draw(st.sampled_from(self.models))
        model.batches += batches
        self.dispatch(model)

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(self.models))
        model.batches = 0
        model.passed.clear()
        self.dispatch(model)

    @precondition(lambda self: any(model.running for model in self.models))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.finish(data.draw(st.sampled_from([model for model in self.models if model.running])))

    @precondition(lambda self: any(model.woken for model in self.models))
    @rule(data=st.data())
    def obey(self, data: st.DataObject) -> None:
        self.dispatch(data.draw(st.sampled_from([model for model in self.models if model.woken])))

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def unload(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(self.models))
        model.batches = 0
        while model.running:
            self.finish(model)
        self.limiter.leave(model.claim)
        self.models.remove(model)
        for other in self.models:
            other.passed.pop(model, None)

    def finish(self, model: Model) -> None:
        model.running -= 1
        self.limiter.end(model.claim)

    def dispatch(self, model: Model) -> None:
        model.woken = False
        while model.wants() and self.limiter.may_run(model.claim):
            model.batches -= 1
            model.running += 1
            model.passed.clear()
            self.limiter.begin(model.claim)
            for other in self.models:
                if (
                    other is not model
                    and other.wants()
                    and not other.woken
                    and other.claim.needs.keys() & model.claim.needs.keys()
                ):
                    other.passed[model] = other.passed.get(model, 0) + 1

    @invariant()
    def no_more_than_there_are(self) -> None:
        if not hasattr(self, "limiter"):
            return
        self.limiter.check_integrity()
        used: dict[tuple[str, int], int] = {}
        for model in self.models:
            for place, count in model.claim.needs.items():
                used[place] = used.get(place, 0) + count * model.running
        for (name, device), count in used.items():
            limit = self.limits.get((name, None if device == GLOBAL else device))
            if limit is None:
                continue
            assert count <= limit

    @invariant()
    def a_share_is_as_promised(self) -> None:
        """A claim of priority n lets one of priority m begin n/m times, and a start that it had, before it begins."""
        for model in getattr(self, "models", ()):
            for other, times in model.passed.items():
                assert times * other.claim.priority <= model.claim.priority + 2 * other.claim.priority

    @invariant()
    def whoever_could_run_was_woken(self) -> None:
        for model in getattr(self, "models", ()):
            if model.wants() and self.limiter.may_run(model.claim):
                assert model.woken

    def teardown(self) -> None:
        """Everything that waits is run in the end, if what runs ends and who is woken comes."""
        for _ in range(10_000):
            for model in getattr(self, "models", ()):
                if model.woken:
                    self.dispatch(model)
            busy = next((model for model in getattr(self, "models", ()) if model.running), None)
            if busy is None:
                break
            self.finish(busy)
        assert not any(model.batches for model in getattr(self, "models", ()))


TestLimiter = Limiter.TestCase
TestLimiter.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
