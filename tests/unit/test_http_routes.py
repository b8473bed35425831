"""Which path is which endpoint, and the codes that failures get."""

from __future__ import annotations

import pytest

from headrace.gateway.http.errors import STATUS
from headrace.gateway.http.routes import PATHS, Endpoint, Route, resolve
from headrace.gateway.restricted import KINDS
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
        ("/v2/repository/models/index", Route(Endpoint.INDEX, repository="models")),
        ("/v2/repository/models/models/m/load", Route(Endpoint.LOAD, "m", repository="models")),
        ("/v2/models/m/generate", Route(Endpoint.GENERATE, "m")),
        ("/v2/models/m/versions/2/generate_stream", Route(Endpoint.GENERATE_STREAM, "m", 2)),
        ("/v2/models/m/trace/setting", Route(Endpoint.TRACE, "m")),
        ("/v2/trace/setting", Route(Endpoint.TRACE)),
        ("/v2/systemsharedmemory/status", Route(Endpoint.SYSTEM_STATUS)),
        ("/v2/systemsharedmemory/region/a%2Fb/status", Route(Endpoint.SYSTEM_STATUS, region="a/b")),
        ("/v2/systemsharedmemory/register", Route(Endpoint.SYSTEM_REGISTER)),
        ("/v2/cudasharedmemory/region/r/register", Route(Endpoint.CUDA_REGISTER, region="r")),
        ("/v2/cudasharedmemory/unregister", Route(Endpoint.CUDA_UNREGISTER)),
        ("/v2/logging", Route(Endpoint.LOGGING)),
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
        *(
            "/v2/systemsharedmemory/region//status",
            "/v2/systemsharedmemory/region/status",
            "/v2/logging/x",
            "/v2/trace",
        ),
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


@pytest.mark.parametrize(("path", "endpoint"), PATHS.items())
def test_every_path_of_the_table_is_found_with_what_it_names(path, endpoint):
    given = {"model": "m", "version": "7", "repository": "r", "region": "x"}
    route = resolve(path.format(**given))
    assert route is not None
    assert route.endpoint is endpoint
    named = {
        "model": route.model,
        "version": str(route.version),
        "repository": route.repository,
        "region": route.region,
    }
    for name, value in named.items():
        assert value == (given[name] if f"{{{name}}}" in path else {"version": "-1"}.get(name, ""))


def test_every_endpoint_has_a_path_and_a_kind_that_can_be_restricted():
    assert set(PATHS.values()) == set(Endpoint)
    assert {endpoint.kind for endpoint in Endpoint} == set(KINDS)


def test_what_a_path_allows():
    assert Endpoint.LIVE.allowed == ("GET", "HEAD", "OPTIONS")
    assert Endpoint.INFER.allowed == ("POST", "OPTIONS")
    assert Endpoint.TRACE.allowed == ("GET", "HEAD", "POST", "OPTIONS")


def test_every_error_code_has_a_status():
    assert set(STATUS) == set(ErrorCode)
