"""A model that a backend loaded, driven as a backend process drives it, without a process: for checks and tests."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from headrace_backends import execution
from headrace_backends.api import Backend, ModelDescription
from headrace_backends.batch import Batch
from headrace_backends.model_memory import ModelMemory
from headrace_backends.streaming import StreamingBatch
from headrace_protocol.arena import ALIGNMENT, Arena
from headrace_protocol.datatype import BY_NAME, Array, DataType, from_numpy, to_numpy
from headrace_protocol.messages import (
    PROTOCOL,
    BatchDone,
    Execute,
    Initialize,
    Parameter,
    RequestHeader,
    Response,
    Responses,
)
from headrace_protocol.tensor import ARENA, INLINE, Tensor, TensorRef

ARENA_BYTES: Final = 64 << 20

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
    slow_inputs: Inputs | None = None
    """Inputs with which it does."""
    backend_config: dict[str, str] = field(default_factory=dict)
    limit_s: float = 10.0
    """Seconds within which a request to a decoupled model must end, and a cancelled one to any."""

    @property
    def batches(self) -> bool:
        """Whether the model batches along the first dimension."""
        return int(self.config["max_batch_size"]) > 0

    @property
    def decoupled(self) -> bool:
        """Whether a request may have any number of responses."""
        return bool(self.config.get("model_transaction_policy", {}).get("decoupled", False))

    @property
    def has_slow(self) -> bool:
        """Whether there is a request that runs until it is cancelled."""
        return self.slow_parameters is not None or self.slow_inputs is not None

    @property
    def has_bad(self) -> bool:
        """Whether there is a request that must fail."""
        return self.bad_parameters is not None or self.bad_inputs is not None


@dataclass(frozen=True, slots=True)
class Answer:
    """One response: outputs by name, or an error."""

    outputs: dict[str, Array]
    code: str = ""
    message: str = ""
    final: bool = True
    empty: bool = False


class StreamRecorder:
    """Takes the responses of a decoupled model, where a process would send them. One for all batches of a model."""

    def __init__(self, read: Callable[[Tensor, Sequence[int]], Array]) -> None:
        self.sending: Final = threading.Lock()
        self.frames = 0
        """Frames that brought responses, so far."""
        self._read: Final = read
        self._changed: Final = threading.Condition()
        self._answers: Final[dict[int, list[list[Answer]]]] = {}

    def begin(self, batch: Batch) -> None:
        """Expect responses for the requests of `batch`."""
        self._answers[batch.number] = [[] for _ in batch.requests]

    def send(self, messages: Sequence[msgspec.Struct], descriptors: Sequence[int]) -> None:
        """Note the responses of one frame. Raises AssertionError for one that breaks the protocol."""
        with self._changed:
            self.frames += 1
            for message in messages:
                assert isinstance(message, Responses), f"a stream sent {type(message).__name__}"
                assert message.batched is None, "a batch of a decoupled model was answered as a whole"
                for response in message.responses:
                    got = self._answers[message.batch][response.request]
                    assert not got or not got[-1].final, "a response came after the last one of its request"
                    got.append(_answer(response, self._read, descriptors))
            self._changed.notify_all()

    def closed(self, batch: StreamingBatch) -> None:
        """Nothing depends on it here: `wait` looks at the responses."""

    def so_far(self, batch: Batch) -> list[list[Answer]]:
        """Return the responses that each request of the batch has had."""
        with self._changed:
            return [list(answers) for answers in self._answers[batch.number]]

    def wait(self, batch: Batch, enough: Callable[[list[list[Answer]]], bool], limit_s: float) -> bool:
        """Wait until the responses of the batch are `enough`; return whether they were within the limit."""
        with self._changed:
            return self._changed.wait_for(lambda: enough(self._answers[batch.number]), limit_s)


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
        self._memory: Final[ModelMemory] = execution.model_memory(
            self._arena, case.config, self.description, case.model_directory
        )
        self.streams: Final = StreamRecorder(self._read)
        self._numbers: Final = itertools.count(1)
        self._position = 0
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
        headers: Sequence[RequestHeader] = (),
    ) -> Batch:
        """Return a batch of these requests, whose outputs may use `space` bytes of the arena.

        `headers` are made where none are given.
        """
        tensors: list[Tensor] = []
        arrays = {
            name: requests[0][name] if len(requests) == 1 else np.concatenate([request[name] for request in requests])
            for name in requests[0]
        }
        parts = {name: from_numpy(array, datatype_of(self._datatypes[name])) for name, array in arrays.items()}
        position = self._lend(sum(len(data) + ALIGNMENT for data in parts.values()) + space)
        for name, data in parts.items():
            self._arena.view[position : position + len(data)] = data
            datatype = datatype_of(self._datatypes[name])
            tensors.append(Tensor(name, datatype.name, arrays[name].shape, TensorRef(position, len(data))))
            position = (position + len(data) + ALIGNMENT - 1) & -ALIGNMENT
        options = [*parameters, *[None] * (len(requests) - len(parameters))]
        headers = headers or [
            RequestHeader(_rows(request, self.case), parameters=option)
            for request, option in zip(requests, options, strict=True)
        ]
        message = Execute(next(self._numbers), 0, tuple(tensors), tuple(headers), wanted, TensorRef(position, space))
        batch = execution.new_batch(message, self._memory, self.streams)
        self.streams.begin(batch)
        return batch

    def _lend(self, nbytes: int) -> int:
        """Return where memory for one batch begins; those of earlier batches stay as they are for a while."""
        start = self._position if self._position + nbytes <= ARENA_BYTES else 0
        self._position = (start + nbytes + ALIGNMENT - 1) & -ALIGNMENT
        return start

    def stream(self, batch: Batch) -> list[list[Answer]]:
        """Execute a batch of a decoupled model and return all that its requests got, once each has ended.

        Raises AssertionError where one has not ended `limit_s` after `execute` returned.
        """
        self.execute(batch)
        return self.ended(batch)

    def execute(self, batch: Batch) -> None:
        """Execute a batch of a decoupled model; return when the backend does, though requests may be open."""
        messages, descriptors = execution.execute(self.backend, batch)
        assert isinstance(messages[-1], BatchDone)
        if messages[:-1]:
            self.streams.send(messages[:-1], descriptors)
        _close(descriptors)

    def ended(self, batch: Batch) -> list[list[Answer]]:
        """Return all that the requests of a batch got, once each has ended. Raises AssertionError as `stream` does."""
        self.streams.wait(batch, _all_ended, self.case.limit_s)
        answers = self.streams.so_far(batch)
        left = [index for index, got in enumerate(answers) if not _all_ended([got])]
        assert not left, f"requests {left} of {len(answers)} had no last response within {self.case.limit_s:g} s"
        return answers

    def run(self, batch: Batch) -> list[Answer]:
        """Execute a batch of a model that is not decoupled; return what each request got, copied out of the memory."""
        messages, descriptors = execution.execute(self.backend, batch)
        responses, done = messages
        assert isinstance(responses, Responses)
        assert isinstance(done, BatchDone)
        assert min(done.compute_input_ns, done.compute_infer_ns, done.compute_output_ns) >= 0
        try:
            return list(self._answers(batch, responses, descriptors))
        finally:
            _close(descriptors)

    def _answers(self, batch: Batch, responses: Responses, descriptors: Sequence[int]) -> Iterator[Answer]:
        own = {response.request: response for response in responses.responses}
        shared = {tensor.name: self._read(tensor, descriptors) for tensor in responses.batched or ()}
        for request in batch.requests:
            response = own.get(request.index)
            if response is None:
                assert responses.batched is not None, f"request {request.index} of the batch got no answer"
                rows = slice(request.start, request.start + request.rows) if len(batch.requests) > 1 else slice(None)
                yield Answer({name: array[rows] if array.ndim else array for name, array in shared.items()})
            else:
                yield _answer(response, self._read, descriptors)

    def _read(self, tensor: Tensor, descriptors: Sequence[int]) -> Array:
        ref = tensor.ref
        if ref.source == INLINE:
            data = tensor.data
        elif ref.source == ARENA:
            data = bytes(self._arena.slice(ref.offset, ref.nbytes))
        else:
            data = os.pread(descriptors[ref.source], ref.nbytes, ref.offset)
        return to_numpy(BY_NAME[tensor.datatype], tensor.shape, data)


def _answer(response: Response, read: Callable[[Tensor, Sequence[int]], Array], descriptors: Sequence[int]) -> Answer:
    error = response.error
    if error is not None:
        assert response.final, "an error that is not the last response of its request"
        return Answer({}, error.code, error.message)
    outputs = {tensor.name: read(tensor, descriptors) for tensor in response.outputs}
    assert not (response.empty and (outputs or not response.final)), "an empty response with outputs, or not final"
    return Answer(outputs, final=response.final, empty=response.empty)


def _all_ended(answers: Sequence[Sequence[Answer]]) -> bool:
    return all(got and got[-1].final for got in answers)


def _close(descriptors: Sequence[int]) -> None:
    for fd in descriptors:
        os.close(fd)


@contextmanager
def loaded(make_backend: type[Backend], case: Case) -> Iterator[LoadedModel]:
    """Load the model of `case`; finalize in the end."""
    model = LoadedModel(make_backend, case)
    try:
        yield model
    finally:
        model.close()


def _rows(inputs: Inputs, case: Case) -> int:
    return int(next(iter(inputs.values())).shape[0]) if case.batches and inputs else 1


def datatype_of(config_name: str) -> DataType:
    """Return the datatype that a configuration calls `config_name`."""
    return BY_NAME["BYTES" if config_name == "TYPE_STRING" else config_name.removeprefix("TYPE_")]
