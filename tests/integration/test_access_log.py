"""The access log of a real server: a line for each request, whatever came of it, and none that a client could forge."""

from __future__ import annotations

import contextlib
import http.client
import json
import time

import grpc
import pytest
import yaml

from harness import running
from headrace.access.table import key_hash
from headrace_protocol._generated import grpc_service_pb2 as pb
from repositories import add_decoupled, add_identity
from victims import add_caller, add_echo

KEY = "a-key-for-the-log-0123"
TRACE = "0af7651916cd43dd8448eb211c80319c"


def body(identifier="", **parameters):
    row = [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]
    return json.dumps({"id": identifier, "inputs": row, "parameters": parameters})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("access_log")
    add_identity(folder / "models", "calm", execute_delay_ms="20")
    add_decoupled(folder / "models", "stream", responses="3")
    add_echo(folder / "models", "callee", "python")
    add_caller(folder / "models", "caller", "callee")
    caller = {"name": "team", "roles": ["infer"], "models": ["calm", "caller", "stream"], "keys": [key_hash(KEY)]}
    (folder / "access.yaml").write_text(yaml.safe_dump({"callers": [caller]}))
    return folder


@contextlib.contextmanager
def serving(folder, *flags):
    with running(folder / "models", "--log-format=json", f"--access-file={folder / 'access.yaml'}", *flags) as server:
        yield server


def post(server, path, text, **headers):
    host, port = server.http.split(":")
    with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=20)) as connection:
        connection.request("POST", path, text, {"Authorization": f"Bearer {KEY}", **headers})
        return connection.getresponse().status


def entries(server, count=1, since=0):
    """Wait for `count` lines of the log; return what they hold."""
    deadline = time.monotonic() + 20
    while True:
        found = [json.loads(line) for line in server.lines[since:] if '"headrace.access"' in line]
        if len(found) >= count:
            return found
        assert time.monotonic() < deadline, server.log()
        time.sleep(0.01)


def test_each_request_has_a_line_with_all_that_is_known_of_it(folder):
    with serving(folder, "--log-access=all") as server:
        since = len(server.lines)
        headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        assert post(server, "/v2/models/calm/infer", body("mine"), **headers) == 200
        (entry,) = entries(server, 1, since)
        known = {
            "level": "info", "logger": "headrace.access", "model": "calm", "version": 1, "request_id": "mine", "trace_id": TRACE,
            "caller": "team", "code": "OK", "bytes_in": 16, "bytes_out": 16, "responses": 1, "batch_rows": 1,
        }  # fmt: skip
        assert known.items() <= entry.items()
        assert 20 <= entry["compute_ms"] <= entry["total_ms"]
        assert 0 <= entry["queue_ms"] < entry["total_ms"]
        assert "message" not in entry


def test_failures_refusals_streams_and_calls_have_lines_too(folder):
    with serving(folder, "--log-access=all") as server:
        cases = [
            ("/v2/models/calm/infer", body(fail="on purpose"), {"code": "INTERNAL"}),
            ("/v2/models/calm/infer", json.dumps({"inputs": []}), {"code": "INVALID_ARG", "bytes_in": 0}),
            ("/v2/models/calm/versions/7/infer", body(), {"code": "NOT_FOUND", "version": 7}),
            ("/v2/models/stream/generate_stream", json.dumps({"INPUT0": [1.5]}), {"code": "OK", "responses": 3}),
        ]
        for path, text, known in cases:
            since = len(server.lines)
            post(server, path, text)
            (entry,) = entries(server, 1, since)
            assert known.items() <= entry.items(), entry
        since = len(server.lines)
        row = [{"name": "INPUT0", "datatype": "INT32", "shape": [1, 1], "data": [3]}]
        assert post(server, "/v2/models/caller/infer", json.dumps({"inputs": row})) == 200
        inner, outer = entries(server, 2, since)
        assert (inner["model"], inner["nested"]) == ("callee", True)
        assert outer["model"] == "caller"


def test_a_client_that_leaves_is_told_as_cancelled(folder):
    with serving(folder, "--log-access=all") as server:
        since = len(server.lines)
        host, port = server.http.split(":")
        with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=20)) as connection:
            held = body(delay_ms=20000)
            connection.request("POST", "/v2/models/calm/infer", held, {"Authorization": f"Bearer {KEY}"})
        (entry,) = entries(server, 1, since)
        assert entry["code"] == "CANCELLED"
        with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError):
            infer = channel.unary_unary(
                "/inference.GRPCInferenceService/ModelInfer", pb.ModelInferRequest.SerializeToString
            )
            infer(pb.ModelInferRequest(model_name="callee"), metadata=(("x-api-key", KEY),))


def test_failures_alone_where_only_those_are_wanted(folder):
    with serving(folder, "--log-access=failures") as server:
        since = len(server.lines)
        assert post(server, "/v2/models/calm/infer", body("good")) == 200
        assert post(server, "/v2/models/calm/infer", body("bad", fail="on purpose")) == 500
        (entry,) = entries(server, 1, since)
        assert entry["request_id"] == "bad"
        assert "on purpose" in entry["error"]


def test_a_client_can_forge_no_line(folder):
    forged = 'x\nI0101 00:00:00.000000 1 headrace.access] code=OK model="forged" \x1b[2J\u202e'
    with running(folder / "models", "--log-access=all") as server:
        since = len(server.lines)
        assert post(server, "/v2/models/calm/infer", body(forged)) == 200
        server.wait_for_log("headrace.access]", since=since)
        lines = [line for line in server.lines[since:] if "forged" in line]
        assert len(lines) == 1
        assert lines[0].startswith("I")
        assert "\x1b" not in lines[0]
        assert "\u202e" not in lines[0]
        assert r"x\n" in lines[0]


def test_nothing_is_logged_of_requests_unless_it_is_asked_for(folder):
    with serving(folder) as server:
        assert post(server, "/v2/models/calm/infer", body()) == 200
        assert post(server, "/v2/models/calm/infer", body(fail="on purpose")) == 500
        assert "headrace.access" not in server.log()
