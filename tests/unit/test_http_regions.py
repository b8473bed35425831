"""Tensors in shared memory, as an infer request over HTTP names them and as its answer tells of them."""

from __future__ import annotations

import json

import pytest

from headrace.gateway.http.request_codec import ResponseForm
from headrace.gateway.http.response_codec import encode_response
from headrace.types import InferenceResponse, OutputTensor, RegionRef
from headrace_protocol import datatype as dt
from http_bodies import decode, refusal

REGION = {"shared_memory_region": "r", "shared_memory_byte_size": 16}
LARGEST = 2**63 - 1


def of_input(parameters: dict, **more: object) -> dict:
    return {"inputs": [{"name": "X", "shape": [4], "datatype": "FP32", "parameters": parameters, **more}]}


def of_output(parameters: dict) -> dict:
    return {"inputs": [], "outputs": [{"name": "O", "parameters": parameters}]}


def test_an_input_may_lie_in_a_region():
    request, _ = decode(of_input(REGION))
    (tensor,) = request.inputs
    assert (tensor.region, bytes(tensor.data), tensor.shape) == (RegionRef("r", 0, 16), b"", (4,))
    request, _ = decode(of_input(REGION | {"shared_memory_offset": 4096}))
    assert request.inputs[0].region == RegionRef("r", 4096, 16)


def test_inputs_in_the_body_and_in_regions_go_together():
    body = of_input(REGION)
    body["inputs"].append({"name": "Y", "shape": [1], "datatype": "FP32", "parameters": {"binary_data_size": 4}})
    body["inputs"].append({"name": "Z", "shape": [1], "datatype": "FP32", "data": [1]})
    text = json.dumps(body).encode()
    request, _ = decode(text + b"abcd", str(len(text)))
    assert [tensor.region is None for tensor in request.inputs] == [False, True, True]
    assert bytes(request.inputs[1].data) == b"abcd"


def test_an_output_may_go_into_a_region():
    request, form = decode(of_output(REGION | {"shared_memory_offset": LARGEST - 16, "binary_data": False}))
    assert request.outputs is not None
    (output,) = request.outputs
    assert output.region == RegionRef("r", LARGEST - 16, 16)
    assert (output.parameters, form.binary) == (None, {"O": False})


@pytest.mark.parametrize("where", [of_input, of_output])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shared_memory_region": 7}, "'shared_memory_region': expected the name of a region, got 7"),
        ({"shared_memory_region": ""}, "'shared_memory_region': expected the name of a region"),
        ({"shared_memory_byte_size": ...}, "'shared_memory_byte_size' is missing"),
        ({"shared_memory_byte_size": -1}, "'shared_memory_byte_size': expected a number of bytes between 0 and"),
        ({"shared_memory_byte_size": "16"}, "'shared_memory_byte_size': expected a number"),
        ({"shared_memory_byte_size": True}, "'shared_memory_byte_size': expected a number"),
        ({"shared_memory_byte_size": 2**63}, "'shared_memory_byte_size': expected a number"),
        ({"shared_memory_offset": -1}, "'shared_memory_offset': expected a number"),
        ({"shared_memory_offset": 1.5}, "'shared_memory_offset': expected a number"),
        ({"shared_memory_offset": 2**64 - 1}, "'shared_memory_offset': expected a number"),
        ({"shared_memory_offset": None}, "'shared_memory_offset': expected a number"),
        ({"shared_memory_offset": LARGEST}, "add up to more than"),
        ({"shared_memory_region": ...}, "say nothing without 'shared_memory_region'"),
    ],
)
def test_a_bad_range_is_named(where, change, words):
    parameters = {key: value for key, value in (REGION | change).items() if value is not ...}
    said = refusal(where(parameters))
    assert words in said
    assert said.startswith(("input 'X'", "output 'O'"))


def test_an_input_in_a_region_has_no_other_source():
    assert "'data' and 'shared_memory_region'" in refusal(of_input(REGION, data=[1, 2, 3, 4]))
    both = refusal(of_input(REGION | {"binary_data_size": 16}))
    assert "'binary_data_size' and 'shared_memory_region'" in both
    every = refusal(of_input(REGION | {"binary_data_size": 16}, data=[1]))
    assert "'data' and 'binary_data_size' and 'shared_memory_region'" in every


def test_a_range_beside_data_in_the_body_says_nothing():
    stray = {"shared_memory_offset": 0}
    for body in (of_input(stray, data=[1, 2, 3, 4]), of_input(stray | {"binary_data_size": 16})):
        assert "without 'shared_memory_region'" in refusal(body)


def test_an_output_in_a_region_is_neither_binary_nor_classified():
    assert "'shared_memory_region' and 'binary_data'" in refusal(of_output(REGION | {"binary_data": True}))
    assert "'shared_memory_region' and 'classification'" in refusal(of_output(REGION | {"classification": 2}))


def test_an_answer_tells_name_datatype_and_shape_of_what_went_into_a_region():
    outputs = [
        OutputTensor("A", dt.FP16, (2,), b"", in_region=True),
        OutputTensor("B", dt.BYTES, (1,), b"", in_region=True),
        OutputTensor("C", dt.INT8, (1,), b"\7"),
    ]
    body, header = encode_response(InferenceResponse("m", 1, outputs), ResponseForm())
    assert header is None
    assert json.loads(body)["outputs"] == [
        {"name": "A", "datatype": "FP16", "shape": [2]},
        {"name": "B", "datatype": "BYTES", "shape": [1]},
        {"name": "C", "datatype": "INT8", "shape": [1], "data": [7]},
    ]
