"""Python models that ask the server: other models, metrics of their own, what is loaded."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from clients import infer
from harness import RunningServer, running

MODELS = Path(__file__).resolve().parents[1] / "python_models"
LOADED = (
    "crashy",
    "stream",
    "square",
    "bls_sync",
    "bls_async",
    "bls_decoupled",
    "bls_thread",
    "custom_metrics",
    "control",
)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    flags = [f"--load-model={name}" for name in LOADED]
    with running(MODELS, "--model-control-mode=explicit", *flags) as started:
        yield started


def data(answer: tuple[int, Any], output: int = 0) -> Any:
    status, body = answer
    assert status == 200, body
    return body["outputs"][output]["data"]


def called(server: RunningServer, model: str, value: int) -> tuple[int, Any]:
    return infer(server, "bls_sync", ("MODEL", "BYTES", [1], [model]), ("INPUT0", "INT32", [1], [value]))


def test_exec_returns_the_response_of_another_model(server: RunningServer) -> None:
    assert data(called(server, "crashy", 0)) == [0]


def test_exec_with_decoupled_iterates_over_the_responses(server: RunningServer) -> None:
    assert data(called(server, "stream", 3)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("model", "value", "status", "text"),
    [
        ("crashy", 8, 500, "crashy said: planned"),
        ("crashy", 1, 503, "crashy said: the backend process failed"),
        ("nowhere", 0, 404, "nowhere said: "),
        ("square", 0, 501, "square said: "),
    ],
)
def test_what_fails_in_another_model_is_a_response_with_its_error(
    server: RunningServer, model: str, value: int, status: int, text: str
) -> None:
    got, answer = called(server, model, value)
    assert (got, answer["error"].startswith(text)) == (status, True), answer
    assert data(called(server, "crashy", 0)) == [0]


def test_many_calls_at_once_out_of_a_coroutine(server: RunningServer) -> None:
    answer = infer(server, "bls_async", ("CALLS", "INT32", [1], [50]), ("RESPONSES", "INT32", [1], [0]))
    assert (data(answer), data(answer, 1)) == ([50], [])


def test_many_streamed_calls_at_once_out_of_a_coroutine_never_fail(server: RunningServer) -> None:
    for _ in range(10):
        answer = infer(server, "bls_async", ("CALLS", "INT32", [1], [50]), ("RESPONSES", "INT32", [1], [20]))
        assert (data(answer), data(answer, 1)) == ([1000], [])


def test_a_decoupled_model_hands_on_the_responses_of_another(server: RunningServer) -> None:
    got: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: got.put(error or result))
        tensor = triton.InferInput("IN", [1], "INT32")
        tensor.set_data_from_numpy(np.array([3], np.int32))
        client.async_stream_infer("bls_decoupled", [tensor])
        assert [got.get(timeout=30).as_numpy("OUT").tolist() for _ in range(3)] == [[3]] * 3


def test_a_thread_of_initialize_may_call(server: RunningServer) -> None:
    for _ in range(3):
        assert data(infer(server, "bls_thread", ("IN", "INT32", [1], [0]))) == ["good"]


def test_metrics_of_a_model_are_scraped_and_refuse_what_they_cannot_do(server: RunningServer) -> None:
    infer(server, "custom_metrics", ("IN", "FP32", [1], [2]))
    words = data(infer(server, "custom_metrics", ("IN", "FP32", [1], [5])))
    assert words[:2] == ["7.0", "5.0"]
    assert "-1" in words[2]
    assert "set" in words[3]
    assert "histogram" in words[4]
    assert "asked_total" in words[5]
    scraped = server.metrics()
    assert 'asked_bucket{le="10",model="custom_metrics"} 2.0' in scraped
    assert 'asked_total{model="custom_metrics"} 7.0' in scraped
    assert 'last_asked{model="custom_metrics"} 5.0' in scraped
    assert "# HELP last_asked What was asked last." in scraped


def test_a_model_loads_and_unloads_others(server: RunningServer) -> None:
    def ask(what: str, model: str) -> str:
        (said,) = data(infer(server, "control", ("WHAT", "BYTES", [2], [what, model])))
        return str(said)

    assert ask("is_model_ready", "ident_fp32") == "False"
    assert ask("load_model", "ident_fp32") == "None"
    assert ask("is_model_ready", "ident_fp32") == "True"
    assert ask("unload_model", "ident_fp32") == "None"
    assert ask("is_model_ready", "ident_fp32") == "False"
    assert ask("load_model", "nowhere").startswith("refused: ")
