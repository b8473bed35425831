"""What headrace expects of a backend whose model is decoupled: a function for each part of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

from headrace_backends.batch import ALL_REQUESTS
from headrace_backends.conformance.checks import check_description, expect_equal, expect_success
from headrace_backends.conformance.model import Answer, LoadedModel, datatype_of
from headrace_protocol.errors import ErrorCode

HELD_BACK_S: Final = 0.1
"""Seconds for which a request that is held back is watched."""


def check_stream(model: LoadedModel) -> None:
    """Check that a request gets responses with configured outputs of their datatypes, and one end."""
    (answers,) = model.stream(model.batch([model.case.inputs]))
    _expect_good(answers)
    datatypes = {tensor["name"]: datatype_of(tensor["data_type"]) for tensor in model.case.config["output"]}
    for answer in answers:
        for name, array in answer.outputs.items():
            datatype = datatypes.get(name)
            assert datatype is not None, f"output '{name}' is not configured"
            assert array.dtype == datatype.numpy, f"output '{name}' has type {array.dtype}, not {datatype}"


def check_streams_together(model: LoadedModel) -> None:
    """Check that each request of a batch gets what it gets alone."""
    if not model.case.batches:
        return
    (alone,) = model.stream(model.batch([model.case.inputs]))
    for answers in model.stream(model.batch([model.case.inputs] * 3)):
        _expect_same(alone, answers)


def check_streams_at_once(model: LoadedModel) -> None:
    """Check that batches executed while requests of others are open get what they get alone."""
    (alone,) = model.stream(model.batch([model.case.inputs]))
    batches = [model.batch([model.case.inputs]) for _ in range(3)]
    for batch in batches:
        model.execute(batch)
    for batch in batches:
        (answers,) = model.ended(batch)
        _expect_same(alone, answers)


def check_wanted(model: LoadedModel) -> None:
    """Check that a request that wants one output gets no other."""
    name = model.case.config["output"][-1]["name"]
    (answers,) = model.stream(model.batch([model.case.inputs], wanted=(name,)))
    _expect_good(answers)
    for answer in answers:
        assert set(answer.outputs) <= {name}, f"asked for ['{name}'], got {list(answer.outputs)}"


def check_failure_is_private(model: LoadedModel) -> None:
    """Check that a bad request ends with an error, and that another gets what it gets alone."""
    case = model.case
    if not case.has_bad:
        return
    (alone,) = model.stream(model.batch([case.inputs]))
    bad = model.batch([case.bad_inputs or case.inputs], [case.bad_parameters])
    good = model.batch([case.inputs])
    model.execute(bad)
    model.execute(good)
    (failed,) = model.ended(bad)
    assert failed[-1].code, "the bad request got no error"
    assert failed[-1].message, "the bad request's error has no text"
    _expect_same(alone, model.ended(good)[0])


def check_works_after_exception(model: LoadedModel) -> None:
    """Check that requests that cannot be run end, and that the next one works."""
    model.stream(model.batch([{}]))
    _expect_good(model.stream(model.batch([model.case.inputs]))[0])


def check_cancelled_before(model: LoadedModel) -> None:
    """Check that a request that was cancelled before it began ends, and that the next one works."""
    batch = model.batch([model.case.inputs])
    batch.cancel(ALL_REQUESTS)
    (answers,) = model.stream(batch)
    code = answers[-1].code
    assert code in {"", ErrorCode.CANCELLED.value}, f"a cancelled request got {code}: {answers[-1].message}"
    _expect_good(model.stream(model.batch([model.case.inputs]))[0])


def check_cancelled_while_open(model: LoadedModel) -> None:
    """Check that cancelling an open request ends it with CANCELLED, and no other request."""
    case = model.case
    if not case.has_slow:
        return
    slow = model.batch([case.slow_inputs or case.inputs], [case.slow_parameters])
    running = _aside(lambda: model.execute(slow))
    slow.cancel(ALL_REQUESTS)
    (answers,) = model.ended(slow)
    running.join(case.limit_s)
    assert not running.is_alive(), f"execute did not return within {case.limit_s:g} s of the end of its requests"
    assert answers[-1].code == ErrorCode.CANCELLED.value, f"a cancelled request ended with '{answers[-1].code}'"
    _expect_good(model.stream(model.batch([case.inputs]))[0])


def check_held_back(model: LoadedModel) -> None:
    """Check that a request whose client reads too slowly gets nothing, then the same as others; and can be cancelled."""
    (alone,) = model.stream(model.batch([model.case.inputs]))
    if len(alone) == 1:
        return  # a single response need not wait
    batch = model.batch([model.case.inputs])
    batch.flow(0, paused=True)
    running = _aside(lambda: model.execute(batch))
    assert not model.streams.wait(batch, lambda answers: bool(answers[0]), HELD_BACK_S), "sent while it was held back"
    batch.flow(0, paused=False)
    _expect_same(alone, model.ended(batch)[0])
    running.join(model.case.limit_s)
    held = model.batch([model.case.inputs])
    held.flow(0, paused=True)
    running = _aside(lambda: model.execute(held))
    held.cancel(ALL_REQUESTS)
    model.ended(held)
    running.join(model.case.limit_s)


STREAM_CHECKS: Final[tuple[Callable[[LoadedModel], None], ...]] = (
    check_description,
    check_stream,
    check_streams_together,
    check_streams_at_once,
    check_wanted,
    check_failure_is_private,
    check_works_after_exception,
    check_cancelled_before,
    check_cancelled_while_open,
    check_held_back,
)


def _aside(call: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def _expect_good(answers: Sequence[Answer]) -> None:
    expect_success(answers[-1])


def _expect_same(expected: Sequence[Answer], got: Sequence[Answer]) -> None:
    _expect_good(expected)
    _expect_good(got)
    assert len(expected) == len(got), f"a request got {len(got)} responses, and {len(expected)} alone"
    for lonely, shared in zip(expected, got, strict=True):
        expect_equal(lonely, shared)
