"""check_backend: what headrace expects of every backend, in executable form, without a server or a process.

The author of a backend calls it from a test with a model and example inputs. Each check is also a function of its own,
so that a failing one is named by the traceback; failures are AssertionErrors that say what was expected.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from headrace_backends import execution
from headrace_backends.api import Backend, ModelDescription
from headrace_backends.batch import ALL_REQUESTS, Batch, ModelMemory
from headrace_protocol.arena import Arena
from headrace_protocol.datatype import BY_NAME, Array, DataType, from_numpy, to_numpy
from headrace_protocol.errors import ErrorCode
from headrace_protocol.messages import PROTOCOL, BatchDone, Execute, Initialize, Parameter, RequestHeader, Responses
from headrace_protocol.tensor import ARENA, Tensor, TensorRef

ARENA_BYTES: Final = 64 << 20
CANCEL_LIMIT_S: Final = 10.0
"""Seconds within which a cancelled batch must end."""

Inputs = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Case:
    """A model to check a backend with."""

    model_directory: Path
    """Holds the version directories; version 1 is loaded."""
    config: dict[str, Any]
    """As the server sends it: proto field names, enums as names, at least `input`, `output`, `max_batch_size`."""
    inputs: Inputs
    """One request's worth of every input; one row where the model batches. BF16 as uint16."""
    bad_inputs: Inputs | None = None
    """Inputs of the same shape for which that request alone must fail, if the backend has such."""
    bad_parameters: dict[str, Parameter] | None = None
    """Request parameters with which that request alone must fail, if the backend has such."""
    slow_parameters: dict[str, Parameter] | None = None
    """Request parameters with which a request runs until it is cancelled, if the backend has such."""
    backend_config: dict[str, str] = field(default_factory=dict)

    @property
    def batches(self) -> bool:
        """Whether the model batches along the first dimension."""
        return int(self.config["max_batch_size"]) > 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request got: outputs by name, or an error."""

    outputs: dict[str, Array]
    code: str = ""
    message: str = ""


class LoadedModel:
    """A backend that loaded a case's model, driven as a backend process drives it. Owns the arena."""

    def __init__(self, make_backend: type[Backend], case: Case) -> None:
        self.case: Final = case
        self._arena: Final = Arena.create(ARENA_BYTES)
        message = Initialize(
            PROTOCOL,
            str(case.config.get("backend", "")),
            str(case.config["name"]),
            1,
            str(case.model_directory),
            str(case.model_directory / "1"),
            case.config,
            case.backend_config,
            (f"{case.config['name']}_0",),
            "KIND_CPU",
            0,
            auto_complete=False,
        )
        context = execution.model_context(message, execution.available_cores())
        self.description: ModelDescription
        self.backend, self.description = execution.initialize(make_backend, context)
        self._memory: Final[ModelMemory] = execution.model_memory(self._arena, case.config, self.description)
        self._datatypes: Final = {tensor["name"]: tensor["data_type"] for tensor in case.config["input"]}

    def close(self) -> None:
        """Finalize the backend and give the arena back."""
        self.backend.finalize()
        self._arena.close()

    def batch(
        self,
        requests: Sequence[Inputs],
        parameters: Sequence[dict[str, Parameter] | None] = (),
        wanted: tuple[str, ...] | None = None,
        space: int = 1 << 20,
    ) -> Batch:
        """Return a batch of these requests, whose outputs may use `space` bytes of the arena."""
        position = 0
        tensors: list[Tensor] = []
        for name in requests[0]:
            array = requests[0][name] if len(requests) == 1 else np.concatenate([request[name] for request in requests])
            datatype = _datatype(self._datatypes[name])
            data = from_numpy(array, datatype)
            self._arena.view[position : position + len(data)] = data
            tensors.append(Tensor(name, datatype.name, array.shape, TensorRef(position, len(data))))
            position = (position + len(data) + 63) & -64
        options = [*parameters, *[None] * (len(requests) - len(parameters))]
        headers = [
            RequestHeader(_rows(request, self.case), parameters=option)
            for request, option in zip(requests, options, strict=True)
        ]
        message = Execute(1, 0, tuple(tensors), tuple(headers), wanted, TensorRef(position, space))
        return Batch(message, self._memory)

    def run(self, batch: Batch) -> list[Answer]:
        """Execute the batch and return what each request got, copied out of the shared memory."""
        messages, descriptors = execution.execute(self.backend, batch)
        responses, done = messages
        assert isinstance(responses, Responses)
        assert isinstance(done, BatchDone)
        assert min(done.compute_input_ns, done.compute_infer_ns, done.compute_output_ns) >= 0
        try:
            return list(self._answers(batch, responses, descriptors))
        finally:
            for fd in descriptors:
                os.close(fd)

    def _answers(self, batch: Batch, responses: Responses, descriptors: Sequence[int]) -> Iterator[Answer]:
        own = {response.request: response for response in responses.responses}
        shared = {tensor.name: self._read(tensor, descriptors) for tensor in responses.batched or ()}
        for request in batch.requests:
            response = own.get(request.index)
            if response is None:
                assert responses.batched is not None, f"request {request.index} of the batch got no answer"
                rows = slice(request.start, request.start + request.rows) if len(batch.requests) > 1 else slice(None)
                yield Answer({name: array[rows] if array.ndim else array for name, array in shared.items()})
            elif response.error is not None:
                yield Answer({}, response.error.code, response.error.message)
            else:
                yield Answer({tensor.name: self._read(tensor, descriptors) for tensor in response.outputs})

    def _read(self, tensor: Tensor, descriptors: Sequence[int]) -> Array:
        ref = tensor.ref
        if ref.source == ARENA:
            data = bytes(self._arena.slice(ref.offset, ref.nbytes))
        else:
            data = os.pread(descriptors[ref.source], ref.nbytes, ref.offset)
        return to_numpy(BY_NAME[tensor.datatype], tensor.shape, data)


@contextmanager
def loaded(make_backend: type[Backend], case: Case) -> Iterator[LoadedModel]:
    """Load the model of `case`; finalize in the end."""
    model = LoadedModel(make_backend, case)
    try:
        yield model
    finally:
        model.close()


def check_backend(make_backend: type[Backend], case: Case) -> None:
    """Run every check that applies to the case. Raises AssertionError, or InferError where the model does not load."""
    for check in CHECKS:
        with loaded(make_backend, case) as model:
            check(model)


def check_description(model: LoadedModel) -> None:
    """Check that what the backend found in the model agrees with the configuration in names and datatypes."""
    for found, key in ((model.description.inputs, "input"), (model.description.outputs, "output")):
        described = {spec.name: BY_NAME[spec.datatype].config_name for spec in found}
        for tensor in model.case.config[key] if described else ():
            assert described.get(tensor["name"]) == tensor["data_type"], f"{key} '{tensor['name']}' is not described"


def check_single(model: LoadedModel) -> None:
    """Check that one request gets every configured output, with its datatype and number of rows."""
    (answer,) = model.run(model.batch([model.case.inputs]))
    _expect_success(answer)
    for tensor in model.case.config["output"]:
        array = answer.outputs.get(tensor["name"])
        assert array is not None, f"output '{tensor['name']}' is missing"
        datatype = _datatype(tensor["data_type"])
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
        _expect_equal(lonely, shared)


def check_wanted(model: LoadedModel) -> None:
    """Check that a batch that wants one output gets that one and no other."""
    name = model.case.config["output"][-1]["name"]
    (answer,) = model.run(model.batch([model.case.inputs], wanted=(name,)))
    _expect_success(answer)
    assert list(answer.outputs) == [name], f"asked for ['{name}'], got {list(answer.outputs)}"


def check_failure_is_private(model: LoadedModel) -> None:
    """Check that a bad request gets an error, and its batchmates what they get alone."""
    case = model.case
    if not case.batches or (case.bad_inputs is None and case.bad_parameters is None):
        return
    (alone,) = model.run(model.batch([case.inputs]))
    bad = case.bad_inputs or case.inputs
    answers = model.run(model.batch([case.inputs, bad, case.inputs], [None, case.bad_parameters]))
    assert answers[1].code, "the bad request got no error"
    assert answers[1].message, "the bad request's error has no text"
    _expect_equal(alone, answers[0])
    _expect_equal(alone, answers[2])


def check_works_after_exception(model: LoadedModel) -> None:
    """Check that a batch that cannot be run answers all its requests, and that the next one works."""
    model.run(model.batch([{}, {}]))
    _expect_success(model.run(model.batch([model.case.inputs]))[0])


def check_cancelled_before(model: LoadedModel) -> None:
    """Check that a batch that was cancelled before it began ends, and that the next one works."""
    batch = model.batch([model.case.inputs])
    batch.cancel(ALL_REQUESTS)
    (answer,) = model.run(batch)
    assert answer.code in {"", ErrorCode.CANCELLED.value}, f"a cancelled request got {answer.code}: {answer.message}"
    _expect_success(model.run(model.batch([model.case.inputs]))[0])


def check_cancelled_while_running(model: LoadedModel) -> None:
    """Check that cancelling every request of a running batch ends it with CANCELLED."""
    if model.case.slow_parameters is None:
        return
    batch = model.batch([model.case.inputs], [model.case.slow_parameters])
    answers: list[Answer] = []
    running = threading.Thread(target=lambda: answers.extend(model.run(batch)), daemon=True)
    running.start()
    batch.cancel(ALL_REQUESTS)
    running.join(CANCEL_LIMIT_S)
    assert answers, f"a cancelled batch did not end within {CANCEL_LIMIT_S:g} s"
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
    _expect_success(model.run(model.batch([model.case.inputs]))[0])


def check_spill(model: LoadedModel) -> None:
    """Check that outputs for which the server left no room arrive all the same."""
    (roomy,) = model.run(model.batch([model.case.inputs]))
    (spilled,) = model.run(model.batch([model.case.inputs], space=0))
    _expect_equal(roomy, spilled)


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


def _expect_success(answer: Answer) -> None:
    assert not answer.code, f"a good request failed: {answer.code}: {answer.message}"


def _expect_equal(expected: Answer, got: Answer) -> None:
    _expect_success(expected)
    _expect_success(got)
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


def _rows(inputs: Inputs, case: Case) -> int:
    return int(next(iter(inputs.values())).shape[0]) if case.batches and inputs else 1


def _datatype(config_name: str) -> DataType:
    return BY_NAME["BYTES" if config_name == "TYPE_STRING" else config_name.removeprefix("TYPE_")]
