"""Calls between models where one side dies, goes away or is unloaded; afterwards nothing of a call is left."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tritonclient.utils import InferenceServerException

from asking import ask
from asking_backend import add_asker, installed
from clients import call
from figures import backend_pid, failures, index, metric, wait_until
from harness import RunningServer, running
from repositories import add_decoupled, add_identity

FREE_WITHIN_S = 0.1
HANGING = [("infer", "leaf"), ("told", "stream"), ("gather", "leaf")]
"""How a model waits for another: blocked, in a stream, in an event loop."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    repository = tmp_path / "models"
    repository.mkdir()
    add_asker(repository, "asker")
    add_asker(repository, "other")
    add_identity(repository, "leaf")
    add_decoupled(repository, "stream", hold_instance="true")
    flags = ["--model-control-mode=explicit", "--load-model=*"]
    with running(repository, *flags, env=installed(tmp_path / "site")) as started:
        yield started


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def hang(server: RunningServer, pool: ThreadPoolExecutor, do: str, model: str) -> Future[Any]:
    """Have the asker hang in a call of a model with one instance."""
    more = {"count": 1} if do == "gather" else {}
    return pool.submit(ask, server, do=do, model=model, parameters={"hang": True}, **more)


def queued(server: RunningServer, pool: ThreadPoolExecutor, model: str) -> Future[Any]:
    """Return a request that waits behind what occupies the model's one instance, or will in a moment."""
    while True:
        behind = pool.submit(ask, server, of="other", do="told", model=model)
        waits = lambda: metric(server, "nv_inference_pending_request_count", model) == 1  # noqa: E731
        wait_until("it waits, or was answered", lambda behind=behind, waits=waits: behind.done() or waits())
        if not behind.done():
            return behind


@pytest.mark.parametrize(("do", "model"), HANGING)
def test_when_the_caller_is_killed_the_called_instance_is_free_at_once(
    server: RunningServer, pool: ThreadPoolExecutor, do: str, model: str
) -> None:
    hanging = hang(server, pool, do, model)
    behind = queued(server, pool, model)
    started = time.monotonic()
    psutil.Process(backend_pid(server, "asker")).send_signal(signal.SIGKILL)
    assert behind.result() == [{"OUTPUT0": [1]}]
    assert time.monotonic() - started < FREE_WITHIN_S
    with pytest.raises(InferenceServerException, match="backend process"):
        hanging.result()
    server.wait_for_log("model asker:1 serves again")
    assert ask(server, do="infer", model="leaf")["outputs"] == {"OUTPUT0": [1]}


@pytest.mark.parametrize(("do", "model"), HANGING)
def test_when_the_client_goes_away_what_its_model_called_is_cancelled_too(
    server: RunningServer, pool: ThreadPoolExecutor, do: str, model: str
) -> None:
    more = ', \\"count\\": 1' if do == "gather" else ""
    command = f'{{\\"do\\": \\"{do}\\", \\"model\\": \\"{model}\\", \\"parameters\\": {{\\"hang\\": true}}{more}}}'
    body = f'{{"inputs": [{{"name": "ASK", "datatype": "BYTES", "shape": [1], "data": ["{command}"]}}]}}'
    with socket.create_connection(server.http.split(":")) as client:
        head = f"POST /v2/models/asker/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body.encode())
        behind = queued(server, pool, model)
    started = time.monotonic()
    assert behind.result() == [{"OUTPUT0": [1]}]
    assert time.monotonic() - started < FREE_WITHIN_S
    wait_until("the cancel is counted", lambda: failures(server, model, "CANCELED") == 1)
    assert ask(server, do="infer", model="leaf")["outputs"] == {"OUTPUT0": [1]}


@pytest.mark.parametrize(("do", "model"), HANGING)
def test_when_the_called_process_is_killed_the_call_fails_and_the_caller_goes_on(
    server: RunningServer, pool: ThreadPoolExecutor, do: str, model: str
) -> None:
    hanging = hang(server, pool, do, model)
    behind = queued(server, pool, model)
    psutil.Process(backend_pid(server, model)).send_signal(signal.SIGKILL)
    told = hanging.result()
    assert (told if do == "infer" else told[-1])["error"] == "UNAVAILABLE"
    assert behind.result() == [{"OUTPUT0": [1]}]


def test_a_model_that_is_unloaded_in_the_middle_of_a_call_answers_it(
    server: RunningServer, pool: ThreadPoolExecutor
) -> None:
    slow = pool.submit(ask, server, do="infer", model="leaf", parameters={"delay_ms": 500})
    behind = queued(server, pool, "leaf")
    assert call(server, "/v2/repository/models/leaf/unload", {})[0] == 200
    assert ask(server, of="other", do="infer", model="leaf")["error"] in {"NOT_FOUND", "UNAVAILABLE"}
    assert slow.result()["outputs"] == {"OUTPUT0": [1]}
    assert behind.result() == [{"OUTPUT0": [1]}]
    wait_until("it is gone", lambda: index(server, "leaf")["1"][0] == "UNAVAILABLE")


def test_a_caller_that_is_unloaded_takes_what_it_left_running_along(
    server: RunningServer, pool: ThreadPoolExecutor
) -> None:
    ask(server, do="keep", model="leaf", parameters={"hang": True})
    behind = queued(server, pool, "leaf")
    assert call(server, "/v2/repository/models/asker/unload", {})[0] == 200
    assert behind.result() == [{"OUTPUT0": [1]}]


def test_a_server_that_stops_still_serves_the_calls_of_running_requests(
    server: RunningServer, pool: ThreadPoolExecutor
) -> None:
    again = pool.submit(ask, server, do="again", model="leaf", delays_ms=[500, 1, 1])
    behind = queued(server, pool, "leaf")
    server.process.send_signal(signal.SIGTERM)
    assert again.result() == 3
    assert server.process.wait(30) == 0
    assert behind.result() == [{"OUTPUT0": [1]}]


def test_after_two_thousand_calls_nothing_is_left_of_them(server: RunningServer, pool: ThreadPoolExecutor) -> None:
    """Of any kind: answered, failed, streamed, cancelled, dropped, small and large."""
    data = np.ones(200_000, np.float32)

    def mix() -> None:
        ask(server, do="many", model="leaf", count=100)
        ask(server, do="gather", model="leaf", count=100)
        ask(server, do="gather", model="nonsuch", count=20)
        ask(server, do="crowd", model="leaf", threads=4, count=50)
        for _ in range(10):
            assert ask(server, data=data, do="data", model="leaf") is True
            assert ask(server, do="large", model="stream", nbytes=1 << 20, responses=3) == 3
            ask(server, do="drop_stream", model="stream")

    def footprint() -> tuple[int, int, int, int]:
        own = psutil.Process(server.process.pid)
        asker = psutil.Process(backend_pid(server, "asker"))
        leaf = psutil.Process(backend_pid(server, "leaf"))
        return own.num_fds(), asker.num_fds(), leaf.num_fds(), own.memory_info().rss + asker.memory_info().rss

    mix()
    before = footprint()
    for _ in range(7):
        mix()
    wait_until("no descriptor is left", lambda: footprint()[:3] <= before[:3])
    assert footprint()[3] < before[3] + (24 << 20)
