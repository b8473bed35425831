"""Which waits of models for one another nothing could end."""

from __future__ import annotations

import random

import pytest

from headrace.instances.waiting import WaitGraph

INSTANCES = {"a": 1, "b": 1, "c": 1, "two": 2, "none": 0}


@pytest.fixture
def graph() -> WaitGraph:
    return WaitGraph()


def closes(graph: WaitGraph, model: str, batch: int, target: str) -> bool:
    return graph.closes_circle(model, batch, target, INSTANCES.__getitem__)


def test_a_call_to_another_model_may_wait(graph: WaitGraph) -> None:
    assert not closes(graph, "a", 1, "b")


def test_a_call_to_the_own_only_instance_would_wait_for_ever(graph: WaitGraph) -> None:
    assert closes(graph, "a", 1, "a")


def test_with_a_second_instance_the_first_call_to_oneself_may_wait_and_the_second_not(graph: WaitGraph) -> None:
    assert not closes(graph, "two", 1, "two")
    graph.add("two", 1, "two")
    assert closes(graph, "two", 2, "two")
    assert not closes(graph, "two", 1, "two"), "the same batch once more takes no other instance"


def test_a_circle_is_found_over_several_models(graph: WaitGraph) -> None:
    graph.add("a", 1, "b")
    graph.add("b", 7, "c")
    assert closes(graph, "c", 3, "a")
    graph.remove("a", 1, "b")
    assert not closes(graph, "c", 3, "a")


def test_a_circle_with_an_instance_to_spare_is_none(graph: WaitGraph) -> None:
    graph.add("a", 1, "two")
    assert not closes(graph, "two", 1, "a")
    graph.add("two", 1, "a")
    assert closes(graph, "two", 2, "a")


def test_a_batch_that_waits_for_two_waits_for_the_one_that_never_comes(graph: WaitGraph) -> None:
    graph.add("a", 1, "c")
    graph.add("a", 1, "b")
    assert closes(graph, "b", 1, "a")


def test_who_waits_for_a_circle_is_not_in_it(graph: WaitGraph) -> None:
    """It waits for ever too, but whoever closed the circle is told so, and then it does not."""
    graph.add("a", 1, "b")
    assert not closes(graph, "c", 1, "a")


@pytest.mark.parametrize("seed", range(30))
def test_as_long_as_it_is_heeded_some_batch_can_always_go_on(seed: int) -> None:
    chance, graph = random.Random(seed), WaitGraph()
    waits: dict[tuple[str, int], str] = {}
    for number in range(60):
        model, target = chance.choice(["a", "b", "c", "two"]), chance.choice(["a", "b", "c", "two"])
        if sum(held == model for held, _ in waits) < INSTANCES[model] and not closes(graph, model, number, target):
            graph.add(model, number, target)
            waits[model, number] = target
        if waits and chance.random() < 0.3:
            (held, batch), waited = chance.choice(list(waits.items()))
            graph.remove(held, batch, waited)
            del waits[held, batch]
        assert _can_go_on(waits)


def _can_go_on(waits: dict[tuple[str, int], str]) -> bool:
    """Return whether all waits end if each instance that is free answers who waits for its model."""
    left = dict(waits)
    while left:
        busy = {model: sum(held == model for held, _ in left) for model in INSTANCES}
        free = [key for key, target in left.items() if busy[target] < INSTANCES[target]]
        if not free:
            return False
        for key in free:
            del left[key]
    return True
