"""What headrace expects of a backend whose model gives each request one response: a function for each part of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from headrace_backends.batch import ALL_REQUESTS
from headrace_backends.conformance.model import Answer, Inputs, LoadedModel, datatype_of
from headrace_protocol.datatype import BY_NAME, Array
from headrace_protocol.errors import ErrorCode


def check_description(model: LoadedModel) -> None:
    """Check that what the backend found in the model agrees with the configuration in names and datatypes."""
    for found, key in ((model.description.inputs, "input"), (model.description.outputs, "output")):
        described = {spec.name: BY_NAME[spec.datatype].config_name for spec in found}
        for tensor in model.case.config[key] if described else ():
            assert described.get(tensor["name"]) == tensor["data_type"], f"{key} '{tensor['name']}' is not described"


def check_single(model: LoadedModel) -> None:
    """Check that one request gets every configured output, with its datatype and number of rows."""
    (answer,) = model.run(model.batch([model.case.inputs]))
    expect_success(answer)
    for tensor in model.case.config["output"]:
        array = answer.outputs.get(tensor["name"])
        assert array is not None, f"output '{tensor['name']}' is missing"
        datatype = datatype_of(tensor["data_type"])
        assert array.dtype == datatype.numpy, f"output '{tensor['name']}' has type {array.dtype}, not {datatype}"
        if model.case.batches:
            assert array.shape[0] == 1, f"output '{tensor['name']}' has {array.shape[0]} rows, not 1"


def check_rows(model: LoadedModel) -> None:
    """Check that requests of 1, 3 and 2 rows in one batch each get what they get alone."""
    if not model.case.batches:
        return
    rows = iter([_rolled(model.case.inputs, by) for by in range(6)])
    requests = [_stack([next(rows) for _ in range(count)]) for count in (1, 3, 2)]
    alone = [model.run(model.batch([request]))[0] for request in requests]
    together = model.run(model.batch(requests))
    for lonely, shared in zip(alone, together, strict=True):
        expect_equal(lonely, shared)


def check_wanted(model: LoadedModel) -> None:
    """Check that a batch that wants one output gets that one and no other."""
    name = model.case.config["output"][-1]["name"]
    (answer,) = model.run(model.batch([model.case.inputs], wanted=(name,)))
    expect_success(answer)
    assert list(answer.outputs) == [name], f"asked for ['{name}'], got {list(answer.outputs)}"


def check_failure_is_private(model: LoadedModel) -> None:
    """Check that a bad request gets an error, and its batchmates what they get alone."""
    case = model.case
    if not case.batches or not case.has_bad:
        return
    (alone,) = model.run(model.batch([case.inputs]))
    bad = case.bad_inputs or case.inputs
    answers = model.run(model.batch([case.inputs, bad, case.inputs], [None, case.bad_parameters]))
    assert answers[1].code, "the bad request got no error"
    assert answers[1].message, "the bad request's error has no text"
    expect_equal(alone, answers[0])
    expect_equal(alone, answers[2])


def check_works_after_exception(model: LoadedModel) -> None:
    """Check that a batch that cannot be run answers all its requests, and that the next one works."""
    model.run(model.batch([{}, {}]))
    expect_success(model.run(model.batch([model.case.inputs]))[0])


def check_cancelled_before(model: LoadedModel) -> None:
    """Check that a batch that was cancelled before it began ends, and that the next one works."""
    batch = model.batch([model.case.inputs])
    batch.cancel(ALL_REQUESTS)
    (answer,) = model.run(batch)
    assert answer.code in {"", ErrorCode.CANCELLED.value}, f"a cancelled request got {answer.code}: {answer.message}"
    expect_success(model.run(model.batch([model.case.inputs]))[0])


def check_cancelled_while_running(model: LoadedModel) -> None:
    """Check that cancelling every request of a running batch ends it with CANCELLED."""
    case = model.case
    if not case.has_slow:
        return
    batch = model.batch([case.slow_inputs or case.inputs], [case.slow_parameters])
    answers: list[Answer] = []
    running = threading.Thread(target=lambda: answers.extend(model.run(batch)), daemon=True)
    running.start()
    batch.cancel(ALL_REQUESTS)
    running.join(case.limit_s)
    assert answers, f"a cancelled batch did not end within {case.limit_s:g} s"
    assert answers[0].code == ErrorCode.CANCELLED.value, f"a cancelled request got '{answers[0].code}'"


def check_no_elements(model: LoadedModel) -> None:
    """Check that a request with no elements, where dimensions may vary, gets an answer, be it an error."""
    inputs = dict(model.case.inputs)
    first = 1 if model.case.batches else 0
    for tensor in model.case.config["input"]:
        array = inputs[tensor["name"]]
        for axis, dim in enumerate(tensor["dims"], start=first):
            if int(dim) == -1 and axis < array.ndim:
                array = np.take(array, [], axis=axis)
        inputs[tensor["name"]] = array
    if all(array.size for array in inputs.values()):
        return
    model.run(model.batch([inputs]))
    expect_success(model.run(model.batch([model.case.inputs]))[0])


def check_spill(model: LoadedModel) -> None:
    """Check that outputs for which the server left no room arrive all the same."""
    (roomy,) = model.run(model.batch([model.case.inputs]))
    (spilled,) = model.run(model.batch([model.case.inputs], space=0))
    expect_equal(roomy, spilled)


CHECKS: Final[tuple[Callable[[LoadedModel], None], ...]] = (
    check_description,
    check_single,
    check_rows,
    check_wanted,
    check_failure_is_private,
    check_works_after_exception,
    check_cancelled_before,
    check_cancelled_while_running,
    check_no_elements,
    check_spill,
)


def expect_success(answer: Answer) -> None:
    """Assert that a request got no error."""
    assert not answer.code, f"a good request failed: {answer.code}: {answer.message}"


def expect_equal(expected: Answer, got: Answer) -> None:
    """Assert that two responses hold the same."""
    expect_success(expected)
    expect_success(got)
    assert expected.outputs.keys() == got.outputs.keys()
    for name, array in expected.outputs.items():
        other = got.outputs[name]
        assert array.shape == other.shape, f"output '{name}' has shape {other.shape}, expected {array.shape}"
        same = array.tolist() == other.tolist() if array.dtype == np.object_ else _close(array, other)
        assert same, f"output '{name}' differs from what the request gets alone"


def _close(array: Array, other: Array) -> bool:
    exact = array.dtype.kind != "f"
    return bool(np.array_equal(array, other) if exact else np.allclose(array, other, rtol=1e-3, equal_nan=True))


def _rolled(inputs: Inputs, by: int) -> dict[str, Array]:
    """Return inputs with the same elements in another order, so that rows can be told apart."""
    return {name: np.roll(array.reshape(-1), by).reshape(array.shape) for name, array in inputs.items()}


def _stack(rows: Sequence[Inputs]) -> dict[str, Array]:
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
