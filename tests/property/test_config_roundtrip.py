"""Configurations of any content: rendering and reading are inverse, and no text does worse than a ConfigError."""

import json
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.repository.config_loading import draft_config
from headrace.repository.config_text import ParsedConfig, parse_json, parse_text, to_text
from headrace.repository.model_config import ConfigError
from headrace.repository.proto_json import from_dict, to_dict
from headrace_protocol._generated import grpc_service_pb2
from headrace_protocol._generated import model_config_pb2 as pb

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SCALARS = {
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32, allow_nan=False),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(allow_nan=False),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
}


def scalar(field):
    if field.enum_type is not None:
        return st.sampled_from([value.number for value in field.enum_type.values])
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=8)
    return SCALARS.get(field.cpp_type, TEXT)


def member(field):
    return scalar(field) if field.message_type is None else keywords(field.message_type)


def field_value(field):
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        return st.dictionaries(scalar(entry.fields_by_name["key"]), member(entry.fields_by_name["value"]), max_size=2)
    return st.lists(member(field), max_size=2) if isinstance(field.default_value, list) else member(field)


def keywords(descriptor: Descriptor) -> st.SearchStrategy[dict[str, Any]]:
    """Constructor arguments of any message of the type, at most four fields of it at once."""

    @st.composite
    def build(draw):
        fields = draw(
            st.lists(st.sampled_from(list(descriptor.fields)), max_size=4, unique_by=lambda field: field.name)
        )
        taken = set()
        values = {}
        for field in fields:
            oneof = field.containing_oneof
            if oneof is None or oneof.name not in taken:
                taken.add("" if oneof is None else oneof.name)
                values[field.name] = draw(field_value(field))
        return values

    return build() if descriptor.fields else st.just({})


def fill(message, values):
    for problem in from_dict(values, message):
        raise AssertionError(str(problem))
    return message


CONFIGS = keywords(pb.ModelConfig.DESCRIPTOR).map(lambda values: pb.ModelConfig(**values))
MESSAGES = st.one_of(
    CONFIGS,
    *(
        keywords(message.DESCRIPTOR).map(lambda values, message=message: message(**values))
        for message in (
            grpc_service_pb2.ModelInferRequest,
            grpc_service_pb2.ModelStatisticsResponse,
            grpc_service_pb2.TraceSettingResponse,
            grpc_service_pb2.RepositoryModelLoadRequest,
            grpc_service_pb2.SystemSharedMemoryStatusResponse,
        )
    ),
)


@given(MESSAGES)
def test_reading_what_was_rendered_gives_the_message_back(message):
    values = json.loads(json.dumps(to_dict(message)))
    assert fill(type(message)(), values) == message


@given(CONFIGS)
def test_printed_text_and_json_parse_back(config):
    assert parse_text(to_text(config)).proto == config
    assert parse_json(json.dumps(to_dict(config))).proto == config


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
SHAPED = st.dictionaries(st.sampled_from([field.name for field in pb.ModelConfig.DESCRIPTOR.fields]), JSON_VALUES)


@given(st.one_of(JSON_VALUES, SHAPED))
def test_any_values_give_problems_and_no_exception(values):
    for problem in from_dict(values, pb.ModelConfig()):
        assert len(str(problem)) < 1000
        str(problem).encode()


TOKENS = st.sampled_from(
    ["name", "input", "dims", "parameters", "key", "value", "dynamic_batching", "max_batch_size", "[", "]", "{", "}", ":",
     ",", ";", "-", "1", "1.5", "1e400", '"x"', "'", '"', "\\", "#", "\n", "\0", "TYPE_FP32", "true", "nan", "[a.b/c.d]", "é"]
)  # fmt: skip
NOISE = st.one_of(st.text(max_size=40), st.lists(TOKENS, max_size=25).map(" ".join))


@settings(max_examples=300)
@given(NOISE)
def test_no_text_does_worse_than_a_config_error(text):
    for parse in (parse_text, parse_json):
        try:
            parse(text)
        except ConfigError as error:
            assert error.problems
            str(error).encode()


@given(CONFIGS, st.text(max_size=5))
def test_no_configuration_does_worse_than_a_config_error(tmp_path_factory, config, name):
    directory = tmp_path_factory.getbasetemp()
    try:
        draft_config(
            ParsedConfig(config, frozenset(), "config.pbtxt"),
            model_name=name,
            model_directory=directory,
            version_directory=None,
        )
    except ConfigError as error:
        assert error.problems
