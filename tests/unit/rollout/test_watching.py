"""The watch looks at versions on trial once a second, takes bad ones back, and does nothing where there is nothing to watch."""

from __future__ import annotations

import asyncio

import pytest

from headrace.rollout import watching as module
from headrace.rollout.policy import parse_policy
from headrace.rollout.rollouts import Rollouts
from headrace.rollout.watching import GuardWatch
from headrace_protocol.errors import FailureReason
from traffic_fakes import Registry, Version

POLICY = {"default": 1, "weights": {"2": 10}, "guard": {"max_error_rate": 0.1, "window_secs": 5}}
SECOND = 1_000_000_000


class Setting:
    def __init__(self, policy: dict = POLICY) -> None:
        self.registry = Registry(1, 2)
        self.now = 0
        self.rollouts = Rollouts(lambda: 0)
        self.rollouts.connect(self.registry)
        self.watch = GuardWatch(self.rollouts, self.registry, lambda: self.now)
        self.rollouts.on_change = self.watch.update
        self.rollouts.set("m", parse_policy(policy))

    def look(self) -> list[str]:
        """Look once more, a second later; return why versions were taken back so far."""
        self.now += SECOND
        self.watch.look()
        return [back.reason for back in self.rollouts.get("m").rollbacks]

    def fail(self, version: int, count: int, reason: FailureReason = FailureReason.BACKEND) -> None:
        for _ in range(count):
            self.registry.models[version].statistics.record_failure(reason, 1)

    def answer(self, version: int, count: int, ms: int = 1) -> None:
        for _ in range(count):
            self.registry.models[version].statistics.record_success(1, ms * 1_000_000, 0, 0, 0, 0, 0)


@pytest.fixture
async def setting():
    made = Setting()
    yield made
    made.watch.close()


async def test_a_version_that_fails_is_taken_back_and_watched_no_more(setting):
    setting.fail(2, 20)
    assert setting.look() == ["error_rate"]
    assert setting.rollouts.policy("m").weights == {}
    assert setting.watch._timer is None
    assert setting.watch._loads == {}


@pytest.mark.parametrize("reason", [FailureReason.REJECTED, FailureReason.CANCELED])
async def test_requests_that_were_refused_or_cancelled_are_nobodys_fault(setting, reason):
    setting.fail(2, 50, reason)
    assert setting.look() == []


async def test_failures_of_the_default_are_its_own(setting):
    setting.fail(1, 50)
    assert setting.look() == []


async def test_durations_are_those_of_the_version():
    setting = Setting({**POLICY, "guard": {"max_p99_ms": 50}})
    setting.look()
    setting.answer(2, 100, ms=10)
    assert setting.look() == []
    setting.answer(2, 10, ms=80)
    assert setting.look() == ["p99"]
    setting.watch.close()


async def test_a_version_that_has_not_served_yet_is_waited_for():
    setting = Setting({"default": 1})
    gone = setting.registry.models.pop(2)
    setting.rollouts.set("m", parse_policy(POLICY))
    assert [setting.look() for _ in range(10)] == [[]] * 10
    setting.registry.models[2] = gone
    assert setting.look() == []
    del setting.registry.models[2]
    assert setting.look() == ["gone"]
    setting.watch.close()


async def test_a_model_that_is_unloaded_keeps_its_weights(setting):
    assert setting.look() == []
    setting.registry.models.clear()
    assert setting.look() == []
    assert setting.rollouts.policy("m").weights == {2: 10.0}


async def test_a_version_whose_processes_were_given_up_is_taken_back(setting):
    assert setting.look() == []
    setting.registry.models[2].accepting = False
    assert setting.look() == ["gone"]


async def test_what_an_earlier_load_counted_is_forgotten(setting):
    setting.fail(2, 19)
    assert setting.look() == []
    setting.registry.models[2] = Version(2)
    setting.fail(2, 19)
    assert setting.look() == []


async def test_another_weight_goes_on_with_the_same_window_another_guard_does_not(setting):
    setting.look()
    setting.fail(2, 10)
    setting.rollouts.set("m", parse_policy({**POLICY, "weights": {"2": 20}}))
    setting.fail(2, 10)
    assert setting.look() == ["error_rate"]
    setting.rollouts.set("m", parse_policy({**POLICY, "guard": {"max_error_rate": 0.2}}))
    assert setting.look() == ["error_rate"], "the earlier one"


async def test_two_versions_that_fail_at_once_are_taken_back_once_each():
    setting = Setting({"default": 1})
    setting.registry.models[3] = Version(3)
    setting.registry.leased[3] = 0
    setting.rollouts.set("m", parse_policy({**POLICY, "weights": {"2": 10, "3": 10}}))
    setting.fail(2, 30)
    setting.fail(3, 30)
    assert setting.look() == ["error_rate", "error_rate"]
    assert setting.rollouts.get("m").rolled_back["error_rate"] == 2
    setting.watch.close()


async def test_it_looks_by_itself(monkeypatch):
    monkeypatch.setattr(module, "PERIOD_S", 0.01)
    setting = Setting()
    setting.fail(2, 30)
    async with asyncio.timeout(5):
        while not setting.rollouts.get("m").rollbacks:  # noqa: ASYNC110 - the timer is the event
            await asyncio.sleep(0.01)
    setting.watch.close()


async def test_it_has_no_timer_without_a_guard_and_none_after_its_end(setting):
    assert setting.watch._timer is not None
    setting.rollouts.set("m", parse_policy({"default": 1, "weights": {"2": 10}}))
    setting.look()
    assert setting.watch._timer is None
    setting.rollouts.set("m", parse_policy(POLICY))
    assert setting.watch._timer is not None
    setting.watch.close()
    setting.rollouts.set("m", parse_policy(POLICY))
    assert setting.watch._timer is None
