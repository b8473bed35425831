"""The HTTP endpoints about the server, its models and its repository, and what is answered where there is none."""

from __future__ import annotations

import base64
import json

import pytest

from http_door import error_of


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready"])
async def test_health_is_told_by_the_status_with_an_empty_body(door, path):
    assert (await door.ask("GET", path))[::2] == (200, b"")
    door.data.is_live = door.data.is_ready = False
    assert (await door.ask("GET", path))[::2] == (400, b"")
    door.data.is_exiting = True
    status, _, body = await door.ask("GET", path)
    assert status == 503
    assert "exiting" in error_of(body)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v2/models/echo/ready", 200),
        ("/v2/models/echo/versions/1/ready", 200),
        ("/v2/models/nope/ready", 404),
        ("/v2/models/echo/versions/99/ready", 404),
        ("/v2/models/loading/ready", 503),
        ("/v2/models/name%20with%20%C3%A9/ready", 200),
    ],
)
async def test_readiness_of_a_model(door, path, status):
    got, _, body = await door.ask("GET", path)
    assert got == status
    assert (body == b"") == (status == 200)


async def test_metadata(door):
    assert json.loads((await door.ask("GET", "/v2?ignored=1"))[2]) == {
        "name": "echo",
        "version": "1.0",
        "extensions": ["binary_tensor_data"],
    }
    metadata = json.loads((await door.ask("GET", "/v2/models/echo"))[2])
    assert metadata["inputs"] == [{"name": "INPUT0", "datatype": "FP32", "shape": [-1, 4]}]
    assert metadata["versions"] == ["1"]


async def test_configuration_and_statistics_are_json_with_every_default(door):
    config = json.loads((await door.ask("GET", "/v2/models/echo/config"))[2])
    assert (config["name"], config["max_batch_size"], config["input"]) == ("echo", 8, [])
    stats = json.loads((await door.ask("GET", "/v2/models/stats"))[2])["model_stats"]
    assert [entry["name"] for entry in stats] == ["echo", "slow"]
    assert stats[0]["inference_count"] == 2**40
    one = json.loads((await door.ask("GET", "/v2/models/echo/versions/1/stats"))[2])["model_stats"]
    assert [entry["name"] for entry in one] == ["echo"]


async def test_the_index_has_only_what_is_known(door):
    everything = json.loads((await door.ask("POST", "/v2/repository/index"))[2])
    assert everything[0] == {"name": "echo", "version": "1", "state": "READY"}
    assert everything[2] == {"name": "bad", "version": "1", "state": "UNAVAILABLE", "reason": "no file"}
    assert everything[3] == {"name": "new"}
    assert len(json.loads((await door.ask("POST", "/v2/repository/any/index", {"ready": True}))[2])) == 2
    assert json.loads((await door.ask("GET", "/v2/models"))[2]) == {"models": ["echo"]}


async def test_load_and_unload_reach_the_control_plane(door):
    body = {"parameters": {"config": "{}", "file:1/m": base64.b64encode(b"\0model").decode()}}
    assert (await door.ask("POST", "/v2/repository/models/m/load", body))[::2] == (200, b"")
    assert (await door.ask("POST", "/v2/repository/models/m/unload"))[::2] == (200, b"")
    assert door.control.calls == [("load", "m", {"config": "{}", "file:1/m": b"\0model"}), ("unload", "m", False)]
    status, _, answer = await door.ask("POST", "/v2/repository/models/missing/load")
    assert (status, error_of(answer)) == (404, "model 'missing' is in no repository")
    assert (await door.ask("POST", "/v2/repository/r/models/m/load"))[0] == 501
    assert (await door.ask("POST", "/v2/repository/models/..%2Fm/load"))[0] == 400


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/", 404, None),
        ("GET", "/v2/nothing", 404, None),
        ("POST", "/v2/models/echo/frobnicate", 404, None),
        ("GET", "/v2/models/echo/infer", 405, "POST, OPTIONS"),
        ("DELETE", "/v2", 405, "GET, HEAD, OPTIONS"),
        ("POST", "/v2/health/live", 405, "GET, HEAD, OPTIONS"),
        ("GET", "/v2/repository/index", 405, "POST, OPTIONS"),
        ("PUT", "/v2/logging", 405, "GET, HEAD, POST, OPTIONS"),
        ("TRACE", "/v2/logging", 405, "GET, HEAD, POST, OPTIONS"),
        ("HEAD", "/v2/models/echo/infer", 405, "POST, OPTIONS"),
        ("GET", "/v2/models/echo/versions/1/trace/setting", 404, None),
        ("GET", "/v2/models/echo/versions/one", 400, None),
    ],
)
async def test_what_cannot_be_asked_here_gets_a_json_error(door, method, path, status, allow):
    got, headers, body = await door.ask(method, path)
    assert got == status
    assert headers.get("Allow") == allow
    assert headers["Content-Type"] == "application/json"
    assert error_of(body) if method != "HEAD" else body == b""


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2", "/v2/models/echo/config", "/v2/logging"])
async def test_head_is_answered_as_get_without_the_body(door, path):
    status, headers, body = await door.ask("GET", path)
    got, got_headers, nothing = await door.ask("HEAD", path)
    assert (got, nothing) == (status, b"") == (200, b"")
    assert got_headers["Content-Length"] == headers["Content-Length"] == str(len(body))


async def test_options_tells_what_a_path_takes(door):
    status, headers, body = await door.ask("OPTIONS", "/v2/models/echo/infer", b"ignored")
    assert (status, headers["Allow"], body) == (200, "POST, OPTIONS", b"")
    assert (await door.ask("OPTIONS", "/v2/trace/setting"))[1]["Allow"] == "GET, HEAD, POST, OPTIONS"
    assert (await door.ask("OPTIONS", "/v2/nothing"))[0] == 404
