"""The `data` of a tensor in JSON: every form of it, and every element that does not fit."""

from __future__ import annotations

import math

import numpy as np
import pytest

from headrace_protocol import datatype as dt
from http_bodies import decode, packed, refusal, tensor


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("BOOL", [True, False, True]),
        ("UINT8", [0, 255]),
        ("UINT16", [0, 65535]),
        ("UINT32", [0, 4294967295]),
        ("UINT64", [0, 18446744073709551615, 9007199254740993]),
        ("INT8", [-128, 127]),
        ("INT16", [-32768, 32767]),
        ("INT32", [-2147483648, 2147483647]),
        ("INT64", [-9223372036854775808, 9223372036854775807, 9007199254740993]),
        ("FP32", [0.5, -1, 3.4028234663852886e38]),
        ("FP64", [1e-300, 1.7976931348623157e308, 7]),
    ],
)
def test_numbers_keep_every_digit(datatype, values):
    expected = np.array(values, dtype=dt.BY_NAME[datatype].numpy).tobytes()
    assert packed(datatype, [len(values)], values) == expected


@pytest.mark.parametrize(
    ("datatype", "value", "words"),
    [
        ("UINT8", 257, "0 and 255 for UINT8, got 257"),
        ("INT8", -129, "-128 and 127 for INT8, got -129"),
        ("UINT64", -1, "for UINT64, got -1"),
        ("UINT64", 18446744073709551616, "got 18446744073709551616"),
        ("INT64", 9223372036854775808, "got 9223372036854775808"),
        ("INT32", 1.5, "for INT32, got 1.5"),
        ("INT32", 1.0, "for INT32, got 1.0"),
        ("INT32", True, "got true"),
        ("INT32", "1", "got '1'"),
        ("INT32", None, "got null"),
        ("BOOL", 2, "expected true or false for BOOL, got 2"),
        ("BOOL", 0, "expected true or false for BOOL, got 0"),
        ("FP32", "x", "expected a number for FP32, got 'x'"),
        ("FP32", 1e39, "too large for FP32"),
        ("FP32", False, "got false"),
        ("FP64", {}, "got an object"),
        ("BYTES", 5, "expected a string for BYTES, got 5"),
        ("BYTES", {"b64": "AA=="}, "got an object"),
    ],
)
def test_an_element_that_does_not_fit_is_named_with_its_index(datatype, value, words):
    good: object = {"BOOL": True, "BYTES": "s"}.get(datatype, 1)
    message = refusal(tensor(datatype, [3], [good, good, value]))
    assert "input 'X': data[2]" in message
    assert words in message


@pytest.mark.parametrize("text", ["1e400", "-1e400", "1" * 5000])
@pytest.mark.parametrize("datatype", ["FP64", "INT64"])
def test_a_number_beyond_every_datatype_is_refused(text, datatype):
    assert "input 'X'" in refusal(
        '{"inputs":[{"name":"X","shape":[1],"datatype":"%s","data":[1e9]}]}'.replace("%s", datatype).replace(
            "1e9", text
        )
    )


@pytest.mark.parametrize("data", [[1, 2, 3, 4], [[1, 2], [3, 4]], [[[1], [2]], [[3], [4]]], [[1], 2, [3, [4]]]])
@pytest.mark.parametrize("datatype", ["INT32", "FP32"])
def test_nested_data_is_read_in_row_major_order(data, datatype):
    assert packed(datatype, [2, 2], data) == np.array([1, 2, 3, 4], dt.BY_NAME[datatype].numpy).tobytes()


def test_nested_strings_keep_brackets_quotes_and_escapes():
    values = ["a[", ']"', "\\", "\u00e9\0", "", "한글 \U0001f600"]
    wire = packed("BYTES", [2, 3], [values[:3], values[3:]])
    assert dt.decode_bytes(wire, 6) == [value.encode() for value in values]
    assert packed("BYTES", [6], values) == wire


def test_layout_between_numbers_does_not_matter():
    body = '{"inputs":[{"name":"X","shape":[2,2],"datatype":"INT8","data": [\n [ 1 ,\t2 ],\r\n[3,4 ] ] }]}'
    request, _ = decode(body)
    assert bytes(request.inputs[0].data) == b"\1\2\3\4"


@pytest.mark.parametrize("datatype", sorted(set(dt.BY_NAME) - {"FP16", "BF16"}))
@pytest.mark.parametrize(("shape", "data"), [([0], []), ([2, 0], []), ([2, 0], [[], []]), ([0, 3], [[]])])
def test_tensors_without_elements_are_good(datatype, shape, data):
    assert packed(datatype, shape, data) == b""


def test_empty_arrays_among_numbers_hold_no_element():
    assert packed("INT8", [3], [[], [1], [[]], [2, 3], []]) == b"\1\2\3"


@pytest.mark.parametrize("datatype", ["INT32", "FP32", "BOOL", "BYTES"])
@pytest.mark.parametrize("got", [0, 1, 3, 4, 30])
def test_a_count_that_differs_from_the_shape_is_refused(datatype, got):
    element: object = {"BOOL": True, "BYTES": "s"}.get(datatype, 1)
    message = refusal(tensor(datatype, [2, 1], [element] * got))
    assert "input 'X': shape [2, 1] takes 2 elements" in message


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_precision_in_json_is_refused_with_advice(datatype):
    message = refusal(tensor(datatype, [1], [0.5]))
    assert datatype in message
    assert "binary" in message


@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
def test_nan_and_infinities_are_read_as_bare_tokens(datatype):
    body = '{"id":"NaN","inputs":[{"name":"X","shape":[2,2],"datatype":"%s","data":[[NaN,Infinity],[-Infinity,1]]}]}'
    request, form = decode(body % datatype)
    values = np.frombuffer(request.inputs[0].data, dt.BY_NAME[datatype].numpy).tolist()
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf, 1.0]
    assert form.id == "NaN"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"inputs":[{"name":"X","shape":[1],"datatype":"INT32","data":[NaN]}]}', "data[0]"),
        ('{"inputs":[{"name":"X","shape":[1],"datatype":"BYTES","data":[Infinity]}]}', "data[0]"),
        ('{"inputs":[{"name":"X","shape":[NaN],"datatype":"INT32","data":[1]}]}', "inputs[0].shape[0]"),
        ('{"id":NaN,"inputs":[]}', "id"),
        ('{"parameters":{"p":-Infinity},"inputs":[]}', "'p'"),
    ],
)
def test_nan_anywhere_else_is_of_a_wrong_kind(body, words):
    assert words in refusal(body)


def test_a_string_that_holds_nan_stays_a_string_beside_a_bare_token():
    body = (
        '{"inputs":[{"name":"X","shape":[1],"datatype":"FP32","data":[NaN]},'
        '{"name":"Y","shape":[2],"datatype":"BYTES","data":["NaN","\\"Infinity"]}]}'
    )
    request, _ = decode(body)
    assert dt.decode_bytes(request.inputs[1].data, 2) == [b"NaN", b'"Infinity']
