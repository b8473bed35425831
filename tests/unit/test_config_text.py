"""Configuration text into a message: what was written is known, and mistakes have a place."""

import pytest

from headrace.repository.config_text import (
    MAX_CONFIG_BYTES,
    expanded_parameters,
    parse_json,
    parse_text,
    to_text,
)
from headrace.repository.model_config import ConfigError
from headrace_protocol._generated import model_config_pb2 as pb

TEXT = """
name: "m"
backend: "python"
max_batch_size: 0
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1, 3 ] reshape: { shape: [ -1, 3 ] } } ]
output { name: "Y" data_type: TYPE_STRING dims: 1 reshape { shape: [ ] } }
instance_group [ { count: 1 kind: KIND_CPU } ]
parameters { key: "A" value: { string_value: "$$TRITON_MODEL_DIRECTORY/env.tar" } }
"""
JSON = """{"name": "m", "backend": "python", "max_batch_size": 0,
  "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [-1, 3], "reshape": {"shape": [-1, 3]}}],
  "output": [{"name": "Y", "data_type": "TYPE_STRING", "dims": [1], "reshape": {"shape": []}}],
  "instance_group": [{"count": 1, "kind": "KIND_CPU"}],
  "parameters": {"A": {"string_value": "$$TRITON_MODEL_DIRECTORY/env.tar"}}}"""


def test_text_and_json_of_the_same_configuration_give_the_same_message():
    parsed = parse_text(TEXT)
    assert parsed == parse_json(JSON, "config.pbtxt")
    assert list(parsed.proto.input[0].dims) == [-1, 3]
    assert parsed.proto.output[0].HasField("reshape")


@pytest.mark.parametrize(
    "parsed",
    [parse_text("max_batch_size: 0"), parse_json('{"max_batch_size": 0}'), parse_json('{"maxBatchSize": 0}')],
)
def test_an_explicit_zero_is_known_to_have_been_written(parsed):
    assert parsed.proto.max_batch_size == 0
    assert parsed.written == {"max_batch_size"}


def test_what_was_not_written_is_not_among_the_written():
    assert parse_text('name: "m" dynamic_batching { }').written == {"name", "dynamic_batching"}
    assert parse_json('{"max_batch_size": null}').written == frozenset()


TEXT_MISTAKES = [
    ('name: "m"\nfoo: 1', "2:1", 'no field named "foo"'),
    ("input { data_type: FP32 }", "1:20", "no value named FP32"),
    ("input { data_type: 99 }", "1:20", "no value with number 99"),
    ("input { dims: [ 1.5 ] }", "1:17", "Couldn't parse integer: 1.5"),
    ("max_batch_size: 99999999999", "1:17", "Value out of range"),
    ("max_batch_size: 0 max_batch_size: 1", "1:35", "multiple"),
    ("dynamic_batching { } ensemble_scheduling { }", "1:22", "dynamic_batching"),
    ('name: "m', "1:7", "missing ending quote"),
    ('name: "\\xff"', "1:13", "Couldn't parse string"),
    ("input {", "1:7", 'Expected "}"'),
    ("{" * 5000, "1:1", "Expected identifier"),
    ('backend: "a"\nname: "m\\q"', "2:9", r"no escape sequence \q"),
    ("name: '\\400'", "1:8", r"no escape sequence \4"),
    (r"name: 'a\\\?'", "1:11", r"no escape sequence \?"),
    ("\ud800", "1:1", "\\ud800"),
]


@pytest.mark.parametrize(("text", "place", "message"), TEXT_MISTAKES, ids=[row[0][:30] for row in TEXT_MISTAKES])
def test_a_mistake_in_text_is_told_with_line_and_column(text, place, message):
    with pytest.raises(ConfigError) as caught:
        parse_text(text)
    (problem,) = caught.value.problems
    assert problem.path == place
    assert message in problem.message
    assert len(problem.message) < 400


JSON_MISTAKES = [
    ("", "1:1", "not JSON"),
    ('{"name": "m",\n ]', "2:2", "not JSON"),
    ('{"name": NaN}', "", "NaN is no JSON number"),
    ("[" * 100_000, "", "nested too deeply"),
    ('{"max_batch_size": 1, "max_batch_size": 2}', "", "a key occurs twice"),
    ('{"max_batch_size": ' + "9" * 5000 + "}", "", "not JSON"),
    ('{"parameter": {}}', "parameter", "did you mean parameters?"),
    ('{"parameters": {"key": "A", "value": {"string_value": "b"}}}', "parameters", "parameters.A.string_value"),
    ("null", "", "got null"),
]


@pytest.mark.parametrize(("text", "path", "message"), JSON_MISTAKES, ids=[row[0][:30] for row in JSON_MISTAKES])
def test_a_mistake_in_json_is_told_with_its_place(text, path, message):
    with pytest.raises(ConfigError) as caught:
        parse_json(text)
    (problem,) = caught.value.problems
    assert problem.path == path
    assert message in problem.message
    assert len(problem.message) < 400


@pytest.mark.parametrize("parse", [parse_text, parse_json])
def test_an_oversized_configuration_is_refused_before_it_is_parsed(parse):
    with pytest.raises(ConfigError, match="at most"):
        parse(" " * (MAX_CONFIG_BYTES + 1))


def test_printed_text_parses_to_the_same_message():
    proto = parse_text(TEXT).proto
    assert parse_text(to_text(proto)).proto == proto


@pytest.mark.parametrize("parsed", [parse_text(TEXT), parse_json(JSON)], ids=["text", "json"])
def test_the_name_of_the_model_directory_is_expanded_in_parameters(parsed):
    assert expanded_parameters(parsed.proto, "/models/m") == {"A": "/models/m/env.tar"}
    assert "$$TRITON_MODEL_DIRECTORY" in parsed.proto.parameters["A"].string_value


def test_escapes_in_strings_and_backslashes_in_comments_are_fine():
    text = r"""# a "comment\q"
        name: "\n\t\\q\x41\101\u00e9" backend: 'it\'s'"""
    parsed = parse_text(text)
    assert parsed.proto.name == "\n\t\\qAAé"
    assert parsed.proto.backend == "it's"


def test_an_empty_text_is_an_empty_configuration():
    assert parse_text("# nothing\n").proto == pb.ModelConfig()
