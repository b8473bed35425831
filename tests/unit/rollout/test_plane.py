"""The data plane follows policies: shares, sequences that stay, ensembles' steps, shadows; and costs nothing without one."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from prometheus_client import CollectorRegistry

from headrace.clock import SystemClock
from headrace.config import ControlMode
from headrace.dataplane import RegistryDataPlane
from headrace.observability.snapshot import Snapshot
from headrace.rollout.control import TrafficControl
from headrace.rollout.policy import parse_policy
from headrace.rollout.rollouts import Rollouts
from headrace.rollout.service import RolloutService
from headrace.types import SEQUENCE_START, ServerMetadata
from headrace_protocol.errors import InferError, unavailable
from traffic_fakes import Answer, Registry, Version, a_request

HALF = parse_policy({"default": 1, "weights": {"2": 50}})


class Sequences:
    """The sequences of a version."""

    def __init__(self) -> None:
        self.on_occupied = None
        self.held: set[int] = set()

    def holds(self, correlation_id: int) -> bool:
        return correlation_id in self.held


class Setting:
    def __init__(self) -> None:
        self.registry = Registry(1, 2, 3)
        self.plane = RegistryDataPlane(self.registry, ServerMetadata("t", "1", ()), strict_readiness=True)
        self.rollouts = Rollouts(lambda: 0)
        self.service = RolloutService(self.rollouts, self.registry, self.plane, SystemClock())
        self.control = TrafficControl(self.rollouts, self.registry, self.service.shadows, ControlMode.NONE)

    def submitted(self) -> Counter[int]:
        return Counter({number: len(found.driver.done) for number, found in self.registry.models.items()})


@pytest.fixture
async def setting():
    made = Setting()
    yield made
    made.service.close()


async def test_without_a_policy_nobody_is_asked(setting):
    assert (setting.plane.traffic, setting.plane.shadows) == (None, None)
    setting.plane.submit(a_request(), print)
    assert setting.submitted() == {1: 0, 2: 0, 3: 1}
    setting.rollouts.set("m", parse_policy({"default": 2}))
    assert (setting.plane.traffic, setting.plane.shadows) == (None, None), "a default alone is the registry's"


async def test_requests_and_streams_are_shared(setting):
    setting.rollouts.set("m", HALF)
    for _ in range(10):
        setting.plane.submit(a_request(), print)
        setting.plane.stream(a_request(), print)
        setting.plane.submit(a_request(nested=True), print)
    found = setting.submitted()
    assert abs(found[1] - 15) <= 1
    assert found[1] + found[2] == 30
    setting.rollouts.reset("m")
    assert setting.plane.traffic is None


async def test_who_names_a_version_gets_it(setting):
    setting.rollouts.set("m", HALF)
    for _ in range(5):
        setting.plane.submit(a_request(model_version=3), print)
    assert setting.submitted() == {1: 0, 2: 0, 3: 5}


async def test_steps_of_ensembles_get_the_default(setting):
    setting.rollouts.set("m", HALF)
    assert {setting.plane.lease(a_request()).version for _ in range(10)} == {1}


async def test_a_sequence_stays_with_its_version_whatever_becomes_of_weights(setting):
    for found in setting.registry.models.values():
        found.sequences = Sequences()
    setting.rollouts.set("m", HALF)
    begun = {}
    for number in range(1, 21):
        model = setting.plane.lease(a_request(correlation_id=number, flags=SEQUENCE_START), setting.plane.traffic)
        model.sequences.held.add(number)
        begun[number] = model.version
    assert set(begun.values()) == {1, 2}
    setting.rollouts.roll_back("m", 2, "p99", "slow")
    for number, version in begun.items():
        assert setting.plane.lease(a_request(correlation_id=number), setting.plane.traffic).version == version
    fresh = {setting.plane.lease(a_request(correlation_id=n, flags=SEQUENCE_START)).version for n in range(50, 70)}
    assert fresh == {1}


async def test_a_shadow_follows_the_request_and_neither_changes_the_other(setting):
    setting.rollouts.set("m", parse_policy({"default": 1, "shadow": {"version": 3, "percent": 100}}))
    told = []
    setting.plane.submit(a_request(), told.append)
    await asyncio.sleep(0)
    assert setting.submitted() == {1: 1, 2: 0, 3: 1}
    assert setting.plane.under_way() == 1, "a shadow is not under way for anybody"
    answer = Answer()
    setting.registry.models[1].driver.done[0](answer)
    assert told == [answer]
    setting.service.close()
    assert setting.plane.shadows is None
    assert set(setting.registry.leased.values()) == {0}


async def test_a_request_that_is_refused_has_no_shadow(setting):
    setting.rollouts.set("m", parse_policy({"default": 1, "shadow": {"version": 3, "percent": 100}}))
    setting.registry.models[1].driver.refuses = unavailable("its queue is full")
    with pytest.raises(InferError):
        setting.plane.submit(a_request(), print)
    await asyncio.sleep(0)
    assert setting.submitted()[3] == 0


async def test_metrics_tell_weights_shadows_and_rollbacks(setting):
    setting.rollouts.set(
        "m", parse_policy({"default": 1, "weights": {"2": 10}, "shadow": {"version": 3, "percent": 1}})
    )
    setting.rollouts.roll_back("m", 2, "gone", "it went")
    setting.rollouts.set("m", parse_policy({"default": 1, "weights": {"2": 25}}))
    snapshot, registry = Snapshot(), CollectorRegistry()
    setting.service.add_to(snapshot)
    registry.register(snapshot)

    def value(name, **labels):
        return registry.get_sample_value(name, {"model": "m", **labels})

    assert value("headrace_traffic_weight", version="1") == 75
    assert value("headrace_traffic_weight", version="2") == 25
    assert value("headrace_rollbacks_total", reason="gone") == 1
    assert value("headrace_rollbacks_total", reason="p99") == 0
    assert value("headrace_shadow_requests_total", version="3", outcome="ok") == 0


async def test_a_weight_without_a_default_makes_what_serves_the_default(setting):
    told = await setting.control.update("m", {"weights": {"2": 5}})
    assert told["policy"] == {"default": 3, "weights": {"2": 5.0}}
    await setting.control.update("m", {"default": None, "weights": None})
    told = await setting.control.update("m", {"weights": {"3": 5}})
    assert told["policy"]["default"] == 2


async def test_no_change_is_none(setting):
    told = await setting.control.update("m", {})
    assert (told["set_by"], told["policy"]) == ("configuration", {})
    assert setting.rollouts.get("m") is None


async def test_a_switch_waits_until_the_version_is_ready(setting):
    setting.registry.models[2].ready = False
    switching = asyncio.ensure_future(setting.control.update("m", {"switch": {"version": 2}}))
    await asyncio.sleep(0)
    assert not switching.done()
    setting.registry.models[2].ready = True
    assert (await switching)["default"] == 2


async def test_a_switch_gives_up_with_the_reason(setting):
    setting.registry.models[2].ready = False
    with pytest.raises(InferError, match="version 2 is not ready: it is not well"):
        await setting.control.update("m", {"switch": {"version": 2, "timeout_secs": 0}})
    assert setting.control.get("m")["default"] == 3


async def test_versions_are_not_loaded_by_a_switch_where_calls_may_not(setting):
    with pytest.raises(InferError, match="model control mode 'none'"):
        await setting.control.update("m", {"switch": {"version": 2, "unload_old": True}})


async def test_a_version_that_is_loaded_beside_others_gets_no_request_until_that_is_said(setting):
    with setting.control.pinned("m"):
        setting.registry.models[4] = Version(4)
    assert setting.control.get("m")["default"] == 3
    with pytest.raises(InferError), setting.control.pinned("m"):
        raise unavailable("it does not load")
    assert setting.control.get("m")["policy"] == {"default": 3}


@pytest.mark.parametrize("before", [None, {}, {"sticky_parameter": "user"}])
async def test_a_load_that_fails_leaves_the_policy_as_it_was(setting, before):
    if before is not None:
        setting.rollouts.set("m", parse_policy(before))
    told = setting.control.get("m")
    with pytest.raises(InferError), setting.control.pinned("m"):
        assert setting.control.get("m")["policy"]["default"] == 3
        raise unavailable("it does not load")
    assert setting.control.get("m") == told


async def test_the_first_version_of_a_model_is_pinned_by_nobody(setting):
    setting.registry.models.clear()
    with setting.control.pinned("m"):
        pass
    assert setting.rollouts.get("m") is None


async def test_a_promotion_ends_weights_and_the_version_s_own_shadow(setting):
    await setting.control.update("m", {"default": 1, "weights": {"2": 5}, "shadow": {"version": 3, "percent": 5}})
    told = await setting.control.update("m", {"promote": 3})
    assert told["policy"] == {"default": 3}


async def test_the_default_is_not_unloaded_and_a_canary_loses_its_weight_first(setting):
    await setting.control.update("m", {"default": 1, "weights": {"2": 5}})
    with pytest.raises(InferError, match="version 1 is the default"):
        setting.control.unloading("m", 1)
    setting.control.unloading("m", 2)
    assert setting.rollouts.policy("m").weights == {}
    assert setting.control.get("m")["rollbacks"][0]["reason"] == "manual"
