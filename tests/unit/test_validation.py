"""The rules of a configuration, one row each; all problems are told, each with its path."""

import pytest

from headrace.repository.config_text import parse_text
from headrace.repository.model_config import Problem
from headrace.repository.normalise import NormaliseSettings, normalise
from headrace.repository.unsupported import IGNORED, UNSUPPORTED, ignored, set_fields, unsupported
from headrace.repository.validation import MAX_INSTANCES, validate
from headrace_protocol._generated import model_config_pb2 as pb

BASE = """
backend: "python"
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: [ -1, 4 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 4 ] }
"""


def problems_of(text, *, gpu_count=0, draft=False):
    proto = parse_text(text).proto
    normalise(proto, model_name="m", server=NormaliseSettings(gpu_count))
    return validate(proto, model_name="m", gpu_count=gpu_count, draft=draft)


GOOD = [
    BASE,
    BASE + 'platform: "custom" name: "m"',
    BASE.replace('backend: "python"', 'backend: "onnxruntime" platform: "onnxruntime_onnx"'),
    BASE.replace('backend: "python"', 'backend: "pytorch" platform: "torch_aoti"'),
    BASE + "dynamic_batching { preferred_batch_size: [ 1, 8 ] max_queue_delay_microseconds: 100 }",
    BASE.replace("max_batch_size: 8", "") + "dynamic_batching { default_queue_policy { max_queue_size: 2 } }",
    BASE + "dynamic_batching { priority_levels: 3 default_priority_level: 3 priority_queue_policy { key: 1 value { } } }",
    BASE + "dynamic_batching { preserve_ordering: true priority_levels: 1 default_priority_level: 1 }",
    BASE + "dynamic_batching { preserve_ordering: true default_queue_policy { timeout_action: DELAY } }",
    BASE + "instance_group [ { kind: KIND_MODEL }, { count: 3 } ]",
    BASE + "instance_group [ { passive: true }, { host_policy: 'x' } ]",
    BASE + "instance_group { rate_limiter { resources [ { name: 'a' count: 1 }, { name: 'b' global: true count: 9 } ] } }",
    BASE + "response_cache { enable: true } dynamic_batching { }",
    BASE + "model_warmup { name: 's' batch_size: 8 count: 2 inputs { key: 'X' value { data_type: TYPE_FP32 "
    "dims: [ 0, 4 ] zero_data: true } } }",
    BASE + "version_policy { specific { versions: [ 0, 2 ] } }",
    BASE + "response_cache { enable: false } model_transaction_policy { decoupled: false }",
    BASE + 'output { name: "Z" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } }',
    BASE.replace("max_batch_size: 8", "") + 'output { name: "Z" data_type: TYPE_FP32 dims: 1 reshape { } }',
    BASE + 'input { name: "Z" data_type: TYPE_FP32 dims: [ 2, 4, -1, 6 ] reshape { shape: [ 8, -1, 1, 6 ] } }',
    BASE + 'input { name: "Z" data_type: TYPE_FP32 dims: [ 3, 8, 8 ] format: FORMAT_NCHW }',
    BASE + 'model_metrics { metric_control { metric_identifier { family: "nv_inference_first_response_histogram_ms" } '
    "histogram_options { buckets: [ 1, 2.5 ] } } }",
]  # fmt: skip


@pytest.mark.parametrize("text", GOOD)
def test_a_good_configuration_has_no_problem(text):
    assert problems_of(text) == []


INPUT = "input[1]"
BAD = [
    ("response_cache { enable: true } model_transaction_policy { decoupled: true }", "response_cache.enable",
     "the answers of a decoupled model cannot be kept"),
    ("response_cache { enable: true } sequence_batching { }", "response_cache.enable", "depend on what came before"),
    ("instance_group [ { passive: true }, { passive: true } ]", "instance_group", "every group is passive"),
    ("instance_group { rate_limiter { resources { count: 1 } } }",
     "instance_group[0].rate_limiter.resources[0].name", "the resource has no name"),
    ("instance_group { rate_limiter { resources { name: 'r' } } }",
     "instance_group[0].rate_limiter.resources[0].count", "expected >= 1, got 0"),
    ("instance_group { rate_limiter { resources [ { name: 'r' count: 1 }, { name: 'R' count: 1 } ] } }",
     "instance_group[0].rate_limiter.resources[1].name", "'R' is given twice; capitals make no difference"),
    ('name: "other"', "name", "expected the name of the model's directory, 'm', got 'other'"),
    ('platform: "onnxruntime_onnx"', "backend", "belongs to the backend 'onnxruntime', got 'python'"),
    ("dynamic_batching { preferred_batch_size: [ 4, 0 ] }", "dynamic_batching.preferred_batch_size[1]", "got 0"),
    ("dynamic_batching { preferred_batch_size: [ -1 ] }", "dynamic_batching.preferred_batch_size[0]", "got -1"),
    ("dynamic_batching { preferred_batch_size: [ 9 ] }", "dynamic_batching.preferred_batch_size[0]",
     "expected at most max_batch_size = 8, got 9"),
    ("dynamic_batching { priority_levels: 2 }", "dynamic_batching.default_priority_level", "from 1 to priority_levels = 2, got 0"),
    ("dynamic_batching { priority_levels: 2 default_priority_level: 3 }", "dynamic_batching.default_priority_level", "got 3"),
    ("dynamic_batching { default_priority_level: 3 }", "dynamic_batching.default_priority_level", "priority_levels is 0"),
    ("dynamic_batching { priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 3 value { } } }",
     "dynamic_batching.priority_queue_policy.3", "from 1 to priority_levels = 2"),
    ("dynamic_batching { priority_queue_policy { key: 1 value { } } }", "dynamic_batching.priority_queue_policy.1", "= 0"),
    ("dynamic_batching { preserve_ordering: true priority_levels: 2 default_priority_level: 1 }",
     "dynamic_batching.priority_levels", "there is one level, got 2"),
    ("dynamic_batching { preserve_ordering: true default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 5 } }",
     "dynamic_batching.default_queue_policy.timeout_action", "use REJECT"),
    (("dynamic_batching { preserve_ordering: true priority_levels: 1 default_priority_level: 1 priority_queue_policy "
     "{ key: 1 value { timeout_action: DELAY default_timeout_microseconds: 5 } } }"),
     "dynamic_batching.priority_queue_policy.1.timeout_action", "use REJECT"),
    ("version_policy { specific { } }", "version_policy.specific.versions", "at least one"),
    ("version_policy { specific { versions: [ 1, -1 ] } }", "version_policy.specific.versions[1]", "got -1"),
    ("instance_group { kind: KIND_CPU gpus: [ 0 ] }", "instance_group[0].gpus", "this group is KIND_CPU and names [0]"),
    ("instance_group { kind: KIND_MODEL gpus: [ 0 ] }", "instance_group[0].gpus", "KIND_MODEL"),
    ("instance_group { kind: KIND_GPU }", "instance_group[0].kind", "this server has none"),
    ("instance_group { count: -1 }", "instance_group[0].count", "expected >= 1, got -1"),
    ("instance_group [ { name: 'a' }, { name: 'a' } ]", "instance_group[1].name", "'a' is the name of instance_group[0]"),
    (f"instance_group {{ count: {MAX_INSTANCES + 1} }}", "instance_group", f"at most {MAX_INSTANCES} instances"),
    ("instance_group { profile: 'p' }", "instance_group[0].profile", "belong to the backend 'tensorrt'"),
    ("input { data_type: TYPE_FP32 dims: 1 }", f"{INPUT}.name", "missing"),
    ("input { name: 'Z' dims: 1 }", f"{INPUT}.data_type", "missing for 'Z'"),
    ("input { name: 'Z' data_type: TYPE_FP32 }", f"{INPUT}.dims", "dims: [ 1 ] reshape: { shape: [ ] }"),
    ("input { name: 'Z' data_type: TYPE_FP32 dims: [ 1, 0 ] }", f"{INPUT}.dims[1]", "got 0"),
    ("input { name: 'Z' data_type: TYPE_FP32 dims: [ -2 ] }", f"{INPUT}.dims[0]", "got -2"),
    ("input { name: 'X' data_type: TYPE_FP32 dims: 1 }", f"{INPUT}.name", "'X' is input[0] already"),
    ("input { name: 'Z' data_type: TYPE_FP32 dims: 4 reshape { shape: [ 2, 0 ] } }", f"{INPUT}.reshape.shape[1]", "got 0"),
    ("input { name: 'Z' data_type: TYPE_FP32 dims: 4 reshape { shape: [ 2, 3 ] } }", f"{INPUT}.reshape.shape", "differ in"),
    ("input { name: 'Z' data_type: TYPE_FP32 dims: 4 reshape { } }", f"{INPUT}.reshape.shape", "differ in"),
    ("input { name: 'Z' data_type: TYPE_FP32 dims: [ -1, 4 ] reshape { shape: [ 4 ] } }", f"{INPUT}.reshape.shape",
     "has 1 dimensions that vary, the reshape [4] has 0"),
    ("input { name: 'Z' data_type: TYPE_FP32 dims: [ 2, -1, 6 ] reshape { shape: [ 6, -1, 2 ] } }",
     f"{INPUT}.reshape.shape", "differ in"),
    ("input { name: 'Z' data_type: TYPE_FP32 dims: [ 8, 8 ] format: FORMAT_NHWC }", f"{INPUT}.format", "means 3 dims"),
    ("input { name: 'Z' data_type: TYPE_FP32 dims: 1 is_shape_tensor: true }", f"{INPUT}.is_shape_tensor", "tensorrt"),
    ("output { name: 'Z' data_type: TYPE_FP32 dims: 1 is_non_linear_format_io: true }", "output[1].is_non_linear_format_io",
     "tensorrt"),
    ("output { name: 'Y' data_type: TYPE_FP32 dims: 1 }", "output[1].name", "'Y' is output[0] already"),
    ("model_metrics { metric_control { metric_identifier { family: 'nope' } histogram_options { buckets: 1 } } }",
     "model_metrics.metric_control[0].metric_identifier.family", "got 'nope'"),
    (("model_metrics { metric_control { metric_identifier { family: 'nv_inference_first_response_histogram_ms' } "
     "histogram_options { buckets: [ 2, 1 ] } } }"),
     "model_metrics.metric_control[0].histogram_options.buckets", "got [2.0, 1.0]"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "path", "message"), BAD, ids=[row[0][:70] for row in BAD])
def test_a_broken_rule_is_one_problem_with_its_path(text, path, message):
    problems = problems_of(BASE + text)
    assert [problem.path for problem in problems] == [path]
    assert message in problems[0].message


WHOLE = [
    (BASE.replace("8", "-1"), "max_batch_size", "expected >= 0, got -1"),
    (BASE.replace('backend: "python"', ""), "backend", "neither backend nor platform"),
    (BASE.replace('backend: "python"', 'platform: "nope"'), "platform", "got 'nope'"),
    ('backend: "python"', "output", "names no inputs and outputs"),
    ('backend: "python" input { name: "X" data_type: TYPE_FP32 dims: 1 }', "output", "names no outputs"),
    (BASE.replace('backend: "python"', 'platform: "ensemble"'), "ensemble_scheduling", "missing"),
]


@pytest.mark.parametrize(("text", "path", "message"), WHOLE)
def test_a_configuration_without_what_it_needs_is_refused(text, path, message):
    problems = problems_of(text)
    assert [problem.path for problem in problems] == [path]
    assert message in problems[0].message


def test_gpus_beyond_those_that_exist_are_refused():
    problems = problems_of(BASE + "instance_group { kind: KIND_GPU gpus: [ 0, 2, -1 ] }", gpu_count=2)
    assert [problem.path for problem in problems] == ["instance_group[0].gpus[1]", "instance_group[0].gpus[2]"]


def test_all_problems_are_told_at_once():
    problems = problems_of(
        BASE + 'name: "other" instance_group { count: -1 } input { } dynamic_batching { priority_levels: 1 }'
    )
    assert [problem.path for problem in problems] == [
        "name",
        "input[1].name",
        "input[1].data_type",
        "input[1].dims",
        "dynamic_batching.default_priority_level",
        "instance_group[0].count",
    ]


def test_a_draft_may_lack_what_the_backend_completes():
    text = 'backend: "python" dynamic_batching { preferred_batch_size: 2 }'
    assert problems_of(text, draft=True) == []
    assert [problem.path for problem in problems_of(text)] == ["output", "dynamic_batching.preferred_batch_size[0]"]


def test_a_tensorrt_model_has_shape_tensors_but_no_other_orders_of_elements():
    tensor = "platform: 'tensorrt_plan' backend: 'tensorrt' input { name: 'X' data_type: TYPE_INT32 dims: 1 "
    assert problems_of(tensor + "is_shape_tensor: true }", draft=True) == []
    (problem,) = problems_of(tensor + "is_non_linear_format_io: true }", draft=True)
    assert (problem.path, "row-major" in problem.message) == ("input[0].is_non_linear_format_io", True)


def test_what_a_backend_uses_is_neither_refused_nor_noted():
    used = "optimization { priority: PRIORITY_MAX cuda { graphs: true } } cc_model_filenames { key: '8.0' value: 'x' }"
    used += " instance_group { secondary_devices { device_id: 1 } }"
    for backend, noted in (("tensorrt", 0), ("python", 3)):
        proto = parse_text(f"backend: '{backend}' {used}").proto
        assert (len(ignored(proto)), len(unsupported(proto))) == (noted, noted // 3)


def test_a_draft_is_still_checked_for_what_it_says():
    problems = problems_of('backend: "python" input { name: "X" } instance_group { count: -1 }', draft=True)
    assert [problem.path for problem in problems] == ["input[0].data_type", "input[0].dims", "instance_group[0].count"]


NOT_SERVED = {
    "model_repository_agents": "model_repository_agents { agents { name: 'checksum' } }",
    "model_operations.op_library_filename": "model_operations { op_library_filename: 'l.so' }",
    "instance_group[].secondary_devices": "instance_group { secondary_devices { device_id: 1 } }",
}


@pytest.mark.parametrize("path", UNSUPPORTED)
def test_a_feature_that_is_not_served_is_an_error_that_says_so(path):
    problems = problems_of(NOT_SERVED[path], draft=True)
    assert Problem(path.replace("[]", "[0]"), UNSUPPORTED[path]) in problems


HINTS = {
    "runtime": "runtime: 'x'",
    "cc_model_filenames": "cc_model_filenames { key: '8.0' value: 'x' }",
    "optimization.priority": "optimization { priority: PRIORITY_MAX }",
    "optimization.cuda": "optimization { cuda { graphs: true } }",
    "optimization.gather_kernel_buffer_threshold": "optimization { gather_kernel_buffer_threshold: 1 }",
    "optimization.eager_batching": "optimization { eager_batching: true }",
}


@pytest.mark.parametrize("path", IGNORED)
def test_a_hint_that_is_not_used_is_a_note(path):
    proto = parse_text(HINTS[path]).proto
    assert ignored(proto) == [f"{path.replace('[]', '[0]')} {IGNORED[path]}"]


def test_set_fields_finds_every_item_of_a_list():
    proto = pb.ModelConfig(instance_group=[{"passive": True}, {}, {"passive": True}])
    assert set_fields(proto, "instance_group[].passive") == ["instance_group[0].passive", "instance_group[2].passive"]
