"""Sequences through a real server: each client gets the sums of its own numbers, whatever the others do."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from onnx import TensorProto

from clients import call, infer
from figures import metric
from harness import RunningServer, running
from repositories import add_onnx
from sequence_models import (
    CONTROLS,
    DIRECT,
    HISTORY_CONFIG,
    accumulator,
    accumulator_config,
    add,
    control_echo,
    history,
    oldest,
)

LONG_US = 60_000_000
MODELS = {
    "direct": {"strategy": DIRECT, "idle_us": LONG_US},
    "oldest": {"strategy": oldest(8), "idle_us": LONG_US},
    "two": {"strategy": oldest(4), "idle_us": LONG_US, "instances": 2},
    "brief": {"strategy": oldest(2), "idle_us": 300_000},
    "narrow": {
        "strategy": oldest(1),
        "idle_us": LONG_US,
        "extra": 'parameters { key: "sequence_max_queue_size" value { string_value: "3" } }',
    },
    "unbatched": {"strategy": oldest(8), "idle_us": LONG_US, "max_batch_size": 0},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        batch = config.get("max_batch_size", 4) > 0
        add_onnx(
            repository, name, lambda path, batch=batch: accumulator(path, batch), config=accumulator_config(**config)
        )
    with running(repository) as started:
        yield started


def stock_input(value: int, shape: tuple[int, ...] = (1, 1)) -> list[grpcclient.InferInput]:
    tensor = grpcclient.InferInput("INPUT0", shape, "INT32")
    tensor.set_data_from_numpy(np.full(shape, value, np.int32))
    return [tensor]


def over_http(server: RunningServer, model: str, sequence: int, steps: int) -> list[int]:
    shape = (1,) if model == "unbatched" else (1, 1)
    return [
        add(server, model, sequence, sequence, start=step == 0, end=step == steps - 1, shape=shape)[1]
        for step in range(steps)
    ]


def over_grpc(server: RunningServer, model: str, sequence: int, steps: int) -> list[int]:
    shape = (1,) if model == "unbatched" else (1, 1)
    with grpcclient.InferenceServerClient(server.grpc) as client:
        answers = [
            client.infer(
                model,
                stock_input(sequence, shape),
                sequence_id=sequence,
                sequence_start=step == 0,
                sequence_end=step == steps - 1,
            )
            for step in range(steps)
        ]
        return [answer.as_numpy("OUTPUT0").item() for answer in answers]


def over_stream(server: RunningServer, model: str, sequences: list[int], steps: int) -> dict[int, list[int]]:
    """Interleave the requests of many sequences in one stream, without waiting for answers."""
    shape = (1,) if model == "unbatched" else (1, 1)
    answers: queue.Queue = queue.Queue()
    sums: dict[int, list[int]] = {sequence: [] for sequence in sequences}
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        for step in range(steps):
            for sequence in sequences:
                client.async_stream_infer(
                    model,
                    stock_input(sequence, shape),
                    request_id=str(sequence),
                    sequence_id=sequence,
                    sequence_start=step == 0,
                    sequence_end=step == steps - 1,
                )
        for _ in range(steps * len(sequences)):
            result = answers.get(timeout=30)
            assert not isinstance(result, Exception), result
            sums[int(result.get_response().id)].append(result.as_numpy("OUTPUT0").item())
        client.stop_stream()
    return sums


@pytest.mark.parametrize("model", ["direct", "oldest", "two", "unbatched"])
def test_fifty_interleaved_sequences_over_all_doors_keep_to_their_own_sums(server: RunningServer, model: str) -> None:
    steps = 6
    with ThreadPoolExecutor(37) as pool:
        http = {n: pool.submit(over_http, server, model, n, steps) for n in range(1, 21)}
        grpc = {n: pool.submit(over_grpc, server, model, n, steps) for n in range(21, 36)}
        stream = pool.submit(over_stream, server, model, list(range(36, 51)), steps)
        sums = {n: future.result() for n, future in {**http, **grpc}.items()} | stream.result()
    assert sums == {n: [n * (step + 1) for step in range(steps)] for n in range(1, 51)}
    assert metric(server, "headrace_sequences_active", model=model) == 0
    assert metric(server, "headrace_sequences_backlog", model=model) == 0


def test_requests_of_different_sequences_share_executions(server: RunningServer) -> None:
    before = metric(server, "nv_inference_exec_count", model="oldest")
    over_stream(server, "oldest", [101, 102, 103, 104], 20)
    assert metric(server, "nv_inference_exec_count", model="oldest") - before < 80


def test_what_is_no_request_of_a_sequence_is_refused_and_named(server: RunningServer) -> None:
    for given, text in (
        ({"sequence": 0, "start": True}, "sequence_id that is not 0"),
        ({"sequence": "", "start": True}, "sequence_id that is not 0"),
        ({"sequence": 70}, "needs the start flag"),
        ({"sequence": 70, "start": True, "shape": (2, 1)}, "batch size of 1"),
    ):
        status, message = add(server, "oldest", given.pop("sequence"), 1, **given)
        assert status == 400
        assert text in message
        assert "'oldest'" in message


def test_a_string_names_a_sequence_as_well_as_a_number(server: RunningServer) -> None:
    assert add(server, "oldest", "7", 1, start=True) == (200, 1)
    assert add(server, "oldest", 7, 20, start=True) == (200, 20)
    assert add(server, "oldest", "7", 1, end=True) == (200, 2)
    assert add(server, "oldest", 7, 20, end=True) == (200, 40)


def test_a_start_in_mid_sequence_begins_anew(server: RunningServer) -> None:
    assert add(server, "direct", 71, 5, start=True) == (200, 5)
    assert add(server, "direct", 71, 6, start=True) == (200, 6)
    assert add(server, "direct", 71, 6, end=True) == (200, 12)


def test_an_idle_sequence_is_dropped_and_has_to_start_again(server: RunningServer) -> None:
    assert add(server, "brief", 72, 5, start=True) == (200, 5)
    deadline = time.monotonic() + 10
    while metric(server, "headrace_sequences_active", model="brief"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    status, message = add(server, "brief", 72, 5)
    assert status == 400
    assert "start flag" in message
    assert add(server, "brief", 72, 3, start=True, end=True) == (200, 3)


def test_the_backlog_is_bounded_and_its_timeout_rejects_the_whole_sequence(server: RunningServer) -> None:
    assert add(server, "narrow", 80, 1, start=True) == (200, 1)
    with ThreadPoolExecutor(4) as pool:
        late = pool.submit(add, server, "narrow", 81, 5, start=True, timeout=400_000)
        wait_for_backlog(server, "narrow", 1)
        also = pool.submit(add, server, "narrow", 81, 6)
        patient = pool.submit(add, server, "narrow", 82, 7, start=True, end=True)
        wait_for_queue(server, "narrow", 3)
        status, message = add(server, "narrow", 83, 1, start=True)
        assert status == 503
        assert "sequence_max_queue_size is 3" in message
        for rejected in (late, also):
            status, message = rejected.result()
            assert status == 503
            assert "waited for a free slot" in message
        status, message = add(server, "narrow", 81, 1)
        assert status == 400
        assert not patient.done()
        assert add(server, "narrow", 80, 1, end=True) == (200, 2)
        assert patient.result() == (200, 7)
    rejected = metric(server, "nv_inference_request_failure", model="narrow", reason="REJECTED")
    assert rejected == 3


def wait_for_backlog(server: RunningServer, model: str, count: int) -> None:
    deadline = time.monotonic() + 10
    while metric(server, "headrace_sequences_backlog", model=model) != count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_queue(server: RunningServer, model: str, count: int) -> None:
    deadline = time.monotonic() + 10
    while metric(server, "headrace_queue_depth", model=model) != count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def one_model(folder: Path, *flags: str, **config: object) -> Iterator[RunningServer]:
    """Run a server with the accumulator `seq`."""
    add_onnx(folder, "seq", accumulator, config=accumulator_config(**config))
    with running(folder, *flags) as server:
        yield server


def test_the_sequences_of_a_killed_process_are_over_and_say_so(tmp_path: Path) -> None:
    with one_model(tmp_path, strategy=oldest(2), idle_us=LONG_US) as server:
        assert add(server, "seq", 1, 5, start=True) == (200, 5)
        assert add(server, "seq", 2, 7, start=True) == (200, 7)
        with ThreadPoolExecutor(2) as pool:
            queued = pool.submit(add, server, "seq", 3, 9, start=True, end=True)
            wait_for_backlog(server, "seq", 1)
            (backend,) = server.backends()
            os.kill(backend.pid, signal.SIGKILL)
            assert queued.result() == (200, 9), "it had not begun, so it is served by the next process"
        for sequence in (1, 2):
            status, message = add(server, "seq", sequence, 1)
            assert (status, "start flag" in message) == (400, True)
        assert add(server, "seq", 1, 4, start=True) == (200, 4)
        assert add(server, "seq", 1, 4, end=True) == (200, 8)


def test_a_sequence_goes_on_in_the_copy_that_it_began_in_while_new_ones_go_to_the_new(tmp_path: Path) -> None:
    with one_model(
        tmp_path, "--model-control-mode=explicit", "--load-model=seq", strategy=oldest(2), idle_us=LONG_US
    ) as server:
        assert add(server, "seq", 1, 5, start=True) == (200, 5)
        (old,) = server.backends()
        (tmp_path / "seq" / "config.pbtxt").write_text(accumulator_config(oldest(3), idle_us=LONG_US))
        assert call(server, "/v2/repository/models/seq/load", {})[0] == 200
        assert len(server.backends()) == 2
        assert add(server, "seq", 2, 1, start=True, end=True) == (200, 1)
        assert add(server, "seq", 1, 5) == (200, 10)
        assert call(server, "/v2/repository/models/seq/unload", {})[0] == 200
        assert add(server, "seq", 2, 1, start=True)[0] == 503
        assert add(server, "seq", 1, 5, end=True) == (200, 15)
        old.wait(10)
        assert add(server, "seq", 1, 5)[0] in (400, 503)


def test_a_server_that_stops_lets_a_running_sequence_finish_and_refuses_new_ones(tmp_path: Path) -> None:
    with one_model(tmp_path, strategy=oldest(2), idle_us=LONG_US) as server:
        assert add(server, "seq", 1, 5, start=True) == (200, 5)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_log("no new requests")
        assert add(server, "seq", 2, 1, start=True)[0] == 503
        assert add(server, "seq", 1, 5, end=True) == (200, 10)
        assert server.process.wait(10) == 0


def test_a_server_that_stops_does_not_wait_for_an_idle_sequence_beyond_its_timeout(tmp_path: Path) -> None:
    with one_model(tmp_path, "--exit-timeout-secs=1", strategy=oldest(2), idle_us=LONG_US) as server:
        assert add(server, "seq", 1, 5, start=True) == (200, 5)
        started = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started < 5


def seen(server: RunningServer, model: str, sequence: int | str, *, start: bool = False, end: bool = False) -> dict:
    """Return what the model of controls saw of one request, by name."""
    parameters = {"sequence_id": sequence, "sequence_start": start, "sequence_end": end}
    status, answer = infer(server, model, ("INPUT0", "INT32", [1, 1], [5]), parameters=parameters)
    assert status == 200, answer
    return {output["name"].removesuffix("_SEEN"): output["data"] for output in answer["outputs"]}


@pytest.fixture(scope="module")
def controls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Models completed from their files: the configuration names nothing but the controls."""
    repository = tmp_path_factory.mktemp("controls")
    for name, strategy, id_type in (
        ("direct_numbers", DIRECT, "UINT64"),
        ("oldest_numbers", oldest(8), "UINT64"),
        ("direct_texts", DIRECT, "STRING"),
    ):
        kind = TensorProto.STRING if id_type == "STRING" else TensorProto.UINT64
        batching = f"max_sequence_idle_microseconds: 60000000 {strategy} {CONTROLS % id_type}"
        text = f"max_batch_size: 4 instance_group [ {{ count: 1 kind: KIND_CPU }} ] sequence_batching {{ {batching} }}"
        add_onnx(repository, name, lambda path, kind=kind: control_echo(path, kind), config=text)
    for name, strategy in (("history", oldest(8)), ("history_rows", DIRECT)):
        add_onnx(repository, name, history, config=HISTORY_CONFIG % strategy)
    with running(repository) as started:
        yield started


@pytest.mark.parametrize(("model", "name"), [("direct_numbers", 2**63), ("oldest_numbers", 9), ("direct_texts", "a-é")])
def test_a_model_sees_where_in_its_sequence_a_request_is(controls: RunningServer, model: str, name: int | str) -> None:
    first, second, last = seen(controls, model, name, start=True), seen(controls, model, name), None
    last = seen(controls, model, name, end=True)
    for found, start, end in ((first, 1, False), (second, 0, False), (last, 0, True)):
        assert found == {"START": [start], "READY": [1], "END": [end], "ID": [name], "INPUT0": [5], "ROWS": [1, 1]}


def test_the_rows_of_a_direct_model_are_its_slots(controls: RunningServer) -> None:
    for sequence in (1, 2, 3):
        seen(controls, "direct_numbers", sequence, start=True)
    assert seen(controls, "direct_numbers", 1)["ROWS"] == [1, 1]
    assert seen(controls, "direct_numbers", 3)["ROWS"] == [3, 1]
    assert seen(controls, "direct_numbers", 3)["ID"] == [3]
    for sequence in (1, 2, 3):
        seen(controls, "direct_numbers", sequence, end=True)
    for sequence in (1, 2, 3):
        seen(controls, "oldest_numbers", sequence, start=True)
    for sequence in (3, 2, 1):
        assert seen(controls, "oldest_numbers", sequence, end=True)["ROWS"] == [1, 1]


@pytest.mark.parametrize(
    ("model", "name", "text"),
    [("direct_numbers", "seven", "is a string"), ("direct_texts", 7, "is a number")],
)
def test_a_name_that_the_model_cannot_take_is_refused(
    controls: RunningServer, model: str, name: int | str, text: str
) -> None:
    parameters = {"sequence_id": name, "sequence_start": True}
    status, answer = infer(controls, model, ("INPUT0", "INT32", [1, 1], [5]), parameters=parameters)
    assert (status, text in answer["error"]) == (400, True), answer


def test_controls_and_states_are_none_of_the_clients_inputs(controls: RunningServer) -> None:
    _, metadata = call(controls, "/v2/models/direct_numbers")
    assert [tensor["name"] for tensor in metadata["inputs"]] == ["INPUT0"]
    status, answer = infer(
        controls,
        "direct_numbers",
        ("INPUT0", "INT32", [1, 1], [5]),
        ("START", "FP32", [1, 1], [1]),
        parameters={"sequence_id": 5, "sequence_start": True},
    )
    assert (status, "no input 'START'" in answer["error"]) == (400, True)
    _, metadata = call(controls, "/v2/models/history")
    assert [tensor["name"] for tensor in metadata["outputs"]] == ["OUTPUT0"]


@pytest.mark.parametrize("model", ["history", "history_rows"])
def test_states_that_grow_stay_apart_though_their_shapes_differ(controls: RunningServer, model: str) -> None:
    def play(number: int) -> list[int]:
        length = 2 + number % 5
        for at in range(length):
            parameters = {"sequence_id": number, "sequence_start": at == 0, "sequence_end": at == length - 1}
            status, answer = infer(
                controls, model, ("INPUT0", "INT32", [1, 1], [number * 100 + at]), parameters=parameters
            )
            assert status == 200, answer
        return answer["outputs"][0]["data"]

    with ThreadPoolExecutor(12) as pool:
        found = dict(zip(range(1, 25), pool.map(play, range(1, 25)), strict=True))
    assert found == {n: [0, *(n * 100 + at for at in range(2 + n % 5))] for n in range(1, 25)}
