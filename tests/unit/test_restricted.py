"""The operator's groups of restricted calls."""

import pytest

from headrace.config import load_config
from headrace.gateway.restricted import Restriction, by_kind, parse_group
from headrace.options import UsageError


def test_a_group_names_kinds_a_header_and_its_value():
    group = parse_group("health, inference:X-Key=s3=cret:x")

    assert group.kinds == ("health", "inference")
    assert group.restriction == Restriction("x-key", b"s3=cret:x")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "<kinds>:<header>=<value>"),
        ("health", "<kinds>:<header>=<value>"),
        ("health:key", "<kinds>:<header>=<value>"),
        (":key=secret", "got ''"),
        ("health,:key=secret", "got ''"),
        ("helth:key=secret", "got 'helth'"),
        ("Health:key=secret", "got 'Health'"),
        ("health:=secret", "got ''"),
        ("health:a key=secret", "got 'a key'"),
        ("health:clé=secret", "got 'clé'"),
        ("health:key=", "visible ASCII"),
        ("health:key=secr\u00e9t", "visible ASCII"),
        ("health:key=secr\nt", "visible ASCII"),
    ],
)
def test_what_is_no_group_is_refused_without_telling_the_value(text, said):
    with pytest.raises(ValueError, match="expected") as caught:
        parse_group(text)

    assert said in str(caught.value)
    assert "secr" not in str(caught.value)


def test_a_kind_is_restricted_once():
    groups = [parse_group("health,trace:a=1"), parse_group("trace:b=2")]

    assert by_kind(groups[:1]) == {"health": Restriction("a", b"1"), "trace": Restriction("a", b"1")}
    with pytest.raises(ValueError, match="'trace'"):
        by_kind(groups)
    with pytest.raises(ValueError, match="'trace'"):
        by_kind([parse_group("trace,trace:a=1")])


@pytest.mark.parametrize(
    ("shown", "right"), [("s3cret", True), (b"s3cret", True), ("s3cre", False), ("", False), ("é", False)]
)
def test_only_the_value_itself_admits(shown, right):
    assert Restriction("key", b"s3cret").admits(shown) is right


def test_the_value_is_not_printed():
    assert "s3cret" not in repr(parse_group("health:key=s3cret"))


@pytest.mark.parametrize("option", ["http-restricted-api", "grpc-restricted-protocol"])
def test_a_bad_group_is_a_problem_at_start(option, tmp_path):
    with pytest.raises(UsageError) as caught:
        load_config([f"--model-repository={tmp_path}", f"--{option}=nope:a=b", f"--{option}=health:a=b"], {})
    assert [f"--{option}" in problem and "'nope'" in problem for problem in caught.value.problems] == [True]

    with pytest.raises(UsageError, match=f"--{option}: kind 'health' is restricted twice"):
        load_config([f"--model-repository={tmp_path}", f"--{option}=health:a=b", f"--{option}=health:c=d"], {})


def test_each_door_gets_its_own_groups(tmp_path):
    config = load_config(
        [
            f"--model-repository={tmp_path}",
            "--http-restricted-api=health:a=b",
            "--grpc-restricted-protocol=trace,logging:c=d",
        ],
        {},
    )

    assert config.http.restricted == {"health": Restriction("a", b"b")}
    assert config.grpc.restricted == {"trace": Restriction("c", b"d"), "logging": Restriction("c", b"d")}
