"""ResidencyPolicy: who comes, who goes, who waits."""

import pytest

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

STAY_NS, PATIENCE_NS = 10, 100


@pytest.fixture
def policy():
    policy = ResidencyPolicy(Settings(10, STAY_NS, PATIENCE_NS))
    for name in "abc":
        policy.put(name, Traits(4))
    return policy


def bring(policy, name, now=0, nbytes=4):
    policy.want(name, now)
    assert policy.decide(now, {}) == [Load(name)]
    policy.loaded(name, nbytes, now)
    policy.unwant(name)


def idle(**used_ns):
    return {name: Activity(used) for name, used in used_ns.items()}


def test_what_is_wanted_is_loaded_once_while_there_is_room(policy):
    policy.want("a", 1)
    assert policy.decide(1, {}) == [Load("a")]
    assert policy.stage("a") is Stage.LOADING
    assert policy.used == 4, "memory is taken while it is loaded"
    assert policy.decide(2, {}) == []
    policy.loaded("a", 3, 3)
    assert policy.open("a")
    assert policy.used == 3


def test_the_least_recently_used_goes_and_its_memory_counts_until_it_is_free(policy):
    bring(policy, "a")
    bring(policy, "b")
    policy.want("c", 50)
    assert policy.decide(50, idle(a=40, b=30)) == [Evict("b")]
    assert policy.decide(51, idle(a=40)) == []
    assert not policy.open("b")
    policy.freed("b")
    assert policy.decide(52, idle(a=40)) == [Load("c")]


def test_nobody_goes_who_has_just_come(policy):
    bring(policy, "a", 45)
    bring(policy, "b", 45)
    policy.want("c", 50)
    assert policy.decide(50, idle(a=0, b=0)) == []
    assert policy.decide(45 + STAY_NS, idle(a=0, b=0)) == [Evict("a")]


@pytest.mark.parametrize("kind", ["pinned", "held", "busy", "bound", "waited for"])
def test_nobody_goes_who_has_to_stay(policy, kind):
    bring(policy, "a")
    bring(policy, "b")
    doing = Activity(0, busy=kind in ("busy", "bound"), bound=kind == "bound")
    if kind == "pinned":
        policy.put("a", Traits(4, pinned=True))
    elif kind == "held":
        policy.hold("a", held=True)
    elif kind == "waited for":
        policy.want("a", 60)
    policy.want("c", 50)
    assert policy.decide(60, {"a": doing, "b": Activity(40)}) == [Evict("b")]


def test_nothing_goes_where_it_would_not_suffice(policy):
    policy.put("big", Traits(9))
    bring(policy, "a")
    bring(policy, "b")
    policy.want("big", 50)
    assert policy.decide(50, {"a": Activity(0), "b": Activity(0, busy=True)}) == []


def test_busy_models_are_closed_for_one_that_has_waited_long_and_opened_when_it_gives_up(policy):
    bring(policy, "a", 0)
    bring(policy, "b", 5)
    busy = {"a": Activity(200, busy=True), "b": Activity(200, busy=True)}
    policy.want("c", 50)
    assert policy.decide(50 + PATIENCE_NS - 1, busy) == []
    assert policy.decide(50 + PATIENCE_NS, busy) == [Close("a")], "the one that came first is closed first"
    assert not policy.open("a")
    policy.unwant("c")
    assert policy.decide(300, busy) == [Reopen("a")]
    assert policy.open("a")


def test_a_closed_model_goes_when_it_is_idle_though_somebody_waits_for_it(policy):
    bring(policy, "a", 0)
    bring(policy, "b", 5)
    busy = {"a": Activity(200, busy=True), "b": Activity(200, busy=True)}
    policy.want("c", 50)
    assert policy.decide(200, busy) == [Close("a")]
    policy.want("a", 210)
    assert policy.decide(220, busy) == []
    assert policy.decide(230, {**busy, "a": Activity(210)}) == [Evict("a")]
    policy.freed("a")
    assert policy.decide(240, busy) == [Load("c")]
    assert policy.wanted("a")


def test_what_cannot_fit_beside_the_pinned_is_refused_with_the_figures(policy):
    policy.put("big", Traits(11))
    policy.want("big", 1)
    (refusal,) = policy.decide(1, {})
    assert refusal == Refuse(
        "big", "model 'big' takes about 11 bytes, and the memory for models is 10 bytes, with 0 kept free"
    )
    assert not policy.wanting
    policy.put("a", Traits(4, pinned=True))
    bring(policy, "a")
    policy.put("big", Traits(7))
    policy.want("big", 2)
    (refusal,) = policy.decide(2, {})
    assert "4 of them for models that are pinned" in refusal.reason


def test_a_load_leaves_a_sixteenth_of_the_budget_free():
    policy = ResidencyPolicy(Settings(160))
    policy.put("a", Traits(150))
    policy.put("b", Traits(1))
    bring(policy, "a", nbytes=150)
    policy.want("b", 1)
    assert policy.decide(1, {"a": Activity(0, busy=True)}) == []
    policy.put("huge", Traits(151))
    policy.want("huge", 2)
    assert Refuse in map(type, policy.decide(2, {"a": Activity(0, busy=True)}))


def test_an_ensemble_comes_after_its_members_and_goes_before_them():
    policy = ResidencyPolicy(Settings(10, STAY_NS, PATIENCE_NS))
    for name in "abc":
        policy.put(name, Traits(4))
    policy.put("both", Traits(0, members=frozenset("ab")))
    policy.want("both", 1)
    assert policy.decide(1, {}) == [Load("a"), Load("b")]
    policy.loaded("a", 4, 2)
    assert policy.decide(2, {}) == []
    policy.loaded("b", 4, 3)
    assert policy.decide(3, {}) == [Load("both")]
    policy.loaded("both", 0, 4)
    policy.unwant("both")
    policy.want("c", 50)
    busy = {"both": Activity(40, busy=True), "a": Activity(0), "b": Activity(0)}
    assert policy.decide(50, busy) == []
    assert policy.decide(50, idle(both=40, a=0, b=0)) == [Evict("both"), Evict("a")]


def test_an_ensemble_whose_member_fails_is_not_waited_for():
    policy = ResidencyPolicy(Settings(10))
    policy.put("a", Traits(4))
    policy.put("one", Traits(0, members=frozenset("a")))
    policy.want("one", 1)
    assert policy.decide(1, {}) == [Load("a")]
    assert policy.load_failed("a") == ["one"]
    assert policy.decide(2, {}) == []
    assert policy.used == 0


def test_what_a_model_took_is_remembered_until_its_content_is_another(policy):
    bring(policy, "a", 0, nbytes=9)
    policy.leaving("a")
    policy.freed("a")
    bring(policy, "b", 1, nbytes=4)
    policy.put("a", Traits(4))
    policy.want("a", 50)
    assert policy.decide(50, {"b": Activity(0, busy=True)}) == [], "it is known to take 9"
    policy.put("a", Traits(4), changed=True)
    assert policy.decide(51, {"b": Activity(0, busy=True)}) == [Load("a")]


def test_idle_models_go_when_others_have_grown_beyond_the_budget(policy):
    bring(policy, "a")
    bring(policy, "b")
    policy.measured("b", 8)
    assert policy.decide(50, {"a": Activity(0), "b": Activity(40)}) == [Evict("a")]


def test_new_content_is_loaded_beside_the_old_once_there_is_room_for_both(policy):
    bring(policy, "a")
    bring(policy, "b")
    policy.outdate("a")
    busy = {"a": Activity(0), "b": Activity(0, busy=True)}
    assert policy.decide(500, busy) == [], "nobody is closed for that"
    assert policy.open("a")
    assert policy.decide(501, idle(a=0, b=0)) == [Evict("b")]
    policy.freed("b")
    assert policy.decide(502, idle(a=0)) == [Reload("a")]
    assert policy.used == 8
    assert policy.load_failed("a") == []
    assert policy.used == 4
    assert policy.open("a")


def test_content_that_changes_during_a_load_is_loaded_after_it(policy):
    policy.want("a", 1)
    assert policy.decide(1, {}) == [Load("a")]
    policy.outdate("a")
    policy.loaded("a", 4, 2)
    policy.unwant("a")
    assert policy.decide(3, {}) == [Reload("a")]
