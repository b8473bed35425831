"""A real server's traces: one for each picked request, with times in their order, whatever door it came through."""

from __future__ import annotations

import contextlib
import json
import queue
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import requests
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from harness import RunningServer, running
from repositories import add_decoupled, add_identity

ON = ("--trace-config=rate=1", "--trace-config=level=TIMESTAMPS")
CORE = [
    *("REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"),
    *("INFER_RESPONSE_COMPLETE", "REQUEST_END"),
]
HTTP = ["HTTP_RECV_START", "HTTP_RECV_END", *CORE, "HTTP_SEND_START", "HTTP_SEND_END"]
GRPC = ["GRPC_WAITREAD_START", "GRPC_WAITREAD_END", *CORE, "GRPC_SEND_START", "GRPC_SEND_END"]
X = np.arange(4, dtype=np.float32).reshape(1, 4)


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models")
    add_identity(path, "first")
    add_identity(path, "second")
    add_decoupled(path, "many")
    return path


@pytest.fixture
def serve(repository, tmp_path):
    """Return a function that has a server traced: it starts one, does what it is told, and returns the traces."""

    def serve(*flags: str, do: Callable[[RunningServer], object]) -> dict[int, list[dict]]:
        with running(repository, f"--trace-config=triton,file={tmp_path / 'trace.json'}", *flags) as server:
            do(server)
        found: dict[int, list[dict]] = {}
        for path in sorted(tmp_path.iterdir()):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            for entry in json.loads(path.read_text()):
                found.setdefault(entry["id"], []).append(entry)
        return found

    return serve


def tensors(module, array: np.ndarray = X) -> list:
    tensor = module.InferInput("INPUT0", array.shape, "FP32")
    tensor.set_data_from_numpy(array)
    return [tensor]


def over_http(server: RunningServer, model: str = "first", times: int = 1, **how) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        for _ in range(times):
            client.infer(model, tensors(httpclient), **how)


def over_grpc(server: RunningServer, model: str = "first", times: int = 1, **how) -> None:
    with grpcclient.InferenceServerClient(server.grpc) as client:
        for _ in range(times):
            client.infer(model, tensors(grpcclient), **how)


def moments(trace: list[dict]) -> list[str]:
    """Return the names of a trace's moments, which must be in the order of their times."""
    at = [stamp["ns"] for entry in trace if "timestamps" in entry for stamp in entry["timestamps"]]
    assert at == sorted(at)
    return [stamp["name"] for entry in trace if "timestamps" in entry for stamp in entry["timestamps"]]


@pytest.mark.parametrize(("door", "names"), [(over_http, HTTP), (over_grpc, GRPC)], ids=["http", "grpc"])
def test_a_request_is_traced_from_its_arrival_to_its_answer(serve, door, names):
    traces = serve(*ON, do=lambda server: door(server, request_id="mine"))
    assert list(traces) == [1]
    assert traces[1][0] == {"id": 1, "model_name": "first", "model_version": 1, "request_id": "mine"}
    assert sorted(moments(traces[1])) == sorted(names)
    # The end of the request and the sending of its answer lie in one call, in which the order is the door's.
    assert [name for name in moments(traces[1]) if name in CORE] == CORE


def test_one_of_so_many_requests_is_traced_and_no_more_than_the_count(serve):
    traces = serve(
        *ON[1:], "--trace-config=rate=3", "--trace-config=count=4", do=lambda server: over_http(server, times=20)
    )
    assert len(traces) == 4


def test_each_traced_request_has_its_own_times_under_load(serve):
    def load(server: RunningServer) -> None:
        threads = [
            threading.Thread(target=door, args=(server, model, 25))
            for door in (over_http, over_grpc)
            for model in ("first", "second")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    traces = serve(*ON, do=load)
    assert len(traces) == 100
    assert sorted(trace[0]["model_name"] for trace in traces.values()) == ["first"] * 50 + ["second"] * 50
    for trace in traces.values():
        assert len(moments(trace)) == len(HTTP)


def test_tensors_are_written_where_they_are_asked_for(serve):
    traces = serve("--trace-config=rate=1", "--trace-config=level=TENSORS", do=over_http)
    activities = {entry["activity"]: entry["tensor"] for entry in traces[1][1:]}
    data = {"data": "0.0,1.0,2.0,3.0", "shape": "1,4", "dtype": "FP32"}
    assert activities == {
        "TENSOR_QUEUE_INPUT": {"name": "INPUT0", **data},
        "TENSOR_BACKEND_OUTPUT": {"name": "OUTPUT0", **data},
    }


def test_a_new_file_begins_after_log_frequency_traces(serve, tmp_path):
    traces = serve(*ON, "--trace-config=triton,log-frequency=3", do=lambda server: over_http(server, times=7))
    assert len(traces) == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.json.0", "trace.json.1", "trace.json.2"]


def test_every_response_of_a_stream_is_noted_down(serve):
    def stream(server: RunningServer) -> None:
        url = f"http://{server.http}/v2/models/many/generate_stream"
        body = {"INPUT0": [1.0, 2.0], "responses": 3}
        with requests.post(url, json=body, stream=True, timeout=30) as answer:
            assert len([line for line in answer.iter_lines() if line]) == 3

    traces = serve(*ON, do=stream)
    names = moments(traces[1])
    assert names.count("INFER_RESPONSE_COMPLETE") == 3
    assert set(HTTP) == set(names)


def test_a_stream_over_grpc_is_traced_as_one_over_http_is(serve):
    def stream(server: RunningServer) -> None:
        answers: queue.Queue = queue.Queue()
        with grpcclient.InferenceServerClient(server.grpc) as client:
            client.start_stream(lambda result, error: answers.put((result, error)))
            client.async_stream_infer("many", tensors(grpcclient), parameters={"responses": 3})
            for _ in range(3):
                _, error = answers.get(timeout=30)
                assert error is None
            client.stop_stream()

    traces = serve(*ON, do=stream)
    names = moments(traces[1])
    assert names.count("INFER_RESPONSE_COMPLETE") == 3
    assert set(GRPC) == set(names)


def test_a_request_that_fails_or_is_refused_by_its_queue_is_traced_to_its_end(serve):
    def fail(server: RunningServer) -> None:
        with httpclient.InferenceServerClient(server.http) as client:
            with pytest.raises(InferenceServerException):
                client.infer("first", tensors(httpclient), parameters={"fail": "on purpose"})
            with pytest.raises(InferenceServerException):
                client.infer("first", tensors(httpclient, np.zeros((1, 4), np.float32))[:0])

    traces = serve(*ON, do=fail)
    assert list(traces) == [1], "one that does not fit its model is refused before it is picked"
    names = moments(traces[1])
    assert names[-1] in ("REQUEST_END", "HTTP_SEND_END")
    assert "INFER_RESPONSE_COMPLETE" not in names


def test_the_file_can_be_read_while_the_server_runs(serve, tmp_path):
    seen = threading.Event()

    def look(server: RunningServer) -> None:
        over_http(server)
        path = tmp_path / "trace.json"
        while not seen.wait(0.02):
            with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # it was looked at amid a write
                assert len(json.loads(path.read_text())) == 1 + len(HTTP)
                seen.set()
        assert "headrace_traces_total 1.0" in server.metrics().splitlines()

    assert list(serve(*ON, do=look)) == [1]
