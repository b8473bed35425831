"""Who runs when resources are short: shares by priority, no starvation, devices apart, and claims that could never run."""

from __future__ import annotations

from collections import Counter, deque

import pytest

from headrace.repository.model_config import Need
from headrace.scheduling.rate_limiter import GLOBAL, RateLimiter
from headrace_protocol.errors import ErrorCode, InferError


class Busy:
    """A model that always has a batch, unless `idle`."""

    def __init__(
        self, limiter: RateLimiter, *needs: Need, device: int = 0, priority: int = 1, instances: int = 9
    ) -> None:
        self.idle = False
        self.running = 0
        self.instances = instances
        self.claim = limiter.join(needs, device, priority, self.wants, lambda: None)

    def wants(self) -> bool:
        return not self.idle and self.running < self.instances


def serve(limiter: RateLimiter, models: dict[str, Busy], turns: int) -> Counter[str]:
    """Let everything run that may, and end the oldest, `turns` times; return who began how often."""
    begun: Counter[str] = Counter()
    running: deque[Busy] = deque()
    for _ in range(turns):
        again = True
        while again:
            again = False
            for name, model in models.items():
                if model.wants() and limiter.may_run(model.claim):
                    limiter.begin(model.claim)
                    model.running += 1
                    running.append(model)
                    begun[name] += 1
                    again = True
        oldest = running.popleft()
        oldest.running -= 1
        limiter.end(oldest.claim)
    return begun


def test_turns_are_shared_by_priority():
    limiter = RateLimiter({})
    models = {f"p{priority}": Busy(limiter, Need("r", 1), priority=priority) for priority in (1, 2, 4)}
    begun = serve(limiter, models, 700)
    assert begun["p1"] == pytest.approx(400, abs=5)
    assert begun["p2"] == pytest.approx(200, abs=5)
    assert begun["p4"] == pytest.approx(100, abs=5)


def test_one_that_needs_much_is_not_passed_by_many_that_need_little():
    limiter = RateLimiter({("r", None): 4})
    models = {f"little {n}": Busy(limiter, Need("r", 1), instances=1) for n in range(6)}
    models["much"] = Busy(limiter, Need("r", 4), instances=1)
    begun = serve(limiter, models, 300)
    assert begun["much"] >= 0.8 * max(begun.values())


def test_one_that_was_idle_does_not_make_up_for_it():
    limiter = RateLimiter({})
    models = {"steady": Busy(limiter, Need("r", 1)), "late": Busy(limiter, Need("r", 1))}
    models["late"].idle = True
    assert serve(limiter, models, 500)["late"] == 0
    models["late"].idle = False
    begun = serve(limiter, models, 100)
    assert abs(begun["late"] - begun["steady"]) <= 2


def test_there_are_as_many_as_the_neediest_instance_needs_where_nothing_is_said():
    limiter = RateLimiter({})
    small = Busy(limiter, Need("r", 2))
    limiter.begin(small.claim)
    assert not limiter.may_run(small.claim)
    Busy(limiter, Need("r", 5)).idle = True
    assert limiter.may_run(small.claim)
    limiter.begin(small.claim)
    assert not limiter.may_run(small.claim)
    assert limiter.usage() == [(("r", 0), 4, 5)]


def test_each_device_has_its_own_and_the_machine_one_for_all():
    limiter = RateLimiter({})
    first, second = (Busy(limiter, Need("r", 1), device=device) for device in (0, 1))
    limiter.begin(first.claim)
    assert limiter.may_run(second.claim)
    first, second = (Busy(limiter, Need("g", 1, everywhere=True), device=device) for device in (0, 1))
    limiter.begin(first.claim)
    assert not limiter.may_run(second.claim)
    assert (("g", GLOBAL), 1, 1) in limiter.usage()


def test_limits_are_of_one_device_or_of_each():
    limiter = RateLimiter({("r", None): 1, ("r", 1): 2})
    zero, one = (Busy(limiter, Need("r", 1), device=device) for device in (0, 1))
    for model, runs in ((zero, 1), (one, 2)):
        for _ in range(runs):
            assert limiter.may_run(model.claim)
            limiter.begin(model.claim)
        assert not limiter.may_run(model.claim)


def test_what_needs_nothing_always_may_run():
    limiter = RateLimiter({})
    model = Busy(limiter)
    for _ in range(5):
        assert limiter.may_run(model.claim)
        limiter.begin(model.claim)


@pytest.mark.parametrize(
    ("limits", "first", "second", "text"),
    [
        ({("r", None): 2}, Need("r", 1), Need("r", 3), "resource 'r' is limited to 2, and an instance that needs 3"),
        ({("r", 0): 2}, Need("r", 1), Need("r", 3), "resource 'r' is limited to 2, and an instance that needs 3"),
        ({}, Need("r", 1), Need("r", 1, everywhere=True), "resource 'r' is global in one model configuration and"),
        ({}, Need("r", 1, everywhere=True), Need("r", 1), "resource 'r' is global in one model configuration and"),
    ],
)
def test_a_claim_that_could_never_run_is_refused_and_leaves_nothing(limits, first, second, text):
    limiter = RateLimiter(limits)
    model = Busy(limiter, first)
    with pytest.raises(InferError, match=text) as raised:
        Busy(limiter, second)
    assert raised.value.code is ErrorCode.INVALID_ARG
    limiter.check_integrity()
    limiter.leave(model.claim)
    assert limiter.usage() == []


def test_whoever_may_run_is_woken_when_resources_come_free():
    limiter = RateLimiter({})
    woken: list[str] = []
    claims = [
        limiter.join([Need("r", 1)], 0, 1, lambda: True, lambda name=name: woken.append(name)) for name in ("a", "b")
    ]
    woken.clear()
    limiter.begin(claims[0])
    assert woken == []
    limiter.end(claims[0])
    assert woken == ["b"], "a had its turn"
