"""A backend process gives models of sequences their controls and states, and keeps the states of each apart."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_backends.api import Batch, EndedSequence
from headrace_backends.conformance import Case, LoadedModel, loaded
from headrace_backends.identity.backend import IdentityBackend
from headrace_backends.sequences import SequenceStates
from headrace_protocol.datatype import BY_NAME, encode_bytes, to_numpy
from headrace_protocol.errors import ErrorCode, InferError, invalid
from headrace_protocol.messages import RequestHeader, Responses

START, END = 1, 2
STATE = {"input_name": "S_IN", "output_name": "S_OUT", "data_type": "TYPE_INT32", "dims": [1]}


class Scripted(IdentityBackend):
    """Does with a batch what the test says."""

    def execute(self, batch: Batch) -> None:
        self.script(batch)

    script: Callable[[Batch], None]


def config(max_batch_size: int = 4, *, decoupled: bool = False, shown: bool = False, **batching: Any) -> dict[str, Any]:
    tensor = {"data_type": "TYPE_INT32", "dims": [1]}
    outputs = [{"name": "OUTPUT0", **tensor}, *([{"name": "S_OUT", **tensor}] if shown else [])]
    return {
        "name": "m",
        "max_batch_size": max_batch_size,
        "input": [{"name": "INPUT0", **tensor}],
        "output": outputs,
        "model_transaction_policy": {"decoupled": decoupled},
        "sequence_batching": {"oldest": {}, **batching} if "direct" not in batching else batching,
    }


def model(tmp_path: Path, given: dict[str, Any] | None = None, **more: Any) -> AbstractContextManager[LoadedModel]:
    one = np.ones((1, 1) if (given or config())["max_batch_size"] else (1,), np.int32)
    return loaded(Scripted, Case(tmp_path, given or config(**more), {"INPUT0": one}))


def accumulate(batch: Batch) -> None:
    total = batch.inputs["INPUT0"] + batch.inputs["S_IN"]
    batch.respond({"OUTPUT0": total, "S_OUT": total})


def run(
    loaded_model: LoadedModel,
    script: Callable[[Batch], None],
    *headers: RequestHeader,
    values: Any = None,
    wanted: tuple[str, ...] | None = None,
) -> tuple[Batch, Responses]:
    """Run a batch whose requests have these headers, and 1, 2, ... as input; return it and what was answered."""
    assert isinstance(loaded_model.backend, Scripted)
    loaded_model.backend.script = script  # type: ignore[method-assign]
    batches = loaded_model.case.config["max_batch_size"] > 0
    given = values or range(1, len(headers) + 1)
    inputs = [{"INPUT0": np.full((1, 1) if batches else (1,), value, np.int32)} for value in given]
    batch = loaded_model.batch(inputs, wanted=wanted, headers=headers)
    try:
        batch.open_inputs()
        script(batch)
        failure = None
    except InferError as error:
        failure = error
    responses, _ = batch.finish(failure)
    assert responses is not None
    return batch, responses


def header(number: int, flags: int = 0, slot: int = 0, correlation_id: int | str = 0) -> RequestHeader:
    return RequestHeader(1, correlation_id=correlation_id or number, flags=flags, sequence=number, slot=slot)


def batched(loaded_model: LoadedModel, responses: Responses) -> dict[str, list[int]]:
    assert responses.batched is not None, responses
    return {
        tensor.name: to_numpy(
            BY_NAME[tensor.datatype],
            tensor.shape,
            loaded_model._arena.view[tensor.ref.offset : tensor.ref.offset + tensor.ref.nbytes],
        )
        .reshape(-1)
        .tolist()
        for tensor in responses.batched
    }


def control(name: str, kind: str, **how: Any) -> dict[str, Any]:
    return {"name": name, "control": [{"kind": f"CONTROL_SEQUENCE_{kind}", **how}]}


def test_controls_have_the_type_and_the_values_that_the_configuration_gives(tmp_path: Path) -> None:
    controls = [
        control("START", "START", int32_false_true=[0, 1]),
        control("END", "END", fp32_false_true=[-1.0, 2.5]),
        control("READY", "READY", bool_false_true=[False, True]),
        control("ID", "CORRID", data_type="TYPE_UINT32"),
    ]
    seen: dict[str, np.ndarray] = {}
    with model(tmp_path, control_input=controls, direct={}) as loaded_model:
        run(
            loaded_model,
            lambda batch: seen.update(batch.inputs),
            header(1, START, slot=0, correlation_id=77),
            header(2, END, slot=3, correlation_id=88),
        )
    assert {name: (array.dtype.name, array.shape) for name, array in seen.items()} == {
        "INPUT0": ("int32", (4, 1)),
        "START": ("int32", (4, 1)),
        "END": ("float32", (4, 1)),
        "READY": ("bool", (4, 1)),
        "ID": ("uint32", (4, 1)),
    }
    assert {name: array[:, 0].tolist() for name, array in seen.items()} == {
        "INPUT0": [1, 0, 0, 2],
        "START": [1, 0, 0, 0],
        "END": [-1, -1, -1, 2.5],
        "READY": [True, False, False, True],
        "ID": [77, 0, 0, 88],
    }


@pytest.mark.parametrize("datatype", ["UINT64", "INT64", "INT32", "STRING"])
def test_a_correlation_id_comes_as_any_type_that_may_be_configured(tmp_path: Path, datatype: str) -> None:
    seen: dict[str, np.ndarray] = {}
    given: int | str = "a-é" if datatype == "STRING" else 2**31 - 1
    with model(tmp_path, control_input=[control("ID", "CORRID", data_type=f"TYPE_{datatype}")]) as loaded_model:
        run(loaded_model, lambda batch: seen.update(batch.inputs), header(1, START, correlation_id=given))
    assert seen["ID"].tolist() == [["a-é".encode() if datatype == "STRING" else given]]


def test_without_a_batch_dimension_controls_and_states_have_none(tmp_path: Path) -> None:
    seen: dict[str, np.ndarray] = {}
    start = control("START", "START", int32_false_true=[0, 1])
    with model(tmp_path, max_batch_size=0, control_input=[start], state=[STATE]) as loaded_model:
        run(loaded_model, lambda batch: seen.update(batch.inputs), header(1, START))
    assert {name: array.shape for name, array in seen.items()} == {"INPUT0": (1,), "START": (1,), "S_IN": (1,)}


def test_rows_of_slots_without_a_request_are_null_and_their_outputs_go_nowhere(tmp_path: Path) -> None:
    def each(batch: Batch) -> None:
        assert (batch.rows, len(batch.requests)) == (4, 4)
        assert [request.ready for request in batch.requests] == [False, True, False, True]
        for request in batch.requests:
            request.respond({"OUTPUT0": request.input("INPUT0") * 10})

    with model(tmp_path, direct={}) as loaded_model:
        headers = [header(1, START, slot=1), header(2, START, slot=3)]
        _, whole = run(
            loaded_model, lambda batch: batch.respond({"OUTPUT0": np.arange(4, dtype=np.int32)[:, None]}), *headers
        )
        assert batched(loaded_model, whole) == {"OUTPUT0": [1, 3]}
        _, single = run(loaded_model, each, *headers)
        assert [(answer.request, answer.error) for answer in single.responses] == [(0, None), (1, None)]
        _, wrong = run(loaded_model, lambda batch: batch.respond({"OUTPUT0": np.ones((2, 1), np.int32)}), *headers)
        assert all("expected a first dimension of 4" in answer.error.message for answer in wrong.responses)


def test_a_state_goes_on_to_the_next_request_of_its_sequence_alone(tmp_path: Path) -> None:
    with model(tmp_path, state=[STATE]) as loaded_model:
        steps = [
            ([header(1, START), header(2, START)], [10, 20], [10, 20]),
            ([header(2), header(1)], [20, 10], [40, 20]),
            ([header(1, END)], [10], [30]),
            ([header(3, START), header(2)], [7, 20], [7, 60]),
        ]
        for headers, values, expected in steps:
            _, responses = run(loaded_model, accumulate, *headers, values=values)
            assert batched(loaded_model, responses) == {"OUTPUT0": expected}


def test_a_state_is_seen_by_clients_only_where_it_is_an_output_too(tmp_path: Path) -> None:
    with model(tmp_path, shown=True, state=[STATE]) as loaded_model:
        _, responses = run(loaded_model, accumulate, header(1, START))
        assert batched(loaded_model, responses) == {"OUTPUT0": [1], "S_OUT": [1]}
        batch, responses = run(loaded_model, accumulate, header(1), wanted=("OUTPUT0",))
        assert batch.wanted == ("OUTPUT0", "S_OUT"), "the model has to give its state, whoever asks for what"
        assert batched(loaded_model, responses) == {"OUTPUT0": [2]}


def test_a_request_that_fails_leaves_the_state_as_it_was(tmp_path: Path) -> None:
    def fail_first(batch: Batch) -> None:
        batch.requests[0].fail(invalid("planned"))
        accumulate(batch)

    def fail_all(batch: Batch) -> None:
        accumulate(batch)
        raise invalid("never sent")

    with model(tmp_path, state=[STATE]) as loaded_model:
        run(loaded_model, accumulate, header(1, START), header(2, START), values=[5, 6])
        run(loaded_model, fail_first, header(1), header(2), values=[5, 6])
        _, responses = run(loaded_model, accumulate, header(1), header(2), values=[5, 6])
        assert batched(loaded_model, responses) == {"OUTPUT0": [10, 18]}


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ({}, "gave no output 'S_OUT'"),
        ({"S_OUT": np.ones((1, 2), np.int32)}, "rows of shape [2], expected [1]"),
        ({"S_OUT": np.ones((1, 1), np.int64)}, "datatype INT64, expected INT32"),
    ],
)
def test_a_state_that_is_missing_or_of_another_kind_fails_the_request(
    tmp_path: Path, outputs: dict[str, np.ndarray], text: str
) -> None:
    with model(tmp_path, state=[STATE]) as loaded_model:
        _, responses = run(
            loaded_model,
            lambda batch: batch.respond({"OUTPUT0": np.ones((1, 1), np.int32), **outputs}),
            header(1, START),
        )
        (answer,) = responses.responses
        assert answer.error.code == ErrorCode.INTERNAL.value
        assert text in answer.error.message


def test_nothing_is_kept_of_sequences_that_are_over(tmp_path: Path) -> None:
    states = SequenceStates(config(state=[STATE]), tmp_path)
    opened = [states.open(header(number, START, slot=number, correlation_id="x"), 3) for number in range(1, 4)]
    assert len(states) == len(opened) == 3
    assert states.end([2, 9]) == [EndedSequence(3, 2, "x")]
    assert states.end([2]) == []
    with model(tmp_path, state=[STATE]) as loaded_model:
        memory = loaded_model._memory.sequences
        assert memory is not None
        run(loaded_model, accumulate, header(1, START), header(2, START | END))
        assert len(memory) == 1
        run(loaded_model, lambda batch: batch.requests[0].fail(invalid("planned")), header(1, END))
        assert len(memory) == 0


def test_states_of_varying_shape_tell_by_a_key_which_may_share_a_batch(tmp_path: Path) -> None:
    def grow(batch: Batch) -> None:
        grown = np.concatenate([batch.inputs["S_IN"], batch.inputs["INPUT0"]], 1)
        batch.respond({"OUTPUT0": batch.inputs["INPUT0"], "S_OUT": grown})

    with model(tmp_path, state=[{**STATE, "dims": [-1]}]) as loaded_model:
        _, first = run(loaded_model, grow, header(1, START), header(2, START))
        _, second = run(loaded_model, grow, header(1))
        _, third = run(loaded_model, grow, header(2))
        assert first.states[0][1] == first.states[1][1] != 0
        assert second.states[0][1] == third.states[0][1] != first.states[0][1]
        _, mixed = run(loaded_model, grow, header(1), header(3, START))
        assert all("unequal shapes" in answer.error.message for answer in mixed.responses)


@pytest.mark.parametrize("batches", [True, False])
def test_an_initial_state_comes_from_zeros_or_a_file(tmp_path: Path, *, batches: bool) -> None:
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "ten").write_bytes(np.array([10], np.int32).tobytes())
    (tmp_path / "initial_state" / "texts").write_bytes(encode_bytes([b"a", b"bc"]))
    first = {"name": "i", "data_type": "TYPE_INT32", "dims": [1], "data_file": "ten"}
    text = {"name": "t", "data_type": "TYPE_STRING", "dims": [2], "data_file": "texts"}
    none = {"name": "z", "data_type": "TYPE_FP32", "dims": [2], "zero_data": True}
    states = [
        {**STATE, "initial_state": [first]},
        {"input_name": "T_IN", "output_name": "T", "data_type": "TYPE_STRING", "dims": [2], "initial_state": [text]},
        {"input_name": "Z_IN", "output_name": "Z", "data_type": "TYPE_FP32", "dims": [-1], "initial_state": [none]},
        {"input_name": "B_IN", "output_name": "B", "data_type": "TYPE_BF16", "dims": [1]},
    ]
    seen: dict[str, np.ndarray] = {}

    def turn(batch: Batch) -> None:
        seen.update(batch.inputs)
        texts = np.array(["x", "ü"], object).reshape(batch.inputs["T_IN"].shape)
        kept = {"S_OUT": seen["S_IN"] + 1, "T": texts, "Z": seen["Z_IN"], "B": seen["B_IN"] + np.uint16(7)}
        batch.respond({"OUTPUT0": batch.inputs["INPUT0"], **kept})

    with model(tmp_path, max_batch_size=4 if batches else 0, state=states) as loaded_model:
        run(loaded_model, turn, header(1, START))
        flat = {name: array.reshape(-1).tolist() for name, array in seen.items()}
        assert flat == {"INPUT0": [1], "S_IN": [10], "T_IN": [b"a", b"bc"], "Z_IN": [0, 0], "B_IN": [0]}
        run(loaded_model, turn, header(1))
        assert seen["S_IN"].reshape(-1).tolist() == [11]
        assert seen["T_IN"].reshape(-1).tolist() == [b"x", "ü".encode()]
        assert seen["B_IN"].reshape(-1).tolist() == [7]


@pytest.mark.parametrize(
    ("name", "text"),
    [("short", "has 3 bytes, a state of shape [1] has 4"), ("none", "cannot be read"), ("../out", "lies outside")],
)
def test_a_file_that_is_no_initial_state_fails_the_load(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "short").write_bytes(b"123")
    (tmp_path / "out").write_bytes(b"1234")
    initial = {"name": "i", "data_type": "TYPE_INT32", "dims": [1], "data_file": name}
    with pytest.raises(InferError, match=r".") as caught:
        SequenceStates(config(state=[{**STATE, "initial_state": [initial]}]), tmp_path)
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert text in caught.value.message


def test_a_request_of_no_sequence_gets_controls_and_leaves_nothing(tmp_path: Path) -> None:
    """Warm-up requests are such."""
    with model(tmp_path, state=[STATE], direct={}) as loaded_model:
        _, responses = run(loaded_model, accumulate, RequestHeader(1), RequestHeader(1))
        assert batched(loaded_model, responses) == {"OUTPUT0": [1, 2]}
        memory = loaded_model._memory.sequences
        assert memory is not None
        assert len(memory) == 0


def test_a_rescheduled_request_keeps_the_state_that_it_gives(tmp_path: Path) -> None:
    def again(batch: Batch) -> None:
        (request,) = batch.requests
        request.reschedule({"S_OUT": request.input("S_IN") + 5})

    with model(tmp_path, state=[STATE]) as loaded_model:
        _, responses = run(loaded_model, again, header(1, START))
        assert [(answer.reschedule, answer.error) for answer in responses.responses] == [(True, None)]
        _, responses = run(loaded_model, accumulate, header(1))
        assert batched(loaded_model, responses) == {"OUTPUT0": [6]}


def test_a_decoupled_model_keeps_the_last_state_that_it_sent(tmp_path: Path) -> None:
    def twice(batch: Batch) -> None:
        (request,) = batch.requests
        state = request.input("S_IN")
        request.send({"OUTPUT0": state, "S_OUT": state + 1})
        request.send({"OUTPUT0": state, "S_OUT": state + 2})
        request.send({"OUTPUT0": state}, final=True)

    sent: list[int] = []
    with model(tmp_path, decoupled=True, state=[STATE]) as loaded_model:
        for number in range(3):
            assert isinstance(loaded_model.backend, Scripted)
            loaded_model.backend.script = twice  # type: ignore[method-assign]
            batch = loaded_model.batch([loaded_model.case.inputs], headers=[header(1, 0 if number else START)])
            loaded_model.execute(batch)
            (answers,) = loaded_model.streams.so_far(batch)
            assert all(set(answer.outputs) == {"OUTPUT0"} for answer in answers)
            sent.append(answers[0].outputs["OUTPUT0"].item())
    assert sent == [0, 2, 4]


def test_a_decoupled_model_answers_null_rows_into_nothing(tmp_path: Path) -> None:
    def all_rows(batch: Batch) -> None:
        assert batch.rows == 3
        batch.respond({"OUTPUT0": np.arange(3, dtype=np.int32)[:, None]})

    with model(tmp_path, decoupled=True, direct={}) as loaded_model:
        assert isinstance(loaded_model.backend, Scripted)
        loaded_model.backend.script = all_rows  # type: ignore[method-assign]
        batch = loaded_model.batch([loaded_model.case.inputs], headers=[header(1, START, slot=2)])
        loaded_model.execute(batch)
        (answer,) = loaded_model.streams.so_far(batch)[0]
        assert answer.outputs["OUTPUT0"].tolist() == [[2]]
