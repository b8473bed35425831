"""Policies in force: who gets a request, what outlives what, and how a version is taken back."""

from __future__ import annotations

import json
import logging

import pytest

from headrace.repository.model_config import ConfigError
from headrace.repository.sources import Preference
from headrace.rollout import rollouts as module
from headrace.rollout.policy import parse_policy
from headrace.rollout.rollouts import Rollouts
from headrace_protocol.errors import InferError
from traffic_fakes import Registry, a_request


@pytest.fixture
def registry() -> Registry:
    return Registry(1, 2, 3)


@pytest.fixture
def rollouts(registry: Registry) -> Rollouts:
    made = Rollouts(lambda: 1_700_000_000_000_000_000)
    made.connect(registry)
    return made


CANARY = parse_policy({"default": 2, "weights": {"3": 10}})


def served(rollouts: Rollouts, registry: Registry, count: int = 100, **fields) -> dict[int, int]:
    found: dict[int, int] = {}
    for _ in range(count):
        model = rollouts.acquire(a_request(**fields))
        registry.release(model)
        found[model.version] = found.get(model.version, 0) + 1
    return found


def test_requests_are_shared_by_weight(rollouts, registry):
    assert (rollouts.any_split, served(rollouts, registry)) == (False, {3: 100})
    rollouts.set("m", CANARY)
    assert rollouts.any_split
    assert served(rollouts, registry) == {2: 90, 3: 10}


@pytest.mark.parametrize(
    "fields", [{"sticky": b"me"}, {"sticky": "me"}, {"correlation_id": 7}, {"parameters": {"user": "me"}}]
)
def test_a_key_decides_alone(rollouts, registry, fields):
    rollouts.set("m", parse_policy({"default": 1, "weights": {"3": 50}, "sticky_parameter": "user"}))
    assert len(served(rollouts, registry, 20, **fields)) == 1


def test_the_header_goes_before_the_parameter_and_that_before_the_sequence(rollouts, registry):
    rollouts.set("m", parse_policy({"default": 1, "weights": {"3": 50}, "sticky_parameter": "user"}))
    for number in range(20):
        header, parameter = f"h{number}", f"p{number}"
        (by_header,) = served(rollouts, registry, 1, sticky=header)
        (by_parameter,) = served(rollouts, registry, 1, parameters={"user": parameter})
        assert set(served(rollouts, registry, 1, sticky=header, parameters={"user": parameter})) == {by_header}
        assert set(served(rollouts, registry, 1, correlation_id=number + 1, parameters={"user": parameter})) == {
            by_parameter
        }


def test_a_canary_that_would_not_serve_at_once_gets_nothing(rollouts, registry):
    rollouts.set("m", CANARY)
    registry.models[3].ready = False
    assert served(rollouts, registry) == {2: 100}
    registry.models[3].accepting = False
    assert served(rollouts, registry) == {2: 100}
    assert set(registry.leased.values()) == {0}


def test_the_default_is_asked_though_it_has_to_be_waited_for(rollouts, registry):
    rollouts.set("m", CANARY)
    registry.models[2].ready = False
    assert served(rollouts, registry) == {2: 90, 3: 10}


def test_where_the_default_is_gone_what_is_not_on_trial_serves(rollouts, registry):
    rollouts.set("m", CANARY)
    registry.models[2].accepting = False
    assert served(rollouts, registry) == {1: 90, 3: 10}


def test_an_unknown_model_is_refused_as_ever(rollouts):
    request = a_request()
    request.model_name = "ghost"
    with pytest.raises(InferError, match="no model ghost"):
        rollouts.acquire(request)


def test_a_version_that_is_taken_back_gets_nothing_and_it_is_told_why(rollouts, registry, caplog):
    rollouts.set("m", CANARY)
    with caplog.at_level(logging.WARNING):
        rollouts.roll_back("m", 3, "error_rate", "half of them failed")
    assert served(rollouts, registry) == {2: 100}
    assert "model m version 3 is rolled back from 10 % of the requests (error_rate): half of them failed" in caplog.text
    found = rollouts.get("m")
    assert [(back.version, back.reason) for back in found.rollbacks] == [(3, "error_rate")]
    assert found.rolled_back["error_rate"] == 1
    registry.models[2].accepting = False
    assert served(rollouts, registry) == {1: 100}, "the version that was taken back is the last resort"


def test_rollbacks_that_are_remembered_have_a_bound(rollouts):
    for _ in range(50):
        rollouts.set("m", CANARY)
        rollouts.roll_back("m", None, "manual", "by a call")
    assert len(rollouts.get("m").rollbacks) == module.MOST_ROLLBACKS
    assert rollouts.get("m").rolled_back["manual"] == 50


def test_what_came_by_a_call_counts_before_the_configuration_until_it_is_reset(rollouts, registry):
    rollouts.adopt("m", json.dumps({"default": 1}))
    assert registry.preference == Preference(1)
    rollouts.set("m", parse_policy({"default": 2}))
    rollouts.adopt("m", json.dumps({"default": 3}))
    assert registry.preference == Preference(2)
    rollouts.reset("m")
    assert registry.preference == Preference(3)
    rollouts.adopt("m", None)
    assert registry.preference is None
    assert rollouts.get("m") is None, "nothing is left of it"


def test_a_load_of_the_same_configuration_does_not_bring_back_what_was_taken(rollouts, registry):
    text = json.dumps({"default": 2, "weights": {"3": 10}})
    rollouts.adopt("m", text)
    rollouts.roll_back("m", 3, "p99", "slow")
    rollouts.adopt("m", text)
    assert served(rollouts, registry) == {2: 100}
    rollouts.adopt("m", json.dumps({"default": 2, "weights": {"3": 20}}))
    assert served(rollouts, registry) == {2: 80, 3: 20}


def test_a_configuration_that_says_nonsense_is_refused(rollouts):
    with pytest.raises(ConfigError, match=r"parameters\.traffic\.default"):
        rollouts.adopt("m", '{"default": 0}')
    assert rollouts.get("m") is None


def test_models_with_a_policy_have_a_bound(rollouts, monkeypatch):
    monkeypatch.setattr(module, "MOST_MODELS", 0)
    with pytest.raises(InferError, match="no room"):
        rollouts.set("m", CANARY)


def test_who_joined_is_told_of_each_change(rollouts):
    told = []
    rollouts.on_change = lambda: told.append(rollouts.any_split)
    rollouts.set("m", CANARY)
    rollouts.reset("m")
    assert told == [True, False]
