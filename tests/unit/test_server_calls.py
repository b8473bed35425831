"""What a backend asks of the server, with a server that the test plays."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace_backends.batch import Batch
from headrace_backends.calls import CallRequest, CallTensor, ServerCalls
from headrace_backends.model_memory import ModelMemory
from headrace_protocol.arena import Arena
from headrace_protocol.datatype import BF16, FP32
from headrace_protocol.errors import ErrorCode, InferError, unavailable
from headrace_protocol.messages import (
    MAX_CALLS,
    MAX_CONTROLS,
    Call,
    CallRead,
    CallResponse,
    CancelCall,
    Control,
    ControlResult,
    DefineFamily,
    Error,
    Execute,
    MetricValues,
    RequestHeader,
)
from headrace_protocol.tensor import INLINE, Tensor, TensorRef

ROW = np.array([[1, 2]], np.float32)


class Wire:
    """Keeps what is sent; answers by what the test put into `answer`."""

    def __init__(self) -> None:
        self.sent: list[msgspec.Struct] = []
        self.contents: list[bytes] = []
        self.whose: Any = None
        self.watched = 0
        self.answer: Callable[[msgspec.Struct], None] = lambda _: None

    def send(self, messages: Sequence[msgspec.Struct], descriptors: Sequence[int]) -> None:
        msgspec.msgpack.encode(messages)
        self.sent += messages
        self.contents += [os.pread(fd, os.fstat(fd).st_size, 0) for fd in descriptors]
        for message in messages:
            self.answer(message)

    def executing(self) -> Any:
        return self.whose

    def watch(self) -> None:
        self.watched += 1

    def read_until(self, arrived: Callable[[], bool]) -> None:
        self.watch()

    def last(self, kind: type) -> Any:
        return [message for message in self.sent if isinstance(message, kind)][-1]


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def server(wire: Wire) -> ServerCalls:
    return ServerCalls(wire)


def request(**more: Any) -> CallRequest:
    return CallRequest("leaf", [CallTensor("IN", ROW)], **more)


def response(number: int, data: bytes = ROW.tobytes(), *, final: bool = True) -> CallResponse:
    tensor = Tensor("OUT", "FP32", (len(data) // 4,), TensorRef(0, len(data), INLINE), None, data)
    return CallResponse(number, (tensor,), final=final)


def answers(server: ServerCalls, *responses: Callable[[int], CallResponse]) -> Callable[[msgspec.Struct], None]:
    def answer(message: msgspec.Struct) -> None:
        if isinstance(message, Call):
            for make in responses:
                server.on_response(make(message.number), ())

    return answer


def batch() -> Batch:
    return Batch(Execute(3, 0, (), (RequestHeader(1),), None, TensorRef(0, 0)), ModelMemory(Arena.create(4096), {}))


def refused(act: Callable[..., object], *arguments: object, **more: object) -> InferError:
    with pytest.raises(InferError) as raised:
        act(*arguments, **more)
    return raised.value


def test_a_call_says_everything_and_its_answer_is_arrays(server: ServerCalls, wire: Wire) -> None:
    wire.answer = answers(server, response)
    result = server.infer(
        request(
            version=3,
            outputs=["OUT"],
            id="x",
            correlation_id="s",
            flags=1,
            timeout_us=2,
            priority=3,
            parameters={"p": 1},
        )
    )
    sent = wire.last(Call)
    assert (sent.model, sent.version, sent.outputs, sent.id) == ("leaf", 3, ("OUT",), "x")
    assert (sent.correlation_id, sent.flags, sent.timeout_us, sent.priority) == ("s", 1, 2, 3)
    assert (sent.parameters, sent.batch, sent.decoupled) == ({"p": 1}, 0, False)
    assert sent.inputs == (Tensor("IN", "FP32", (1, 2), TensorRef(0, 8, INLINE), None, ROW.tobytes()),)
    (output,) = result.outputs
    assert (output.name, output.array.tolist(), output.datatype) == ("OUT", [1, 2], FP32)
    output.array[0] = 7
    assert not server.waiting


def test_large_inputs_travel_in_a_descriptor(server: ServerCalls, wire: Wire) -> None:
    wire.answer = answers(server, response)
    big = np.arange(100_000, dtype=np.float32)
    server.infer(CallRequest("leaf", [CallTensor("IN", big[::2])]))
    assert wire.last(Call).inputs[0].ref == TensorRef(0, 200_000, 0)
    assert np.array_equal(np.frombuffer(wire.contents[0][:200_000], np.float32), big[::2])


@pytest.mark.parametrize("size", [5000, 1 << 20], ids=["read", "mapped"])
def test_an_answer_in_a_descriptor_is_the_readers_own(server: ServerCalls, wire: Wire, size: int) -> None:
    memory = os.memfd_create("answer")
    os.write(memory, b"\1" * size)
    call = server.begin(request())
    tensors = (Tensor("A", "UINT8", (size,), TensorRef(0, size, 0)), Tensor("B", "UINT8", (4,), TensorRef(4, 4, 0)))
    server.on_response(CallResponse(wire.last(Call).number, tensors), [memory])
    result = call.next()
    assert result is not None
    first, second = (output.array for output in result.outputs)
    first[...] = 2
    assert os.pread(memory, 1, 0) == b"\1"
    os.close(memory)
    assert second.tolist() in ([1] * 4, [2] * 4)


def test_strings_and_bf16_keep_their_types(server: ServerCalls, wire: Wire) -> None:
    texts = np.array(["ä", b"\xff"], np.object_)
    server.begin(CallRequest("m", [CallTensor("S", texts), CallTensor("H", np.array([1], np.uint16), BF16)]))
    strings, halves = wire.last(Call).inputs
    assert (strings.datatype, strings.data) == ("BYTES", b"\2\0\0\0\xc3\xa4\1\0\0\0\xff")
    assert halves.datatype == "BF16"


def test_an_error_is_raised_with_its_code(server: ServerCalls, wire: Wire) -> None:
    wire.answer = answers(server, lambda number: CallResponse(number, error=Error("NOT_FOUND", "no such model")))
    error = refused(server.infer, request())
    assert (error.code, error.message) == (ErrorCode.NOT_FOUND, "no such model")


def test_a_stream_yields_its_responses_and_not_its_empty_end(server: ServerCalls, wire: Wire) -> None:
    wire.answer = answers(
        server,
        lambda number: response(number, final=False),
        lambda number: response(number, final=False),
        lambda number: CallResponse(number, empty=True),
    )
    call = server.stream(request())
    assert [result.outputs[0].array.tolist() for result in call] == [[1, 2], [1, 2]]
    assert call.over
    assert call.next() is None
    assert call.poll() is None
    assert wire.last(Call).decoupled


def test_an_error_ends_the_iteration_over_a_stream(server: ServerCalls, wire: Wire) -> None:
    wire.answer = answers(
        server,
        lambda number: response(number, final=False),
        lambda number: CallResponse(number, error=Error("INTERNAL", "half way")),
    )
    results = iter(server.stream(request()))
    next(results)
    assert refused(next, results).message == "half way"


def test_the_server_is_told_of_reads_by_number_and_by_size(server: ServerCalls, wire: Wire) -> None:
    call = server.stream(request())
    number = wire.last(Call).number
    for _ in range(40):
        server.on_response(response(number, final=False), ())
        call.next()
    assert [message for message in wire.sent if isinstance(message, CallRead)] == [CallRead(number, 16)] * 2
    server.on_response(response(number, bytes(1 << 20), final=False), ())
    call.next()
    assert wire.last(CallRead) == CallRead(number, 9)


def test_a_call_that_nobody_holds_is_cancelled(server: ServerCalls, wire: Wire) -> None:
    server.stream(request())
    gc.collect()
    assert wire.last(CancelCall).number == wire.last(Call).number
    assert not server.waiting
    server.on_response(response(wire.last(Call).number), ())


def test_a_call_whose_answer_nobody_read_is_not_cancelled(server: ServerCalls, wire: Wire) -> None:
    """It is over for the server."""
    call = server.begin(request())
    server.on_response(response(wire.last(Call).number), ())
    del call
    gc.collect()
    assert not any(isinstance(message, CancelCall) for message in wire.sent)


def test_a_cancel_is_told_once_and_read_as_an_error(server: ServerCalls, wire: Wire) -> None:
    arrived: list[bool] = []
    call = server.begin(request(), on_arrival=lambda: arrived.append(True))
    call.cancel()
    call.cancel()
    result = call.poll()
    assert result is not None
    assert result.error is not None
    assert result.error.code is ErrorCode.CANCELLED
    assert arrived == [True]
    assert sum(isinstance(message, CancelCall) for message in wire.sent) == 1


def test_a_wait_in_another_thread_ends_with_a_cancel(server: ServerCalls) -> None:
    call = server.begin(request())
    thread = threading.Timer(0.01, call.cancel)
    thread.start()
    result = call.next()
    assert result is not None
    assert result.error is not None
    thread.join()


def test_calls_are_cancelled_with_whoever_they_are_made_for(server: ServerCalls, wire: Wire) -> None:
    wire.whose, other = batch(), batch()
    mine, others = server.begin(request()), server.begin(request(), on_behalf=other)
    assert wire.last(Call).batch == 3
    wire.whose.cancel(-1)
    server.cancel_with_batches()
    assert others.poll() is None
    result = mine.poll()
    assert result is not None
    assert result.error is not None
    late = server.begin(request()).poll()
    assert late is not None
    assert late.error is not None
    assert late.error.code is ErrorCode.CANCELLED


def test_a_process_has_so_many_calls_under_way_and_no_more(server: ServerCalls, wire: Wire) -> None:
    calls = [server.begin(request()) for _ in range(MAX_CALLS)]
    assert refused(server.begin, request()).code is ErrorCode.UNAVAILABLE
    calls.pop()
    calls.append(server.begin(request()))
    assert wire.watched >= MAX_CALLS


@pytest.mark.parametrize(
    "bad",
    [
        CallRequest(7, []),  # type: ignore[arg-type]
        CallRequest("m", [], version=-2),
        CallRequest("m", [], version="1"),  # type: ignore[arg-type]
        CallRequest("m", [], timeout_us=-1),
        CallRequest("m", [], priority=1.5),  # type: ignore[arg-type]
        CallRequest("m", [], id=None),  # type: ignore[arg-type]
        CallRequest("m", [], outputs=[1]),  # type: ignore[list-item]
        CallRequest("m", [], correlation_id=1.5),  # type: ignore[arg-type]
        CallRequest("m", [], correlation_id=1 << 70),
        CallRequest("m", [], parameters={"p": [1]}),  # type: ignore[dict-item]
        CallRequest("m", [], parameters={1: "p"}),  # type: ignore[dict-item]
        CallRequest("m", [], parameters={"p": 1 << 70}),
        CallRequest("m", [], id="\ud800"),
        CallRequest("m", [CallTensor("IN", [1.0])]),  # type: ignore[arg-type]
        CallRequest("m", [CallTensor("IN", np.array([1j]))]),
        CallRequest("m", [CallTensor("IN", np.array([1.0]), BF16)]),
        CallRequest("m", [CallTensor(None, ROW)]),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_request_is_refused_before_it_is_sent(server: ServerCalls, wire: Wire, bad: CallRequest) -> None:
    assert refused(server.begin, bad).code is ErrorCode.INVALID_ARG
    assert not wire.sent
    assert not server.waiting


def test_a_load_brings_configuration_and_files_and_waits_for_the_answer(server: ServerCalls, wire: Wire) -> None:
    wire.answer = lambda message: server.on_control_result(ControlResult(message.number))  # type: ignore[attr-defined]
    server.load("m", "{}", {"file:1/model": b"abc", "1/empty": b"", "1/more": b"de"})
    sent = wire.last(Control)
    assert (sent.action, sent.model, sent.config) == ("load", "m", "{}")
    assert [path for path, _ in sent.files] == ["1/model", "1/empty", "1/more"]
    where = [ref for _, ref in sent.files]
    assert [wire.contents[0][ref.offset : ref.offset + ref.nbytes] for ref in where] == [b"abc", b"", b"de"]
    server.unload("m", unload_dependents=True)
    assert wire.last(Control).unload_dependents


def test_control_is_refused_with_the_servers_reason(server: ServerCalls, wire: Wire) -> None:
    wire.answer = lambda message: server.on_control_result(
        ControlResult(message.number, Error("UNAVAILABLE", "not now"))  # type: ignore[attr-defined]
    )
    assert refused(server.load, "m").message == "not now"
    assert refused(server.ready, "m").code is ErrorCode.UNAVAILABLE
    assert not server.waiting


@pytest.mark.parametrize(
    ("act", "arguments"),
    [
        ("load", (1,)),
        ("load", ("m", 1)),
        ("load", ("m", "", {"f": "text"})),
        ("load", ("m", "", {1: b""})),
        ("unload", (None,)),
        ("ready", ("m", "1")),
        ("metric_family", (1, "", "counter")),
        ("metric_family", ("m", None, "counter")),
        ("metric_family", ("m", "", "gouge")),
    ],
)
def test_what_is_no_control_is_refused_before_it_is_sent(
    server: ServerCalls, wire: Wire, act: str, arguments: tuple[object, ...]
) -> None:
    assert refused(getattr(server, act), *arguments).code is ErrorCode.INVALID_ARG
    assert not wire.sent


def test_controls_have_a_bound(server: ServerCalls, wire: Wire) -> None:
    waiting = threading.Semaphore(0)
    wire.answer = lambda _: waiting.release()
    threads = [threading.Thread(target=lambda: refused(server.load, "m")) for _ in range(MAX_CONTROLS)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert waiting.acquire(timeout=5)
    assert refused(server.load, "m").code is ErrorCode.UNAVAILABLE
    server.close(unavailable("the end"))
    for thread in threads:
        thread.join()


def test_a_family_is_named_by_the_number_of_its_definition(server: ServerCalls, wire: Wire) -> None:
    wire.answer = lambda message: (
        server.on_control_result(ControlResult(message.number, value=5.0))
        if isinstance(message, DefineFamily | Control)
        else None
    )
    family = server.metric_family("mine", "help", "gauge")
    assert wire.last(DefineFamily) == DefineFamily(family.number, "mine", "help", "gauge")
    assert family.metric().value() == 5
    assert wire.last(MetricValues).series[0].family == family.number
    assert wire.last(Control).series == wire.last(MetricValues).series[0].number
    server.tell_metrics(77)
    assert wire.last(MetricValues) == MetricValues((), (), 77)
    server.close(unavailable("the end"))


def test_the_end_fails_what_is_under_way_and_refuses_what_comes(server: ServerCalls, wire: Wire) -> None:
    call = server.begin(request())
    end = unavailable("the end")
    server.close(end)
    result = call.next()
    assert result is not None
    assert result.error is end
    assert refused(server.begin, request()) is end
    assert refused(server.load, "m") is end
    assert refused(server.metric_family, "m", "", "counter") is end


def test_without_a_server_whatever_is_asked_fails_with_a_reason() -> None:
    server = ServerCalls()
    assert "without a server" in refused(server.infer, request()).message
    assert "without a server" in refused(server.ready, "m").message
    assert not server.waiting
