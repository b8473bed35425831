"""What the server makes of the calls of one backend process: with a data plane and a channel that the test plays."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from headrace.clock import SystemClock
from headrace.instances.calls import ProcessCalls
from headrace.instances.waiting import WaitGraph
from headrace.types import InferenceRequest, InferenceResponse, OutputTensor
from headrace_protocol.datatype import FP32
from headrace_protocol.errors import ErrorCode, InferError, not_found
from headrace_protocol.messages import MAX_CALLS, Call, CallRead, CallResponse, CancelCall
from headrace_protocol.tensor import INLINE, Tensor, TensorRef

Outcome = InferenceResponse | InferError


class Instances:
    """A model's one instance."""

    def slots(self) -> int:
        return 1


class Asked:
    """A request that the plane was given."""

    def __init__(self, request: InferenceRequest, tell: Callable[[Outcome], None], *, streamed: bool) -> None:
        self.request = request
        self.tell = tell
        self.streamed = streamed
        self.cancelled = 0

    def cancel(self) -> None:
        self.cancelled += 1


class Plane:
    """Takes requests; the test answers them."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.instances: Instances | None = Instances()

    def submit(self, request: InferenceRequest, done: Callable[[Outcome], None]) -> Asked:
        return self._take(Asked(request, done, streamed=False))

    def stream(self, request: InferenceRequest, on_outcome: Callable[[Outcome], None]) -> Asked:
        return self._take(Asked(request, on_outcome, streamed=True))

    def _take(self, asked: Asked) -> Asked:
        if asked.request.model_name == "nonsuch":
            raise not_found("no such model")
        self.asked.append(asked)
        return asked

    def model_ready(self, name: str, version: int) -> bool:
        return bool(name) and version < 9

    def instances_of(self, name: str, version: int, outputs: Sequence[str] | None) -> list[Instances]:
        if name == "nonsuch":
            raise not_found("no such model")
        return [self.instances] if version < 9 else []


class Process:
    """The process that asks."""

    def __init__(self) -> None:
        self.reading = True
        self.sent: list[CallResponse] = []
        self.contents: list[bytes] = []

    def executes(self, batch: int) -> bool:
        return batch == 5

    def trace_of(self, batch: int):
        return None

    def send(self, messages: Sequence[CallResponse], descriptors: Sequence[int] = ()) -> None:
        self.sent += messages
        self.contents += [os.pread(fd, os.fstat(fd).st_size, 0) for fd in descriptors]


class Released:
    """Counts the responses that were given back."""

    def __init__(self) -> None:
        self.count = 0

    def response(self, data: bytes = b"\0\0\0\0", *, final: bool = True) -> InferenceResponse:
        shape = (len(data) // 4,)
        response = InferenceResponse("leaf", 1, [OutputTensor("OUT", FP32, shape, data)], release=self.add)
        response.final = final
        return response

    def add(self) -> None:
        self.count += 1


class Desk:
    """A ProcessCalls with everything around it."""

    def __init__(self) -> None:
        self.process, self.plane, self.released = Process(), Plane(), Released()
        self.own, self.graph = Instances(), WaitGraph()
        self.calls = ProcessCalls(self.process, self.own, self.graph, SystemClock())
        self.calls.plane = self.plane

    def begin(self, number: int = 1, model: str = "leaf", **more: object) -> Asked | None:
        before = len(self.plane.asked)
        self.calls.begin(Call(number, model, -1, (INPUT,), **more), [])  # type: ignore[arg-type]
        return self.plane.asked[-1] if len(self.plane.asked) > before else None

    def answered(self) -> CallResponse:
        (response,) = self.process.sent
        self.process.sent.clear()
        return response


INPUT = Tensor("IN", "FP32", (1,), TensorRef(0, 4, INLINE), None, b"abcd")


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.calls.close()
    assert not desk.graph._waits


def sealed(content: bytes, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    fd = os.memfd_create("inputs", os.MFD_ALLOW_SEALING)
    os.write(fd, content)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def nonsense(act: Callable[..., object], *arguments: object) -> str:
    with pytest.raises(InferError) as raised:
        act(*arguments)
    assert raised.value.code is ErrorCode.INTERNAL
    return raised.value.message


def test_a_call_becomes_a_request_with_all_that_it_brings(desk: Desk) -> None:
    asked = desk.begin(
        outputs=("OUT",), id="x", parameters={"p": 1}, correlation_id=3, flags=2, timeout_us=4, priority=5
    )
    assert asked is not None
    request = asked.request
    assert (request.model_name, request.model_version, request.id, request.parameters) == ("leaf", -1, "x", {"p": 1})
    assert (request.correlation_id, request.flags, request.timeout_us, request.priority) == (3, 2, 4, 5)
    assert [output.name for output in request.outputs or ()] == ["OUT"]
    assert [(t.name, t.datatype, t.shape, bytes(t.data)) for t in request.inputs] == [("IN", FP32, (1,), b"abcd")]
    assert request.nested
    assert not asked.streamed


def test_a_small_response_travels_in_the_message_and_is_released(desk: Desk) -> None:
    asked = desk.begin()
    assert asked is not None
    asked.tell(desk.released.response(b"efgh"))
    response = desk.answered()
    assert response.outputs == (Tensor("OUT", "FP32", (1,), TensorRef(0, 4, INLINE), None, b"efgh"),)
    assert response.final
    assert desk.released.count == 1


def test_a_large_response_travels_in_a_descriptor_and_leaves_none_open(desk: Desk) -> None:
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    asked = desk.begin()
    assert asked is not None
    asked.tell(desk.released.response(b"efgh" * 10_000))
    (output,) = desk.answered().outputs
    assert output.ref == TensorRef(0, 40_000, 0)
    assert desk.process.contents == [b"efgh" * 10_000]
    assert desk.released.count == 1
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) == before


def test_inputs_in_a_sealed_descriptor_are_read_in_place(desk: Desk) -> None:
    fd = sealed(b"...." + b"abcdefgh")
    desk.calls.begin(Call(1, "leaf", -1, (Tensor("IN", "FP32", (2,), TensorRef(4, 8, 0)),)), [fd])
    os.close(fd)
    assert bytes(desk.plane.asked[0].request.inputs[0].data) == b"abcdefgh"


def test_what_the_plane_refuses_is_the_answer(desk: Desk) -> None:
    assert desk.begin(model="nonsuch") is None
    error = desk.answered().error
    assert error is not None
    assert error.code == "NOT_FOUND"
    assert desk.begin() is not None, "its number may be used again"


def test_without_a_plane_there_are_no_other_models(desk: Desk) -> None:
    desk.calls.plane = None
    desk.begin()
    error = desk.answered().error
    assert error is not None
    assert error.code == "UNAVAILABLE"


def test_a_process_has_so_many_calls_under_way_and_no_more(desk: Desk) -> None:
    for number in range(MAX_CALLS):
        desk.begin(number)
    assert not desk.process.sent
    assert desk.begin(MAX_CALLS) is None
    error = desk.answered().error
    assert error is not None
    assert error.code == "UNAVAILABLE"
    desk.plane.asked[0].tell(desk.released.response())
    assert desk.begin(MAX_CALLS) is not None


def test_a_cancel_reaches_the_request_and_what_comes_still_goes_nowhere(desk: Desk) -> None:
    asked = desk.begin()
    assert asked is not None
    desk.calls.cancel(CancelCall(1))
    desk.calls.cancel(CancelCall(1))
    assert asked.cancelled == 1
    asked.tell(desk.released.response())
    assert not desk.process.sent
    assert desk.released.count == 1


def test_responses_to_a_stream_count_as_unread_until_the_process_says_so(desk: Desk) -> None:
    asked = desk.begin(decoupled=True)
    assert asked is not None
    assert asked.streamed
    for _ in range(3):
        asked.tell(desk.released.response(final=False))
    assert [response.final for response in desk.process.sent] == [False] * 3
    assert desk.released.count == 0
    desk.calls.read(CallRead(1, 2))
    assert desk.released.count == 2
    asked.tell(desk.released.response())
    assert desk.process.sent[-1].final
    assert desk.released.count == 4


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_whatever_ends_a_stream_gives_its_unread_responses_back(desk: Desk, end: str) -> None:
    asked = desk.begin(decoupled=True)
    assert asked is not None
    asked.tell(desk.released.response(final=False))
    desk.process.reading = False
    asked.tell(desk.released.response(final=False))
    if end == "cancel":
        desk.calls.cancel(CancelCall(1))
        desk.process.reading = True
        desk.calls.flush()
    else:
        desk.calls.close()
    assert desk.released.count == 2
    assert asked.cancelled == 1
    assert len(desk.process.sent) == 1


def test_responses_wait_in_order_until_the_process_reads(desk: Desk) -> None:
    first, second = desk.begin(1), desk.begin(2)
    assert first is not None
    assert second is not None
    desk.process.reading = False
    second.tell(desk.released.response())
    first.tell(not_found("gone"))
    assert not desk.process.sent
    assert desk.released.count == 0
    desk.process.reading = True
    desk.calls.flush()
    assert [response.number for response in desk.process.sent] == [2, 1]
    assert desk.released.count == 1


def test_a_cancel_of_a_call_that_is_over_is_no_nonsense(desk: Desk) -> None:
    desk.calls.cancel(CancelCall(77))
    desk.calls.read(CallRead(77, 1))


def test_a_batch_that_waits_for_its_own_model_is_told_so(desk: Desk) -> None:
    desk.plane.instances = desk.own
    assert desk.begin(batch=5) is None
    error = desk.answered().error
    assert error is not None
    assert "wait for ever" in error.message


def test_a_call_that_no_running_batch_waits_for_may_go_to_the_own_model(desk: Desk) -> None:
    desk.plane.instances = desk.own
    assert desk.begin(1, batch=0) is not None
    assert desk.begin(2, batch=6) is not None, "a batch that does not run waits for nothing"


@pytest.mark.parametrize("end", ["answer", "cancel", "refusal"])
def test_a_wait_is_forgotten_when_the_call_is_over(desk: Desk, end: str) -> None:
    asked = desk.begin(1, model="nonsuch" if end == "refusal" else "leaf", batch=5)
    if end == "answer":
        assert asked is not None
        asked.tell(desk.released.response())
    else:
        desk.calls.cancel(CancelCall(1))
    assert not desk.graph._waits


# --- nonsense -----------------------------------------------------------------------------------------------------


def test_a_number_that_is_under_way_is_nonsense(desk: Desk) -> None:
    desk.begin()
    assert "twice" in nonsense(desk.begin)


@pytest.mark.parametrize("count", [-1, 0, 2])
def test_more_responses_read_than_were_sent_are_nonsense(desk: Desk, count: int) -> None:
    asked = desk.begin(decoupled=True)
    assert asked is not None
    asked.tell(desk.released.response(final=False))
    nonsense(desk.calls.read, CallRead(1, count))


@pytest.mark.parametrize(
    "tensor",
    [
        Tensor("IN", "FP99", (1,), TensorRef(0, 4, INLINE), None, b"abcd"),
        Tensor("IN", "FP32", (-1,), TensorRef(0, 4, INLINE), None, b"abcd"),
        Tensor("IN", "FP32", (1,) * 65, TensorRef(0, 4, INLINE), None, b"abcd"),
        Tensor("IN", "FP32", (1,), TensorRef(0, 4, -1)),
        Tensor("IN", "FP32", (1,), TensorRef(0, 4, 1)),
        Tensor("IN", "FP32", (1,), TensorRef(6, 4, 0)),
        Tensor("IN", "FP32", (1,), TensorRef(-4, 4, 0)),
        Tensor("IN", "FP32", (1,), TensorRef(4, -4, 0)),
    ],
)
def test_an_input_that_cannot_be_is_nonsense(desk: Desk, tensor: Tensor) -> None:
    fd = sealed(b"12345678")
    nonsense(desk.calls.begin, Call(1, "leaf", -1, (tensor,)), [fd])
    os.close(fd)


def test_a_descriptor_that_could_shrink_is_nonsense(desk: Desk) -> None:
    fd = sealed(b"12345678", 0)
    tensor = Tensor("IN", "FP32", (1,), TensorRef(0, 4, 0))
    nonsense(desk.calls.begin, Call(1, "leaf", -1, (tensor,)), [fd])
    nonsense(desk.calls.begin, Call(2, "leaf", -1, (tensor,)), [])
    os.close(fd)


@pytest.mark.parametrize("more", [{"timeout_us": -1}, {"priority": -1}])
def test_a_number_below_its_least_is_nonsense(desk: Desk, more: dict[str, int]) -> None:
    nonsense(lambda: desk.begin(**more))


def test_calls_that_a_process_begins_and_drops_without_reading_leave_nothing_behind(desk: Desk) -> None:
    desk.process.reading = False
    for number in range(3):
        asked = desk.begin(number)
        assert asked is not None
        asked.tell(desk.released.response())
        desk.calls.cancel(CancelCall(number))
        assert desk.released.count == number + 1
    for number in range(MAX_CALLS + 5):
        desk.begin(number)
    assert [response.error.code for response in desk.process.sent if response.error] == ["UNAVAILABLE"] * 5


def test_a_stream_whose_response_cannot_be_handed_over_ends(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stayed under way, with responses that nobody would ever read."""

    def none_left(*_: object) -> int:
        raise OSError(24, "Too many open files")

    asked = desk.begin(decoupled=True)
    assert asked is not None
    monkeypatch.setattr("headrace.instances.calls.os.memfd_create", none_left)
    asked.tell(desk.released.response(bytes(1 << 20), final=False))
    answered = desk.answered()
    assert answered.final
    assert answered.error is not None
    assert (answered.error.code, asked.cancelled, desk.released.count) == ("UNAVAILABLE", 1, 1)
