"""The body of an infer answer."""

from __future__ import annotations

import json
import math
import struct

import numpy as np
import pytest

from headrace.gateway.http.request_codec import ResponseForm
from headrace.gateway.http.response_codec import encode_response
from headrace.types import InferenceResponse, OutputTensor
from headrace_protocol import datatype as dt
from headrace_protocol.errors import ErrorCode, InferError


def answer(outputs: list[OutputTensor], form: ResponseForm | None = None, parameters=None) -> tuple[bytes, int | None]:
    return encode_response(InferenceResponse("m", 3, outputs, parameters), form or ResponseForm())


def test_what_the_client_did_not_send_is_not_in_the_answer():
    body, json_size = answer([])
    assert json_size is None
    assert json.loads(body) == {"model_name": "m", "model_version": "3", "outputs": []}


@pytest.mark.parametrize("identifier", ["", "é-1", 'quote " and \n'])
def test_an_id_comes_back_exactly(identifier):
    form = ResponseForm()
    form.id = identifier
    assert json.loads(answer([], form)[0])["id"] == identifier


@pytest.mark.parametrize("datatype", sorted(set(dt.BY_NAME) - {"FP16", "BF16", "BYTES"}))
def test_json_answers_are_flat_and_exact(datatype):
    array = np.array([[0, 1], [1, 0]], dt.BY_NAME[datatype].numpy)
    if array.dtype.kind in "iu":
        array[0] = np.iinfo(array.dtype).min, np.iinfo(array.dtype).max
    body, _ = answer([OutputTensor("O", dt.BY_NAME[datatype], (2, 2), array.tobytes())])
    output = json.loads(body)["outputs"][0]
    assert output == {"name": "O", "datatype": datatype, "shape": [2, 2], "data": array.reshape(-1).tolist()}


def test_nan_and_infinities_are_written_as_bare_tokens():
    body, _ = answer([OutputTensor("O", dt.FP32, (3,), struct.pack("<3f", math.nan, math.inf, -math.inf))])
    assert b'"data":[NaN,Infinity,-Infinity]' in body


def test_text_that_is_not_utf8_is_refused_with_advice():
    with pytest.raises(InferError, match="output 'O'.*binary_data") as caught:
        answer([OutputTensor("O", dt.BYTES, (1,), dt.encode_bytes([b"\xff"]))])
    assert caught.value.code is ErrorCode.INVALID_ARG


@pytest.mark.parametrize("datatype", [dt.FP16, dt.BF16])
def test_half_precision_asked_for_as_json_is_refused_with_advice(datatype):
    with pytest.raises(InferError, match=f"output 'O'.*{datatype.name}.*binary_data"):
        answer([OutputTensor("O", datatype, (1,), b"\0\0")])


def test_binary_outputs_follow_the_json_in_order():
    form = ResponseForm()
    form.binary = {"B": True, "J": False, "A": True}
    outputs = [
        OutputTensor("A", dt.UINT8, (2,), b"aa"),
        OutputTensor("J", dt.UINT8, (1,), b"\7"),
        OutputTensor("B", dt.FP32, (1,), memoryview(np.ones(1, np.float32))),
    ]
    body, json_size = answer(outputs, form)
    head = json.loads(body[:json_size])
    assert [(o["name"], o.get("parameters"), o.get("data")) for o in head["outputs"]] == [
        ("A", {"binary_data_size": 2}, None),
        ("J", None, [7]),
        ("B", {"binary_data_size": 4}, None),
    ]
    assert body[json_size:] == b"aa" + struct.pack("<f", 1)


def test_binary_outputs_that_are_all_empty_leave_plain_json():
    form = ResponseForm()
    form.binary_by_default = True
    body, json_size = answer([OutputTensor("A", dt.FP32, (0,), b"")], form)
    assert json_size is None
    assert json.loads(body)["outputs"][0]["parameters"] == {"binary_data_size": 0}


def test_parameters_of_the_response_are_written():
    assert json.loads(answer([], parameters={"a": 1, "b": "x"})[0])["parameters"] == {"a": 1, "b": "x"}
