"""Requests of a decoupled model as the author of a backend meets them, without a process."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_backends.api import Batch, BatchRequest, StreamResponse, send_many
from headrace_backends.conformance import Case, LoadedModel, loaded
from headrace_backends.identity.backend import IdentityBackend
from headrace_backends.outputs import FRAME_BYTES, INLINE_BYTES
from headrace_protocol.datatype import FP32
from headrace_protocol.errors import ErrorCode, InferError, invalid

LIMIT_S = 10.0
ONE = np.ones((1, 1), np.float32)


class Scripted(IdentityBackend):
    """Does with a batch what the test says."""

    def execute(self, batch: Batch) -> None:
        self.script(batch)

    script: Callable[[Batch], None]


def _case(tmp_path: Path, *, decoupled: bool = True) -> Case:
    tensor = {"data_type": "TYPE_FP32", "dims": [-1]}
    config = {
        "name": "m",
        "max_batch_size": 8,
        "input": [{"name": "INPUT0", **tensor}],
        "output": [{"name": "OUTPUT0", **tensor}, {"name": "OUTPUT1", **tensor}],
        "model_transaction_policy": {"decoupled": decoupled},
    }
    return Case(tmp_path, config, {"INPUT0": ONE})


@pytest.fixture
def model(tmp_path: Path) -> Iterator[LoadedModel]:
    with loaded(Scripted, _case(tmp_path)) as model:
        yield model


def script(model: LoadedModel, what: Callable[[Batch], None]) -> None:
    assert isinstance(model.backend, Scripted)
    model.backend.script = what  # type: ignore[method-assign]


def opened(model: LoadedModel, requests: int = 1) -> Batch:
    """Return a batch whose execute has returned and all of whose requests are open."""
    script(model, lambda batch: batch.defer())
    batch = model.batch([model.case.inputs] * requests)
    model.execute(batch)
    return batch


def refused(call: Callable[[], None], code: ErrorCode = ErrorCode.INTERNAL) -> str:
    with pytest.raises(InferError) as caught:
        call()
    assert caught.value.code is code
    return caught.value.message


def codes(model: LoadedModel, batch: Batch) -> list[list[str]]:
    return [[answer.code for answer in answers] for answers in model.streams.so_far(batch)]


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Have the system refuse every new descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def started(call: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_responses_go_out_in_order_and_the_last_is_final(model: LoadedModel) -> None:
    def count(batch: Batch) -> None:
        (request,) = batch.requests
        for number in range(3):
            request.send({"OUTPUT0": ONE * number}, final=number == 2)

    script(model, count)
    (answers,) = model.stream(model.batch([model.case.inputs]))
    assert [answer.outputs["OUTPUT0"].item() for answer in answers] == [0, 1, 2]
    assert [answer.final for answer in answers] == [False, False, True]


def test_a_response_is_with_the_server_before_send_returns(model: LoadedModel) -> None:
    (request,) = opened(model).requests
    request.send({"OUTPUT0": ONE})
    assert model.streams.frames == 1


def test_a_request_may_end_without_any_response(model: LoadedModel) -> None:
    script(model, lambda batch: batch.requests[0].complete())
    ((end,),) = model.stream(model.batch([model.case.inputs]))
    assert (end.final, end.empty, end.code) == (True, True, "")


def test_an_error_may_follow_responses_and_is_the_last(model: LoadedModel) -> None:
    batch = opened(model)
    (request,) = batch.requests
    request.send({"OUTPUT0": ONE})
    request.fail(invalid("no further"))
    assert codes(model, batch) == [["", "INVALID_ARG"]]
    assert request.answered


@pytest.mark.parametrize("end", ["complete", "fail", "respond", "send"])
def test_nothing_can_be_sent_after_the_last_response(model: LoadedModel, end: str) -> None:
    batch = opened(model)
    (request,) = batch.requests
    ends: dict[str, Callable[[], None]] = {
        "complete": request.complete,
        "fail": lambda: request.fail(invalid("the end")),
        "respond": lambda: request.respond({"OUTPUT0": ONE}),
        "send": lambda: request.send({"OUTPUT0": ONE}, final=True),
    }
    ends[end]()
    for call in (*ends.values(), lambda: request.send({"OUTPUT0": ONE})):
        assert "after the last one of request 0" in refused(call)
    assert len(model.streams.so_far(batch)[0]) == 1


def test_requests_left_open_without_defer_are_ended(model: LoadedModel) -> None:
    def first_alone(batch: Batch) -> None:
        batch.requests[0].send({"OUTPUT0": ONE})

    script(model, first_alone)
    sent, silent = model.stream(model.batch([model.case.inputs] * 2))
    assert [answer.empty for answer in sent] == [False, True]
    assert [answer.code for answer in silent] == ["INTERNAL"]
    assert "did not answer" in silent[0].message


def test_one_request_may_be_deferred_while_another_is_ended(model: LoadedModel) -> None:
    script(model, lambda batch: batch.requests[1].defer())
    batch = model.batch([model.case.inputs] * 2)
    model.execute(batch)
    assert codes(model, batch) == [["INTERNAL"], []]
    assert batch.open
    batch.requests[1].complete()
    assert not batch.open


def test_an_exception_ends_what_is_open_even_if_it_was_deferred(model: LoadedModel) -> None:
    def stumble(batch: Batch) -> None:
        batch.requests[0].send({"OUTPUT0": ONE}, final=True)
        batch.requests[1].defer()
        raise RuntimeError("on purpose")

    script(model, stumble)
    first, second, third = model.stream(model.batch([model.case.inputs] * 3))
    assert [answer.code for answer in first] == [""]
    assert [[answer.code for answer in answers] for answers in (second, third)] == [["INTERNAL"], ["INTERNAL"]]
    assert "RuntimeError: on purpose" in second[0].message


def test_sending_for_a_cancelled_request_raises_cancelled(model: LoadedModel) -> None:
    batch = opened(model, 2)
    batch.cancel(0)
    refused(lambda: batch.requests[0].send({"OUTPUT0": ONE}), ErrorCode.CANCELLED)
    batch.requests[1].send({"OUTPUT0": ONE})
    assert [len(answers) for answers in model.streams.so_far(batch)] == [0, 1]


def test_a_backend_that_gives_up_at_a_cancelled_request_does_not_cancel_the_others(model: LoadedModel) -> None:
    def all_in_turn(batch: Batch) -> None:
        for request in batch.requests:
            request.send({"OUTPUT0": ONE})

    script(model, all_in_turn)
    batch = model.batch([model.case.inputs] * 2)
    batch.cancel(0)
    cancelled, other = model.stream(batch)
    assert [answer.code for answer in cancelled] == ["CANCELLED"]
    assert [answer.code for answer in other] == ["INTERNAL"]
    assert "another request" in other[0].message


def test_a_cancelled_request_that_sent_something_and_was_left_ends_as_cancelled(model: LoadedModel) -> None:
    def send_once(batch: Batch) -> None:
        batch.requests[0].send({"OUTPUT0": ONE})
        batch.cancel(0)

    script(model, send_once)
    (answers,) = model.stream(model.batch([model.case.inputs]))
    assert [answer.code for answer in answers] == ["", "CANCELLED"]


def test_send_waits_while_the_client_reads_too_slowly(model: LoadedModel) -> None:
    batch = opened(model)
    (request,) = batch.requests
    batch.flow(0, paused=True)
    assert request.paused
    sending = started(lambda: request.send({"OUTPUT0": ONE}))
    assert not model.streams.wait(batch, lambda answers: bool(answers[0]), 0.05)
    batch.flow(0, paused=False)
    sending.join(LIMIT_S)
    assert codes(model, batch) == [[""]]


def test_a_cancel_ends_the_wait_of_send(model: LoadedModel) -> None:
    batch = opened(model)
    (request,) = batch.requests
    batch.flow(0, paused=True)
    errors: list[str] = []
    sending = started(lambda: errors.append(refused(lambda: request.send({"OUTPUT0": ONE}), ErrorCode.CANCELLED)))
    batch.cancel(0)
    sending.join(LIMIT_S)
    assert len(errors) == 1


def test_who_sends_many_streams_is_told_when_one_is_held_back_or_goes_on(model: LoadedModel) -> None:
    batch = opened(model, 2)
    told: list[tuple[bool, bool]] = []
    batch.on_flow(lambda: told.append((batch.requests[0].paused, batch.requests[1].paused)))
    batch.flow(1, paused=True)
    batch.flow(1, paused=False)
    assert told == [(False, True), (False, False)]


def test_wait_sleeps_for_its_time_or_until_the_request_is_cancelled(model: LoadedModel) -> None:
    batch = opened(model)
    (request,) = batch.requests
    assert not request.wait(0.001)
    ended: list[float] = []

    def sleep() -> None:
        assert request.wait(LIMIT_S)
        ended.append(time.monotonic())

    sleeping = started(sleep)
    cancelled = time.monotonic()
    batch.cancel(0)
    sleeping.join(LIMIT_S)
    assert ended[0] - cancelled < LIMIT_S / 2


def test_many_requests_of_several_batches_get_their_responses_in_one_frame(model: LoadedModel) -> None:
    batches = [opened(model, 2), opened(model)]
    requests = [request for batch in batches for request in batch.requests]
    send_many([StreamResponse(request, {"OUTPUT0": ONE * number}) for number, request in enumerate(requests)])
    assert model.streams.frames == 1
    got = [answer.outputs["OUTPUT0"].item() for batch in batches for (answer,) in model.streams.so_far(batch)]
    assert got == [0, 1, 2]


def test_send_many_leaves_out_what_is_cancelled_and_ends_it_where_it_was_the_last(model: LoadedModel) -> None:
    batch = opened(model, 3)
    batch.cancel(0)
    batch.cancel(1)
    outputs = {"OUTPUT0": ONE}
    first, second, third = batch.requests
    send_many([StreamResponse(first, outputs), StreamResponse(second, outputs, final=True), StreamResponse(third)][:2])
    assert codes(model, batch) == [[], ["CANCELLED"], []]
    send_many([StreamResponse(third, outputs), StreamResponse(third, final=True)])
    assert codes(model, batch)[2] == ["", ""]


def test_send_many_sends_nothing_where_one_response_cannot_be_sent(model: LoadedModel) -> None:
    batch = opened(model, 2)
    first, second = batch.requests
    good = StreamResponse(first, {"OUTPUT0": ONE})
    bad: list[tuple[StreamResponse, str]] = [
        (StreamResponse(second, {"OUTPUT0": np.zeros(1, np.complex64)}), "no tensor datatype"),
        (StreamResponse(second), "without outputs"),
        (StreamResponse(first, {"OUTPUT0": ONE}), "after the last one"),
    ]
    for response, text in bad:
        parts = [StreamResponse(first, {"OUTPUT0": ONE}, final=True) if response.request is first else good, response]
        assert text in refused(lambda parts=parts: send_many(parts))  # type: ignore[misc]
    assert codes(model, batch) == [[], []]
    assert batch.open


def test_a_response_that_cannot_be_sent_leaves_no_descriptor_behind(model: LoadedModel) -> None:
    def descriptors() -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    (request,) = opened(model).requests
    large, wrong = np.zeros((1, INLINE_BYTES), np.float32), np.zeros(1, np.complex64)
    before = descriptors()
    refused(lambda: request.send({"OUTPUT0": large, "OUTPUT1": wrong}))
    refused(lambda: send_many([StreamResponse(request, {"OUTPUT0": large}), StreamResponse(request)]))
    assert descriptors() == before
    request.send({"OUTPUT0": large})
    assert descriptors() == before


LARGE = np.zeros((1, INLINE_BYTES), np.float32)


@pytest.mark.parametrize(
    "call",
    [
        lambda request: request.send({"OUTPUT0": LARGE}),
        lambda request: request.respond({"OUTPUT0": LARGE}),
        lambda request: send_many([StreamResponse(request, {"OUTPUT0": LARGE}, final=True)]),
    ],
)
def test_a_response_that_finds_no_descriptor_is_refused_and_its_request_may_be_failed(
    model: LoadedModel, call: Callable[[BatchRequest], None]
) -> None:
    batch = opened(model, 2)
    first, second = batch.requests
    with no_descriptors():
        assert "Too many open files" in refused(lambda: call(first), ErrorCode.UNAVAILABLE)
        second.send({"OUTPUT0": ONE})
        assert not first.answered
        first.fail(invalid("no further"))
    assert codes(model, batch) == [["INVALID_ARG"], [""]]


@pytest.mark.parametrize("error", [OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), MemoryError()])
def test_requests_of_a_frame_that_the_system_does_not_take_are_open_still(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    batch = opened(model, 2)

    def send(*_: Any) -> None:
        raise error

    with monkeypatch.context() as lacking:
        lacking.setattr(model.streams, "send", send)
        parts = [StreamResponse(request, {"OUTPUT0": ONE}, final=True) for request in batch.requests]
        assert "Cannot allocate memory" in refused(lambda: send_many(parts), ErrorCode.UNAVAILABLE)
    assert [request.answered for request in batch.requests] == [False, False]
    batch.requests[0].respond({"OUTPUT0": ONE})
    batch.requests[1].complete()
    assert codes(model, batch) == [[""], [""]]
    assert not batch.open


def test_a_batch_answered_as_a_whole_gives_each_open_request_its_rows(model: LoadedModel) -> None:
    def whole(batch: Batch) -> None:
        batch.requests[1].complete()
        place = batch.allocate("OUTPUT0", (3, 1), FP32)
        place[:] = np.array([[1], [2], [3]])
        batch.respond({"OUTPUT0": place})

    script(model, whole)
    first, second, third = model.stream(model.batch([model.case.inputs] * 3))
    assert [answers[0].outputs["OUTPUT0"].tolist() for answers in (first, third)] == [[[1]], [[3]]]
    assert second[0].empty


def test_outputs_that_a_request_does_not_want_are_not_sent(model: LoadedModel) -> None:
    script(model, lambda batch: batch.requests[0].respond({"OUTPUT0": ONE, "OUTPUT1": ONE}))
    ((answer,),) = model.stream(model.batch([model.case.inputs], wanted=("OUTPUT1",)))
    assert list(answer.outputs) == ["OUTPUT1"]


@pytest.mark.parametrize("elements", [0, 1, INLINE_BYTES // 4, INLINE_BYTES // 4 + 1, FRAME_BYTES])
def test_an_output_of_any_size_arrives(model: LoadedModel, elements: int) -> None:
    large = np.arange(elements, dtype=np.float32)[None]
    texts = np.array([[b"a" * elements, b""]], object)
    script(model, lambda batch: batch.requests[0].respond({"OUTPUT0": large, "OUTPUT1": texts}))
    ((answer,),) = model.stream(model.batch([model.case.inputs]))
    assert answer.outputs["OUTPUT0"].tolist() == large.tolist()
    assert answer.outputs["OUTPUT1"].tolist() == texts.tolist()


def test_small_outputs_beyond_what_a_frame_may_hold_arrive_too(model: LoadedModel) -> None:
    count = FRAME_BYTES // INLINE_BYTES + 3
    part = np.arange(INLINE_BYTES // 4, dtype=np.float32)[None]
    (request,) = opened(model).requests
    send_many([StreamResponse(request, {"OUTPUT0": part + number}) for number in range(count)])
    answers = model.streams.so_far(request._batch)[0]
    assert [answer.outputs["OUTPUT0"][0, 1] for answer in answers] == [1 + number for number in range(count)]


def test_the_end_of_another_thread_waits_for_a_response_on_its_way(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = opened(model)
    (request,) = batch.requests
    send = model.streams.send
    ending: list[threading.Thread] = []

    def slow(*frame: Any) -> None:
        if not ending:
            ending.append(started(request.complete))
            ending[0].join(0.05)  # as far as it gets
        send(*frame)

    monkeypatch.setattr(model.streams, "send", slow)
    request.send({"OUTPUT0": ONE})
    ending[0].join(LIMIT_S)
    assert [answer.empty for answer in model.ended(batch)[0]] == [False, True]


@pytest.mark.parametrize(
    "call",
    [
        lambda request: request.send({"OUTPUT0": ONE}),
        lambda request: request.complete(),
        lambda request: request.defer(),
        lambda request: send_many([StreamResponse(request, {"OUTPUT0": ONE}, final=True)]),
    ],
)
def test_a_model_that_is_not_decoupled_has_one_response_and_says_so(
    tmp_path: Path, call: Callable[[BatchRequest], None]
) -> None:
    with loaded(Scripted, _case(tmp_path, decoupled=False)) as model:
        script(model, lambda batch: call(batch.requests[0]))
        (answer,) = model.run(model.batch([model.case.inputs]))
        assert answer.code == "INTERNAL"
        assert "not decoupled" in answer.message
        script(model, lambda batch: batch.requests[0].send({"OUTPUT0": ONE}, final=True))
        (answer,) = model.run(model.batch([model.case.inputs]))
        assert answer.outputs["OUTPUT0"].tolist() == [[1]]
