"""Shared memory, trace and log settings over HTTP: what reaches the control plane, and what it tells."""

from __future__ import annotations

import base64
import json

import pytest

from http_door import error_of

HANDLE = bytes(range(64))
SYSTEM = {"key": "/k", "offset": 4096, "byte_size": 64}
CUDA = {"raw_handle": {"b64": base64.b64encode(HANDLE).decode()}, "device_id": 1, "byte_size": 64}


async def told(door, path: str):
    status, headers, body = await door.ask("GET", path)
    assert (status, headers["Content-Type"]) == (200, "application/json")
    return json.loads(body)


# --- shared memory ------------------------------------------------------------------------------------------------


async def test_regions_are_registered_and_unregistered(door):
    for path, body in (
        ("systemsharedmemory/region/a%2Fb/register", SYSTEM),
        ("systemsharedmemory/region/c/register", {"key": "/k", "byte_size": 1}),
        ("systemsharedmemory/region/a%2Fb/unregister", None),
        ("systemsharedmemory/unregister", None),
        ("cudasharedmemory/region/g/register", CUDA),
        ("cudasharedmemory/region/g/unregister", b"{}"),
        ("cudasharedmemory/unregister", None),
    ):
        assert (await door.ask("POST", f"/v2/{path}", body))[::2] == (200, b""), path
    assert door.control.calls == [
        ("register_system", "a/b", "/k", 4096, 64),
        ("register_system", "c", "/k", 0, 1),
        ("unregister_system", "a/b"),
        ("unregister_system", ""),
        ("register_cuda", "g", HANDLE, 1, 64),
        ("unregister_cuda", "g"),
        ("unregister_cuda", ""),
    ]


async def test_the_status_of_one_region_and_of_all(door):
    assert await told(door, "/v2/systemsharedmemory/region/r/status") == [
        {"name": "r", "key": "/r", "offset": 4096, "byte_size": 2**40}
    ]
    assert [region["name"] for region in await told(door, "/v2/systemsharedmemory/status")] == ["a", "b"]
    assert await told(door, "/v2/cudasharedmemory/region/r/status") == [
        {"name": "r", "device_id": 3, "byte_size": 2**40}
    ]
    assert len(await told(door, "/v2/cudasharedmemory/status")) == 2


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("GET", "systemsharedmemory/region/missing/status", None, 404, "'missing'"),
        ("GET", "cudasharedmemory/region/missing/status", None, 404, "'missing'"),
        ("POST", "systemsharedmemory/region/taken/register", SYSTEM, 400, "registered already"),
        ("POST", "systemsharedmemory/register", SYSTEM, 400, "name of the region is missing"),
        ("POST", "cudasharedmemory/register", CUDA, 400, "name of the region is missing"),
        ("POST", "systemsharedmemory/region/r/register", None, 400, "not valid JSON"),
        ("POST", "systemsharedmemory/region/r/register", {"key": "/k"}, 400, "'byte_size'"),
        ("POST", "systemsharedmemory/region/r/register", SYSTEM | {"byte_size": -1}, 400, "byte_size"),
        ("POST", "systemsharedmemory/region/r/register", SYSTEM | {"offset": 2**64}, 400, "offset"),
        ("POST", "cudasharedmemory/region/r/register", CUDA | {"raw_handle": {"b64": "AAAA"}}, 400, "64 bytes"),
        ("POST", "cudasharedmemory/region/r/register", {}, 400, "'raw_handle'"),
        ("GET", "systemsharedmemory/region/r/register", None, 405, "POST"),
        ("POST", "systemsharedmemory/status", None, 405, "GET"),
    ],
)
async def test_a_bad_call_about_regions_is_refused_and_changes_nothing(door, method, path, body, status, words):
    got, _, said = await door.ask(method, f"/v2/{path}", body)
    assert got == status
    assert words in error_of(said)
    assert door.control.calls == []


# --- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "model"), [("/v2/trace/setting", ""), ("/v2/models/m%20n/trace/setting", "m n")])
async def test_trace_settings_of_all_models_and_of_one(door, path, model):
    settings = await told(door, path)
    assert settings["trace_level"] == ["TIMESTAMPS", "TENSORS"]
    change = {"trace_level": ["OFF"], "trace_rate": "5", "log_frequency": None}
    status, _, body = await door.ask("POST", path, change)
    assert (status, json.loads(body)) == (200, settings)
    assert door.control.calls == [
        ("trace", model, {"trace_level": ["OFF"], "trace_rate": ["5"], "log_frequency": None})
    ]


async def test_traffic_of_a_model_is_told_and_changed(door):
    assert (await told(door, "/v2/models/m%20n/traffic"))["model"] == "m n"
    changes = {"weights": {"3": 10}, "shadow": None}
    status, _, body = await door.ask("POST", "/v2/models/m%20n/traffic", changes)
    assert (status, json.loads(body)["model"]) == (200, "m n")
    assert door.control.calls == [("traffic", "m n", changes)]


async def test_log_settings_are_told_and_changed(door):
    assert (await told(door, "/v2/logging"))["log_verbose_level"] == 2
    status, _, body = await door.ask("POST", "/v2/logging", {"log_info": False, "log_error": None})
    assert (status, json.loads(body)["log_info"]) == (200, False)
    assert door.control.calls == [("log", {"log_info": False})]


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v2/trace/setting", {"trace_file": "/tmp/x"}, 501, "trace_file"),
        ("/v2/trace/setting", {"trace_rate": "-1"}, 400, "from 0 to 4294967295"),
        ("/v2/trace/setting", {"trace_rate": 1}, 400, "'trace_rate': expected a string"),
        ("/v2/trace/setting", [], 400, "expected 'object'"),
        ("/v2/models/missing/trace/setting", {}, 404, "'missing'"),
        ("/v2/logging", {"log_file": "/tmp/x"}, 501, "log_file"),
        ("/v2/logging", {"log_format": "x"}, 400, "log_format"),
        ("/v2/logging", {"log_info": 1.5}, 400, "'log_info'"),
        ("/v2/logging", b"{", 400, "not valid JSON"),
        ("/v2/models/m/traffic", b"[" * 100_000, 400, "the traffic policy"),
        ("/v2/models/m/traffic", [], 400, "expected 'object'"),
        ("/v2/models/missing/traffic", {}, 404, "'missing'"),
    ],
)
async def test_a_bad_setting_is_refused_and_changes_nothing(door, path, body, status, words):
    got, _, said = await door.ask("POST", path, body)
    assert got == status
    assert words in error_of(said)
    assert door.control.calls == []
