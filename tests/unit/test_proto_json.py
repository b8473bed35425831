"""Messages as JSON-ready values, and the strict way back."""

import json

import pytest
from google.protobuf import descriptor_pb2

from headrace.repository.proto_json import MAX_DEPTH, MAX_PROBLEMS, from_dict, to_dict
from headrace_protocol._generated import grpc_service_pb2
from headrace_protocol._generated import model_config_pb2 as pb


def test_unset_scalars_lists_and_maps_are_printed_with_their_defaults():
    values = to_dict(pb.ModelConfig())
    assert values["name"] == ""
    assert values["max_batch_size"] == 0
    assert values["input"] == []
    assert values["parameters"] == {}


def test_unset_messages_and_oneof_members_are_left_out():
    values = to_dict(pb.ModelConfig())
    assert "version_policy" not in values
    assert "dynamic_batching" not in values
    sample = to_dict(pb.ModelWarmup.Input())
    assert set(sample) == {"data_type", "dims"}


def test_a_set_but_empty_message_is_printed():
    config = pb.ModelConfig()
    config.dynamic_batching.SetInParent()
    assert to_dict(config)["dynamic_batching"]["preferred_batch_size"] == []


def test_enums_are_names_and_64_bit_integers_are_numbers():
    config = pb.ModelConfig()
    config.input.add(name="X", data_type=pb.TYPE_FP32, dims=[-1, 2**62])
    tensor = to_dict(config)["input"][0]
    assert tensor["data_type"] == "TYPE_FP32"
    assert tensor["dims"] == [-1, 2**62]


def test_32_bit_floats_print_in_their_shortest_form():
    direct = pb.ModelSequenceBatching.StrategyDirect(minimum_slot_utilization=0.1)
    assert json.dumps(to_dict(direct)["minimum_slot_utilization"]) == "0.1"


def test_the_largest_32_bit_float_comes_back():
    direct = pb.ModelSequenceBatching.StrategyDirect(minimum_slot_utilization=3.4028234663852886e38)
    back = pb.ModelSequenceBatching.StrategyDirect()
    assert from_dict(to_dict(direct), back) == []
    assert back == direct


def test_numbers_that_json_lacks_print_as_the_names_of_proto_json():
    options = pb.ModelMetrics.MetricControl.HistogramOptions(buckets=[float("inf"), float("-inf"), float("nan")])
    assert to_dict(options)["buckets"] == ["Infinity", "-Infinity", "NaN"]


def test_keys_of_a_map_become_text_in_order():
    batching = pb.ModelDynamicBatching()
    batching.priority_queue_policy[2].max_queue_size = 5
    batching.priority_queue_policy[1].max_queue_size = 4
    assert list(to_dict(batching)["priority_queue_policy"]) == ["1", "2"]


def test_bytes_are_base64_both_ways():
    parameter = grpc_service_pb2.ModelRepositoryParameter(bytes_param=b"\x00\xff")
    assert to_dict(parameter) == {"bytes_param": "AP8="}
    back = grpc_service_pb2.ModelRepositoryParameter()
    assert from_dict({"bytes_param": "AP8="}, back) == []
    assert back == parameter


def test_lower_camel_case_names_decimal_strings_and_null_are_accepted():
    config = pb.ModelConfig()
    values = {"maxBatchSize": 8, "input": [{"name": "X", "dims": ["-1", 3]}], "name": None}
    assert from_dict(values, config) == []
    assert config.max_batch_size == 8
    assert list(config.input[0].dims) == [-1, 3]


def test_an_empty_object_sets_the_message():
    config = pb.ModelConfig()
    assert from_dict({"dynamic_batching": {}}, config) == []
    assert config.HasField("dynamic_batching")


MISFITS = [
    ({"parameter": {}}, "parameter", "unknown field; did you mean parameters?"),
    ({"input": [{"nmae": "X"}]}, "input[0].nmae", "did you mean name?"),
    ({"input": [{"data_type": "FP32"}]}, "input[0].data_type", "did you mean TYPE_FP32?"),
    ({"input": [{"data_type": 99}]}, "input[0].data_type", "expected one of TYPE_INVALID"),
    ({"input": [{"dims": "3"}]}, "input[0].dims", "expected a list, each an integer from"),
    ({"input": [{"dims": [1.5]}]}, "input[0].dims[0]", "got 1.5"),
    ({"input": [{"dims": [None]}]}, "input[0].dims[0]", "got null"),
    ({"input": [{"dims": [True]}]}, "input[0].dims[0]", "got true"),
    ({"input": [{"dims": [2**63]}]}, "input[0].dims[0]", f"to {2**63 - 1}, got {2**63}"),
    ({"input": [{"dims": [10**5000]}]}, "input[0].dims[0]", "got a huge integer"),
    ({"input": {}}, "input", "expected a list, each an object (name"),
    ({"input": [7]}, "input[0]", "expected an object (name, data_type, format, dims, ...), got 7"),
    ({"max_batch_size": "8"}, "max_batch_size", 'got "8"'),
    ({"max_batch_size": 2**31}, "max_batch_size", "2147483647, got 2147483648"),
    ({"max_batch_size": 1, "maxBatchSize": 2}, "maxBatchSize", "exclude each other"),
    ({"dynamic_batching": {}, "ensemble_scheduling": {}}, "ensemble_scheduling", "exclude each other"),
    ({"dynamic_batching": {"max_queue_delay_microseconds": -5}}, "dynamic_batching.max_queue_delay_microseconds", "-5"),
    ({"dynamic_batching": {"preserve_ordering": 1}}, "dynamic_batching.preserve_ordering", "true or false, got 1"),
    ({"dynamic_batching": []}, "dynamic_batching", "got a list"),
    ({"name": 5}, "name", "expected text, got 5"),
    ({"name": "\ud800"}, "name", "surrogate"),
    ({"na\nme": 5}, "na\\nme", "unknown field"),
    ({"parameters": {"A": "b"}}, "parameters.A", "expected an object (string_value)"),
    ({"parameters": {"A": {"string_value": 5}}}, "parameters.A.string_value", "expected text, got 5"),
    ({"parameters": {"key": "A", "value": {"string_value": "b"}}}, "parameters", "which sets parameters.A.string_value"),
    ({"parameters": [{"key": "A", "value": {}}]}, "parameters", 'written {"A": {"string_value": ...}}'),
    ({"metric_tags": [{"key": "A", "value": "b"}]}, "metric_tags", "which sets metric_tags.A"),
    ({"metric_tags": {"A": None}}, "metric_tags.A", "expected text, got null"),
    (
        {"dynamic_batching": {"priority_queue_policy": {"x": {}}}},
        "dynamic_batching.priority_queue_policy.x",
        "key of a map: expected an integer",
    ),
    ({"model_metrics": {"metric_control": [{"histogram_options": {"buckets": ["one"]}}]}},
     "model_metrics.metric_control[0].histogram_options.buckets[0]", "expected a number of 64 bits"),
    ({"sequence_batching": {"direct": {"minimum_slot_utilization": 1e39}}},
     "sequence_batching.direct.minimum_slot_utilization", "expected a number of 32 bits"),
    ([], "", "expected an object (name, platform, backend, runtime, ...), got a list"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "path", "text"), MISFITS, ids=[row[1] for row in MISFITS])
def test_what_does_not_fit_is_one_problem_with_its_path(values, path, text):
    problems = from_dict(values, pb.ModelConfig())
    assert [problem.path for problem in problems] == [path]
    assert text in problems[0].message
    assert len(str(problems[0])) < 400


def test_every_problem_is_reported_not_only_the_first():
    problems = from_dict({"name": 1, "backend": 2, "input": [{"dims": [None, 1, None]}]}, pb.ModelConfig())
    assert [problem.path for problem in problems] == ["name", "backend", "input[0].dims[0]", "input[0].dims[2]"]


def test_a_flood_of_problems_is_cut_off_and_says_so():
    problems = from_dict({f"k{index}": 1 for index in range(10_000)}, pb.ModelConfig())
    assert len(problems) == MAX_PROBLEMS + 1
    assert "more problems than" in problems[-1].message


def test_messages_nested_too_deeply_are_refused():
    values = {}
    for _ in range(MAX_DEPTH + 5):
        values = {"nested_type": [values]}
    problems = from_dict(values, descriptor_pb2.DescriptorProto())
    assert len(problems) == 1
    assert f"deeper than {MAX_DEPTH} levels" in problems[0].message
