"""The body of an infer request: members, sections and parameters, and every misuse with the field or length it names."""

from __future__ import annotations

import json

import pytest

from headrace.gateway.http.errors import HttpError
from headrace.types import SEQUENCE_END, SEQUENCE_START
from headrace_protocol import datatype as dt
from http_bodies import binary, decode, packed, refusal, tensor, with_tail

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


@pytest.mark.parametrize("rank", [65, 100_000])
def test_more_dimensions_than_an_array_can_have_are_refused_by_their_number(rank):
    assert f"input 'X': a shape has at most 64 dimensions, got {rank}" in refusal(tensor("FP64", [0] * rank, []))


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
