"""The bodies of the control endpoints: repository, shared memory, trace and log settings."""

from __future__ import annotations

import base64
import json

import pytest

from headrace.gateway.http.repository import check_target, decode_index, decode_load, decode_unload
from headrace.gateway.http.server_settings import decode_log, decode_trace
from headrace.gateway.http.shared_memory import decode_cuda, decode_system, named
from headrace_protocol.errors import ErrorCode, InferError

HANDLE = base64.b64encode(bytes(range(64))).decode()


def refusal(decode, body: object) -> str:
    with pytest.raises(InferError) as caught:
        decode(body if isinstance(body, bytes) else json.dumps(body).encode())
    assert caught.value.code is ErrorCode.INVALID_ARG
    return caught.value.message


# --- repository ---------------------------------------------------------------------------------------------------


def test_an_index_request_may_ask_for_ready_models():
    assert [decode_index(body) for body in (b"", b"{}", b'{"ready":false}', b'{"ready":true}')] == [False] * 3 + [True]
    with pytest.raises(InferError, match="ready: expected 'bool', got 'int'"):
        decode_index(b'{"ready":1}')


def test_load_parameters_are_decoded():
    body = {"parameters": {"config": "{}", "file:1/model.onnx": "AAH/"}}
    assert decode_load(json.dumps(body).encode()) == {"config": "{}", "file:1/model.onnx": b"\0\1\xff"}
    assert decode_load(b"") == decode_load(b"{}") == decode_load(b'{"parameters":null}') == {}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"parameters":{"config":{}}}', "'config'"),
        ('{"parameters":{"file:1/m":7}}', "'file:1/m'"),
        ('{"parameters":{"file:1/m":"%%%"}}', "not base64"),
        ('{"parameters":{"file:1/m":"é"}}', "not base64"),
        ('{"parameters":{"file:1/m":"QUJD="}}', "not base64"),
        ('{"parameters":{"file:1/m":"QUI"}}', "not base64"),
        ('{"parameters":{"other":"x"}}', "'other'"),
        ('{"parameters":[]}', "parameters"),
        ("[]", "expected 'object'"),
        ("{", "not valid JSON"),
        ('{"parameters":{"config":' + "[" * 5000, "nested deeper"),
    ],
)
def test_a_bad_load_request_is_refused_with_the_field(body, words):
    with pytest.raises(InferError) as caught:
        decode_load(body.encode())
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert words in caught.value.message


@pytest.mark.parametrize("written", ["3", '"3"'])
def test_one_version_is_loaded_and_unloaded_by_its_number(written):
    body = b'{"parameters":{"version":%b}}' % written.encode()

    assert decode_load(body) == {"version": 3}
    assert decode_unload(body) == (False, 3)


@pytest.mark.parametrize("written", ["0", "-1", "true", '"x"', "1.5", '"9999999999999999999"'])
def test_what_is_no_version_is_none(written):
    body = b'{"parameters":{"version":%b}}' % written.encode()
    for decode in (decode_load, decode_unload):
        with pytest.raises(InferError, match="version"):
            decode(body)


def test_unload_dependents_is_a_boolean():
    assert decode_unload(b'{"parameters":{"unload_dependents":true}}') == (True, None)
    assert decode_unload(b"") == (False, None)
    for body in (b'{"parameters":{"unload_dependents":1}}', b'{"parameters":{"x":true}}'):
        with pytest.raises(InferError, match="unload parameter"):
            decode_unload(body)


@pytest.mark.parametrize("name", ["", "  ", "..", ".", "a/b", "../x", "a\0b", "a\\b"])
def test_a_load_names_a_model_and_not_a_path(name):
    with pytest.raises(InferError) as caught:
        check_target(name, "")
    assert caught.value.code is ErrorCode.INVALID_ARG


def test_a_load_may_not_name_a_repository():
    with pytest.raises(InferError, match="repository 'r'") as caught:
        check_target("m", "r")
    assert caught.value.code is ErrorCode.UNSUPPORTED


# --- shared memory ------------------------------------------------------------------------------------------------


def test_a_registration_of_system_memory_is_decoded():
    assert decode_system(b'{"key":"/k","byte_size":64}') == ("/k", 0, 64)
    assert decode_system(b'{"key":"/k","offset":4096,"byte_size":9223372036854775807}') == ("/k", 4096, 2**63 - 1)


GOOD_SYSTEM = {"key": "/k", "offset": 0, "byte_size": 64}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"key": ...}, "'key'"),
        ({"key": 7}, "key: expected 'str'"),
        ({"byte_size": ...}, "'byte_size'"),
        ({"byte_size": -1}, "byte_size: expected 'int' >= 0"),
        ({"byte_size": 2**63}, "byte_size: expected 'int' <= 9223372036854775807"),
        ({"byte_size": "64"}, "byte_size: expected 'int', got 'str'"),
        ({"byte_size": 1.5}, "byte_size: expected 'int', got 'float'"),
        ({"offset": -1}, "offset: expected 'int' >= 0"),
        ({"offset": 2**64}, "offset"),
        ({"offset": None}, "offset: expected 'int', got 'null'"),
        ({"ofset": 4096}, "'ofset'"),
    ],
)
def test_a_bad_registration_of_system_memory_names_the_field(change, words):
    body = {key: value for key, value in (GOOD_SYSTEM | change).items() if value is not ...}
    assert words in refusal(decode_system, body)


def test_a_registration_of_gpu_memory_is_decoded():
    body = {"raw_handle": {"b64": HANDLE}, "device_id": 1, "byte_size": 64}
    assert decode_cuda(json.dumps(body).encode()) == (bytes(range(64)), 1, 64)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"raw_handle": ...}, "'raw_handle'"),
        ({"raw_handle": HANDLE}, "raw_handle: expected 'object'"),
        ({"raw_handle": {}}, "'b64'"),
        ({"raw_handle": {"b64": "%%"}}, "raw_handle.b64"),
        ({"raw_handle": {"b64": base64.b64encode(bytes(63)).decode()}}, "64 bytes"),
        ({"device_id": -1}, "device_id"),
        ({"device_id": ...}, "'device_id'"),
        ({"byte_size": ...}, "'byte_size'"),
    ],
)
def test_a_bad_registration_of_gpu_memory_names_the_field(change, words):
    good = {"raw_handle": {"b64": HANDLE}, "device_id": 0, "byte_size": 64}
    body = {key: value for key, value in (good | change).items() if value is not ...}
    assert words in refusal(decode_cuda, body)


@pytest.mark.parametrize("decode", [decode_system, decode_cuda, decode_trace, decode_log])
@pytest.mark.parametrize("body", [b"[]", b"null", b"{", b"7", b"[" * 100_000, b'{"x":' * 200])
def test_what_is_no_object_of_bounded_depth_is_refused(decode, body):
    assert refusal(decode, body)


def test_a_registration_has_the_name_of_a_region():
    assert named("r") == "r"
    with pytest.raises(InferError, match="name of the region is missing"):
        named("")


# --- settings -----------------------------------------------------------------------------------------------------


def test_trace_settings_are_lists_of_texts_or_taken_back():
    body = {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "10", "trace_count": None}
    assert decode_trace(json.dumps(body).encode()) == {
        "trace_level": ["TIMESTAMPS", "TENSORS"],
        "trace_rate": ["10"],
        "trace_count": None,
    }
    assert decode_trace(b"") == decode_trace(b"{}") == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trace_level", "TIMESTAMPS"),
        ("trace_level", [1]),
        ("trace_level", {}),
        ("trace_rate", 10),
        ("trace_rate", ["10"]),
        ("trace_rate", True),
        ("log_frequency", 1.5),
    ],
)
def test_a_trace_setting_of_a_wrong_kind_is_named(key, value):
    assert f"'{key}'" in refusal(decode_trace, {key: value})


def test_log_settings_are_scalars_and_null_changes_nothing():
    body = {"log_info": False, "log_verbose_level": 3, "log_format": "ISO8601", "log_error": None}
    assert decode_log(json.dumps(body).encode()) == {"log_info": False, "log_verbose_level": 3, "log_format": "ISO8601"}


@pytest.mark.parametrize("value", [1.5, [], {}, [True]])
def test_a_log_setting_of_a_wrong_kind_is_named(value):
    assert "'log_info'" in refusal(decode_log, {"log_info": value})
