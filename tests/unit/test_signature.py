"""Requests are checked against the model once, and each misuse is named."""

from __future__ import annotations

import numpy as np
import pytest

from configs import model, tensor
from headrace.instances.signature import ModelSignature
from headrace.types import InferenceRequest, InputTensor, RequestedOutput
from headrace_protocol.datatype import BY_NAME, encode_bytes
from headrace_protocol.errors import ErrorCode, InferError
from headrace_protocol.tensor import Tensor, TensorRef

ADD_SUB = model(
    [tensor("A", "INT32", 4), tensor("B", "INT32", 4)], [tensor("S", "INT32", 4), tensor("D", "INT32", 4)], 8
)


def request(*inputs: InputTensor, outputs: list[str] | None = None) -> InferenceRequest:
    made = InferenceRequest("m")
    made.inputs = list(inputs)
    made.outputs = None if outputs is None else [RequestedOutput(name) for name in outputs]
    return made


def given(name: str, shape: tuple[int, ...], datatype: str = "INT32", data: bytes | None = None) -> InputTensor:
    if data is None:
        data = bytes(int(np.prod([abs(dim) for dim in shape])) * BY_NAME[datatype].itemsize)
    return InputTensor(name, BY_NAME[datatype], shape, data)


def test_a_good_request_is_ordered_as_the_model_is_and_counts_its_rows() -> None:
    prepared = ModelSignature(ADD_SUB, 1).prepare(request(given("B", (3, 4)), given("A", (3, 4))))
    assert [t.name for t in prepared.inputs if t] == ["A", "B"]
    assert (prepared.rows, prepared.shape_key, prepared.wanted) == (3, None, None)


@pytest.mark.parametrize(
    ("inputs", "outputs", "words"),
    [
        ([given("A", (1, 4))], None, "'B'"),
        ([given("A", (1, 4)), given("B", (1, 4)), given("C", (1, 4))], None, "no input 'C'"),
        ([given("A", (1, 4)), given("A", (1, 4))], None, "'A' is given twice"),
        ([given("A", (1, 4)), given("B", (2, 4))], None, "'B' has 2"),
        ([given("A", (9, 4)), given("B", (9, 4))], None, "batch size 9 is outside 1 to 8"),
        ([given("A", (0, 4)), given("B", (0, 4))], None, "batch size 0"),
        ([given("A", ()), given("B", ())], None, "no dimensions"),
        ([given("A", (1, 4), "FP32"), given("B", (1, 4))], None, "datatype FP32"),
        ([given("A", (1, 5)), given("B", (1, 4))], None, r"shape \[1, 5\].*\[-1, 4\].*batch"),
        ([given("A", (1, 4, 1)), given("B", (1, 4))], None, r"shape \[1, 4, 1\]"),
        ([given("A", (1, -4)), given("B", (1, 4))], None, "negative dimension -4"),
        ([given("A", (1, 4), data=b"123"), given("B", (1, 4))], None, "needs 16 bytes, got 3"),
        ([given("A", (1, 4)), given("B", (1, 4))], ["X"], "no output 'X'"),
        ([given("A", (1, 4)), given("B", (1, 4))], ["S", "S"], "'S' is asked for twice"),
        ([], None, "'A', 'B'"),
    ],
)
def test_what_does_not_fit_is_the_callers_mistake_and_named(
    inputs: list[InputTensor], outputs: list[str] | None, words: str
) -> None:
    with pytest.raises(InferError, match=words) as caught:
        ModelSignature(ADD_SUB, 1).prepare(request(*inputs, outputs=outputs))
    assert caught.value.code is ErrorCode.INVALID_ARG


def test_the_request_id_stands_in_front_of_the_error() -> None:
    bad = request(given("A", (1, 4)))
    bad.id = "r7"
    with pytest.raises(InferError, match=r"^\[request id: r7\] "):
        ModelSignature(ADD_SUB, 1).prepare(bad)


def test_requests_of_unlike_shapes_have_unlike_keys() -> None:
    signature = ModelSignature(model([tensor("A", "FP32", -1)], [tensor("A2", "FP32", -1)], 8), 1)
    keys = [signature.prepare(request(given("A", (rows, n), "FP32"))).shape_key for rows, n in [(1, 3), (2, 3), (1, 4)]]
    assert keys[0] == keys[1] != keys[2]


def test_an_optional_input_may_be_left_out_but_not_all_of_them() -> None:
    config = model([tensor("A", "INT32", 4, optional=True), tensor("B", "INT32", 4, optional=True)], [], 8)
    signature = ModelSignature(config, 1)
    prepared = signature.prepare(request(given("B", (1, 4))))
    assert prepared.inputs[0] is None
    with pytest.raises(InferError, match="at least one"):
        signature.prepare(request())


@pytest.mark.parametrize("datatype", ["FP32", "BYTES"])
def test_dimensions_beside_a_zero_are_bounded_for_no_byte_is_sent_for_them(datatype: str) -> None:
    rank_3 = ModelSignature(model([tensor("A", datatype, -1, -1, -1)], [tensor("S", datatype, -1)]), 1)
    assert rank_3.prepare(request(given("A", (2**20, 0, 2**20), datatype, b""))).rows == 1
    with pytest.raises(InferError, match="'A' has no elements.*above 1099511627776") as caught:
        rank_3.prepare(request(given("A", (2**20, 0, 2**20 + 1), datatype, b"")))
    assert caught.value.code is ErrorCode.INVALID_ARG


def test_strings_are_counted() -> None:
    signature = ModelSignature(model([tensor("A", "BYTES", -1)], []), 1)
    signature.prepare(request(given("A", (2,), "BYTES", encode_bytes([b"a", b""]))))
    with pytest.raises(InferError, match="input 'A': expected 3 string elements, got 2"):
        signature.prepare(request(given("A", (3,), "BYTES", encode_bytes([b"a", b""]))))


def test_a_raw_body_becomes_the_only_input_with_its_one_varying_dimension() -> None:
    signature = ModelSignature(model([tensor("A", "FP32", 2, -1)], [], 4), 1)
    raw = InferenceRequest("m")
    raw.raw_body = bytes(24)
    assert signature.prepare(raw).inputs[0].shape == (1, 2, 3)
    raw.raw_body = bytes(20)
    with pytest.raises(InferError, match="20 bytes does not fill"):
        signature.prepare(raw)


def test_a_raw_string_gets_its_length() -> None:
    signature = ModelSignature(model([tensor("A", "BYTES", 1)], []), 1)
    raw = InferenceRequest("m")
    raw.raw_body = b"hello"
    assert bytes(signature.prepare(raw).inputs[0].data) == encode_bytes([b"hello"])


def test_reshape_changes_what_the_backend_sees_and_back() -> None:
    config = model([tensor("A", "FP32", 1, reshape=())], [tensor("O", "FP32", 1, reshape=())], 8)
    signature = ModelSignature(config, 1)
    assert signature.inputs[0].backend_shape((5, 1), 5) == (5,)
    answer = Tensor("O", "FP32", (5,), TensorRef(0, 20))
    assert signature.outputs[0].client_shape(answer, 5) == (5, 1)


def test_varying_dimensions_keep_their_order_through_reshape() -> None:
    config = model([tensor("A", "FP32", -1, 2, -1, reshape=(2, -1, -1))], [], 0)
    assert ModelSignature(config, 1).inputs[0].backend_shape((3, 2, 5), 1) == (2, 3, 5)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Tensor("S", "FP32", (2, 4), TensorRef(0, 32)), "datatype FP32.*INT32"),
        (Tensor("S", "INT32", (2, 5), TensorRef(0, 40)), r"shape \[2, 5\].*\[-1, 4\]"),
        (Tensor("S", "INT32", (3, 4), TensorRef(0, 48)), "expected 2 rows"),
        (Tensor("S", "INT32", (), TensorRef(0, 4)), "expected 2 rows"),
    ],
)
def test_an_answer_that_breaks_the_configuration_is_the_models_fault(answer: Tensor, words: str) -> None:
    with pytest.raises(InferError, match=words) as caught:
        ModelSignature(ADD_SUB, 1).output(answer).client_shape(answer, 2)
    assert caught.value.code is ErrorCode.INTERNAL


SCALARS = [tensor("A", "INT32", 1, reshape=())], [tensor("S", "INT32", 1, reshape=())]


@pytest.mark.parametrize("max_batch_size", [0, 4])
@pytest.mark.parametrize("dims", [(), (1,)])
def test_a_scalar_may_come_without_the_dimension_that_the_configuration_must_give_it(
    max_batch_size: int, dims: tuple[int, ...]
) -> None:
    signature = ModelSignature(model(*SCALARS, max_batch_size), 1)
    batch = (3,) if max_batch_size else ()
    prepared = signature.prepare(request(given("A", (*batch, *dims))))
    (sent,) = prepared.inputs
    assert sent is not None
    assert signature.inputs[0].backend_shape(sent.shape, prepared.rows) == batch


@pytest.mark.parametrize("shape", [(2,), (1, 1)])
def test_a_scalar_has_one_element_in_at_most_one_dimension(shape: tuple[int, ...]) -> None:
    with pytest.raises(InferError, match=r"shape .*expects \[1\]"):
        ModelSignature(model(*SCALARS), 1).prepare(request(given("A", shape)))
