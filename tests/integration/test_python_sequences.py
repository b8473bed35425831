"""Python models of sequences: what they are given, what is kept for them, and requests that they get again."""

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
LOADED = ("seq_acc", "iterative", "again", "never_again")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    flags = [f"--load-model={name}" for name in LOADED]
    with running(MODELS, "--model-control-mode=explicit", *flags) as started:
        yield started


def test_the_server_keeps_the_state_of_each_sequence(server: RunningServer) -> None:
    def add(number: int, value: int, **flags: bool) -> int:
        parameters = {"sequence_id": number, **flags}
        status, answer = infer(server, "seq_acc", ("INPUT0", "INT32", [1, 1], [value]), parameters=parameters)
        assert status == 200, answer
        return int(answer["outputs"][0]["data"][0])

    assert [add(2, 2, sequence_start=True), add(3, 3, sequence_start=True)] == [2, 3]
    assert [add(2, 2), add(3, 3), add(2, 2), add(3, 3, sequence_end=True), add(2, 2, sequence_end=True)] == [
        4,
        6,
        6,
        9,
        8,
    ]


def test_a_decoupled_model_gets_a_request_until_it_lets_it_go(server: RunningServer) -> None:
    got: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: got.put(error or result))
        for count in (1, 5):
            tensor = triton.InferInput("COUNT", [1, 1], "INT32")
            tensor.set_data_from_numpy(np.array([[count]], np.int32))
            client.async_stream_infer("iterative", [tensor])
            values = [got.get(timeout=30).as_numpy("OUT").item() for _ in range(count)]
            assert values == list(range(count - 1, -1, -1))


@pytest.mark.parametrize("count", [1, 4])
def test_a_plain_model_answers_when_it_has_had_its_request_often_enough(server: RunningServer, count: int) -> None:
    status, answer = infer(server, "again", ("COUNT", "INT32", [1], [count]))
    assert (status, answer["outputs"][0]["data"]) == (200, [count])


def test_a_model_without_iterative_sequences_gets_no_request_again(server: RunningServer) -> None:
    status, answer = infer(server, "never_again", ("COUNT", "INT32", [1], [2]))
    assert status == 400
    assert "no iterative sequences" in answer["error"]
    assert infer(server, "never_again", ("COUNT", "INT32", [1], [1]))[0] == 200
