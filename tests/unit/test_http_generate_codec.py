"""Bodies of generate: which member becomes a tensor, which a parameter, and what an answer holds."""

from __future__ import annotations

import json

import numpy as np
import pytest

from headrace.gateway.http.errors import HttpError
from headrace.gateway.http.generate_codec import decode_generate, encode_generated
from headrace.types import SEQUENCE_START, InferenceRequest, InferenceResponse, OutputTensor, TensorMetadata
from headrace_protocol import datatype as dt
from headrace_protocol.errors import ErrorCode, InferError

LLM = (TensorMetadata("text_input", "BYTES", (-1, 1)), TensorMetadata("stream", "BOOL", (-1, 1)))
LIMIT = 1 << 20


def decode(body: object, inputs: tuple[TensorMetadata, ...] = LLM, limit: int = LIMIT):
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = InferenceRequest("m")
    return request, decode_generate(request, text, inputs, limit)


def refusal(body: object, inputs: tuple[TensorMetadata, ...] = LLM) -> str:
    with pytest.raises(InferError) as caught:
        decode(body, inputs)
    assert caught.value.code is ErrorCode.INVALID_ARG
    return caught.value.message


def one(datatype: str, shape: tuple[int, ...], value: object):
    request, _ = decode({"x": value}, (TensorMetadata("x", datatype, shape),))
    (tensor,) = request.inputs
    return tensor


# --- members ------------------------------------------------------------------------------------------------------


def test_members_become_inputs_id_and_parameters():
    request, identifier = decode(
        {"text_input": "hé", "stream": False, "id": "7", "max_tokens": 5, "stop": "x", "t": 0.5}
    )
    assert [(t.name, t.shape, bytes(t.data)) for t in request.inputs] == [
        ("text_input", (1, 1), b"\3\0\0\0h\xc3\xa9"),
        ("stream", (1, 1), b"\0"),
    ]
    assert (request.id, identifier) == ("7", "7")
    assert request.parameters == {"max_tokens": 5, "stop": "x", "t": 0.5}
    assert request.outputs is None


def test_members_of_parameters_are_read_as_those_of_the_object():
    request, _ = decode({"parameters": {"text_input": "a", "top_k": 3, "id": "no"}, "stream": True})
    assert sorted(t.name for t in request.inputs) == ["stream", "text_input"]
    assert request.parameters == {"top_k": 3, "id": "no"}
    assert request.id == ""


def test_an_id_is_absent_or_comes_back_exactly():
    assert decode({})[1] is decode({"id": None})[1] is None
    assert decode({"id": ""})[1] == ""
    assert "'id': expected a string, got 5" in refusal({"id": 5})


def test_an_input_named_id_is_the_id_too():
    request, identifier = decode({"id": "a"}, (TensorMetadata("id", "BYTES", (1,)),))
    assert (identifier, bytes(request.inputs[0].data)) == ("a", b"\1\0\0\0a")


def test_reserved_parameters_have_their_meaning():
    request, _ = decode({"priority": 2, "timeout": 9, "sequence_id": "s", "parameters": {"sequence_start": True}})
    assert (request.priority, request.timeout_us, request.correlation_id) == (2, 9, "s")
    assert request.flags == SEQUENCE_START
    assert request.parameters is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "the request is not valid JSON"),
        (b"{", "the request is not valid JSON"),
        (b"[]", "the request: expected 'object', got 'array'"),
        (b"null", "the request: expected 'object', got 'null'"),
        (b"[" * 500_000, "nested deeper"),
        (b'{"text_input":' + b"[" * 101 + b"]" * 101 + b"}", "nested deeper"),
        ({"parameters": []}, "'parameters': expected 'object', got 'array'"),
        ({"parameters": "x"}, "'parameters': expected 'object', got 'str'"),
        ({"parameters": {"parameters": {}}}, "'parameters': expected a string, a boolean"),
        ({"extra": {}}, "'extra': expected a string, a boolean"),
        ({"extra": [1]}, "'extra': expected a string, a boolean"),
        ({"extra": None}, "'extra': expected a string, a boolean"),
        ({"extra": 2**64}, "'extra': expected a string, a boolean"),
        (b'{"extra":NaN}', "'extra': expected a string, a boolean"),
        ({"triton_x": 1}, "'triton_x': names that begin with 'triton_' are reserved"),
        ({"priority": -1}, "'priority': expected an integer between 0 and"),
        ({"text_input": "a", "parameters": {"text_input": "b"}}, "input 'text_input' is given twice"),
        ({"k": 1, "parameters": {"k": 2}}, "parameter 'k' is given twice"),
    ],
)
def test_a_bad_member_is_named(body, words):
    assert words in refusal(body)


def test_parameters_cannot_be_nested_where_the_model_has_an_input_of_that_name():
    inputs = (TensorMetadata("parameters", "INT32", (1,)),)
    assert "'parameters' is an input of the model" in refusal({"parameters": {}}, inputs)
    assert decode({"x": 1}, inputs)[0].parameters == {"x": 1}


def test_null_parameters_are_none():
    assert decode({"parameters": None})[0].parameters is None


# --- tensors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "value", "got"),
    [
        ((1,), 5, (1,)),
        ((-1,), 5, (1,)),
        ((-1, 1), 5, (1, 1)),
        ((-1, 1), [1, 2, 3], (3, 1)),
        ((-1, -1), [1, 2, 3], (1, 3)),
        ((-1, 4), [[1, 2, 3, 4], [5, 6, 7, 8]], (2, 4)),
        ((-1, -1, 2), [1, 2, 3, 4], (1, 2, 2)),
        ((2, -1, 3), list(range(12)), (2, 2, 3)),
        ((2, 3), [[1, 2, 3], [4, 5, 6]], (2, 3)),
        ((-1, -1), [], (1, 0)),
        ((-1,), [[], [1], [[]]], (1,)),
        ((), 5, ()),
    ],
)
@pytest.mark.parametrize("datatype", [dt.INT32, dt.FP64, dt.INT8])
def test_elements_take_the_shape_of_the_input(shape, value, got, datatype):
    tensor = one(datatype.name, shape, value)
    assert tensor.shape == got
    flat = np.array(list(flattened(value)), datatype.numpy)
    assert bytes(tensor.data) == flat.tobytes()


def flattened(value):
    if isinstance(value, list):
        for item in value:
            yield from flattened(item)
    else:
        yield value


@pytest.mark.parametrize(
    ("shape", "value", "words"),
    [
        ((2,), 5, "shape [2] takes 2 elements, got 1"),
        ((2, 3), [1, 2, 3], "takes 6 elements, got 3"),
        ((-1, 4), [1, 2, 3], "takes a multiple of 4 elements, got 3"),
        ((1,), [], "takes 1 elements, got 0"),
    ],
)
def test_a_count_that_fits_no_shape_is_refused(shape, value, words):
    said = refusal({"x": value}, (TensorMetadata("x", "INT32", shape),))
    assert "input 'x'" in said
    assert words in said


@pytest.mark.parametrize(
    ("datatype", "value", "words"),
    [
        ("BYTES", 5, "data[0]: expected a string"),
        ("BYTES", ["a", {}], "data[1]: expected a string"),
        ("BYTES", None, "data[0]: expected a string for BYTES, got null"),
        ("INT32", "5", "data[0]: expected an integer"),
        ("INT32", [1, 1.5], "data[1]: expected an integer"),
        (
            "INT32",
            [1, [2, ["a[b"]]],
            "data[2]: expected an integer between -2147483648 and 2147483647 for INT32, got 'a[b'",
        ),
        ("UINT8", [255, 256], "data[1]: expected an integer between 0 and 255"),
        ("BOOL", 1, "data[0]: expected true or false"),
        ("FP32", 1e300, "too large for FP32"),
        ("FP32", {"a": 1}, "data[0]: expected a number"),
        ("FP16", 1.0, "JSON has no form for FP16"),
        ("BF16", [1.0], "JSON has no form for BF16"),
    ],
)
def test_an_element_that_does_not_fit_is_named(datatype, value, words):
    said = refusal({"x": value}, (TensorMetadata("x", datatype, (-1,)),))
    assert said.startswith("input 'x': ")
    assert words in said


def test_nan_and_infinities_are_numbers():
    request, _ = decode(b'{"x":[NaN,-Infinity],"y":NaN}', tuple(TensorMetadata(n, "FP32", (-1,)) for n in "xy"))
    assert np.isnan(np.frombuffer(request.inputs[0].data, np.float32)).tolist() == [True, False]
    assert request.inputs[1].shape == (1,)


def test_integers_keep_every_digit():
    assert bytes(one("UINT64", (1,), 2**64 - 1).data) == b"\xff" * 8
    assert bytes(one("INT64", (1,), -(2**63)).data) == b"\0" * 7 + b"\x80"


def test_strings_keep_brackets_commas_and_nul():
    texts = ["[1,2]", "a,b", "\0", ""]
    assert dt.decode_bytes(one("BYTES", (-1,), texts).data, 4) == [text.encode() for text in texts]


@pytest.mark.parametrize(("datatype", "value"), [("FP64", [0] * 200), ("FP64", [[0]] * 200), ("BYTES", [""] * 300)])
def test_a_tensor_above_the_limit_is_refused(datatype, value):
    with pytest.raises(HttpError) as caught:
        decode({"x": value}, (TensorMetadata("x", datatype, (-1,)),), limit=1000)
    assert caught.value.status == 413
    assert "input 'x': more than 1000 bytes" in caught.value.message


# --- answers ------------------------------------------------------------------------------------------------------


def answer(outputs, parameters=None, identifier=None) -> dict:
    text = encode_generated(InferenceResponse("m", 3, outputs, parameters), identifier)
    assert b"\n" not in text
    return json.loads(text)


def test_an_answer_has_its_outputs_by_name():
    outputs = [
        OutputTensor("text", dt.BYTES, (1, 1), dt.encode_bytes([b"a\nb"])),
        OutputTensor("pair", dt.INT32, (1, 2), np.array([1, 2], np.int32).tobytes()),
        OutputTensor("truth", dt.BOOL, (), b"\1"),
        OutputTensor("nothing", dt.FP32, (0, 4), b""),
    ]
    assert answer(outputs, {"reason": "stop"}, "7") == {
        "id": "7",
        "model_name": "m",
        "model_version": "3",
        "reason": "stop",
        "text": "a\nb",
        "pair": [1, 2],
        "truth": True,
        "nothing": [],
    }


def test_an_answer_has_no_id_where_none_was_given():
    assert set(answer([])) == {"model_name", "model_version"}
    assert answer([], identifier="")["id"] == ""


def test_where_names_meet_an_output_goes_before_a_parameter_and_that_before_the_rest():
    outputs = [OutputTensor("id", dt.INT8, (1,), b"\1"), OutputTensor("a", dt.INT8, (1,), b"\2")]
    assert answer(outputs, {"a": "p", "model_name": "p"}, "x") == {
        "id": 1,
        "a": 2,
        "model_name": "p",
        "model_version": "3",
    }


def test_nan_is_written_as_a_bare_token():
    values = np.array([np.nan, np.inf], np.float32)
    assert answer([OutputTensor("x", dt.FP32, (2,), values.tobytes())])["x"][1] == float("inf")
    assert answer([OutputTensor("x", dt.FP32, (1,), values[1:].tobytes())])["x"] == float("inf")


@pytest.mark.parametrize(
    ("datatype", "data", "words"),
    [(dt.FP16, b"ab", "JSON has no form for FP16"), (dt.BYTES, b"\1\0\0\0\xff", "not all strings are UTF-8")],
)
def test_an_output_without_a_json_form_is_refused_with_advice(datatype, data, words):
    with pytest.raises(InferError, match="use infer and ask for binary data") as caught:
        answer([OutputTensor("x", datatype, (1,), data)])
    assert words in caught.value.message
