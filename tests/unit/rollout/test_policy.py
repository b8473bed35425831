"""A traffic policy is read whole, or every mistake in it is told with its place."""

from __future__ import annotations

import pytest

from headrace.repository.model_config import ConfigError
from headrace.rollout.policy import (
    GuardPolicy,
    ShadowPolicy,
    TrafficPolicy,
    changed,
    parse_policy,
    parse_policy_text,
    to_document,
)

WHOLE = {
    "default": 2,
    "weights": {"3": 10, "4": 2.5},
    "sticky_parameter": "user",
    "shadow": {"version": 5, "percent": 20, "max_in_flight": 3, "timeout_secs": 1, "streams": True},
    "guard": {"max_error_rate": 0.05, "max_p99_ms": 100, "max_p99_ratio": 2, "min_requests": 5, "window_secs": 10},
}


def test_a_policy_says_what_was_written():
    policy = parse_policy(WHOLE)

    assert policy == TrafficPolicy(
        2,
        {3: 10.0, 4: 2.5},
        "user",
        ShadowPolicy(5, 20.0, 3, 1.0, streams=True),
        GuardPolicy(max_error_rate=0.05, max_p99_ms=100, max_p99_ratio=2, min_requests=5, window_secs=10),
    )
    assert policy.default_weight == 87.5
    assert policy.versions() == {2, 3, 4, 5}


def test_a_policy_is_read_from_what_it_prints():
    assert parse_policy(to_document(parse_policy(WHOLE))) == parse_policy(WHOLE)
    assert to_document(TrafficPolicy()) == {}


def test_nothing_is_said_where_nothing_was_written():
    assert parse_policy({}) == TrafficPolicy()


def test_a_weight_of_nothing_is_none_and_all_may_go_to_others():
    assert parse_policy({"default": 1, "weights": {"2": 0}}).weights == {}
    assert parse_policy({"default": 1, "weights": {"2": 60, "3": 40}}).default_weight == 0


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ([], "expected an object, got []"),
        ({"defualt": 2}, "defualt: is unknown"),
        ({"default": 0}, "default: expected a version"),
        ({"default": True}, "default: expected a version"),
        ({"default": "x"}, "default: expected a version, which is a number above 0, got 'x'"),
        ({"weights": {"3": 10}}, "weights: needs a 'default'"),
        ({"default": 3, "weights": {"3": 10}}, "weights.3: is the default"),
        ({"default": 2, "weights": {"3": 60, "4": 60}}, "weights: add up to 120"),
        ({"default": 2, "weights": {"3": -1}}, "weights.3: expected a number from 0 to 100"),
        ({"default": 2, "weights": {"3": float("nan")}}, "weights.3: expected a number"),
        ({"default": 2, "weights": {"three": 1}}, "weights: expected a version"),
        ({"default": 2, "weights": [3]}, "weights: expected an object"),
        ({"default": 2, "weights": {str(v): 1 for v in range(3, 30)}}, "names 27 versions, at most 16 go"),
        ({"sticky_parameter": 3}, "sticky_parameter: expected the name"),
        ({"shadow": {"version": 3}}, "shadow.percent: expected a number"),
        ({"shadow": {"percent": 3}}, "shadow.version: expected a version"),
        ({"default": 3, "shadow": {"version": 3, "percent": 1}}, "shadow.version: version 3 gets requests"),
        ({"shadow": {"version": 3, "percent": 1, "max_in_flight": 0}}, "shadow.max_in_flight: expected an integer"),
        ({"shadow": {"version": 3, "percent": 1, "streams": 1}}, "shadow.streams: expected true or false"),
        ({"guard": {}}, "guard: sets no bound"),
        ({"guard": {"max_error_rate": 2}}, "guard.max_error_rate: expected a number from 0 to 1"),
        ({"guard": {"max_error_rate": 0.1, "window_secs": 1}}, "guard.window_secs: expected an integer from 2"),
    ],
)
def test_a_mistake_is_told_with_its_place(document, told):
    with pytest.raises(ConfigError) as raised:
        parse_policy(document)
    assert told in str(raised.value)


def test_every_mistake_is_told_below_where_the_policy_stands():
    with pytest.raises(ConfigError) as raised:
        parse_policy({"default": -1, "guard": {"x": 1}}, "models.m.traffic")

    assert [problem.path for problem in raised.value.problems] == [
        "models.m.traffic.default",
        "models.m.traffic.guard.x",
        "models.m.traffic.guard",
    ]


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"default": 1' + " " * 20_000 + "}"])
def test_text_that_is_no_policy_is_refused(text):
    with pytest.raises(ConfigError, match=r"parameters\.traffic"):
        parse_policy_text(text, "parameters.traffic")


def test_a_change_replaces_members_and_null_takes_them_away():
    policy = parse_policy(WHOLE)

    assert changed(policy, {"weights": {"3": 50}, "shadow": None})["weights"] == {"3": 50}
    assert "shadow" not in changed(policy, {"shadow": None})
    assert parse_policy(changed(policy, {})) == policy
