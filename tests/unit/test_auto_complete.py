"""What a configuration leaves out: the backend from the files, batching and tensors from the model."""

import pytest

from headrace.repository.auto_complete import backend_of, check_against_model, complete
from headrace.repository.config_text import parse_text
from headrace.repository.model_config import ConfigError
from headrace.repository.platforms import ModelKind
from headrace_protocol.tensor import TensorSpec

ROWS = (TensorSpec("X", "FP32", (-1, 3)),)
ROWS_OUT = (TensorSpec("Y", "BYTES", (-1,)),)
FIXED = (TensorSpec("X", "FP32", (2, 3)),)
SCALAR = (TensorSpec("X", "FP32", ()),)

KINDS = [
    ("", ["model.onnx"], ModelKind("onnxruntime", "onnxruntime_onnx", "model.onnx")),
    ("", ["model.plan", "model.onnx"], ModelKind("tensorrt", "tensorrt_plan", "model.plan")),
    ("", ["model.py", "model.onnx"], ModelKind("onnxruntime", "onnxruntime_onnx", "model.onnx")),
    ("", ["model.xml", "model.bin"], ModelKind("openvino", "", "model.xml")),
    ("", ["model.pt", "model.py"], ModelKind("pytorch", "pytorch_libtorch", "model.pt")),
    ("", ["model.pt2"], ModelKind("pytorch", "torch_aoti", "model.pt2")),
    ("", ["model.savedmodel"], ModelKind("tensorflow", "tensorflow_savedmodel", "model.savedmodel")),
    ("", ["model.py"], ModelKind("python", "", "model.py")),
    ("", ["model.json"], ModelKind("llm", "", "model.json")),
    ('default_model_filename: "net.onnx"', ["net.onnx", "model.py"], ModelKind("onnxruntime", "onnxruntime_onnx", "net.onnx")),
    ('default_model_filename: "net.json"', ["model.py"], ModelKind("python", "", "net.json")),
    ('platform: "torch_aoti"', ["model.onnx"], ModelKind("pytorch", "torch_aoti", "model.pt2")),
    ('backend: "vllm"', ["model.json"], ModelKind("vllm", "", "model.json")),
    ('backend: "python"', ["model.onnx"], ModelKind("python", "", "model.py")),
    ('backend: "pytorch"', ["model.pt2"], ModelKind("pytorch", "torch_aoti", "model.pt2")),
    ('backend: "pytorch"', [], ModelKind("pytorch", "pytorch_libtorch", "model.pt")),
    ('backend: "pytorch" platform: "torch_aoti"', ["model.pt"], ModelKind("pytorch", "torch_aoti", "model.pt2")),
    ('backend: "pytorch" default_model_filename: "a.pt2"', [], ModelKind("pytorch", "torch_aoti", "a.pt2")),
    ('backend: "identity"', [], ModelKind("identity", "", "")),
    ('backend: "mine"', ["model.mine"], ModelKind("mine", "", "model.mine")),
    ('platform: "ensemble"', [], ModelKind("", "ensemble", "")),
    ("ensemble_scheduling { }", [], ModelKind("", "ensemble", "")),
]  # fmt: skip


@pytest.mark.parametrize(("text", "files", "expected"), KINDS)
def test_the_backend_follows_from_configuration_and_files(tmp_path, text, files, expected):
    for name in files:
        (tmp_path / name).touch()
    assert backend_of(parse_text(text).proto, tmp_path, "m") == expected


def test_a_model_name_may_end_in_its_backend():
    assert backend_of(parse_text("").proto, None, "net.v2.mine") == ModelKind("v2.mine", "", "model.v2.mine")
    assert backend_of(parse_text("").proto, None, "net.mine") == ModelKind("mine", "", "model.mine")


def test_an_unknown_backend_is_an_error_that_says_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match="set `backend`, or name the model's file one of .*model.onnx"):
        backend_of(parse_text("").proto, tmp_path / "missing", "m")


def test_an_unknown_platform_without_a_backend_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"platform: expected one of .*, got 'nope'"):
        backend_of(parse_text('platform: "nope"').proto, tmp_path, "m")


def completed(text, inputs=ROWS, outputs=ROWS_OUT, batching=True, default=4):
    parsed = parse_text(text)
    problems = complete(
        parsed.proto,
        inputs,
        outputs,
        batching,
        default_max_batch_size=default,
        max_batch_size_given="max_batch_size" in parsed.written,
    )
    return parsed.proto, [str(problem) for problem in problems]


def dims(tensors):
    return [list(tensor.dims) for tensor in tensors]


X = 'input { name: "X" data_type: TYPE_FP32 dims: 3 }'
Y = 'output { name: "Y" data_type: TYPE_STRING dims: 1 }'
BATCHING = [
    ("", True, 4, 4, True),
    ("", True, 1, 1, False),
    ("", True, 0, 0, False),
    ("", False, 4, 0, False),
    ("", None, 4, 0, False),
    ("max_batch_size: 8", True, 4, 8, False),
    ("max_batch_size: 8 dynamic_batching { }", True, 4, 8, True),
    ("max_batch_size: 0", True, 4, 0, False),
    ("dynamic_batching { preferred_batch_size: 2 }", True, 128, 128, True),
    (X, True, 4, 0, False),
    (Y, True, 4, 0, False),
    (X + Y, True, 4, 0, False),
    (X + "max_batch_size: 8", True, 4, 8, False),
    ("sequence_batching { }", True, 4, 4, False),
]


@pytest.mark.parametrize(("text", "batching", "default", "size", "dynamic"), BATCHING)
def test_batching_is_switched_on_only_where_the_user_said_nothing(text, batching, default, size, dynamic):
    proto, problems = completed(text, batching=batching, default=default)
    assert problems == []
    assert proto.max_batch_size == size
    assert proto.HasField("dynamic_batching") is dynamic


def test_tensors_get_the_models_names_types_and_shapes_without_the_batch_dimension():
    proto, _ = completed("")
    assert [(tensor.name, tensor.data_type) for tensor in proto.input] == [("X", 11)]
    assert dims(proto.input) == [[3]]


def test_an_explicit_max_batch_size_of_zero_keeps_the_first_dimension():
    proto, _ = completed("max_batch_size: 0")
    assert dims(proto.input) == [[-1, 3]]
    assert dims(proto.output) == [[-1]]


def test_one_element_a_row_becomes_a_reshape_to_no_dimension():
    proto, _ = completed("")
    assert dims(proto.output) == [[1]]
    assert list(proto.output[0].reshape.shape) == []
    assert proto.output[0].HasField("reshape")
    assert not proto.input[0].HasField("reshape")


def test_a_tensor_of_rank_0_becomes_a_reshape_too():
    proto, problems = completed("", SCALAR, SCALAR, batching=False)
    assert problems == []
    assert dims(proto.input) == [[1]]
    assert proto.input[0].HasField("reshape")
    assert check_against_model(proto, SCALAR, SCALAR) == []


def test_a_list_that_was_given_is_left_alone():
    proto, _ = completed('input { name: "mine" }')
    assert [tensor.name for tensor in proto.input] == ["mine"]
    assert [tensor.name for tensor in proto.output] == ["Y"]


def test_optional_inputs_stay_optional():
    proto, _ = completed("", (TensorSpec("X", "FP32", (-1, 3), optional=True),))
    assert proto.input[0].optional


def test_batching_that_the_model_cannot_do_is_a_problem():
    _, problems = completed("max_batch_size: 8", FIXED, FIXED, batching=False)
    assert len(problems) == 1
    assert problems[0].startswith("max_batch_size: the model cannot batch, got 8")
    assert "'X' (FP32 [2, 3])" in problems[0]


def test_batches_of_one_row_fit_a_model_made_for_one_row():
    single = (TensorSpec("X", "FP32", (1, 3)),)
    proto, problems = completed("max_batch_size: 1", single, single, batching=False)
    assert problems == []
    assert dims(proto.input) == [[3]]
    assert check_against_model(proto, single, single) == []


def test_a_type_that_the_protocol_lacks_is_a_problem():
    _, problems = completed("", (TensorSpec("X", "COMPLEX64", (-1, 3)),))
    assert problems == ["input: the model's 'X' has the type 'COMPLEX64', which the protocol lacks"]


def test_what_was_completed_agrees_with_the_model():
    proto, _ = completed("")
    assert check_against_model(proto, ROWS, ROWS_OUT) == []


B8 = "max_batch_size: 8 "
BAD = [
    (B8 + X + X.replace("X", "Q"), ROWS, "input[1].name", "the model has no 'Q', it has 'X' (FP32 [-1, 3])"),
    (B8 + X.replace("FP32", "INT32"), ROWS, "input[0].data_type", "the model's 'X' is TYPE_FP32, got TYPE_INT32"),
    (B8 + X.replace("dims: 3", "dims: [ 16, 1 ]"), ROWS, "input[0].dims",
     "has 2 dimensions [-1, 3], the configuration has 3: [-1, 16, 1] (the batch dimension, because max_batch_size is 8"),
    (X, ROWS, "input[0].dims", "has 1: [3] (max_batch_size is 0, so the dims are all there is)"),
    (B8 + X.replace("dims: 3", "dims: 4"), ROWS, "input[0].dims", "is [-1, 3], the configuration has [-1, 4]"),
    (X.replace("dims: 3", "dims: [ 5, 3 ]"), FIXED, "input[0].dims", "is [2, 3], the configuration has [5, 3]"),
    (B8 + X, FIXED, "max_batch_size", "fixed: it cannot batch up to 8"),
    ("max_batch_size: 1 " + X, FIXED, "max_batch_size", "fixed: it cannot batch up to 1"),
    (X.replace("dims: 3", "dims: 6 reshape { shape: [ 3, 2 ] }"), FIXED, "input[0].reshape.shape", "[3, 2]"),
    (X.replace("dims: 3", "dims: 1"), SCALAR, "input[0].dims", "is written dims: [ 1 ] reshape: { shape: [ ] }"),
    (B8 + X.replace("dims: 3", "dims: 1"), (TensorSpec("X", "FP32", (-1,)),), "input[0].dims", "reshape"),
    (B8 + X, (*ROWS, TensorSpec("Z", "INT64", (-1, 2))), "input", "the model needs 'Z' (INT64 [-1, 2])"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "inputs", "path", "message"), BAD)
def test_a_difference_from_the_model_is_told(text, inputs, path, message):
    problems = check_against_model(parse_text(text).proto, inputs, ())
    assert [problem.path for problem in problems] == [path]
    assert message in problems[0].message


GOOD = [
    (B8 + X, ROWS),
    (X.replace("dims: 3", "dims: [ -1, 3 ]"), ROWS),
    (X.replace("dims: 3", "dims: [ 7, -1 ]"), ROWS),
    (X.replace("dims: 3", "dims: 6 reshape { shape: [ 2, 3 ] }"), FIXED),
    (X.replace("dims: 3", "dims: 1 reshape { shape: [ ] }"), SCALAR),
    (B8 + X, (*ROWS, TensorSpec("Z", "INT64", (-1, 2), optional=True))),
    (B8 + X, ()),
]


@pytest.mark.parametrize(("text", "inputs"), GOOD)
def test_what_the_model_can_take_is_fine(text, inputs):
    assert check_against_model(parse_text(text).proto, inputs, ()) == []


def test_a_configuration_may_name_some_of_the_outputs_but_no_others():
    two = (*ROWS_OUT, TensorSpec("Z", "FP32", (-1,)))
    scalar_rows = "max_batch_size: 8 " + Y.replace("dims: 1", "dims: 1 reshape { }")
    assert check_against_model(parse_text(scalar_rows).proto, (), two) == []
    problems = check_against_model(parse_text(scalar_rows.replace('"Y"', '"W"')).proto, (), two)
    assert [problem.path for problem in problems] == ["output[0].name"]
