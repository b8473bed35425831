"""Requests to decoupled models from a stock client's stream to the backend process and back."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

import onnx_models
from figures import metric, wait_until
from harness import RunningServer, running
from repositories import add_decoupled, add_identity, add_onnx, add_sample
from stock_streams import inputs, is_final, streaming

LIMIT_S = 30.0
FREED_WITHIN_S = 0.1
"""Seconds after which a cancelled request no longer keeps its instance from others."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    add_sample(repository, "repeat")
    add_decoupled(repository, "many", max_batch_size=4)
    add_decoupled(repository, "holding", hold_instance="true")
    add_identity(repository, "plain")
    one_by_one = 'backend: "onnxruntime" max_batch_size: 1 instance_group { count: 1 }'
    add_onnx(repository, "endless", onnx_models.endless, config=one_by_one)
    with running(repository) as server:
        yield server


ROW = {"INPUT0": np.ones((1, 2), np.float32)}


def test_the_sample_model_streams_the_elements_of_its_input(server: RunningServer) -> None:
    delays = {"DELAY": np.array([5, 0, 5], np.uint32), "WAIT": np.array([5], np.uint32)}
    with streaming(server) as stream:
        stream.send("repeat", {"IN": np.array([4, 5, 6], np.int32), **delays})
        *parts, end = stream.to_final()
    assert [part.as_numpy("OUT").item() for part in parts] == [4, 5, 6]
    assert [part.as_numpy("IDX").item() for part in parts] == [0, 1, 2]
    assert not end.get_response().outputs


def test_a_response_arrives_long_before_the_request_ends(server: RunningServer) -> None:
    with streaming(server) as stream:
        stream.send("repeat", {"IN": np.array([4, 5], np.int32), "DELAY": np.array([100_000], np.uint32)})
        assert stream.next().as_numpy("OUT").item() == 4


def test_one_instance_serves_a_hundred_streams_at_once(server: RunningServer) -> None:
    tensors = {"IN": np.arange(5, dtype=np.int32), "DELAY": np.full(5, 100, np.uint32)}
    with streaming(server) as stream:
        for number in range(100):
            stream.send("repeat", tensors, request_id=str(number))
        got: dict[str, list[int]] = {}
        ended = 0
        while ended < 100:
            result = stream.next()
            ended += is_final(result)
            if not is_final(result):
                got.setdefault(result.get_response().id, []).append(result.as_numpy("IDX").item())
    assert got == {str(number): [0, 1, 2, 3, 4] for number in range(100)}


def test_requests_of_one_batch_stream_each_for_itself(server: RunningServer) -> None:
    with streaming(server) as stream:
        for number, count in enumerate((3, 0, 1)):
            stream.send("many", ROW, request_id=str(number), parameters={"responses": count})
        counts = {"0": 0, "1": 0, "2": 0}
        ended = 0
        while ended < 3:
            result = stream.next()
            ended += is_final(result)
            counts[result.get_response().id] += bool(result.get_response().outputs)
    assert counts == {"0": 3, "1": 0, "2": 1}


def test_an_error_after_responses_ends_its_request_alone(server: RunningServer) -> None:
    with streaming(server) as stream:
        stream.send("many", ROW, parameters={"responses": 2, "fail": "enough"})
        assert not is_final(stream.next())
        assert not is_final(stream.next())
        with pytest.raises(triton.InferenceServerException, match="enough"):
            stream.next()
        stream.send("many", ROW)
        assert is_final(stream.next())


def freed_after(server: RunningServer, model: str, parameters: dict[str, Any] | None) -> float:
    """Cancel a long request while another waits for its instance; return after how long that one has its answer."""
    answers: queue.Queue[Exception | None] = queue.Queue()
    short = inputs({"INPUT0": np.zeros((1, 2), np.float32)})
    with triton.InferenceServerClient(server.grpc) as client:
        call = client.async_infer(model, inputs(ROW), lambda result, error: None, parameters=parameters)

        def one_waits() -> bool:
            """Whether the long request has the instance; a short one that was faster is followed by another."""
            client.async_infer(model, short, lambda result, error: answers.put(error))
            with contextlib.suppress(queue.Empty):
                answers.get(timeout=0.2)
                return False
            return metric(server, "nv_inference_pending_request_count", model) == 1

        wait_until("a request waits behind the long one", one_waits)
        cancelled = time.monotonic()
        call.cancel()
        assert answers.get(timeout=LIMIT_S) is None
        return time.monotonic() - cancelled


@pytest.mark.parametrize(("model", "parameters"), [("plain", {"delay_ms": 10_000}), ("endless", None)])
def test_a_cancelled_request_of_ten_seconds_leaves_its_instance_to_the_next(
    server: RunningServer, model: str, parameters: dict[str, Any] | None
) -> None:
    assert min(freed_after(server, model, parameters) for _ in range(3)) < FREED_WITHIN_S


def test_a_cancelled_stream_that_holds_an_instance_leaves_it_to_the_next(server: RunningServer) -> None:
    def freed_after() -> float:
        with streaming(server) as stream, streaming(server) as other:
            stream.send("holding", ROW, parameters={"responses": 2, "response_delay_ms": 10_000})
            stream.next()
            cancelled = time.monotonic()
            stream._client.stop_stream(cancel_requests=True)
            other.send("holding", ROW)
            other.next()
            return time.monotonic() - cancelled

    assert min(freed_after() for _ in range(3)) < FREED_WITHIN_S


def test_a_client_that_does_not_read_holds_back_its_own_stream_and_no_other(server: RunningServer) -> None:
    large = {"INPUT0": np.zeros((1, 1 << 16), np.float32)}
    reads = threading.Event()
    with triton.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: reads.wait())
        client.async_stream_infer("many", inputs(large), parameters={"responses": 2000})
        with streaming(server) as stream:
            stream.send("many", ROW, parameters={"responses": 200})
            assert len(stream.to_final()) == 200
        (statistics,) = client.get_inference_statistics("many").model_stats
        produced = sum(figure.success.count for figure in statistics.response_stats.values())
        assert produced < 1000
        reads.set()
        client.stop_stream(cancel_requests=True)
