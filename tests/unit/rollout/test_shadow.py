"""Shadows: which requests get one, how many at once, and that nothing of them is seen or left."""

from __future__ import annotations

import asyncio

import pytest

from headrace.rollout import shadow as module
from headrace.rollout.policy import parse_policy
from headrace.rollout.rollouts import Rollouts
from headrace.rollout.shadow import ShadowSender
from headrace.types import RegionRef, RequestedOutput
from headrace_protocol.errors import unavailable
from traffic_fakes import Answer, Registry, Version, a_request


class Setting:
    """A model with version 1 as default and version 2 as its shadow."""

    def __init__(self, **options) -> None:
        self.registry = Registry(1, 2)
        self.rollouts = Rollouts(lambda: 0)
        self.rollouts.connect(self.registry)
        self.rollouts.set("m", parse_policy({"default": 1, "shadow": {"version": 2, "percent": 100, **options}}))
        self.sender = ShadowSender(self.rollouts, self.registry, lambda: 7)
        self.served = self.registry.models[1]
        self.shadow = self.registry.models[2]

    async def ask(self, **fields) -> None:
        self.sender.consider(a_request(**fields), self.served)
        await asyncio.sleep(0)

    def counts(self) -> dict[str, int]:
        counts = self.rollouts.get("m").shadow_counts[2]
        return {name: count for name in counts.__slots__ if (count := getattr(counts, name))}

    def check_nothing_is_left(self) -> None:
        assert self.sender.in_flight("m") == 0
        assert set(self.registry.leased.values()) == {0}
        assert self.sender._bytes == 0
        assert self.sender._under_way == {}


async def test_an_answer_is_dropped():
    setting = Setting()
    await setting.ask(id="mine", parameters={"a": 1}, priority=3)
    (prepared,) = setting.shadow.driver.prepared
    assert prepared.request.id == "mine"
    assert (prepared.request.parameters, prepared.request.priority) == ({"a": 1}, 3)
    assert (prepared.request.received_ns, prepared.request.caller, prepared.request.trace) == (7, None, None)
    assert setting.sender.in_flight("m") == 1
    answer = Answer()
    setting.shadow.driver.done[0](answer)
    assert (answer.released, setting.counts()) == (1, {"ok": 1})
    setting.check_nothing_is_left()


async def test_it_is_not_sent_in_the_turn_of_the_request():
    setting = Setting()
    setting.sender.consider(a_request(), setting.served)
    assert setting.shadow.driver.prepared == []
    await asyncio.sleep(0)
    assert len(setting.shadow.driver.prepared) == 1
    setting.sender.close()
    setting.check_nothing_is_left()


async def test_an_error_is_counted():
    setting = Setting()
    await setting.ask()
    setting.shadow.driver.done[0](unavailable("its process died"))
    assert setting.counts() == {"error": 1}
    setting.check_nothing_is_left()


async def test_a_version_that_does_not_take_it_is_counted():
    setting = Setting()
    setting.shadow.driver.refuses = unavailable("its queue is full")
    await setting.ask()
    setting.shadow.accepting = False
    await setting.ask()
    del setting.registry.models[2]
    await setting.ask()
    assert setting.counts() == {"refused": 3}
    setting.check_nothing_is_left()


async def test_a_fault_of_our_own_reaches_nobody(caplog):
    setting = Setting()
    setting.shadow.driver.refuses = ZeroDivisionError("a fault")
    await setting.ask()
    assert setting.counts() == {"refused": 1}
    assert "a fault" in caplog.text
    setting.check_nothing_is_left()


async def test_no_more_are_under_way_than_are_allowed():
    setting = Setting(max_in_flight=3)
    for _ in range(5):
        await setting.ask()
    assert (setting.sender.in_flight("m"), setting.counts()) == (3, {"full": 2})
    setting.shadow.driver.done[0](Answer())
    await setting.ask()
    assert setting.sender.in_flight("m") == 3
    setting.sender.close()
    assert sorted(setting.shadow.driver.cancelled) == [2, 3, 4]
    setting.check_nothing_is_left()


async def test_inputs_that_shadows_hold_have_a_bound(monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 7)
    setting = Setting()
    await setting.ask()
    await setting.ask()
    assert setting.counts() == {"full": 1}
    setting.sender.close()
    setting.check_nothing_is_left()


async def test_one_that_hangs_is_given_up_and_its_late_answer_released():
    setting = Setting(timeout_secs=0.1)
    await setting.ask()
    async with asyncio.timeout(5):
        while setting.sender.in_flight("m"):  # noqa: ASYNC110 - the timer is the event
            await asyncio.sleep(0.01)
    assert (setting.counts(), setting.shadow.driver.cancelled) == ({"timeout": 1}, [1])
    late = Answer()
    setting.shadow.driver.done[0](late)
    assert late.released == 1
    setting.check_nothing_is_left()


async def test_those_that_are_about_to_be_sent_are_given_up_too():
    setting = Setting()
    setting.sender.consider(a_request(), setting.served)
    setting.sender.close()
    await asyncio.sleep(0)
    assert setting.shadow.driver.prepared == []
    setting.check_nothing_is_left()


async def test_a_part_of_the_requests_gets_one():
    setting = Setting(percent=20, max_in_flight=100)
    for _ in range(100):
        await setting.ask()
    assert abs(setting.sender.in_flight("m") - 20) <= 1
    setting.sender.close()


IN_MEMORY = RegionRef("region", 0, 4)


@pytest.mark.parametrize(
    "fields",
    [
        {"model_version": 1},
        {"nested": True},
        {"correlation_id": 5},
        {"correlation_id": "five"},
        {"outputs": [RequestedOutput("B", region=IN_MEMORY)]},
    ],
)
async def test_some_requests_get_none(fields):
    setting = Setting()
    await setting.ask(**fields)
    assert setting.sender.in_flight("m") == 0
    setting.check_nothing_is_left()


async def test_a_request_whose_input_is_in_a_client_s_memory_gets_none():
    setting = Setting()
    request = a_request()
    request.inputs[0].region = IN_MEMORY
    setting.sender.consider(request, setting.served)
    assert setting.sender.in_flight("m") == 0


async def test_what_the_version_itself_has_got_is_not_sent_to_it_again():
    setting = Setting()
    setting.sender.consider(a_request(), setting.shadow)
    assert setting.sender.in_flight("m") == 0


@pytest.mark.parametrize("streams", [False, True])
async def test_a_model_that_streams_gets_them_where_that_is_said(streams):
    setting = Setting(streams=streams)
    setting.served = Version(1, decoupled=True)
    setting.shadow = setting.registry.models[2] = Version(2, decoupled=True)
    await setting.ask()
    assert setting.sender.in_flight("m") == streams
    if streams:
        pieces = [Answer(final=False), Answer(final=False), Answer()]
        for piece in pieces:
            setting.shadow.driver.done[0](piece)
        assert [piece.released for piece in pieces] == [1, 1, 1]
        assert setting.counts() == {"ok": 1}
    setting.check_nothing_is_left()


async def test_a_version_that_takes_sequences_is_no_shadow():
    setting = Setting()
    setting.shadow.sequences = object()
    await setting.ask()
    assert setting.counts() == {"refused": 1}
    setting.check_nothing_is_left()


async def test_a_model_without_a_shadow_sends_none():
    setting = Setting()
    setting.rollouts.set("m", parse_policy({}))
    await setting.ask()
    request = a_request()
    request.model_name = "other"
    setting.sender.consider(request, setting.served)
    assert setting.sender.in_flight("m") == 0
