"""Which path is which endpoint, the codes that failures get, and the bodies of the repository API."""

from __future__ import annotations

import json

import pytest

from headrace.gateway.http.errors import STATUS
from headrace.gateway.http.repository import check_target, decode_index, decode_load, decode_unload
from headrace.gateway.http.routes import Endpoint, Route, resolve
from headrace.gateway.version import parse_version
from headrace.types import LATEST
from headrace_protocol.errors import ErrorCode, InferError


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v2", Route(Endpoint.SERVER_METADATA)),
        ("/v2/health/live", Route(Endpoint.LIVE)),
        ("/v2/models", Route(Endpoint.MODELS)),
        ("/v2/models/stats", Route(Endpoint.STATISTICS)),
        ("/v2/models/stats/infer", Route(Endpoint.INFER, "stats")),
        ("/v2/models/m", Route(Endpoint.MODEL_METADATA, "m")),
        ("/v2/models/m/versions/3", Route(Endpoint.MODEL_METADATA, "m", 3)),
        ("/v2/models/m/infer", Route(Endpoint.INFER, "m")),
        ("/v2/models/m/versions/12/infer", Route(Endpoint.INFER, "m", 12)),
        ("/v2/models/m/versions/1/stats", Route(Endpoint.STATISTICS, "m", 1)),
        ("/v2/models/a%2Fb%20%C3%A9/ready", Route(Endpoint.MODEL_READY, "a/b é")),
        ("/v2/models/m/config", Route(Endpoint.MODEL_CONFIG, "m")),
        ("/v2/repository/index", Route(Endpoint.INDEX)),
        ("/v2/repository/r/index", Route(Endpoint.INDEX, repository="r")),
        ("/v2/repository/models/m/load", Route(Endpoint.LOAD, "m")),
        ("/v2/repository/r/models/m/unload", Route(Endpoint.UNLOAD, "m", repository="r")),
        ("/v2/models/m/generate", Route(Endpoint.NOT_SERVED, "m")),
        ("/v2/models/m/trace/setting", Route(Endpoint.NOT_SERVED, "m")),
        ("/v2/systemsharedmemory/status", Route(Endpoint.NOT_SERVED)),
        ("/v2/cudasharedmemory/region/r/register", Route(Endpoint.NOT_SERVED)),
        ("/v2/logging", Route(Endpoint.NOT_SERVED)),
    ],
)
def test_a_path_names_its_endpoint(path, route):
    assert resolve(path) == route


@pytest.mark.parametrize(
    "path",
    [
        *("", "/", "/v1", "/v2/", "v2", "*", "/v2/models/", "/v2/models//infer", "/v2/models/m/", "/v2/models/m/x"),
        *("/v2/models/m/versions", "/v2/models/m/versions/", "/v2/models/m/versions//infer", "/v2/models/m/infer/x"),
        *("/v2/models/m/versions/1/trace/setting", "/v2/health", "/v2/health/live/", "/v2/repository"),
        *("/v2/repository/models/m", "/v2/repository//models/m/load", "/v2/systemsharedmemory/x"),
    ],
)
def test_any_other_path_names_nothing(path):
    assert resolve(path) is None


@pytest.mark.parametrize("version", ["x", "-1", "1.0", "9223372036854775808", "9" * 5000, "%31x", "٣"])
def test_a_version_in_a_path_is_a_number(version):
    with pytest.raises(InferError, match="version") as caught:
        resolve(f"/v2/models/m/versions/{version}/infer")
    assert caught.value.code is ErrorCode.INVALID_ARG


def test_a_name_that_is_not_utf8_is_refused():
    with pytest.raises(InferError, match="not UTF-8"):
        resolve("/v2/models/%FF/infer")


def test_the_empty_version_is_the_servers_choice():
    assert parse_version("") == LATEST
    assert parse_version("0007") == 7


def test_every_error_code_has_a_status():
    assert set(STATUS) == set(ErrorCode)


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


def test_unload_dependents_is_a_boolean():
    assert decode_unload(b'{"parameters":{"unload_dependents":true}}') is True
    assert decode_unload(b"") is False
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
