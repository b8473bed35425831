"""The backend process, as a real child driven by the server's framer."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from backend_process import BackendProcess, Conversation, channel_pair, identity_config, wait_gone
from headrace_backends.runner import EXIT_PROTOCOL_ERROR
from headrace_protocol.datatype import encode_bytes
from headrace_protocol.framing import ProtocolError
from headrace_protocol.messages import (
    PROTOCOL,
    Cancel,
    Execute,
    Finalize,
    Parameter,
    Ping,
    Pong,
    RequestHeader,
    Response,
    Responses,
)
from headrace_protocol.tensor import Tensor, TensorRef

ROWS = np.arange(6, dtype=np.float32).reshape(3, 2)


@pytest.fixture
def process() -> Iterator[BackendProcess]:
    process = BackendProcess()
    yield process
    process.close()


@pytest.fixture
def ready(process: BackendProcess) -> BackendProcess:
    """A process that serves the identity model on one instance."""
    answer = process.initialize(identity_config())
    assert answer.error is None
    return process


def request(rows: int = 1, **parameters: Parameter) -> RequestHeader:
    return RequestHeader(rows, parameters=parameters or None)


def only(responses: Responses) -> Response:
    (response,) = responses.responses
    return response


def test_a_batch_is_answered_together_in_one_frame_with_its_timings(ready: BackendProcess) -> None:
    ready.send(ready.execute(7, ROWS, [request(1), request(2)]))
    responses, done, descriptors = ready.results()
    assert (responses.batch, done.batch, responses.responses, descriptors) == (7, 7, (), [])
    assert responses.batched is not None
    assert ready.array(responses.batched[0]).tolist() == ROWS.tolist()
    assert done.compute_input_ns > 0
    assert done.compute_infer_ns > 0
    assert done.compute_output_ns > 0


def test_a_ping_is_answered_while_a_batch_runs_in_every_slot(ready: BackendProcess) -> None:
    ready.send(ready.execute(1, ROWS[:1], [request(hang=True)]))
    ready.send(Ping(42))
    assert ready.receive()[0] == [Pong(42)]
    ready.send(Cancel(1, -1))
    responses, _, _ = ready.results()
    error = only(responses).error
    assert error is not None
    assert error.code == "CANCELLED"


def test_cancelling_one_request_leaves_its_batchmates_their_answers(ready: BackendProcess) -> None:
    ready.send(ready.execute(1, ROWS, [request(1), request(1, hang=True), request(1)]), Cancel(1, 1))
    responses, _, _ = ready.results()
    first, second, third = responses.responses
    assert second.error is not None
    assert second.error.code == "CANCELLED"
    assert ready.array(first.outputs[0]).tolist() == ROWS[:1].tolist()
    assert ready.array(third.outputs[0]).tolist() == ROWS[2:].tolist()


def test_a_delay_ends_when_its_request_is_cancelled(ready: BackendProcess) -> None:
    started = time.monotonic()
    ready.send(ready.execute(1, ROWS[:1], [request(delay_ms=60_000)]))
    ready.send(Cancel(1, 0))
    ready.results()
    assert time.monotonic() - started < 30


def test_a_cancel_for_a_batch_that_is_over_is_ignored(ready: BackendProcess) -> None:
    ready.send(Cancel(99, 0), Ping(1))
    assert ready.receive()[0] == [Pong(1)]


def test_as_many_batches_run_at_once_as_there_are_instances(process: BackendProcess) -> None:
    assert process.initialize(identity_config(), instances=2).concurrency == 2
    process.send(process.execute(1, ROWS[:1], [request(hang=True)]))
    process.send(process.execute(2, ROWS[1:2], offset=4096))
    responses, _, _ = process.results()
    assert responses.batch == 2
    process.send(Cancel(1, 0))
    assert process.results()[0].batch == 1


def test_two_batches_may_arrive_in_one_frame(process: BackendProcess) -> None:
    process.initialize(identity_config(), instances=2)
    process.send(process.execute(1, ROWS[:1]), process.execute(2, ROWS[1:2], offset=1 << 18))
    assert {process.results()[0].batch, process.results()[0].batch} == {1, 2}


def test_an_exception_fails_every_request_of_its_batch_alone(ready: BackendProcess) -> None:
    ready.send(ready.execute(1, ROWS, [request(2), request(1, fail_all="on purpose")]))
    responses, _, _ = ready.results()
    errors = [response.error for response in responses.responses]
    assert len(errors) == 2
    for error in errors:
        assert error is not None
        assert error.code == "INTERNAL"
        assert "RuntimeError: on purpose" in error.message
    assert any("Traceback" in log.text for log in ready.logs)
    ready.send(ready.execute(2, ROWS[:1]))
    assert ready.results()[0].batched is not None


def test_a_failing_request_leaves_its_batchmates_their_answers(ready: BackendProcess) -> None:
    ready.send(ready.execute(1, ROWS, [request(1, fail="mine alone"), request(2)]))
    responses, _, _ = ready.results()
    failed, good = responses.responses
    assert failed.error is not None
    assert failed.error.message == "mine alone"
    assert ready.array(good.outputs[0]).tolist() == ROWS[1:].tolist()


def test_outputs_that_do_not_fit_into_the_space_come_in_a_descriptor(ready: BackendProcess) -> None:
    ready.send(ready.execute(1, ROWS, [request(3)], space=16))
    responses, _, descriptors = ready.results()
    assert responses.batched is not None
    (output,) = responses.batched
    assert output.ref.source == 0
    assert ready.array(output, descriptors).tolist() == ROWS.tolist()
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(descriptors[0], 0)
    os.close(descriptors[0])


def test_the_process_keeps_no_descriptor_of_a_spilled_output(ready: BackendProcess) -> None:
    def descriptors() -> int:
        return sum(1 for _ in Path(f"/proc/{ready.process.pid}/fd").iterdir())

    before = descriptors()
    for number in range(20):
        ready.send(ready.execute(number, ROWS, [request(3)], space=0))
        os.close(ready.results()[2][0])
    ready.send(ready.execute(100, ROWS, [request(3)]))
    ready.results()
    assert descriptors() <= before


def test_an_input_in_a_descriptor_of_the_frame_is_read_in_place(ready: BackendProcess) -> None:
    region = os.memfd_create("region")
    os.write(region, b"\0" * 8 + ROWS.tobytes())
    tensor = Tensor("INPUT0", "FP32", (3, 2), TensorRef(8, ROWS.nbytes, 0))
    ready.send(Execute(1, 0, (tensor,), (request(3),), None, TensorRef(0, 4096)), descriptors=[region])
    os.close(region)
    responses, _, _ = ready.results()
    assert responses.batched is not None
    assert ready.array(responses.batched[0]).tolist() == ROWS.tolist()


def test_a_frame_too_large_for_a_datagram_is_understood_and_answered(ready: BackendProcess) -> None:
    requests = [request(1, text="x" * 200) for _ in range(600)]
    ready.send(ready.execute(1, np.zeros((600, 1), np.float32), requests, space=1 << 20))
    responses, _, _ = ready.results()
    assert len(responses.responses) == 600


def test_strings_and_ragged_inputs_reach_each_request_in_its_shape(process: BackendProcess) -> None:
    process.initialize(identity_config(datatype="TYPE_STRING", echo_parameters="true"))
    data = encode_bytes([b"a", b"bb", b"\xff"])
    process.arena.view[: len(data)] = data
    ragged = Tensor("INPUT0", "BYTES", (3,), TensorRef(0, len(data)), item_shapes=((1, 1), (1, 2)))
    process.send(Execute(1, 0, (ragged,), (request(), request(tag=5)), None, TensorRef(1024, 1024)))
    responses, _, _ = process.results()
    first, second = responses.responses
    assert process.array(first.outputs[0]).tolist() == [[b"a"]]
    assert process.array(second.outputs[0]).tolist() == [[b"bb", b"\xff"]]
    assert second.parameters == {"tag": 5}


@pytest.mark.parametrize(
    ("misbehaviour", "outputs"),
    [
        ("wrong_dtype", [("OUTPUT0", "INT8")]),
        ("missing_output", []),
        ("extra_output", [("OUTPUT0", "FP32"), ("UNDECLARED", "FP32")]),
    ],
)
def test_the_identity_backend_misbehaves_for_the_request_that_asks(
    ready: BackendProcess, misbehaviour: str, outputs: list[tuple[str, str]]
) -> None:
    ready.send(ready.execute(1, ROWS[:1], [request(**{misbehaviour: True})]))
    response = only(ready.results()[0])
    assert [(tensor.name, tensor.datatype) for tensor in response.outputs] == outputs


def test_an_output_with_the_wrong_number_of_rows_is_an_error_that_names_it(ready: BackendProcess) -> None:
    ready.send(ready.execute(1, ROWS, [request(2, wrong_shape=True), request(1)]))
    wrong, good = ready.results()[0].responses
    assert wrong.error is not None
    assert wrong.error.message == "output 'OUTPUT0' has shape [1, 2, 2], expected a first dimension of 2"
    assert good.error is None


def test_a_bad_delay_is_an_error_of_its_request_alone(ready: BackendProcess) -> None:
    ready.send(ready.execute(1, ROWS[:2], [request(delay_ms=-1), request()]))
    wrong, good = ready.results()[0].responses
    assert wrong.error is not None
    assert "delay_ms" in wrong.error.message
    assert good.error is None


def test_the_end_of_the_channel_ends_the_process_while_it_executes(ready: BackendProcess) -> None:
    ready.send(ready.execute(1, ROWS[:1], [request(hang="forever")]), Ping(1))
    ready.receive()
    ready.socket.close()
    assert ready.wait() == 0


def test_the_end_of_the_channel_ends_the_process_while_it_loads(process: BackendProcess) -> None:
    process.begin_loading(identity_config(hang_load="true"))
    process.send(Ping(1))
    assert process.receive()[0] == [Pong(1)]
    process.socket.close()
    assert process.wait() == 0


def test_finalize_lets_running_batches_end_and_then_exits(ready: BackendProcess) -> None:
    ready.send(ready.execute(1, ROWS[:1], [request(hang=True)]), Finalize())
    ready.send(Ping(1))
    assert ready.receive()[0] == [Pong(1)]
    ready.send(Cancel(1, 0))
    assert ready.results()[0].batch == 1
    assert ready.wait() == 0


def test_a_crash_is_the_end_of_the_channel_and_a_status(ready: BackendProcess) -> None:
    ready.send(ready.execute(1, ROWS[:1], [request(crash=True)]))
    with pytest.raises((EOFError, ConnectionError)):
        ready.receive()
    assert ready.wait() == 42


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_a_signal_ends_the_process(ready: BackendProcess, name: str) -> None:
    ready.send(ready.execute(1, ROWS[:1], [request(signal=name)]))
    assert ready.wait() == -signal.Signals[name]


def test_a_nonsense_frame_is_what_the_server_cannot_decode(ready: BackendProcess) -> None:
    ready.send(ready.execute(1, ROWS[:1], [request(nonsense_frame=True)]))
    with pytest.raises(ProtocolError):
        ready.receive()


@pytest.mark.parametrize("frame", [b"\x00\xc1", b"\x07", b"\x00\x91\x91\x63", b"\x01", b"\x00" * 70_000])
def test_a_frame_that_is_not_understood_ends_the_process(ready: BackendProcess, frame: bytes) -> None:
    ready.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    ready.socket.send(frame)
    assert ready.wait() == EXIT_PROTOCOL_ERROR


def test_more_batches_than_slots_end_the_process(ready: BackendProcess) -> None:
    ready.send(ready.execute(1, ROWS[:1], [request(hang=True)]), ready.execute(2, ROWS[:1], offset=4096))
    assert ready.wait() == EXIT_PROTOCOL_ERROR


def test_an_execute_before_ready_ends_the_process(process: BackendProcess) -> None:
    process.send(process.execute(1, ROWS[:1]))
    assert process.wait() == EXIT_PROTOCOL_ERROR


@pytest.mark.parametrize(
    ("config", "backend", "protocol", "code", "text"),
    [
        (identity_config(fail_load="no such weights"), "identity", PROTOCOL, "INVALID_ARG", "no such weights"),
        (identity_config(execute_delay_ms="soon"), "identity", PROTOCOL, "INVALID_ARG", "execute_delay_ms"),
        (identity_config(), "nonsuch", PROTOCOL, "NOT_FOUND", "there is no backend 'nonsuch'"),
        (identity_config(), "identity", PROTOCOL + 1, "INVALID_ARG", "protocol"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_answered_with_the_reason(
    process: BackendProcess, config: dict, backend: str, protocol: int, code: str, text: str
) -> None:
    answer = process.initialize(config, backend=backend, protocol=protocol)
    assert answer.error is not None
    assert answer.error.code == code
    assert text in answer.error.message


def test_after_a_failed_load_the_process_waits_for_the_server_to_hang_up(process: BackendProcess) -> None:
    process.initialize(identity_config(fail_load="x"))
    process.send(Ping(3))
    assert process.receive()[0] == [Pong(3)]
    process.send(Finalize())
    assert process.wait() == 0


def test_the_delay_of_an_instance_grows_with_its_number(process: BackendProcess) -> None:
    config = identity_config(execute_delay_ms="100", instance_wise_delay_multiplier="3")
    process.initialize(config, instances=2)
    command = process.execute(1, ROWS[:1])
    process.send(Execute(1, 1, command.inputs, command.requests, None, command.space))
    _, done, _ = process.results()
    assert done.compute_infer_ns >= 300_000_000


def test_nothing_is_written_to_standard_output(ready: BackendProcess) -> None:
    ready.send(Finalize())
    ready.wait()
    assert ready.process.stdout is not None
    assert ready.process.stdout.read() == b""


def test_the_interrupt_of_a_terminal_does_not_end_the_process(ready: BackendProcess) -> None:
    ready.process.send_signal(signal.SIGINT)
    ready.send(Ping(5))
    assert ready.receive()[0] == [Pong(5)]


def test_the_process_dies_with_a_parent_that_is_killed() -> None:
    """It may hold the interpreter lock and not notice the end of the channel; here the channel stays open."""
    ours, theirs = channel_pair()
    command = [sys.executable, "-m", "headrace_backends", "run", "--fd", str(theirs.fileno())]
    script = "import subprocess, sys; fd = int(sys.argv[-1]); p = subprocess.Popen(sys.argv[1:], pass_fds=[fd]);"
    script += "print(p.pid, flush=True); p.wait()"
    with ours, theirs:
        parent = subprocess.Popen(
            [sys.executable, "-c", script, *command], pass_fds=[theirs.fileno()], stdout=subprocess.PIPE
        )
        with parent:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            conversation = Conversation(ours)
            conversation.initialize(identity_config())
            parent.kill()
        wait_gone(pid)
        conversation.close()
