"""What a configuration may say of ragged inputs, tensors of a batch and padding; every rule has a row."""

from __future__ import annotations

import pytest

from headrace.repository.auto_complete import check_against_model, complete
from headrace.repository.config_text import parse_text
from headrace.repository.freeze import freeze
from headrace.repository.model_config import Cut
from headrace.repository.normalise import NormaliseSettings, normalise
from headrace.repository.validation import validate
from headrace_protocol.tensor import TensorSpec

BASE = """
name: "m" backend: "onnxruntime" max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "S" data_type: TYPE_STRING dims: [ -1 ] },
        { name: "F" data_type: TYPE_INT8 dims: [ 4 ] }, { name: "O" data_type: TYPE_BOOL dims: [ -1, 2 ] optional: true } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1, 4 ] }, { name: "Z" data_type: TYPE_STRING dims: [ 2, -1 ] } ]
"""
COUNT = 'batch_input { target_name: "N" data_type: TYPE_INT32 source_input: "X" }'
SCATTER = 'batch_output { target_name: "Y" source_input: "X" }'


def pad(inputs: str, sizes: str | None = None, cuts: str | None = None) -> str:
    given = {"pad_batch": inputs, "pad_batch_to": sizes, "pad_batch_cut": cuts}
    return "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
        for key, value in given.items()
        if value is not None
    )


def parsed(text: str, base: str = BASE):
    proto = parse_text(base + text).proto
    normalise(proto, model_name="m", server=NormaliseSettings())
    return proto


def problems_of(text: str, base: str = BASE, *, draft: bool = False) -> list[str]:
    return [str(problem) for problem in validate(parsed(text, base), model_name="m", draft=draft)]


GOOD = [
    COUNT + SCATTER,
    COUNT.replace("TYPE_INT32", "TYPE_FP32 kind: BATCH_ITEM_SHAPE"),
    COUNT + COUNT.replace('"N"', '[ "N2", "N3" ]'),
    pad("X"),
    pad("X", " any "),
    pad(" X = -inf , O=1 ", "64,16 , 32", "Y[0] = X[0]"),
]


@pytest.mark.parametrize("text", GOOD)
def test_a_good_configuration_has_no_problem(text: str) -> None:
    assert problems_of(text) == []


BAD = [
    ('batch_input { data_type: TYPE_INT32 source_input: "X" }', "batch_input[0].target_name: missing"),
    (COUNT.replace("TYPE_INT32", "TYPE_INT64"), "batch_input[0].data_type: expected TYPE_INT32 or TYPE_FP32, got TYPE_INT64"),
    (COUNT.replace("data_type: TYPE_INT32", ""), "batch_input[0].data_type: expected TYPE_INT32 or TYPE_FP32, got TYPE_INVALID"),
    (COUNT.replace('"X"', '[ "X", "F" ]'), "batch_input[0].source_input: expected one input, got 2"),
    (COUNT.replace('source_input: "X"', ""), "batch_input[0].source_input: expected one input, got 0"),
    (COUNT.replace('"X"', '"W"'), "batch_input[0].source_input[0]: the model has no input 'W', it has ['F', 'O', 'S', 'X']"),
    (COUNT.replace('"X"', '"O"'), "batch_input[0].source_input[0]: 'O' is optional: where it is left out, nothing can be told of it"),
    (COUNT + COUNT, "batch_input[1].target_name[0]: 'N' is batch_input[0].target_name[0] already"),
    (COUNT.replace('"N"', '"F"'), "batch_input[0].target_name[0]: 'F' is an input that clients give; a tensor made for the batch has a name of its own"),
    (COUNT.replace('"N"', '""'), "batch_input[0].target_name[0]: missing"),
    (SCATTER + SCATTER, "batch_output[1].target_name[0]: 'Y' is batch_output[0].target_name[0] already"),
    (SCATTER.replace('"Y"', '"W"'), "batch_output[0].target_name[0]: the model has no output 'W', it has ['Y', 'Z']"),
    (SCATTER.replace('"Y"', '[ "Y", "Z" ]'), "batch_output[0].target_name: expected one output, got 2"),
    (SCATTER.replace('"Y"', '"Z"'), "batch_output[0].target_name[0]: 'Z' has the dims [2, -1]: what varies there is taken from the same place of 'X', which has [-1]"),
    (SCATTER + "model_transaction_policy { decoupled: true }", "batch_output: a decoupled model gives each request responses of its own, which are not cut out of a batch"),
    ('output { name: "R" data_type: TYPE_FP32 dims: 1 reshape { } }' + SCATTER.replace('"Y"', '"R"'), "batch_output[0].target_name[0]: 'R' takes its shape from 'X': neither can have a reshape"),
    ('input { name: "T" data_type: TYPE_FP32 dims: 1 is_shape_tensor: true allow_ragged_batch: true }',
     "input[4].allow_ragged_batch: a shape tensor is one for the whole batch, so it cannot be ragged"),
    (COUNT + "sequence_batching { }", "batch_input: the direct strategy of sequences keeps a row for each slot; use the oldest strategy"),
    (pad("X") + "sequence_batching { }", "parameters.pad_batch: is of the dynamic batcher: the requests of sequences are not padded"),
    (pad(""), "parameters.pad_batch: expected names of inputs, each with =VALUE where it is not padded with 0"),
    (pad("W"), "parameters.pad_batch: the model has no input 'W', it has ['F', 'O', 'S', 'X']"),
    (pad("X, X=1"), "parameters.pad_batch: names 'X' twice"),
    (pad("X=a"), "parameters.pad_batch: cannot pad 'X' with 'a': it is TYPE_FP32"),
    (pad("X="), "parameters.pad_batch: cannot pad 'X' with '': it is TYPE_FP32"),
    (pad("X=1e39"), "parameters.pad_batch: cannot pad 'X' with '1e39': it is TYPE_FP32"),
    (pad("O=2"), "parameters.pad_batch: cannot pad 'O' with '2': it is TYPE_BOOL"),
    (pad("S"), "parameters.pad_batch: 'S' is TYPE_STRING, of which there is nothing to pad with"),
    (pad("F"), "parameters.pad_batch: no dimension of 'F' varies: its dims are [4]"),
    ('input { name: "I" data_type: TYPE_INT8 dims: -1 }' + pad("I=128"), "parameters.pad_batch: cannot pad 'I' with '128': it is TYPE_INT8"),
    ('input { name: "B" data_type: TYPE_BF16 dims: -1 }' + pad("B=1"), "parameters.pad_batch: cannot pad 'B' with '1': it is TYPE_BF16"),
    ('input { name: "R" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }' + pad("R"), "parameters.pad_batch: 'R' has allow_ragged_batch and cannot be padded as well"),
    ('input { name: "R" data_type: TYPE_FP32 dims: -1 reshape { shape: [ -1, 1 ] } }' + pad("R"), "parameters.pad_batch: 'R' has a reshape and cannot be padded as well"),
    (pad("X", "0"), "parameters.pad_batch_to: expected any, or sizes from 1 to 2147483648, got '0'"),
    (pad("X", "8;9"), "parameters.pad_batch_to: expected any, or sizes from 1 to 2147483648, got '8;9'"),
    (pad("X", ",".join(map(str, range(1, 258)))), "parameters.pad_batch_to: expected at most 256 sizes, got 257"),
    (pad("X", None, "Y = X"), "parameters.pad_batch_cut: expected OUTPUT[i] = INPUT[j], got 'Y = X'"),
    (pad("X", None, "W[0]=X[0]"), "parameters.pad_batch_cut: the model has no output 'W', it has ['Y', 'Z']"),
    (pad("X", None, "Y[0]=S[0]"), "parameters.pad_batch_cut: 'S' is not padded: pad_batch does not name it"),
    (pad("X", None, "Y[0]=X[1]"), "parameters.pad_batch_cut: dimension 1 of 'X' does not vary: its dims are [-1]"),
    (pad("X", None, "Y[1]=X[0]"), "parameters.pad_batch_cut: dimension 1 of 'Y' does not vary: its dims are [-1, 4]"),
    (pad("X", None, "Z[1]=X[0]"), "parameters.pad_batch_cut: 'Z' holds strings, which are not cut"),
    (pad("X", None, "Y[0]=X[0],Y[0]=X[0]"), "parameters.pad_batch_cut: says twice what dimension 0 of 'Y' follows"),
    (SCATTER + pad("X", None, "Y[0]=X[0]"), "parameters.pad_batch_cut: 'Y' is in batch_output and takes its whole shape from there"),
    (pad("X").replace('"pad_batch"', '"pad_batch_to"'), "parameters.pad_batch_to: has no effect without pad_batch, which names the inputs"),
    (pad("X").replace('"pad_batch"', '"pad_batch_cut"'), "parameters.pad_batch_cut: has no effect without pad_batch, which names the inputs"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "problem"), BAD)
def test_a_bad_configuration_says_where_and_what(text: str, problem: str) -> None:
    assert problem in problems_of(text)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        (COUNT, "batch_input"),
        (SCATTER, "batch_output"),
        (pad("X"), "parameters.pad_batch"),
        ('input { name: "R" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }', "input[4].allow_ragged_batch"),
    ],
)
def test_where_nothing_is_batched_nothing_of_a_batch_can_be_meant(text: str, path: str) -> None:
    unbatched = BASE.replace("max_batch_size: 8", "max_batch_size: 0")
    assert any(problem.startswith(f"{path}: there are no batches") for problem in problems_of(text, unbatched))
    assert problems_of(text, unbatched, draft=True) == [], "the backend may yet find that the model batches"


def test_a_draft_may_name_tensors_that_only_the_model_knows() -> None:
    text = 'name: "m" backend: "onnxruntime"' + pad("A=1", None, "B[0]=A[0]") + COUNT + SCATTER
    assert problems_of(text, "", draft=True) == []


def test_the_frozen_configuration_says_how_shapes_are_made_alike() -> None:
    config = freeze(parsed(COUNT + SCATTER + pad("X=-1.5, O", "64, 16, 64", "Y[0] = X[0]")))
    assert config.scattered == {"Y": "X"}
    assert config.padding is not None
    assert config.padding.values == {"X": -1.5, "O": False}
    assert config.padding.sizes == (16, 64)
    assert config.padding.cuts == {"Y": (Cut(0, "X", 0),)}
    assert [config.padding.rounded(dim) for dim in (1, 16, 17, 65)] == [16, 16, 64, 65]


def model_says(text: str, *inputs: TensorSpec, outputs: tuple[TensorSpec, ...] = ()) -> list[str]:
    return [str(problem) for problem in check_against_model(parsed(text, ""), inputs, outputs)]


RAGGED = 'name: "m" max_batch_size: 8 input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }'
FLAT = TensorSpec("X", "FP32", (-1,))


def test_a_ragged_input_of_the_model_is_flat() -> None:
    assert model_says(RAGGED, FLAT) == []
    (problem,) = model_says(RAGGED, TensorSpec("X", "FP32", (-1, -1)))
    assert problem == (
        "input[0].allow_ragged_batch: a ragged input reaches the model as [-1], the model's 'X' has [-1, -1]"
    )


def test_what_is_made_for_a_batch_fits_the_model() -> None:
    assert model_says(RAGGED + COUNT, FLAT, TensorSpec("N", "INT32", (-1,))) == []
    assert "the model has no 'N'" in model_says(RAGGED + COUNT, FLAT)[0]
    assert "is INT64, got TYPE_INT32" in model_says(RAGGED + COUNT, FLAT, TensorSpec("N", "INT64", (-1,)))[0]
    assert "what is made has 1" in model_says(RAGGED + COUNT, FLAT, TensorSpec("N", "INT32", (-1, 2)))[0]


def test_an_output_that_is_shared_out_may_have_any_shape_in_the_model() -> None:
    text = RAGGED + 'output { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }'
    flat = (TensorSpec("Y", "FP32", (-1,)),)
    assert "has 1 dimensions" in model_says(text, FLAT, outputs=flat)[0]
    assert model_says(text + SCATTER, FLAT, outputs=flat) == []


def test_what_is_made_for_a_batch_is_no_input_that_clients_could_give() -> None:
    proto = parse_text('name: "m" max_batch_size: 8 ' + COUNT).proto
    inputs = (FLAT, TensorSpec("N", "INT32", (-1,)))
    assert complete(proto, inputs, (), True, default_max_batch_size=4, max_batch_size_given=True) == []
    assert [tensor.name for tensor in proto.input] == ["X"]
