"""The backend process with a decoupled model, as a real child driven by the server's framer."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import onnx_models
from backend_process import BackendProcess, identity_config
from headrace_backends.outputs import INLINE_BYTES
from headrace_backends.runner import EXIT_PROTOCOL_ERROR
from headrace_protocol.messages import (
    BatchDone,
    Cancel,
    Finalize,
    Flow,
    Parameter,
    Ping,
    Pong,
    RequestHeader,
    Response,
    Responses,
)
from headrace_protocol.tensor import INLINE

ROWS = np.arange(6, dtype=np.float32).reshape(3, 2)
FREED_WITHIN_S = 0.1
"""Seconds after which the instance of a cancelled request is free."""


@pytest.fixture
def process() -> Iterator[BackendProcess]:
    process = BackendProcess()
    yield process
    process.close()


def stream_config(**parameters: str) -> dict:
    return identity_config(**parameters) | {"model_transaction_policy": {"decoupled": True}}


@pytest.fixture
def ready(process: BackendProcess) -> BackendProcess:
    """A process that serves a decoupled model on one instance."""
    assert process.initialize(stream_config()).error is None
    return process


def request(rows: int = 1, **parameters: Parameter) -> RequestHeader:
    return RequestHeader(rows, parameters=parameters or None)


def next_response(process: BackendProcess) -> Response:
    """Return the one response of the next frame, or of the next but one where the first says that a batch is done."""
    messages, descriptors = process.receive()
    assert not descriptors
    if isinstance(messages[0], BatchDone):
        return next_response(process)
    assert isinstance(messages[0], Responses)
    (response,) = messages[0].responses
    return response


def to_the_end(process: BackendProcess, requests: int = 1) -> tuple[list[Response], list[BatchDone]]:
    """Return all responses up to the end of so many requests and of the batch."""
    responses: list[Response] = []
    done: list[BatchDone] = []
    while sum(response.final for response in responses) < requests or not done:
        messages, descriptors = process.receive()
        for fd in descriptors:
            os.close(fd)
        for message in messages:
            if isinstance(message, Responses):
                responses += message.responses
            else:
                assert isinstance(message, BatchDone)
                done.append(message)
    return responses, done


def is_silent(process: BackendProcess, seconds: float = 0.05) -> bool:
    return not select.select([process.socket], [], [], seconds)[0]


def test_each_response_leaves_as_soon_as_it_is_there(ready: BackendProcess) -> None:
    ready.send(ready.execute(1, ROWS[:1], [request(responses=2, response_delay_ms=10**5)]))
    response = next_response(ready)
    assert not response.final
    (tensor,) = response.outputs
    assert tensor.ref.source == INLINE
    assert tensor.data == ROWS[:1].tobytes()


def test_an_instance_takes_the_next_batch_while_requests_of_others_are_open(ready: BackendProcess) -> None:
    for number in (1, 2, 3):
        command = ready.execute(number, ROWS[:1], [request(hang=True, responses=0)], offset=number * 4096)
        ready.send(command)
        (done,), _ = ready.receive()
        assert isinstance(done, BatchDone)
        assert done.batch == number
    for number in (3, 1, 2):
        ready.send(Cancel(number, 0))
        messages, _ = ready.receive()
        assert isinstance(messages[0], Responses)
        assert messages[0].batch == number


def test_the_last_response_may_come_before_the_batch_is_done(process: BackendProcess) -> None:
    process.initialize(stream_config(hold_instance="true"))
    process.send(process.execute(1, ROWS[:1]))
    first, _ = process.receive()
    second, _ = process.receive()
    assert isinstance(first[0], Responses)
    assert isinstance(second[0], BatchDone)
    process.send(process.execute(2, ROWS[:1]))
    process.receive()
    process.receive()


def test_a_cancel_ends_a_wait_between_responses_at_once(ready: BackendProcess) -> None:
    def wait_for_end(number: int) -> float:
        ready.send(ready.execute(number, ROWS[:1], [request(responses=2, response_delay_ms=10**5)]))
        assert not next_response(ready).final
        cancelled = time.monotonic()
        ready.send(Cancel(number, 0))
        messages, _ = ready.receive()
        while not isinstance(messages[0], Responses):
            messages, _ = ready.receive()
        error = messages[0].responses[0].error
        assert error is not None
        assert error.code == "CANCELLED"
        return time.monotonic() - cancelled

    assert min(wait_for_end(number) for number in range(3)) < 0.05  # the quickest: the machine may be busy


def test_cancelling_one_stream_of_a_batch_leaves_the_others_theirs(ready: BackendProcess) -> None:
    requests = [request(responses=3), request(hang=True), request(responses=3, empty_final=True)]
    ready.send(ready.execute(1, ROWS, requests), Cancel(1, 1))
    responses, _ = to_the_end(ready, 3)
    ends = {response.request: response for response in responses if response.final}
    assert ends[1].error is not None
    assert ends[1].error.code == "CANCELLED"
    assert not ends[0].empty
    assert ends[2].empty
    data = [[part.outputs[0].data for part in responses if part.request == index and part.outputs] for index in (0, 2)]
    assert data == [[ROWS[:1].tobytes()] * 3, [ROWS[2:].tobytes()] * 3]


def test_a_held_back_stream_sends_nothing_until_it_may_go_on(ready: BackendProcess) -> None:
    ready.send(ready.execute(1, ROWS[:2], [request(responses=5), request()]), Flow(1, 0, True))
    responses: list[Response] = []
    while not responses or not responses[-1].request:
        responses.append(next_response(ready))
    assert is_silent(ready) or isinstance(ready.receive()[0][0], BatchDone)
    assert is_silent(ready)
    ready.send(Ping(1))
    assert ready.receive()[0] == [Pong(1)]
    ready.send(Flow(1, 0, False))
    got = [next_response(ready) for _ in range(5)]
    assert [response.final for response in got] == [False] * 4 + [True]


def test_a_held_back_stream_can_be_cancelled(ready: BackendProcess) -> None:
    ready.send(ready.execute(1, ROWS[:1], [request(responses=5)]), Flow(1, 0, True), Cancel(1, 0))
    responses, _ = to_the_end(ready)
    (end,) = responses
    assert end.error is not None
    assert end.error.code == "CANCELLED"


def test_messages_about_a_batch_that_is_over_are_ignored(ready: BackendProcess) -> None:
    ready.send(ready.execute(1, ROWS[:1]))
    to_the_end(ready)
    ready.send(Cancel(1, 0), Flow(1, 0, True), Flow(99, 0, False), Ping(1))
    assert ready.receive()[0] == [Pong(1)]


def test_large_responses_come_each_in_a_descriptor_of_its_own_frame(ready: BackendProcess) -> None:
    large = np.arange(INLINE_BYTES, dtype=np.float32)[None]
    ready.send(ready.execute(1, large, [request(responses=3)]))
    for _ in range(3):
        messages, descriptors = ready.receive()
        while isinstance(messages[0], BatchDone):
            messages, descriptors = ready.receive()
        assert isinstance(messages[0], Responses)
        (tensor,) = messages[0].responses[0].outputs
        assert tensor.ref.source == 0
        assert ready.array(tensor, descriptors).tolist() == large.tolist()
        (fd,) = descriptors
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(fd, 0)
        os.close(fd)


def test_the_process_keeps_no_descriptor_of_a_response(ready: BackendProcess) -> None:
    def descriptors() -> int:
        return sum(1 for _ in Path(f"/proc/{ready.process.pid}/fd").iterdir())

    large = np.zeros((1, INLINE_BYTES), np.float32)
    ready.send(ready.execute(1, large))
    to_the_end(ready)
    before = descriptors()
    ready.send(ready.execute(2, large, [request(responses=50)]))
    to_the_end(ready)
    ready.send(ready.execute(3, ROWS[:1]))
    to_the_end(ready)  # sent by the thread that closes those of the frame before
    assert descriptors() <= before


@pytest.mark.parametrize("responses", [0, 2])
def test_an_error_may_come_after_responses(ready: BackendProcess, responses: int) -> None:
    ready.send(ready.execute(1, ROWS[:1], [request(responses=responses, fail="enough")]))
    got, _ = to_the_end(ready)
    assert len(got) == responses + 1
    assert got[-1].error is not None
    assert got[-1].error.message == "enough"


def test_a_crash_after_some_responses_is_the_end_of_the_channel(ready: BackendProcess) -> None:
    ready.send(ready.execute(1, ROWS[:1], [request(responses=2, crash=True)]))
    got = [next_response(ready), next_response(ready)]
    assert not any(response.final for response in got)
    assert ready.wait() == 42


def test_a_bad_parameter_is_an_error_of_its_request_alone(ready: BackendProcess) -> None:
    ready.send(ready.execute(1, ROWS[:2], [request(responses=-1), request(responses=2)]))
    responses, _ = to_the_end(ready, 2)
    errors = [(response.request, response.error.message) for response in responses if response.error]
    assert errors == [(0, "parameter 'responses': expected a number >= 0, got -1")]


def test_finalize_lets_open_requests_end_and_then_the_process_exits(ready: BackendProcess) -> None:
    ready.send(ready.execute(1, ROWS[:2], [request(hang=True, responses=0), request(hang=True, responses=0)]))
    ready.receive()
    ready.send(Finalize(), Cancel(1, 0))
    ready.receive()
    ready.send(Ping(1))
    assert ready.receive()[0] == [Pong(1)]
    ready.send(Cancel(1, 1))
    ready.receive()
    assert ready.wait() == 0


def test_the_end_of_the_channel_ends_the_process_while_requests_are_open(ready: BackendProcess) -> None:
    ready.send(ready.execute(1, ROWS[:1], [request(hang=True, responses=0)]))
    ready.receive()
    ready.socket.close()
    assert ready.wait() == 0


def test_a_batch_with_the_number_of_an_open_one_ends_the_process(ready: BackendProcess) -> None:
    ready.send(ready.execute(1, ROWS[:1], [request(hang=True, responses=0)]))
    ready.receive()
    ready.send(ready.execute(1, ROWS[:1]))
    assert ready.wait() == EXIT_PROTOCOL_ERROR


def test_a_thousand_streams_at_once_all_come_to_their_end(ready: BackendProcess) -> None:
    responses: list[Response] = []
    done: list[int] = []

    def receive() -> None:
        for message in ready.receive()[0]:
            if isinstance(message, Responses):
                responses.extend(message.responses)
            else:
                assert isinstance(message, BatchDone)
                done.append(message.batch)

    inputs, requests = np.zeros((8, 1), np.float32), [request(responses=3, response_delay_ms=5)] * 8
    for number in range(125):
        ready.send(ready.execute(number, inputs, requests))
        while number not in done:
            receive()
    while sum(response.final for response in responses) < 1000:
        receive()
    assert len(responses) == 3000


def freed_after(process: BackendProcess, number: int) -> float:
    """Cancel the batch, which runs; return after how many seconds its instance was free."""
    process.send(Ping(number))
    while process.receive()[0] != [Pong(number)]:
        pass
    cancelled = time.monotonic()
    process.send(Cancel(number, 0))
    while not isinstance(process.receive()[0][-1], BatchDone):
        pass
    return time.monotonic() - cancelled


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_cancelled_request_of_ten_seconds_frees_its_instance_at_once(
    process: BackendProcess, decoupled: bool
) -> None:
    config = identity_config(hold_instance="true") if decoupled else identity_config()
    process.initialize(config | {"model_transaction_policy": {"decoupled": decoupled}})
    times = []
    for number in range(3):
        process.send(process.execute(number, ROWS[:1], [request(delay_ms=10_000)]))
        times.append(freed_after(process, number))
    assert min(times) < FREED_WITHIN_S  # the quickest: the machine may be busy


def test_a_cancelled_request_to_a_long_loop_of_an_onnx_model_frees_its_instance_at_once(
    process: BackendProcess, tmp_path: Path
) -> None:
    onnx_models.endless(tmp_path / "1" / "model.onnx")
    names = {"input": ["INPUT0"], "output": ["OUTPUT0"]}
    tensors = {
        key: [{"name": n, "data_type": "TYPE_FP32", "dims": [-1]} for n in value] for key, value in names.items()
    }
    config = {"name": "m", "backend": "onnxruntime", "max_batch_size": 8, **tensors}
    assert process.initialize(config, tmp_path, "onnxruntime").error is None
    times = []
    for number in range(3):
        process.send(process.execute(number, np.ones((1, 4), np.float32)))
        times.append(freed_after(process, number))
    assert min(times) < FREED_WITHIN_S
