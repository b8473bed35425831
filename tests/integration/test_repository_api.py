"""The repository API of a real server through stock clients, the same over each door."""

from __future__ import annotations

import gzip
import json
import queue
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from clients import call
from harness import RunningServer, running
from headrace_protocol._generated import grpc_service_pb2 as pb
from repositories import add_identity
from stock_doors import DOORS, Client, client, index, refused

SLOW_S = 1.0
"""How long the models that load slowly take."""
SLOW = ("slow0", "slow1", "slow2")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("repository")


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    for name in ("plain", "never", "twice", "wide"):
        add_identity(repository, name)
    add_identity(repository, "delayed", execute_delay_ms="400")
    for name in SLOW:
        add_identity(repository, name, creation_delay_sec=str(SLOW_S))
    other = tmp_path_factory.mktemp("other")
    add_identity(other, "twice")
    with running(repository, f"--model-repository={other}", "--model-control-mode=explicit") as started:
        yield started


@pytest.fixture(params=DOORS)
def door(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def api(server: RunningServer, door: str) -> Iterator[Client]:
    with client(server, door) as opened:
        yield opened


def entries(api: Client, name: str) -> list[dict[str, str]]:
    return [
        {key: value for key, value in entry.items() if key != "name"} for entry in index(api) if entry["name"] == name
    ]


def until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def config(name: str, **fields: object) -> str:
    tensor = {"data_type": "TYPE_FP32", "dims": [-1]}
    ends = {"input": [{"name": "INPUT0", **tensor}], "output": [{"name": "OUTPUT0", **tensor}]}
    return json.dumps({"name": name, "backend": "identity", "max_batch_size": 8, **ends, **fields})


# --- What the index tells -----------------------------------------------------------------------------------------


def test_a_model_that_nobody_loaded_has_a_name_and_nothing_else(api: Client) -> None:
    assert entries(api, "never") == [{}]


def test_loaded_and_unloaded_models_have_their_state_and_reason(api: Client) -> None:
    api.load_model("plain")
    assert entries(api, "plain") == [{"version": "1", "state": "READY"}]
    api.load_model("plain")
    api.unload_model("plain")
    until(lambda: entries(api, "plain")[0]["state"] != "UNLOADING", "it stays UNLOADING")
    assert entries(api, "plain") == [{"version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}]


def test_a_model_of_two_repositories_is_told_before_anybody_loads_it(api: Client) -> None:
    (entry,) = entries(api, "twice")
    assert (entry["state"], "version" in entry) == ("UNAVAILABLE", False)
    assert "two or more repositories" in entry["reason"]
    code, text = refused(api.load_model, "twice")
    assert code == "INVALID_ARGUMENT"
    assert "two or more repositories" in text


def test_the_ready_filter_leaves_only_what_serves(server: RunningServer, api: Client) -> None:
    api.load_model("plain")
    status, over_http = call(server, "/v2/repository/index", {"ready": True})
    assert status == 200
    with grpc.insecure_channel(server.grpc) as channel:
        ask = channel.unary_unary(
            "/inference.GRPCInferenceService/RepositoryIndex",
            pb.RepositoryIndexRequest.SerializeToString,
            pb.RepositoryIndexResponse.FromString,
        )
        over_grpc = ask(pb.RepositoryIndexRequest(ready=True))
    assert {"name": "plain", "version": "1", "state": "READY"} in over_http
    assert all(entry["state"] == "READY" for entry in over_http)
    assert [(entry.name, entry.state) for entry in over_grpc.models] == [(e["name"], e["state"]) for e in over_http]


@pytest.mark.parametrize("body", [{"ready": 1}, {"ready": "true"}, {"ready": None}, [], "x"])
def test_a_filter_that_is_none_is_refused(server: RunningServer, body: object) -> None:
    assert call(server, "/v2/repository/index", body)[0] == 400


@pytest.mark.parametrize("name", ["models", "..%2F..%2Fetc", "%2Fproc%2Fself%2Froot", "file:%2F%2F%2Fetc"])
def test_a_repository_in_the_path_of_the_index_is_not_looked_at(server: RunningServer, name: str) -> None:
    assert call(server, f"/v2/repository/{name}/index", {}) == call(server, "/v2/repository/index", {})


def test_a_repository_is_chosen_at_neither_door(server: RunningServer) -> None:
    for verb in ("load", "unload"):
        status, answer = call(server, f"/v2/repository/models2/models/plain/{verb}", {})
        assert (status, "models2" in answer["error"]) == (501, True)
    with grpc.insecure_channel(server.grpc) as channel:
        for rpc, message in (
            ("RepositoryIndex", pb.RepositoryIndexRequest(repository_name="models2")),
            ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(repository_name="models2", model_name="plain")),
            ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(repository_name="models2", model_name="plain")),
        ):
            ask = channel.unary_unary(f"/inference.GRPCInferenceService/{rpc}")
            with pytest.raises(grpc.RpcError) as raised:
                ask(message.SerializeToString())
            assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert "models2" in raised.value.details()


# --- Names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [" ", "a/b", "..", "../plain", "/etc", ".", "a\nb", "a\0b", "a\\b", "x" * 300])
def test_names_that_are_no_folder_name_are_refused(server: RunningServer, name: str) -> None:
    with client(server, "grpc") as api:
        for verb in (api.load_model, api.unload_model):
            assert refused(verb, name)[0] == "INVALID_ARGUMENT"
    for verb in ("load", "unload"):
        path = f"/v2/repository/models/{urllib.parse.quote(name, safe='')}/{verb}"
        assert call(server, path, {})[0] == 400


def test_a_name_with_an_open_slash_is_another_path(server: RunningServer) -> None:
    with client(server, "http") as api:
        assert refused(api.load_model, "a/b")[0] == "NOT_FOUND"


def test_a_folder_that_is_not_there_is_not_found_and_leaves_no_trace(api: Client) -> None:
    code, text = refused(api.load_model, "ghost")
    assert (code, "'ghost'" in text) == ("NOT_FOUND", True)
    assert entries(api, "ghost") == []


def test_unloading_what_nobody_knows_is_no_error(api: Client) -> None:
    api.unload_model("ghost")
    api.unload_model("never", unload_dependents=True)
    assert entries(api, "never") == [{}]


@pytest.mark.parametrize("mode", ["none", "poll"])
def test_calls_are_refused_unless_the_mode_is_explicit(tmp_path: Path, mode: str) -> None:
    add_identity(tmp_path, "m")
    with running(tmp_path, f"--model-control-mode={mode}") as server:
        for door in DOORS:
            with client(server, door) as api:
                for verb in (api.load_model, api.unload_model):
                    code, text = refused(verb, "m")
                    assert (code, mode in text) == ("UNAVAILABLE", True)
                assert entries(api, "m") == [{"version": "1", "state": "READY"}]


# --- A configuration in the call ----------------------------------------------------------------------------------


def test_a_configuration_serves_until_the_next_plain_load(api: Client) -> None:
    api.load_model("wide", config=config("wide", max_batch_size=3))
    assert batch_size(api, "wide") == 3
    api.load_model("wide")
    assert batch_size(api, "wide") == 8


def batch_size(api: Client, name: str) -> int:
    told = api.get_model_config(name)
    return told["max_batch_size"] if isinstance(told, dict) else told.config.max_batch_size


@pytest.mark.parametrize("bad", ["[" * 500_000, '{"a":' * 500_000, "[" * 500_000 + "]" * 500_000])
def test_a_configuration_nested_without_end_is_refused_and_the_server_lives(api: Client, bad: str) -> None:
    code, text = refused(api.load_model, "plain", config=bad)
    assert code == "INVALID_ARGUMENT"
    assert len(text) < 1000
    assert api.is_server_live()


@pytest.mark.parametrize("what", ["[", '{"a":'])
def test_a_load_nested_without_end_is_refused(server: RunningServer, what: str) -> None:
    status, _ = post(server, "plain", b'{"parameters":' + what.encode() * 500_000)
    assert status == 400


def test_a_body_that_inflates_without_end_is_refused(server: RunningServer) -> None:
    bomb = gzip.compress(bytes(100 << 20), 9)
    status, text = post(server, "plain", bomb, {"Content-Encoding": "gzip"})
    assert status == 413, text


def test_a_compressed_body_that_breaks_off_is_refused(server: RunningServer) -> None:
    body = gzip.compress(json.dumps({"parameters": {"config": config("plain")}}).encode())
    assert post(server, "plain", body[:-9], {"Content-Encoding": "gzip"})[0] == 400
    assert post(server, "plain", body, {"Content-Encoding": "gzip"})[0] == 200


def post(server: RunningServer, model: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, str]:
    url = f"http://{server.http}/v2/repository/models/{model}/load"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers or {}), timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


# --- Several at once ----------------------------------------------------------------------------------------------


@pytest.fixture
def slow(server: RunningServer) -> Iterator[None]:
    yield
    with client(server, "grpc") as api:
        for name in SLOW:
            api.unload_model(name)
        until(lambda: all(e[0].get("state") != "UNLOADING" for e in (entries(api, name) for name in SLOW)), "not gone")


@pytest.mark.usefixtures("slow")
def test_different_models_load_side_by_side(server: RunningServer, door: str, api: Client) -> None:
    with ThreadPoolExecutor(len(SLOW)) as pool:
        loads = [pool.submit(load_with_a_client_of_its_own, server, door, name) for name in SLOW]
        until(
            lambda: all(entries(api, name) == [{"version": "1", "state": "LOADING"}] for name in SLOW),
            "they load one after the other",
        )
        for load in loads:
            load.result()
    assert all(entries(api, name) == [{"version": "1", "state": "READY"}] for name in SLOW)


@pytest.mark.usefixtures("slow")
def test_a_second_load_of_a_model_that_loads_waits_for_the_first(server: RunningServer, door: str, api: Client) -> None:
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(load_with_a_client_of_its_own, server, door, "slow0")
        until(lambda: entries(api, "slow0") == [{"version": "1", "state": "LOADING"}], "it does not load")
        load_with_a_client_of_its_own(server, door, "slow0")
        assert api.is_model_ready("slow0")
        first.result()


@pytest.mark.usefixtures("slow")
def test_a_newer_load_of_something_else_takes_the_place_of_the_older(
    server: RunningServer, door: str, api: Client
) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(load_with_a_client_of_its_own, server, door, "slow0")
        until(lambda: entries(api, "slow0") == [{"version": "1", "state": "LOADING"}], "it does not load")
        api.load_model("slow0", config=config("slow0", max_batch_size=2))
        code, text = refused(first.result)
    assert (code, "newer operation" in text) == ("UNAVAILABLE", True)
    assert batch_size(api, "slow0") == 2


@pytest.mark.usefixtures("slow")
def test_an_unload_ends_the_load_under_way(server: RunningServer, door: str, api: Client) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(load_with_a_client_of_its_own, server, door, "slow0")
        until(lambda: entries(api, "slow0") == [{"version": "1", "state": "LOADING"}], "it does not load")
        api.unload_model("slow0")
        assert refused(first.result)[0] == "UNAVAILABLE"
    assert entries(api, "slow0") == [{"version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}]


@pytest.mark.usefixtures("slow")
def test_a_client_that_goes_away_does_not_stop_its_load(server: RunningServer, door: str, api: Client) -> None:
    if door == "grpc":
        assert refused(api.load_model, "slow1", client_timeout=0.2)[0] == "DEADLINE_EXCEEDED"
    else:
        host, port = server.http.split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                b"POST /v2/repository/models/slow1/load HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
            )
            until(lambda: entries(api, "slow1") == [{"version": "1", "state": "LOADING"}], "it does not load")
    until(lambda: entries(api, "slow1") == [{"version": "1", "state": "READY"}], "the load was given up")


def load_with_a_client_of_its_own(server: RunningServer, door: str, name: str) -> None:
    with client(server, door) as api:
        api.load_model(name)


# --- Unload -------------------------------------------------------------------------------------------------------


def test_an_unload_answers_at_once_and_the_requests_inside_end_in_peace(server: RunningServer, api: Client) -> None:
    api.load_model("delayed")
    tensor = grpcclient.InferInput("INPUT0", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 4), np.float32))
    outcomes: queue.Queue[object] = queue.Queue()
    with grpcclient.InferenceServerClient(server.grpc) as other:
        for _ in range(2):
            other.async_infer("delayed", [tensor], lambda result, error: outcomes.put(error or result))
        until(lambda: waiting(server, "delayed") == 1, "one is to run while the other waits")
        api.unload_model("delayed")
        assert outcomes.empty(), "the unload has waited for the requests"
        assert entries(api, "delayed") == [{"version": "1", "state": "UNLOADING", "reason": "unloaded"}]
        assert refused(api.get_model_metadata, "delayed")[0] == "UNAVAILABLE"
        assert [type(outcomes.get(timeout=10)) for _ in range(2)] == [grpcclient.InferResult] * 2
    until(lambda: entries(api, "delayed")[0]["state"] == "UNAVAILABLE", "it stays UNLOADING")


def waiting(server: RunningServer, model: str) -> float:
    """Return how many requests wait in the queue of a model."""
    line = next(line for line in server.metrics().splitlines() if f'headrace_queue_depth{{model="{model}"' in line)
    return float(line.rpartition(" ")[2])


@pytest.mark.parametrize("value", [1, "true", None])
def test_dependents_are_asked_for_by_true_or_false(server: RunningServer, value: object) -> None:
    body = {"parameters": {"unload_dependents": value}}
    status, answer = call(server, "/v2/repository/models/plain/unload", body)
    assert (status, "unload_dependents" in answer["error"]) == (400, True)


@pytest.mark.parametrize("verb", ["load", "unload"])
def test_an_unknown_parameter_is_named(server: RunningServer, verb: str) -> None:
    status, answer = call(server, f"/v2/repository/models/plain/{verb}", {"parameters": {"confg": "{}"}})
    assert (status, "'confg'" in answer["error"]) == (400, True)
