"""`sequence_batching` in configurations: what is refused, with the path of the field, and what the server makes of it."""

from __future__ import annotations

import pytest

from headrace.repository.config_text import parse_text
from headrace.repository.freeze import freeze
from headrace.repository.model_config import ModelConfig, Problem
from headrace.repository.normalise import NormaliseSettings, normalise
from headrace.repository.sequence_validation import check_sequence_tensors, shown_to_clients
from headrace.repository.validation import validate
from headrace_protocol._generated import model_config_pb2 as pb
from headrace_protocol.datatype import BYTES, INT32
from headrace_protocol.tensor import TensorSpec

TENSORS = """
    backend: "identity" max_batch_size: 4
    input [ { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } ]
    output [ { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
STATE = 'state { input_name: "S" output_name: "T" data_type: TYPE_INT32 dims: [ -1 ] %s }'
START = 'control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }'


def message(batching: str, extra: str = "") -> pb.ModelConfig:
    proto = parse_text(f"{TENSORS} {extra} sequence_batching {{ {batching} }}").proto
    normalise(proto, model_name="m", server=NormaliseSettings())
    return proto


def config(batching: str, extra: str = "") -> ModelConfig:
    proto = message(batching, extra)
    assert validate(proto, model_name="m") == []
    return freeze(proto)


def problems(batching: str, extra: str = "") -> dict[str, str]:
    found: list[Problem] = validate(message(batching, extra), model_name="m")
    return {problem.path.removeprefix("sequence_batching."): problem.message for problem in found}


def control(how: str, name: str = "C") -> str:
    return f'control_input {{ name: "{name}" control {{ {how} }} }}'


@pytest.mark.parametrize(
    ("batching", "path", "text"),
    [
        (control("kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ]", ""), "control_input[0].name", "missing"),
        ('control_input { name: "C" }', "control_input[0].control", "got 0"),
        (
            (
                'control_input { name: "C" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] }, '
                "{ kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } ] }"
            ),
            "control_input[0].control",
            "one kind of control for the tensor 'C', got 2",
        ),
        (START + START.replace('"START"', '"AGAIN"'), "control_input[1].control[0].kind", "CONTROL_SEQUENCE_START is"),
        (control("kind: CONTROL_SEQUENCE_END"), "control_input[0].control[0]", "got none"),
        (
            control("kind: CONTROL_SEQUENCE_READY fp32_false_true: [ 0, 1 ] bool_false_true: [ false, true ]"),
            "control_input[0].control[0]",
            "got fp32_false_true, bool_false_true",
        ),
        (
            control("kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1, 2 ]"),
            "control_input[0].control[0].int32_false_true",
            "expected two values, for false and for true, got 3",
        ),
        (
            control("kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] data_type: TYPE_INT32"),
            "control_input[0].control[0].data_type",
            "belongs to the correlation id alone",
        ),
        (
            control("kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_FP32"),
            "control_input[0].control[0].data_type",
            "TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32, TYPE_STRING for a correlation id, got TYPE_FP32",
        ),
        (
            control("kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT32 int32_false_true: [ 0, 1 ]"),
            "control_input[0].control[0]",
            "no values for false and true",
        ),
        (START.replace('"START"', '"X"'), "control_input[0].name", "'X' is input[0] already"),
        ((STATE % "").replace('"S"', '"X"'), "state[0].input_name", "'X' is input[0] already"),
        (STATE % "" + (STATE % "").replace('"S"', '"S2"'), "state[1].output_name", "'T' is sequence_batching.state[0]"),
        ('state { output_name: "T" data_type: TYPE_INT32 }', "state[0].input_name", "missing"),
        ('state { input_name: "S" output_name: "T" dims: [ 1 ] }', "state[0].data_type", "missing"),
        ((STATE % "").replace("-1", "0"), "state[0].dims[0]", "got 0"),
        ((STATE % "").replace('"T"', '"Y"'), "state[0]", "has another data_type or other dims"),
        (
            STATE % ('initial_state { name: "a" data_type: TYPE_INT32 dims: [ 1 ] zero_data: true }' * 2),
            "state[0].initial_state",
            "expected one for the state input 'S' at most, got 2",
        ),
        (
            STATE % "initial_state { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true }",
            "state[0].initial_state[0].name",
            "missing",
        ),
        (
            STATE % 'initial_state { name: "a" data_type: TYPE_FP32 dims: [ 1 ] zero_data: true }',
            "state[0].initial_state[0].data_type",
            "expected the state's own, TYPE_INT32, got TYPE_FP32",
        ),
        (
            STATE % 'initial_state { name: "a" data_type: TYPE_INT32 dims: [ -1 ] zero_data: true }',
            "state[0].initial_state[0].dims[0]",
            "expected a dimension >= 1, got -1",
        ),
        (
            STATE % 'initial_state { name: "a" data_type: TYPE_INT32 dims: [ 1, 2 ] zero_data: true }',
            "state[0].initial_state[0].dims",
            "expected dims that fit the state's [-1], got [1, 2]",
        ),
        (
            STATE % 'initial_state { name: "a" data_type: TYPE_INT32 dims: [ 1 ] }',
            "state[0].initial_state[0]",
            "neither zero_data nor data_file",
        ),
        (
            STATE % 'initial_state { name: "a" data_type: TYPE_INT32 dims: [ 1 ] zero_data: false }',
            "state[0].initial_state[0].zero_data",
            "expected true",
        ),
        ("oldest { max_candidate_sequences: -1 }", "oldest.max_candidate_sequences", "got -1"),
        ("oldest { preferred_batch_size: 0 }", "oldest.preferred_batch_size[0]", "got 0"),
        ("oldest { preferred_batch_size: 5 }", "oldest.preferred_batch_size[0]", "at most max_batch_size = 4, got 5"),
        ("direct { minimum_slot_utilization: 1.5 }", "direct.minimum_slot_utilization", "expected 0 to 1, got 1.5"),
        ("direct { minimum_slot_utilization: nan }", "direct.minimum_slot_utilization", "got nan"),
    ],
)
def test_a_mistake_is_told_with_its_field(batching: str, path: str, text: str) -> None:
    found = problems(batching)
    assert text in found[path]


@pytest.mark.parametrize("value", ["0", "-1", "x", "", "²", "9" * 40])
def test_the_bound_of_the_queue_is_a_positive_number(value: str) -> None:
    extra = f'parameters {{ key: "sequence_max_queue_size" value {{ string_value: "{value}" }} }}'
    assert "parameters.sequence_max_queue_size" in problems("", extra)


def test_answers_of_sequences_are_not_cached() -> None:
    assert "response_cache.enable" in problems("", "response_cache { enable: true }")


def test_what_is_left_out_has_the_usual_values() -> None:
    plain = config("")
    assert plain.proto.sequence_batching.max_sequence_idle_microseconds == 1_000_000
    settings = plain.sequence_batching
    assert settings is not None
    assert (settings.oldest, settings.max_idle_us, settings.correlation, settings.iterative) == (
        False,
        1_000_000,
        None,
        False,
    )
    oldest = config("oldest { }")
    assert list(oldest.proto.sequence_batching.oldest.preferred_batch_size) == [4]


def test_the_settings_are_those_of_the_strategy() -> None:
    direct = config(
        f"direct {{ max_queue_delay_microseconds: 5 minimum_slot_utilization: 0.5 }} {START} {STATE % ''}",
        'parameters { key: "sequence_max_queue_size" value { string_value: "7" } }',
    ).sequence_batching
    assert direct is not None
    assert (direct.max_queue_delay_us, direct.minimum_slot_utilization, direct.max_queue_size) == (5, 0.5, 7)
    assert (direct.inputs, direct.outputs) == ({"START", "S"}, {"T"})
    oldest = config(
        "oldest { max_candidate_sequences: 9 preferred_batch_size: [ 4, 2 ] max_queue_delay_microseconds: 6 "
        "preserve_ordering: true } iterative_sequence: true max_sequence_idle_microseconds: 3"
    ).sequence_batching
    assert oldest is not None
    assert (oldest.oldest, oldest.max_candidate_sequences, oldest.preferred_batch_sizes) == (True, 9, (2, 4))
    assert (oldest.max_queue_delay_us, oldest.preserve_ordering, oldest.iterative, oldest.max_idle_us) == (
        6,
        True,
        True,
        3,
    )


@pytest.mark.parametrize(
    ("name", "largest"), [("UINT64", 2**64 - 1), ("INT64", 2**63 - 1), ("UINT32", 2**32 - 1), ("INT32", 2**31 - 1)]
)
def test_the_type_of_correlation_ids_bounds_them(name: str, largest: int) -> None:
    settings = config(control(f"kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_{name}")).sequence_batching
    assert settings is not None
    assert settings.largest_id == largest
    texts = config(control("kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING")).sequence_batching
    assert texts is not None
    assert texts.correlation is BYTES


def spec(name: str, *shape: int, datatype: str = INT32.name) -> TensorSpec:
    return TensorSpec(name, datatype, shape)


def test_what_the_server_makes_is_not_shown_to_clients() -> None:
    proto = message(f"{START} {STATE % ''}")
    inputs, outputs = shown_to_clients(
        proto, (spec("X", -1, 1), spec("START", -1, 1), spec("S", -1, -1)), (spec("Y", -1, 1), spec("T", -1, -1))
    )
    assert [found.name for found in inputs] == ["X"]
    assert [found.name for found in outputs] == ["Y"]


@pytest.mark.parametrize(
    ("inputs", "outputs", "text"),
    [
        ((spec("START", -1, 1), spec("S", -1, -1)), (spec("T", -1, 3),), None),
        ((), (), None),
        ((spec("S", -1, -1),), (spec("T", -1, -1),), "the model has no 'START', it has 'S'"),
        ((spec("START", -1, 1, datatype="FP32"), spec("S", -1, -1)), (), "'START' is TYPE_FP32, got TYPE_INT32"),
        ((spec("START", -1, 2), spec("S", -1, -1)), (), "'START' has the shape [-1, 2], got [-1, 1]"),
        ((spec("START", -1, 1), spec("S", -1)), (), "'S' has the shape [-1], got [-1, -1]"),
        ((), (spec("Y", -1, 1),), "the model has no 'T', it has 'Y'"),
    ],
)
def test_controls_and_states_are_checked_against_the_model(
    inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], text: str | None
) -> None:
    found = [problem.message for problem in check_sequence_tensors(message(f"{START} {STATE % ''}"), inputs, outputs)]
    assert not found if text is None else any(text in problem for problem in found), found
