"""Which argument an input is, and which result an output is."""

from __future__ import annotations

import pytest

from headrace_backends.pytorch.naming import (
    ANY,
    DICT,
    INT,
    STRINGS,
    Argument,
    Function,
    bind,
    check_optional,
    check_strings,
    configured_inputs,
    configured_outputs,
    index_of,
    place_by_path,
    place_outputs,
    plain_path,
)
from headrace_protocol.datatype import BOOL, BYTES, FP32, INT32, INT64
from headrace_protocol.errors import ErrorCode, InferError

X, Y = Argument("x"), Argument("y")


def call(names: list[str], *arguments: Argument, given: list[str] | None = None, **function: bool) -> tuple:
    binding = bind(dict.fromkeys(names, FP32), Function(arguments, **function), "forward()")
    args, kwargs = binding.call({name: name.lower() for name in (names if given is None else given)})
    return list(args), dict(kwargs)


def refusal(names: list[str], *arguments: Argument, datatype=FP32, **function: bool) -> str:
    with pytest.raises(InferError) as caught:
        bind(dict.fromkeys(names, datatype), Function(arguments, **function), "forward()")
    assert caught.value.code is ErrorCode.INVALID_ARG
    return caught.value.message


def test_inputs_with_the_names_of_arguments_are_those() -> None:
    assert call(["y", "x"], X, Y) == (["x", "y"], {})


def test_inputs_with_an_index_go_by_it() -> None:
    assert call(["b__1", "a__0"], X, Y) == (["a__0", "b__1"], {})


def test_the_name_of_an_argument_counts_for_more_than_an_index_in_it() -> None:
    assert call(["a__1", "b__0"], Argument("a__1"), Argument("b__0")) == (["a__1", "b__0"], {})


def test_other_inputs_go_in_the_order_of_the_configuration() -> None:
    assert call(["second", "first"], X, Y) == (["second", "first"], {})


def test_one_input_without_an_index_makes_all_go_in_order() -> None:
    assert call(["a__1", "other"], X, Y) == (["a__1", "other"], {})


@pytest.mark.parametrize(
    ("name", "index"),
    [("INPUT__0", 0), ("a__b__12", 12), ("__3", 3), ("INPUT_0", None), ("a__", None), ("a__0b", None)],
)
def test_an_index_is_what_follows_two_underscores(name: str, index: int | None) -> None:
    assert index_of(name) == index


def test_one_dictionary_gets_all_inputs_by_their_names() -> None:
    assert call(["a", "b"], Argument("given", DICT)) == ([{"a": "a", "b": "b"}], {})


def test_an_index_beyond_the_arguments_is_refused_with_those_there_are() -> None:
    said = refusal(["a__0", "a__2"], X, Y)
    assert said == (
        "input 'a__2' would be argument 2 of forward(), which takes argument 'x' (Tensor), argument 'y' (Tensor)"
    )


def test_too_many_inputs_in_order_are_refused() -> None:
    assert "input 'c' would be argument 2" in refusal(["a", "b", "c"], X, Y)


def test_an_argument_that_no_input_is_is_named() -> None:
    assert refusal(["x"], X, Y) == "forward() needs argument 'y' (Tensor), which no input of the configuration is"


def test_two_inputs_for_one_argument_are_refused() -> None:
    assert refusal(["a__0", "b__0"], X, Y) == "inputs 'a__0' and 'b__0' are both argument 'x' of forward()"


def test_an_argument_with_a_default_needs_no_input() -> None:
    assert call(["x"], X, Argument("y", required=False)) == (["x"], {})


def test_an_argument_that_may_be_none_is_none_without_an_input() -> None:
    assert call(["y"], Argument("x", nullable=True), Y) == ([], {"x": None, "y": "y"})


def test_an_input_that_is_left_out_leaves_its_argument_to_its_default() -> None:
    optional = Argument("y", required=False)
    assert call(["x", "y", "z"], X, optional, Argument("z"), given=["x", "z"]) == (["x"], {"z": "z"})


def test_an_input_that_is_left_out_is_none_where_its_argument_has_no_default() -> None:
    assert call(["x", "y"], X, Argument("y", nullable=True), given=["x"]) == (["x"], {"y": None})


def test_arguments_by_keyword_get_what_has_no_argument_of_its_name() -> None:
    assert call(["x", "more"], X, keywords=True) == (["x"], {"more": "more"})


def test_further_arguments_by_position_follow_in_the_order_of_their_indices() -> None:
    assert call(["a__2", "a__0", "a__1"], X, more=True) == (["a__0", "a__1", "a__2"], {})


def test_further_arguments_need_those_before_them() -> None:
    assert "before it are no inputs" in refusal(["a__0", "a__2"], X, more=True)


def test_strings_go_to_lists_of_strings_alone() -> None:
    assert refusal(["x"], Argument("x", STRINGS)) == "input 'x' is argument 'x' (List[str]) of forward(), got TYPE_FP32"
    assert refusal(["x"], X, datatype=BYTES) == "input 'x' is argument 'x' (Tensor) of forward(), got TYPE_STRING"


def test_arguments_without_a_known_kind_take_anything_and_those_that_no_tensor_fits_nothing() -> None:
    assert call(["x"], Argument("x", ANY)) == (["x"], {})
    assert call(["x"], Argument("x", INT)) == (["x"], {})
    assert "which no tensor can be" in refusal(["x"], Argument("x", "Device"))


def test_outputs_with_an_index_go_by_it_and_others_in_order() -> None:
    assert place_outputs(["o__1", "o__0"], 2, "forward()") == {"o__1": 1, "o__0": 0}
    assert place_outputs(["b", "a"], None, "forward()") == {"b": 0, "a": 1}


def test_an_output_beyond_the_results_is_refused() -> None:
    with pytest.raises(InferError, match=r"output 'o__2' would be result 2 of forward\(\), which gives 2"):
        place_outputs(["o__2"], 2, "forward()")


PATHS = ["ARGS[0]", "ARGS[1][a]", "KWARGS[m]"]
OWN = ["x", "d_a", "m"]


@pytest.mark.parametrize(
    "names",
    [["x", "d_a", "m"], PATHS, ["ARGS[0]", "ARGS[1]['a']", 'KWARGS["m"]'], ["i__0", "i__1", "i__2"], ["p", "q", "r"]],
)
def test_leaves_go_by_their_own_names_by_paths_by_indices_or_in_order(names: list[str]) -> None:
    assert place_by_path(names, PATHS, OWN, "the inputs") == dict(zip(names, range(3), strict=True))


def test_names_of_leaves_may_be_of_several_ways() -> None:
    assert place_by_path(["m", "i__0", "ARGS[1][a]"], PATHS, OWN, "the inputs") == {"m": 2, "i__0": 0, "ARGS[1][a]": 1}


def test_a_name_beyond_the_leaves_or_two_for_one_are_refused() -> None:
    with pytest.raises(InferError, match="'i__3' would be number 3 of the inputs, which are: x, d_a, m"):
        place_by_path(["i__3"], PATHS, OWN, "the inputs")
    with pytest.raises(InferError, match=r"'x' and 'ARGS\[0\]' are both x of the inputs"):
        place_by_path(["x", "ARGS[0]"], PATHS, OWN, "the inputs")


def test_quotes_around_keys_make_no_difference() -> None:
    assert plain_path("""KWARGS['a']["b c"][0]""") == "KWARGS[a][b c][0]"


def test_inputs_that_the_server_makes_follow_those_of_clients() -> None:
    config = {
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [1]}],
        "batch_input": [{"target_name": ["counts"], "data_type": "TYPE_INT32", "kind": "BATCH_ELEMENT_COUNT"}],
        "sequence_batching": {
            "control_input": [
                {"name": "start", "control": [{"kind": "CONTROL_SEQUENCE_START", "bool_false_true": [False, True]}]},
                {"name": "ready", "control": [{"kind": "CONTROL_SEQUENCE_READY", "int32_false_true": [0, 1]}]},
                {"name": "end", "control": [{"kind": "CONTROL_SEQUENCE_END", "fp32_false_true": [0, 1]}]},
                {"name": "id", "control": [{"kind": "CONTROL_SEQUENCE_CORRID", "data_type": "TYPE_INT64"}]},
            ],
            "state": [{"input_name": "s", "output_name": "t", "data_type": "TYPE_STRING", "dims": [1]}],
        },
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [1]}],
    }
    made = {"start": BOOL, "ready": INT32, "end": FP32, "id": INT64, "s": BYTES, "counts": INT32}
    assert configured_inputs(config) == {"x": FP32, **made}
    assert configured_outputs(config) == {"y": FP32, "t": BYTES}


@pytest.mark.parametrize(
    ("max_batch_size", "tensor"),
    [
        (0, {"dims": [-1]}),
        (8, {"dims": [1], "reshape": {"shape": []}}),
        (0, {"dims": [1, 4], "reshape": {"shape": [4]}}),
    ],
)
def test_strings_of_one_dimension_are_taken(max_batch_size: int, tensor: dict) -> None:
    check_strings({"max_batch_size": max_batch_size, "input": [{"name": "x", "data_type": "TYPE_STRING", **tensor}]})


@pytest.mark.parametrize(("max_batch_size", "dims"), [(0, [-1, -1]), (8, [1])])
def test_strings_of_more_dimensions_are_refused(max_batch_size: int, dims: list[int]) -> None:
    output = {"name": "y", "data_type": "TYPE_STRING", "dims": dims}
    with pytest.raises(InferError, match="output 'y': strings are a list for PyTorch"):
        check_strings({"max_batch_size": max_batch_size, "output": [output]})


def test_an_optional_input_that_the_model_needs_is_refused() -> None:
    config = {"input": [{"name": "x", "optional": True}, {"name": "y"}]}
    check_optional(config, ["x"], "forward()")
    with pytest.raises(InferError, match=r"input 'x' is optional in the configuration, but forward\(\) needs it"):
        check_optional(config, ["y"], "forward()")
