"""Trace and log settings of a real server through both stock clients: read, changed, cleared, and refused as a whole."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import requests
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from harness import RunningServer, running
from repositories import add_identity


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models")
    add_identity(path, "first")
    add_identity(path, "second")
    return path


@pytest.fixture(scope="module")
def server(repository, tmp_path_factory) -> Iterator[RunningServer]:
    """A server that traces nothing until it is told."""
    file = tmp_path_factory.mktemp("traces") / "trace.json"
    with running(repository, f"--trace-config=triton,file={file}") as server:
        yield server


@pytest.fixture(params=["http", "grpc"])
def traced(request, server):
    """Return (read, change) over one of the stock clients; each gives settings as texts."""
    with httpclient.InferenceServerClient(server.http) as http, grpcclient.InferenceServerClient(server.grpc) as grpc:
        if request.param == "http":
            yield http.get_trace_settings, http.update_trace_settings
        else:
            yield (
                lambda *args: plain(grpc.get_trace_settings(*args)),
                lambda *args, **kwargs: plain(grpc.update_trace_settings(*args, **kwargs)),
            )
        for model in ("first", "second", None):
            http.update_trace_settings(model, dict.fromkeys(ALL))


def plain(message) -> dict[str, object]:
    """Return a gRPC answer as HTTP gives it."""
    return {
        name: list(setting.value) if name == "trace_level" else setting.value[0]
        for name, setting in message.settings.items()
    }


ALL = ("trace_level", "trace_rate", "trace_count", "log_frequency")


def test_settings_are_changed_for_a_model_and_cleared_again(traced):
    read, change = traced
    before = read()
    assert before["trace_level"] == ["OFF"]
    changed = change("first", settings={"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "5"})
    assert changed == {**before, "trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "5"} == read("first")
    assert read("second") == read() == before
    assert change(settings={"trace_count": "7"})["trace_count"] == "7" == read("first")["trace_count"]
    assert change("first", settings=dict.fromkeys(ALL)) == read()
    assert change(settings={"trace_count": None}) == before


def test_the_count_that_is_shown_goes_down(traced, server):
    read, change = traced
    change("second", settings={"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_count": "5"})
    tensor = httpclient.InferInput("INPUT0", [1, 2], "FP32")
    tensor.set_data_from_numpy(np.zeros((1, 2), np.float32))
    with httpclient.InferenceServerClient(server.http) as client:
        for _ in range(2):
            client.infer("second", [tensor])
    assert read("second")["trace_count"] == "3"


@pytest.mark.parametrize("model", [None, "first"])
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"trace_rate": "10000000000"}, "expected an integer from 0 to 4294967295"),
        ({"trace_rate": "-5"}, "expected an integer from 0 to 4294967295"),
        ({"trace_rate": ""}, "expected an integer from 0 to 4294967295"),
        ({"trace_rate": "1.5"}, "expected an integer from 0 to 4294967295"),
        ({"trace_count": "-2"}, "expected an integer from -1 to 2147483647"),
        ({"log_frequency": "4294967296"}, "expected an integer from 0 to 4294967295"),
        ({"trace_level": ["NOPE"]}, "expected OFF, TIMESTAMPS or TENSORS"),
        ({"trace_level": ["OFF", "TENSORS"]}, "OFF stands alone"),
        ({"trace_level": ["TENSORS"], "trace_rate": "0"}, "0 is for trace_level OFF alone"),
        ({"trace_file": "/tmp/y"}, "trace_file is given when the server is started"),
        ({"trace_mode": "opentelemetry"}, "trace_mode is given when the server is started"),
        ({"trace_speed": "1"}, "unknown trace setting"),
    ],
)
def test_a_bad_setting_is_refused_and_changes_nothing(traced, model, settings, sentence):
    read, change = traced
    before = read(model)
    with pytest.raises(InferenceServerException, match=sentence) as caught:
        change(model, settings={"log_frequency": "9", "trace_count": "9", **settings})
    fixed = "when the server is started" in sentence
    assert caught.value.status() in (
        ("501", "StatusCode.UNIMPLEMENTED") if fixed else ("400", "StatusCode.INVALID_ARGUMENT")
    )
    assert read(model) == before


def test_settings_of_an_unknown_model_are_not_found(traced):
    read, change = traced
    for call in (lambda: read("nobody"), lambda: change("nobody", settings={"trace_rate": "1"})):
        with pytest.raises(InferenceServerException, match="nobody") as caught:
            call()
        assert caught.value.status() in ("404", "StatusCode.NOT_FOUND")


def test_many_changes_at_once_leave_one_of_them_whole(server):
    def change(number: int) -> None:
        with httpclient.InferenceServerClient(server.http) as client:
            for _ in range(20):
                told = client.update_trace_settings(
                    "first", {"trace_rate": str(number), "trace_count": str(number), "log_frequency": str(number)}
                )
                assert told["trace_rate"] == told["trace_count"] == told["log_frequency"] == str(number)

    threads = [threading.Thread(target=change, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with httpclient.InferenceServerClient(server.http) as client:
        told = client.get_trace_settings("first")
        assert told["trace_rate"] == told["trace_count"] == told["log_frequency"]
        client.update_trace_settings("first", dict.fromkeys(ALL))


def test_without_a_file_tracing_cannot_be_switched_on(repository):
    with running(repository) as server, httpclient.InferenceServerClient(server.http) as client:
        with pytest.raises(InferenceServerException, match="there is no file for traces") as caught:
            client.update_trace_settings(None, {"trace_level": ["TIMESTAMPS"]})
        assert caught.value.status() == "400"
        assert client.get_trace_settings()["trace_level"] == ["OFF"]


# --- log settings ----------------------------------------------------------------------------------------------------

QUIET_LOG = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}


def plain_log(message) -> dict[str, object]:
    return {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in message.settings.items()}


@pytest.fixture(params=["http", "grpc"])
def logged(request, server):
    """Return (read, change) over one of the stock clients."""
    with httpclient.InferenceServerClient(server.http) as http, grpcclient.InferenceServerClient(server.grpc) as grpc:
        if request.param == "http":
            yield http.get_log_settings, http.update_log_settings
        else:
            yield (
                lambda: plain_log(grpc.get_log_settings()),
                lambda settings: plain_log(grpc.update_log_settings(settings)),
            )
        http.update_log_settings({name: value for name, value in QUIET_LOG.items() if name != "log_file"})


def test_log_settings_are_changed_one_or_all(logged):
    read, change = logged
    assert read() == QUIET_LOG
    assert change({"log_warning": False, "log_verbose_level": 2}) == {
        **QUIET_LOG,
        "log_warning": False,
        "log_verbose_level": 2,
    }
    everything = {**QUIET_LOG, "log_info": False, "log_error": False, "log_verbose_level": 9, "log_format": "ISO8601"}
    assert change({name: value for name, value in everything.items() if name != "log_file"}) == everything == read()


def test_a_change_is_seen_in_the_next_line_of_the_log(logged, server):
    _, change = logged
    change({"log_format": "ISO8601"})
    before = len(server.lines)
    change({"log_error": True})
    server.wait_for_log("log settings are changed by a call: log_error=True")
    line = next(line for line in server.lines[before:] if line.endswith("log_error=True"))
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ I \d+ headrace", line)


def test_verbosity_shows_failed_requests_then_batches_then_nothing(server, logged):
    _, change = logged

    def said(verbose: int) -> list[str]:
        """Send a good request, one that fails and one that is refused; return what is said of them, less its numbers."""
        change({"log_verbose_level": verbose})
        before = len(server.lines)
        for name, parameters in (("INPUT0", {}), ("INPUT0", {"fail": "on purpose"}), ("NOPE", {})):
            tensor = {"name": name, "datatype": "FP32", "shape": [1, 1], "data": [1]}
            body = {"id": "7\n", "inputs": [tensor], "parameters": parameters}
            requests.post(f"http://{server.http}/v2/models/first/infer", json=body, timeout=30)
        change({"log_verbose_level": 0})
        server.wait_for_log("log_verbose_level=0", since=before)
        found = [line.rsplit("model first: ", 1)[1] for line in server.lines[before:] if "] model first: " in line]
        return [re.sub(r"in \d+ us", "in N us", text) for text in found]

    ran = "ran 1 requests, 1 rows, in N us"
    failed, refused = said(1)
    assert failed.startswith(r"request '7\n' failed: ")
    assert refused.startswith(r"request '7\n' is refused: ")
    assert said(2) == [ran, ran, failed, refused]
    assert said(0) == []


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"log_verbose_level": 10}, "expected an integer from 0 to 9, got 10"),
        ({"log_format": "iso"}, "expected one of default, ISO8601, json, got 'iso'"),
        ({"log_file": "/tmp/x.sh"}, "log_file"),
    ],
)
def test_a_bad_log_setting_is_refused_and_changes_nothing(logged, settings, sentence):
    read, change = logged
    with pytest.raises(InferenceServerException, match=sentence) as caught:
        change({"log_error": False, **settings})
    allowed = ("501", "StatusCode.UNIMPLEMENTED") if "log_file" in settings else ("400", "StatusCode.INVALID_ARGUMENT")
    assert caught.value.status() in allowed
    assert read() == QUIET_LOG


@pytest.mark.parametrize(
    "body",
    [
        {"log_verbose_level": -1},
        {"log_verbose_level": 2**64},
        {"log_verbose_level": 1.5},
        {"log_verbose_level": "1"},
        {"log_info": 1},
        {"log_info": "true"},
        {"log_format": True},
        {"log_format": ["default"]},
        {"log_level": 1},
        {"\x1b[2J\n": 1},
        [],
        "x",
    ],
)
def test_values_of_the_wrong_kind_over_http_are_the_clients_fault(server, body):
    answer = requests.post(f"http://{server.http}/v2/logging", data=json.dumps(body), timeout=30)
    assert answer.status_code == 400
    assert answer.json()["error"].isprintable()
    assert requests.get(f"http://{server.http}/v2/logging", timeout=30).json() == QUIET_LOG


def test_a_hostile_id_stays_on_its_line_of_the_log_and_of_the_traces(repository, tmp_path):
    file = tmp_path / "trace.json"
    hostile = "\n#!/bin/sh\nrm -rf /\x1b[2J\x00"
    flags = (f"--trace-config=triton,file={file}", "--trace-config=rate=1", "--trace-config=level=TIMESTAMPS")
    with running(repository, *flags, "--log-verbose=9") as server:
        body = {
            "id": hostile,
            "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}],
            "parameters": {"fail": hostile},
        }
        assert requests.post(f"http://{server.http}/v2/models/first/infer", json=body, timeout=30).status_code >= 400
    text = file.read_text()
    assert all(line.isprintable() for line in text.splitlines())
    assert json.loads(text)[0]["request_id"] == hostile
    assert all(line.isprintable() for line in server.lines)
    assert not any(line.startswith(("#!", "rm ")) for line in server.lines)
