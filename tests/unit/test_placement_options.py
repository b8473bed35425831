"""The options about resources and processors: what they mean, and everything wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config import load_config
from headrace.options import UsageError
from headrace.placement_options import core_list, host_policies


@pytest.fixture
def load(tmp_path: Path):
    return lambda *argv: load_config([f"--model-repository={tmp_path}", *argv], {})


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    for number, cores in enumerate(("0-1", "2-3\n")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cores)
    return tmp_path


def test_executions_are_limited_by_resources_only_where_that_is_asked_for(load):
    assert load().rate_limits is None
    assert load("--rate-limit=execution_count").rate_limits == {}
    config = load("--rate-limit-resource=r:1")
    assert config.rate_limits is None
    assert config.warnings == ("--rate-limit-resource has no effect without --rate-limit=execution_count",)


def test_limits_are_of_each_device_or_of_one(load):
    limits = load(
        "--rate-limit=execution_count", "--rate-limit-resource=R:4", "--rate-limit-resource=r:2:1"
    ).rate_limits
    assert limits == {("r", None): 4, ("r", 1): 2}


@pytest.mark.parametrize("text", ["r", "r:", "r:0", "r:-1", "r:x", ":1", "r:1:x", "r:1:-1", "r:1:2:3"])
def test_a_limit_that_is_none_is_refused(load, text):
    with pytest.raises(UsageError, match="expected <resource>:<count>"):
        load(f"--rate-limit-resource={text}")


def test_a_limit_given_twice_has_to_be_the_same(load):
    on = "--rate-limit=execution_count"
    assert load(on, "--rate-limit-resource=r:1", "--rate-limit-resource=R:1").rate_limits == {("r", None): 1}
    with pytest.raises(UsageError, match="'r' is given twice, with 1 and 2"):
        load(on, "--rate-limit-resource=r:1", "--rate-limit-resource=R:2")


@pytest.mark.parametrize(("text", "cores"), [("0", {0}), ("0-3,8", {0, 1, 2, 3, 8}), (" 2-2 \n", {2})])
def test_lists_of_processors(text, cores):
    assert core_list(text) == cores


@pytest.mark.parametrize("text", ["", "a", "3-1", "1-", "-1", "0,,1", "0-999999"])
def test_what_is_no_list_of_processors(text):
    with pytest.raises(ValueError, match="expected processors like"):
        core_list(text)


def test_policies_are_processors_nodes_or_both(nodes):
    problems: list[str] = []
    given = [
        ("listed", {"cpu-cores": "1-2"}),
        ("node", {"numa-node": "1"}),
        ("both", {"numa-node": "0"}),
        ("both", {"cpu-cores": "1-3"}),
    ]
    assert host_policies(given, problems, lambda: range(4), nodes) == {
        "listed": {1, 2},
        "node": {2, 3},
        "both": {1},
    }
    assert problems == []


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"numa-node": "7"}, "numa-node: this machine has no node 7"),
        ({"numa-node": "x"}, "numa-node: expected the number of a node, got 'x'"),
        ({"cpu-cores": "x"}, "cpu-cores: expected processors like 0-3,8, got 'x'"),
        ({"cores": "1"}, "unknown setting 'cores'; there are numa-node and cpu-cores"),
        ({"numa-node": "0", "cpu-cores": "2"}, "numa-node and cpu-cores have no processor in common"),
        ({"cpu-cores": "9"}, "the server may run on none of its processors [9]"),
    ],
)
def test_a_policy_that_cannot_be_is_told(nodes, values, problem):
    problems: list[str] = []
    assert host_policies([("p", values)], problems, lambda: range(4), nodes) == {}
    assert problems == [f"--host-policy p: {problem}"]


def test_a_policy_is_given_on_the_command_line(load):
    assert load("--host-policy=cpu,cpu-cores=0").host_policies == {"cpu": {0}}
    with pytest.raises(UsageError, match="--host-policy: expected <policy>,<key>=<value>"):
        load("--host-policy=cpu")
