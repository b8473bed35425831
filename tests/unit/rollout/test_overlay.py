"""An overlay lays a deployment's settings over configurations, and tells every mistake with its path."""

from __future__ import annotations

import json

import pytest

from headrace.repository.config_loading import read_config
from headrace.repository.config_text import parse_text
from headrace.repository.model_config import ConfigError
from headrace.repository.overlay import parse_overlay, read_overlay

WRITTEN = """
max_batch_size: 8
instance_group [ { count: 1 } ]
dynamic_batching { preferred_batch_size: 4 }
parameters { key: "a" value { string_value: "1" } }
parameters { key: "b" value { string_value: "2" } }
"""


def laid(name: str, models: dict) -> object:
    return parse_overlay({"models": models}).applied(name, parse_text(WRITTEN))


def test_a_field_takes_the_place_of_the_whole_field():
    config = laid("m", {"m": {"instance_group": [{"count": 3, "kind": "KIND_CPU"}, {"count": 1}], "max_batch_size": 0}})

    assert [group.count for group in config.proto.instance_group] == [3, 1]
    assert config.proto.max_batch_size == 0
    assert "max_batch_size" in config.written
    assert list(config.proto.dynamic_batching.preferred_batch_size) == [4]


def test_of_several_entries_the_last_counts():
    config = laid(
        "resnet50", {"*": {"max_batch_size": 2}, "resnet*": {"max_batch_size": 3}, "x*": {"max_batch_size": 4}}
    )

    assert config.proto.max_batch_size == 3


def test_null_takes_away_what_the_repository_says():
    config = laid("m", {"m": {"dynamic_batching": None, "parameters": {"a": None}}})

    assert not config.proto.HasField("dynamic_batching")
    assert "dynamic_batching" not in config.written
    assert set(config.proto.parameters) == {"b"}


def test_an_empty_scheduler_is_one_that_was_written():
    config = laid("m", {"m": {"dynamic_batching": {}}})

    assert config.proto.HasField("dynamic_batching")
    assert list(config.proto.dynamic_batching.preferred_batch_size) == []


def test_parameters_go_key_by_key_and_are_text():
    config = laid("m", {"m": {"parameters": {"b": 3, "c": True, "d": 0.5, "e": "text"}}})

    values = {key: value.string_value for key, value in config.proto.parameters.items()}
    assert values == {"a": "1", "b": "3", "c": "true", "d": "0.5", "e": "text"}


def test_traffic_becomes_what_a_configuration_would_say():
    config = laid("m", {"m": {"traffic": {"default": 2, "weights": {3: 10}}}})

    said = json.loads(config.proto.parameters["traffic"].string_value)
    assert said == {"default": 2, "weights": {"3": 10}}


def test_other_models_are_left_alone():
    config = parse_text(WRITTEN)

    assert parse_overlay({"models": {"m": {"max_batch_size": 1}}}).applied("n", config) is config
    assert parse_overlay({}).applied("n", config) is config


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ([], "models: expected names"),
        ({"model": {}}, "model: is unknown"),
        ({"models": []}, "models: expected names"),
        ({"models": {"m": 3}}, "models.m: expected settings, got int"),
        ({"models": {"m": {"input": []}}}, "models.m.input: is unknown; there are instance_group"),
        ({"models": {"r*": {"instance_group": [{"cuont": 1}]}}}, "models.r*.instance_group[0].cuont: unknown field"),
        ({"models": {"m": {"max_batch_size": "many"}}}, "models.m.max_batch_size: expected"),
        ({"models": {"m": {"parameters": {"a": [1]}}}}, "models.m.parameters.a: expected text"),
        ({"models": {"m": {"parameters": 1}}}, "models.m.parameters: expected keys"),
        ({"models": {"m": {"parameters": {"traffic": "{}"}}}}, "models.m.parameters.traffic: is written beside"),
        ({"models": {"m": {"traffic": {"weights": {3: 5}}}}}, "models.m.traffic.weights: needs a 'default'"),
    ],
)
def test_a_mistake_is_told_with_its_path(document, told):
    with pytest.raises(ConfigError) as raised:
        parse_overlay(document)
    assert told in str(raised.value)


def test_every_mistake_of_a_file_is_told(tmp_path):
    file = tmp_path / "overlay.yaml"
    file.write_text("models:\n  a: {x: 1}\n  b: {y: 1}\n")
    with pytest.raises(ConfigError) as raised:
        read_overlay(file)
    assert [problem.path for problem in raised.value.problems] == ["models.a.x", "models.b.y"]


@pytest.mark.parametrize("content", [b"models: [", b"\xff\xfe\x00", b"x: !!python/object:os.system {}"])
def test_a_file_that_is_no_yaml_is_refused(tmp_path, content):
    file = tmp_path / "overlay.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"overlay\.yaml"):
        read_overlay(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_overlay(tmp_path / "missing")


def test_an_overlay_is_laid_over_what_is_read(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    overlay = parse_overlay({"models": {"m": {"max_batch_size": 5}}})

    assert read_config(folder, None, overlay).proto.max_batch_size == 5
    (folder / "config.pbtxt").write_text(WRITTEN)
    assert read_config(folder, None, overlay).proto.max_batch_size == 5
    assert read_config(folder).proto.max_batch_size == 8
