"""Tensors made for each batch: what a backend sees of batch_input, ragged inputs and scattered outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace_backends.api import ModelDescription
from headrace_backends.batch import Batch
from headrace_backends.execution import model_memory
from headrace_protocol.arena import Arena
from headrace_protocol.datatype import Array
from headrace_protocol.errors import InferError
from headrace_protocol.messages import Execute, RequestHeader
from headrace_protocol.tensor import Tensor, TensorRef

SHAPES = ((1, 3), (2, 1))
FLAT = (5,)


def opened(
    shape: tuple[int, ...], item_shapes: tuple[tuple[int, ...], ...] | None, rows: tuple[int, ...], **config: Any
) -> Batch:
    arena = Arena.create(1 << 16)
    values = np.arange(int(np.prod(shape)), dtype=np.float32)
    arena.view[: values.nbytes] = values.tobytes()
    memory = model_memory(arena, {"max_batch_size": 8, **config}, ModelDescription())
    given = Tensor("X", "FP32", shape, TensorRef(0, values.nbytes), item_shapes)
    headers = tuple(RequestHeader(count) for count in rows)
    batch = Batch(Execute(1, 0, (given,), headers, None, TensorRef(4096, 4096)), memory)
    batch.open_inputs()
    return batch


def made(kind: str, data_type: str = "TYPE_INT32") -> dict[str, Any]:
    entry = {"kind": kind, "target_name": ["T", "T2"], "data_type": data_type, "source_input": ["X"]}
    return {"batch_input": [entry]}


KINDS = [
    ("BATCH_ELEMENT_COUNT", [3, 2]),
    ("BATCH_ACCUMULATED_ELEMENT_COUNT", [3, 5]),
    ("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", [0, 3, 5]),
    ("BATCH_ITEM_SHAPE", [[3], [1], [1]]),
    ("BATCH_ITEM_SHAPE_FLATTEN", [3, 1, 1]),
]


@pytest.mark.parametrize("data_type", ["TYPE_INT32", "TYPE_FP32"])
@pytest.mark.parametrize(("kind", "values"), KINDS)
def test_each_kind_of_batch_input_tells_of_the_ragged_input(kind: str, values: Any, data_type: str) -> None:
    batch = opened(FLAT, SHAPES, (1, 2), **made(kind, data_type))
    assert batch.inputs["T"].tolist() == values
    assert batch.inputs["T2"].dtype == (np.int32 if data_type == "TYPE_INT32" else np.float32)
    assert set(batch.inputs) == {"X", "T", "T2"}


def test_the_largest_count_is_told_by_a_shape() -> None:
    assert opened(FLAT, SHAPES, (1, 2), **made("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE")).inputs["T"].shape == (3,)


def test_an_input_of_equal_shapes_may_be_told_of_too() -> None:
    batch = opened((3, 4), None, (1, 2), **made("BATCH_ITEM_SHAPE"))
    assert batch.inputs["T"].tolist() == [[4], [4], [4]]
    assert opened((3, 4), None, (1, 2), **made("BATCH_ELEMENT_COUNT")).inputs["T"].tolist() == [4, 8]


def test_a_padded_input_is_told_as_it_was_before() -> None:
    batch = opened((2, 4), ((1, 3), (1, 4)), (1, 1), **made("BATCH_ITEM_SHAPE_FLATTEN"))
    assert batch.inputs["T"].tolist() == [3, 4]
    assert batch.item_shapes == {}, "it is not ragged: each request has its row"
    assert batch.requests[0].input("X").tolist() == [[0, 1, 2, 3]]


def test_a_request_sees_its_own_part_of_a_ragged_input_and_all_that_was_made() -> None:
    batch = opened(FLAT, SHAPES, (1, 2), **made("BATCH_ELEMENT_COUNT"))
    parts: list[Array] = [request.input("X") for request in batch.requests]
    assert [part.tolist() for part in parts] == [[[0, 1, 2]], [[3], [4]]]
    assert batch.requests[1].input("T").tolist() == [3, 2]
    assert opened((3,), ((1, 3),), (1,)).requests[0].input("X").shape == (1, 3), "also alone in its batch"


SCATTERED = {"batch_output": [{"target_name": ["Y"], "source_input": ["X"]}]}


def test_an_output_that_the_server_shares_out_may_have_any_shape() -> None:
    batch = opened(FLAT, SHAPES, (1, 2), **SCATTERED)
    assert batch.scattered == {"Y"}
    batch.respond({"Y": np.zeros(5, np.float32)})
    responses, _ = batch.finish(None)
    assert responses is not None
    assert responses.batched is not None
    assert responses.batched[0].shape == (5,)


def test_of_a_request_alone_it_may_too() -> None:
    batch = opened(FLAT, SHAPES, (1, 2), **SCATTERED)
    batch.requests[1].respond({"Y": np.zeros(2, np.float32)})
    with pytest.raises(InferError, match="expected a first dimension of 1"):
        batch.requests[0].respond({"Z": np.zeros((2, 1), np.float32)})


def test_a_request_that_is_run_alone_has_the_inputs_that_a_batch_of_its_own_would_have() -> None:
    batch = opened(FLAT, SHAPES, (1, 2), **made("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO"))
    alone = [request.alone() for request in batch.requests]
    assert [inputs["X"].tolist() for inputs in alone] == [[0, 1, 2], [3, 4]]
    assert [inputs["T"].tolist() for inputs in alone] == [[0, 3], [0, 2]]
    plain = opened((3, 4), None, (1, 2), **made("BATCH_ITEM_SHAPE")).requests[1].alone()
    assert plain["X"].shape == (2, 4)
    assert plain["T"].tolist() == [[4], [4]]
