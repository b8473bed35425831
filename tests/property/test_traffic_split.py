"""Shares of requests: they add up, they hold, and callers with a key move only towards the version that grows."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.rollout.policy import TrafficPolicy, parse_policy, to_document
from headrace.rollout.rollouts import shares
from headrace.rollout.split import Split, Turns, point_of

KEYS = [f"user-{number}" for number in range(400)]


@st.composite
def policies(draw: st.DrawFn) -> TrafficPolicy:
    versions = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True))
    left, weights = 100.0, {}
    for version in versions[1:]:
        weights[version] = draw(st.floats(0.5, max(0.5, left / 2)))
        left -= weights[version]
    return TrafficPolicy(versions[0], weights)


def placed(policy: TrafficPolicy) -> dict[str, int]:
    split = Split("m", policy, Turns())
    return {key: split.version_of(key) for key in KEYS}


@given(policies())
def test_shares_add_up_to_a_hundred(policy):
    found = shares(policy, policy.default)
    assert abs(sum(found.values()) - 100) < 1e-6
    assert parse_policy(to_document(policy)) == policy


@given(policies(), st.integers(0, 2**64 - 1))
@settings(deadline=None, max_examples=30)
def test_requests_without_a_key_are_shared_as_the_weights_say(policy, start):
    split = Split("m", policy, Turns(start))
    counts = Counter(split.version_of(None) for _ in range(1000))
    for version, percent in shares(policy, policy.default).items():
        assert abs(counts[version] - percent * 10) <= 6, (version, counts)


@given(policies(), st.data())
@settings(deadline=None, max_examples=60)
def test_who_is_with_a_version_stays_with_it_as_its_weight_grows(policy, data):
    if not policy.weights:
        return
    version = data.draw(st.sampled_from(sorted(policy.weights)))
    more = data.draw(st.floats(0, policy.default_weight))
    grown = TrafficPolicy(policy.default, {**policy.weights, version: policy.weights[version] + more})
    before, after = placed(policy), placed(grown)
    assert all(after[key] == version for key in KEYS if before[key] == version)


@given(st.integers(2, 9), st.floats(0.1, 100), st.floats(0.1, 100))
@settings(deadline=None, max_examples=60)
def test_nobody_moves_but_towards_the_one_version_that_grows(version, one, other):
    few, many = sorted((one, other))
    before = placed(TrafficPolicy(1, {version: few}))
    after = placed(TrafficPolicy(1, {version: many}))
    assert {after[key] for key in KEYS if before[key] != after[key]} <= {version}


@given(policies(), st.floats(0.5, 20), st.floats(0, 20))
@settings(deadline=None, max_examples=60)
def test_nobody_moves_but_towards_the_newest_version_that_grows(policy, weight, more):
    newest = max([policy.default, *policy.weights]) + 1
    others = {version: percent / 2 for version, percent in policy.weights.items()}
    before = placed(TrafficPolicy(policy.default, {**others, newest: weight}))
    after = placed(TrafficPolicy(policy.default, {**others, newest: weight + more}))
    assert {after[key] for key in KEYS if before[key] != after[key]} <= {newest}


@given(st.one_of(st.text(), st.binary(), st.integers()), st.binary(max_size=80))
def test_a_key_has_one_place(key, salt):
    assert 0 <= point_of(key, salt) < 1
    assert point_of(key, salt) == point_of(key, salt)


def test_keys_are_spread_evenly_and_otherwise_for_another_model():
    policy = TrafficPolicy(1, {2: 25})
    split, other = Split("m", policy, Turns()), Split("other", policy, Turns())
    keys = [f"user-{number}" for number in range(4000)]
    chosen = {key for key in keys if split.version_of(key) == 2}
    assert 900 < len(chosen) < 1100
    both = {key for key in chosen if other.version_of(key) == 2}
    assert 0.18 < len(both) / len(chosen) < 0.32


def test_a_key_of_text_and_of_bytes_is_one():
    assert point_of("käse", b"m") == point_of("käse".encode(), b"m")
