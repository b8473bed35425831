"""The infer codecs: every form of a tensor both ways, and every misuse with the field or the length it names."""

from __future__ import annotations

import json
import math
import struct

import numpy as np
import pytest

from headrace.gateway.http.errors import HttpError
from headrace.gateway.http.request_codec import ResponseForm, decode_request
from headrace.gateway.http.response_codec import encode_response
from headrace.types import SEQUENCE_END, SEQUENCE_START, InferenceRequest, InferenceResponse, OutputTensor
from headrace_protocol import datatype as dt
from headrace_protocol.errors import ErrorCode, InferError

LIMIT = 1 << 20


def decode(body: bytes | str | dict, header: str | None = None, limit: int = LIMIT):
    if isinstance(body, dict):
        body = json.dumps(body)
    if isinstance(body, str):
        body = body.encode()
    request = InferenceRequest("m")
    return request, decode_request(request, body, header, limit)


def refusal(body, header: str | None = None) -> str:
    with pytest.raises(InferError) as caught:
        decode(body, header)
    assert caught.value.code is ErrorCode.INVALID_ARG
    return caught.value.message


def tensor(datatype: str, shape: list, data: object) -> dict:
    return {"inputs": [{"name": "X", "shape": shape, "datatype": datatype, "data": data}]}


def packed(datatype: str, shape: list, data: object) -> bytes:
    request, _ = decode(tensor(datatype, shape, data))
    return bytes(request.inputs[0].data)


def binary(size: object = 16, shape: object = (4,), **more: object) -> dict:
    return {"name": "X", "shape": list(shape), "datatype": "FP32", "parameters": {"binary_data_size": size}, **more}


def with_tail(header: dict, tail: bytes) -> tuple[bytes, str]:
    text = json.dumps(header).encode()
    return text + tail, str(len(text))


# --- JSON data ----------------------------------------------------------------------------------------------------


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


# --- fields of a wrong kind ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"inputs":[{"name":"X","shape":"-1","datatype":"STRING","data":[{"b64":"AA=="}]}]}', "inputs[0].shape"),
        ('{"inputs":[{%s,"shape":{},"data":[]}]}', "inputs[0].shape"),
        ('{"inputs":[{%s,"shape":[1.5],"data":[]}]}', "inputs[0].shape[0]"),
        ('{"inputs":[{%s,"shape":[null],"data":[]}]}', "inputs[0].shape[0]"),
        ('{"inputs":[{%s,"shape":[1],"data":{}}]}', "data: expected an array, got an object"),
        ('{"inputs":[{%s,"shape":[1],"data":null}]}', "data: expected an array, got null"),
        ('{"inputs":[{%s,"shape":[1],"data":"s"}]}', "data: expected an array, got 's'"),
        ('{"inputs":[{%s,"shape":[2],"data":[["a"],{}]}]}', "data[1]"),
        ('{"inputs":[{"name":"X","datatype":"INT8","shape":[2],"data":[[1],{}]}]}', "data[1]"),
        ('{"inputs":[{%s,"data":[]}]}', "'shape'"),
        ('{"inputs":[{"shape":[1],"datatype":"INT8","data":[1]}]}', "'name'"),
        ('{"inputs":[{"name":"X","shape":[1],"data":[1]}]}', "'datatype'"),
        ('{"inputs":[{"name":7,"shape":[1],"datatype":"INT8","data":[1]}]}', "inputs[0].name"),
        ('{"inputs":[{"name":"X","shape":[1],"datatype":"STRING","data":["a"]}]}', "unknown datatype 'STRING'"),
        ('{"inputs":{}}', "inputs: expected 'array'"),
        ('{"inputs":[7]}', "inputs[0]"),
        ('{"inputs":[],"outputs":"x"}', "outputs"),
        ('{"inputs":[],"outputs":[{}]}', "'name'"),
        ('{"inputs":[],"parameters":[]}', "parameters"),
        ('{"inputs":[],"id":5}', "id"),
        ("{}", "'inputs'"),
        ("[]", "expected 'object', got 'array'"),
        ("null", "expected 'object', got 'null'"),
        ("", "not valid JSON"),
        ('{"inputs":[{%s,"shape":[1],"da', "not valid JSON"),
        ('{"inputs":[]}}', "not valid JSON"),
        (b'{"inputs":[],"id":"\xff"}', "UTF-8"),
        ('{"inputs":[],"id":"\\ud800"}', "not valid JSON"),
    ],
)
def test_a_field_of_a_wrong_kind_is_named(body, words):
    if isinstance(body, str):
        body = body.replace("%s", '"name":"X","datatype":"BYTES"')
    assert words in refusal(body)


@pytest.mark.parametrize(
    "shape",
    [[-1, 16], [-1, -4], [-9223372036854775808], [0, -1], [9223372036854775808], [10**30]],
)
def test_a_dimension_outside_its_range_is_named(shape):
    bad = next(dim for dim in shape if not 0 <= dim < 2**63)
    assert f"input 'X': dimension {bad}" in refusal(tensor("UINT8", shape, []))


@pytest.mark.parametrize("shape", [[2**62, 2], [2**32, 2**32], [2**61], [2**63 - 1] * 50])
def test_a_shape_whose_size_overflows_is_refused(shape):
    assert "more than 9223372036854775807 bytes" in refusal(tensor("FP64", shape, []))


def test_huge_dimensions_beside_a_zero_hold_no_element():
    assert packed("FP64", [2**62, 2**62, 0], []) == b""


NESTED = ["[" * 500000 + "]" * 500000, "[" * 500000, '{"a":' * 100000 + "1" + "}" * 100000, "[" * 101 + "]" * 101]


@pytest.mark.parametrize("deep", NESTED, ids=["closed", "unclosed", "objects", "just too deep"])
@pytest.mark.parametrize(
    "body",
    [
        '{"inputs":[{"name":"X","datatype":"FP32","shape":[1],"data":%s}]}',
        '{"inputs":[{"name":"X","datatype":"BYTES","shape":[1],"data":%s}]}',
        '{"inputs":[],"parameters":{"a":%s}}',
        '{"inputs":[],"unknown":%s}',
        '{"id":"\\"","inputs":[],"unknown":%s}',
        "%s",
    ],
)
def test_deep_nesting_is_refused(body, deep):
    message = refusal(body % deep)
    assert "nested deeper than 100 levels" in message


def test_nesting_up_to_the_limit_is_read():
    assert packed("INT8", [1], json.loads("[" * 97 + "1" + "]" * 97)) == b"\1"


def test_brackets_inside_strings_are_not_nesting():
    values = ["[" * 300, '{"' * 300 + "\\"]
    assert packed("BYTES", [2], values) == dt.encode_bytes([value.encode() for value in values])


def test_escaped_quotes_without_end_take_linear_time():
    assert "JSON" in refusal('{"id":"' + '\\"' * 200000 + "[" * 200)


def test_names_may_not_repeat():
    good = {"name": "X", "shape": [1], "datatype": "INT8", "data": [1]}
    assert "input 'X'" in refusal({"inputs": [good, good]})
    assert "output 'O'" in refusal({"inputs": [good], "outputs": [{"name": "O"}, {"name": "O"}]})


# --- binary data --------------------------------------------------------------------------------------------------


def test_binary_inputs_are_views_of_the_body_in_order():
    second = {"name": "Y", "shape": [3], "datatype": "UINT8", "parameters": {"binary_data_size": 3}}
    third = {"name": "Z", "shape": [1], "datatype": "INT8", "data": [5]}
    body, length = with_tail({"inputs": [binary(), third, second]}, bytes(range(19)))
    request, _ = decode(body, length)
    assert [bytes(item.data) for item in request.inputs] == [bytes(range(16)), b"\5", bytes(range(16, 19))]
    assert request.inputs[0].data.obj is body
    assert request.inputs[0].shape == (4,)
    assert request.inputs[0].datatype is dt.FP32


def test_binary_data_without_elements_is_good():
    body, length = with_tail({"inputs": [binary(0, (2, 0))]}, b"")
    request, _ = decode(body, length)
    assert bytes(request.inputs[0].data) == b""


@pytest.mark.parametrize("header", ["-1", "abc", "1e3", "", " 5", "+5", "1_0", "٣", "9" * 30, "5.0", "0x10"])
def test_a_header_length_that_is_no_number_is_named(header):
    body, _ = with_tail({"inputs": [binary()]}, bytes(16))
    assert "Inference-Header-Content-Length" in refusal(body, header)


def test_a_header_length_beyond_the_body_is_named_with_both_lengths():
    body, _ = with_tail({"inputs": [binary()]}, bytes(16))
    message = refusal(body, str(len(body) + 1))
    assert f"is {len(body) + 1}, but the body has only {len(body)} bytes" in message


@pytest.mark.parametrize("change", [-1, 1, 16])
def test_a_header_length_that_cuts_the_json_wrongly_is_named(change):
    body, length = with_tail({"inputs": [binary()]}, bytes(16))
    wrong = str(int(length) + change)
    assert f"Inference-Header-Content-Length says that the JSON part is {wrong} bytes" in refusal(body, wrong)


def test_a_missing_header_length_is_named():
    body, _ = with_tail({"inputs": [binary()]}, bytes(16))
    assert "Inference-Header-Content-Length, which is missing" in refusal(body)
    assert "without the header Inference-Header-Content-Length" in refusal({"inputs": [binary()]})


@pytest.mark.parametrize("size", [15, 17, 0])
def test_a_binary_size_that_contradicts_the_shape_is_named(size):
    body, length = with_tail({"inputs": [binary(size)]}, bytes(16))
    message = refusal(body, length)
    assert f"'binary_data_size' is {size}" in message
    assert "takes 16 bytes" in message


@pytest.mark.parametrize("size", [-16, "16", 16.0, True, None, 2**63, [16], {}])
def test_a_binary_size_of_a_wrong_kind_is_named(size):
    body, length = with_tail({"inputs": [binary(size)]}, bytes(16))
    assert "input 'X': 'binary_data_size': expected a number of bytes" in refusal(body, length)


def test_inputs_that_claim_more_than_the_body_has_are_named():
    body, length = with_tail({"inputs": [binary(), binary(name="Y")]}, bytes(20))
    assert "input 'Y': 'binary_data_size' is 16, but 4 bytes are left" in refusal(body, length)


def test_trailing_bytes_that_nobody_claims_are_refused():
    body, length = with_tail({"inputs": [binary()]}, bytes(19))
    assert "3 bytes of the body belong to no input" in refusal(body, length)


def test_each_input_has_exactly_one_source():
    assert "'data' and 'binary_data_size'" in refusal({"inputs": [binary(data=[1])]})
    assert "got none" in refusal({"inputs": [{"name": "X", "shape": [1], "datatype": "INT8"}]})
    both = {"shared_memory_region": "r", "binary_data_size": 4}
    assert "'binary_data_size' and 'shared_memory_region'" in refusal({"inputs": [binary() | {"parameters": both}]})


@pytest.mark.parametrize(
    "body",
    [
        {"inputs": [{"name": "X", "shape": [1], "datatype": "INT8", "parameters": {"shared_memory_region": "r"}}]},
        {"inputs": [], "outputs": [{"name": "O", "parameters": {"shared_memory_region": "r"}}]},
    ],
)
def test_shared_memory_is_refused_as_unsupported(body):
    with pytest.raises(InferError, match="shared memory") as caught:
        decode(body)
    assert caught.value.code is ErrorCode.UNSUPPORTED


def test_a_raw_request_is_the_whole_body_and_answered_in_binary():
    request, form = decode(b"{not json", "0")
    assert bytes(request.raw_body) == b"{not json"
    assert form.binary_by_default


def test_the_limit_binds_the_json_part_and_what_it_unpacks_to_but_not_binary_data():
    body, length = with_tail({"inputs": [binary(4000, (1000,))]}, bytes(4000))
    request, _ = decode(body, length, limit=1000)
    assert request.inputs[0].data.nbytes == 4000
    with pytest.raises(HttpError, match="limit is 100") as caught:
        decode(tensor("INT8", [100], [1] * 100), limit=100)
    assert caught.value.status == 413
    with pytest.raises(HttpError, match="8000 bytes, the limit is 2000"):
        decode(tensor("FP64", [1000], [0] * 3), limit=2000)


# --- parameters ---------------------------------------------------------------------------------------------------


def test_parameters_are_sorted_into_fields():
    parameters = {
        "sequence_id": 2**64 - 1,
        "sequence_start": True,
        "sequence_end": True,
        "priority": 2**64 - 1,
        "timeout": 5,
        "headers": {"x": "y"},
        "binary_data_output": True,
        "mine": "s",
        "flag": False,
        "number": -(2**63),
        "ratio": 0.5,
    }
    request, form = decode({"id": "é-1", "inputs": [], "parameters": parameters})
    assert request.correlation_id == 2**64 - 1
    assert request.flags == SEQUENCE_START | SEQUENCE_END
    assert (request.priority, request.timeout_us, request.id) == (2**64 - 1, 5, "é-1")
    assert request.parameters == {"mine": "s", "flag": False, "number": -(2**63), "ratio": 0.5}
    assert form.binary_by_default


def test_absent_and_null_members_are_the_same():
    request, form = decode('{"id":null,"parameters":null,"outputs":null,"inputs":[]}')
    assert (form.id, form.binary, request.parameters, request.outputs) == (None, None, None, None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sequence_id", -1),
        ("sequence_id", 1.5),
        ("sequence_id", True),
        ("sequence_id", 2**64),
        ("sequence_id", "x" * 129),
        ("sequence_start", 1),
        ("sequence_end", "true"),
        ("priority", -1),
        ("priority", "1"),
        ("priority", 2**64),
        ("timeout", 1.0),
        ("binary_data_output", 1),
        ("mine", None),
        ("mine", [1]),
        ("mine", {}),
        ("mine", 2**64),
        ("triton_x", 1),
    ],
)
def test_a_bad_parameter_is_named(key, value):
    assert f"'{key}'" in refusal({"inputs": [], "parameters": {key: value}})


def test_a_correlation_text_of_128_characters_is_the_longest():
    request, _ = decode({"inputs": [], "parameters": {"sequence_id": "é" * 128}})
    assert request.correlation_id == "é" * 128


def test_requested_outputs_carry_their_parameters():
    outputs = [{"name": "A", "parameters": {"binary_data": True, "classification": 3, "z": 1}}, {"name": "B"}]
    request, form = decode({"inputs": [], "outputs": outputs, "parameters": {"binary_data_output": True}})
    first, second = request.outputs
    assert (first.name, first.binary, first.classification, first.parameters) == ("A", True, 3, {"z": 1})
    assert (second.binary, second.classification, second.parameters) == (False, 0, None)
    assert form.binary == {"A": True, "B": False}


@pytest.mark.parametrize(("key", "value"), [("binary_data", 1), ("classification", -1), ("classification", "3")])
def test_a_bad_output_parameter_is_named(key, value):
    message = refusal({"inputs": [], "outputs": [{"name": "A", "parameters": {key: value}}]})
    assert "output 'A'" in message
    assert f"'{key}'" in message


# --- answers ------------------------------------------------------------------------------------------------------


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
