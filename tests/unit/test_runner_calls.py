"""What a backend process with one slot asks of the server, and how answers reach it while the slot is occupied."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asking_backend import installed
from backend_process import BackendProcess
from headrace_backends.runner import EXIT_PROTOCOL_ERROR
from headrace_protocol.messages import (
    BatchDone,
    Call,
    CallResponse,
    Cancel,
    CancelCall,
    Control,
    ControlResult,
    Finalize,
    MetricValues,
    Ping,
    Pong,
    RequestHeader,
    Responses,
    TellMetrics,
)
from headrace_protocol.tensor import INLINE, Tensor, TensorRef

CONFIG: dict[str, Any] = {
    "name": "m",
    "max_batch_size": 0,
    "input": [{"name": "ASK", "data_type": "TYPE_STRING", "dims": [1]}],
    "output": [{"name": "ANSWER", "data_type": "TYPE_STRING", "dims": [1]}],
}


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BackendProcess]:
    monkeypatch.setenv("PYTHONPATH", installed(tmp_path)["PYTHONPATH"])
    process = BackendProcess()
    assert process.initialize(CONFIG, backend="apart").error is None
    yield process
    process.close()


def ask(process: BackendProcess, **command: Any) -> None:
    """Send a batch that has the model do something."""
    array = np.array([json.dumps(command)], np.object_)
    process.send(process.execute(1, array, [RequestHeader(1)], name="ASK"))


def answer(call: Call) -> CallResponse:
    data = np.ones(1, np.float32).tobytes()
    output = Tensor("OUTPUT0", "FP32", (1,), TensorRef(0, 4, INLINE), None, data)
    return CallResponse(call.number, (output,))


def one(process: BackendProcess, kind: type) -> Any:
    """Return the next message, of which nothing but the kind is known."""
    (message,), _ = process.receive()
    assert isinstance(message, kind), message
    return message


def told(process: BackendProcess) -> Any:
    """Return what the model tells at the end of its batch."""
    responses, _, descriptors = process.results()
    (response,) = responses.responses
    if response.error is not None:
        return response.error.code
    return json.loads(process.array(response.outputs[0], descriptors)[0])


LEAF: dict[str, Any] = {"model": "leaf", "values": [1]}


@pytest.mark.parametrize("command", [{"do": "infer"}, {"do": "thread", "what": "infer"}], ids=["itself", "a thread"])
def test_an_answer_reaches_a_model_that_occupies_the_only_slot(
    process: BackendProcess, command: dict[str, Any]
) -> None:
    ask(process, **command, **LEAF)
    call = one(process, Call)
    assert call.batch == (1 if command["do"] == "infer" else 0)
    process.send(Ping(5))
    assert one(process, Pong) == Pong(5)
    process.send(answer(call))
    assert told(process)["outputs"] == {"OUTPUT0": [1]}


@pytest.mark.parametrize("command", [{"do": "infer"}, {"do": "thread", "what": "infer"}], ids=["itself", "a thread"])
def test_an_answer_does_not_wait_until_another_thread_reads(process: BackendProcess, command: dict[str, Any]) -> None:
    """Which one does by itself after two milliseconds of a batch."""
    took = []
    for _ in range(30):
        ask(process, **command, **LEAF)
        call = one(process, Call)
        started = time.monotonic()
        process.send(answer(call))
        told(process)
        took.append(time.monotonic() - started)
    assert min(took) < 0.0015


def test_the_cancel_of_a_batch_cancels_what_it_waits_for(process: BackendProcess) -> None:
    ask(process, do="infer", **LEAF)
    call = one(process, Call)
    process.send(Cancel(1, 0))
    assert one(process, CancelCall) == CancelCall(call.number)
    assert told(process)["error"] == "CANCELLED"
    process.send(answer(call), Ping(1))
    assert one(process, Pong) == Pong(1)


def test_an_answer_comes_while_the_next_batch_is_on_its_way(process: BackendProcess) -> None:
    """The thread that waits for the answer has nothing to do with that batch: another runs it."""
    ask(process, do="leave", what="infer", **LEAF)
    messages = [message for _ in range(2) for message in process.receive()[0]]
    (call,) = [message for message in messages if isinstance(message, Call)]
    assert any(isinstance(message, BatchDone) for message in messages)
    ask(process, do="pid")
    assert told(process) == process.process.pid
    process.send(answer(call))
    process.send(Ping(1))
    assert one(process, Pong) == Pong(1)


def test_the_end_fails_the_calls_of_a_thread_that_the_backend_waits_for(process: BackendProcess) -> None:
    ask(process, do="leave", what="infer", **LEAF)
    kinds = {type(message) for _ in range(2) for message in process.receive()[0]}
    assert kinds == {Call, Responses, BatchDone}
    process.send(Finalize())
    assert process.wait() == 0


def test_the_end_of_the_server_is_the_end_of_a_process_that_waits_for_it(process: BackendProcess) -> None:
    ask(process, do="infer", **LEAF)
    one(process, Call)
    process.socket.close()
    assert process.wait() == 0


def test_a_control_is_answered_while_the_only_slot_is_occupied(process: BackendProcess) -> None:
    ask(process, do="ready", model="leaf")
    control = one(process, Control)
    assert (control.action, control.model) == ("ready", "leaf")
    process.send(ControlResult(control.number, value=1))
    assert told(process) is True


def test_a_process_tells_of_its_metrics_when_it_is_asked(process: BackendProcess) -> None:
    process.send(TellMetrics(3))
    assert one(process, MetricValues) == MetricValues((), (), 3)


def test_an_answer_that_nobody_asked_for_is_ignored(process: BackendProcess) -> None:
    process.send(CallResponse(99), ControlResult(99), Ping(1))
    assert one(process, Pong) == Pong(1)


def test_an_answer_that_is_none_ends_the_process(process: BackendProcess) -> None:
    process.socket.send(b"\x00\x91\x92\x1e\xa1x")
    assert process.wait() == EXIT_PROTOCOL_ERROR
