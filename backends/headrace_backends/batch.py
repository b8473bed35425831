"""A batch as a backend sees it: its inputs, its requests, and the answers to them.

Knows nothing of sockets and threads, except that `cancel` may be called by another thread while the batch runs.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Final

import numpy as np

from headrace_backends.batch_request import NOBODY, BatchRequest, NullRequest
from headrace_backends.input_views import InputViews
from headrace_backends.model_memory import ModelMemory
from headrace_backends.outputs import OutputSpace, wire_type
from headrace_backends.ragged import item_shapes
from headrace_backends.regions import Place
from headrace_backends.sequences import BatchSequences
from headrace_protocol.datatype import BYTES, Array, DataType, element_count, from_numpy
from headrace_protocol.errors import InferError, cancelled, internal
from headrace_protocol.messages import Execute, Parameter, Response, Responses, error_message
from headrace_protocol.tensor import ARENA, REGION, Tensor, TensorRef

ALL_REQUESTS: Final = -1
"""Cancel.request that stands for the whole batch."""


class Batch:
    """What one `execute` works on. The inputs and the memory from `allocate` are borrowed until it returns.

    Of a decoupled model the inputs are borrowed until each request has had its last response.
    """

    _paused: Collection[int] = ()

    def __init__(self, message: Execute, model: ModelMemory) -> None:
        self._message: Final = message
        self._model: Final = model
        self._space: Final = OutputSpace(model.arena, message.space)
        self._regions: Mapping[str, TensorRef] = {}
        """The tensors that lie in clients' shared memory, and are read or written there."""
        self._places: Mapping[str, Place] = {}
        """Where such outputs go."""
        self._cancelled: set[int] = set()
        self._on_cancel: Callable[[], None] | None = None
        self._answers: dict[int, Response] = {}
        self._batched: tuple[Tensor, ...] | None = None
        self._allocated: dict[int, tuple[Array, Tensor]] = {}
        self._requests: tuple[BatchRequest, ...] | None = None
        self._sequences: Final = None if model.sequences is None else BatchSequences(model.sequences, message)
        self._own_rows: Final = sum(header.rows for header in message.requests)
        self.rows: Final = self._own_rows if self._sequences is None else self._sequences.rows
        """Rows of all requests together, and those of sequences' slots without one."""
        self._checks_rows: Final = model.batching or self.rows > 1
        self.inputs: Final = InputViews()
        """The rows of all requests, in order; all elements of a ragged input; and what was made for the batch.

        BYTES as object arrays of bytes, BF16 as uint16 bit patterns.
        """
        self.output_ns = 0
        """Nanoseconds spent placing outputs."""

    @property
    def number(self) -> int:
        """The server's number for the batch."""
        return self._message.batch

    @property
    def instance(self) -> int:
        """Number of the instance that runs this batch: an index into ModelContext.instances."""
        return self._message.instance

    @property
    def wanted(self) -> tuple[str, ...] | None:
        """Names of the outputs that some request wants; None = all. Others need not be computed."""
        outputs = self._message.outputs
        if outputs is None or self._sequences is None:
            return outputs
        return tuple(dict.fromkeys((*outputs, *self._sequences.state_outputs)))

    @property
    def requests(self) -> Sequence[BatchRequest]:
        """The requests, in the order of their rows."""
        if self._requests is None and self._sequences is not None:
            headers = dict(zip(self._sequences.starts, enumerate(self._message.requests), strict=True))
            rows = range(self.rows) if self._sequences.sparse else self._sequences.starts
            self._requests = tuple(
                BatchRequest(self, *headers[row], row) if row in headers else NullRequest(self, -1, NOBODY, row)
                for row in rows
            )
        if self._requests is None:
            requests, start = [], 0
            for index, header in enumerate(self._message.requests):
                requests.append(BatchRequest(self, index, header, start))
                start += header.rows
            self._requests = tuple(requests)
        return self._requests

    @property
    def open(self) -> bool:
        """Whether some request still waits for its last response although `execute` may have returned."""
        return False

    @property
    def item_shapes(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Of each ragged input, the shape that each request gave; their elements follow one another in the input."""
        return {t.name: t.item_shapes for t in self._message.inputs if _is_ragged(t) and t.item_shapes is not None}

    @property
    def made(self) -> Collection[str]:
        """Names of the inputs that were made for the whole batch, and belong to no single request."""
        return self._model.made

    @property
    def scattered(self) -> Collection[str]:
        """Names of outputs whose elements may be given in any shape, flat for example, also to a single request.

        The server gives each request its part, in a shape that it takes from an input.
        """
        return self._model.scattered

    def owns(self, name: str) -> bool:
        """Whether the input lies in memory that is this batch's alone: what is written there, nobody sees.

        Other inputs are clients' memory, or cannot be written to; `inputs` offers all of them read-only.
        """
        return any(tensor.name == name and tensor.ref.source == ARENA for tensor in self._message.inputs)

    @property
    def cancelled(self) -> bool:
        """Whether every request was cancelled: nobody waits for anything of this batch."""
        return len(self._cancelled) >= len(self._message.requests)

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Have `callback` called, by another thread, whenever a request of this batch was cancelled.

        At once if some already are; it may be called more than once for one cancellation, and must not block.
        """
        self._on_cancel = callback
        if self._cancelled:
            callback()

    def on_flow(self, callback: Callable[[], None]) -> None:
        """Have `callback` called, by another thread, whenever `paused` of a request changed. It must not block."""

    def defer(self) -> None:
        """Leave every request that is open open, as BatchRequest.defer does."""
        self._deferrals().update(range(len(self._message.requests)))

    def allocate(self, name: str, shape: Sequence[int], datatype: DataType) -> Array:
        """Return memory (contents undefined) for the output `name`; pass it to `respond`, which then copies nothing."""
        if datatype is BYTES:
            raise internal(f"output '{name}': BYTES elements vary in size and cannot be allocated beforehand")
        if self._sequences is not None and (self._sequences.sparse or name in self._sequences.state_outputs):
            return np.empty(shape, datatype.numpy)  # the server does not see it as it is
        nbytes = element_count(shape) * datatype.itemsize
        place = self._places.get(name)
        found = None if place is None else place.reserve(nbytes, datatype.itemsize)
        buffer, offset, ref = found or self._space.reserve(nbytes)
        array = np.ndarray(shape, datatype.numpy, buffer, offset)
        self._allocated[id(array)] = (array, Tensor(name, datatype.name, tuple(shape), ref))
        return array

    def respond(self, outputs: Mapping[str, Array]) -> None:
        """Answer every request that is not answered yet, with outputs that hold the rows of all requests in order."""
        if self._batched is not None:
            raise internal("the batch was answered twice")
        if self._sequences is not None:
            outputs = self._sequences.take_all(outputs)
        self._batched = self._place_all(outputs, self._message.outputs, self._own_rows, self._model.scattered)

    # What follows is not for authors: the runner and BatchRequest call it.

    def open_inputs(self, descriptors: Sequence[int] = ()) -> None:
        """Build the input views. `descriptors` came with the frame; the mappings made here outlive them."""
        for tensor in self._message.inputs:
            ref = tensor.ref
            if ref.source == ARENA:
                self.inputs.add(tensor, self._model.readonly, ref.offset)
            elif ref.source == REGION:
                self._regions = {**self._regions, tensor.name: ref}
                self.inputs.add(tensor, self._model.regions.read(tensor), 0)
            else:
                mapped = memoryview(mmap.mmap(descriptors[ref.source], 0, prot=mmap.PROT_READ))
                self.inputs.add(tensor, mapped, ref.offset)
        if self._model.batch_inputs:
            self._make_inputs()
        if self._sequences is not None:
            self._make_sequence_inputs(self._sequences)
        outputs = self._message.requests[0].regions if self._message.requests else ()
        if outputs:
            self._places = self._model.regions.places(outputs)
            self._regions = {**self._regions, **dict(outputs)}

    def _make_inputs(self) -> None:
        for name, array in self._made_for(slice(None)).items():
            self.inputs.make(name, array)

    def _made_for(self, requests: slice) -> dict[str, Array]:
        """Return the inputs of `batch_input` for a batch of these requests."""
        given = {tensor.name: tensor for tensor in self._message.inputs}
        arrays = {}
        for made in self._model.batch_inputs:
            source = given[made.source]
            shapes = source.item_shapes
            if shapes is None:
                shapes = item_shapes(source.shape, [header.rows for header in self._message.requests])
            arrays.update(dict.fromkeys(made.targets, made.make(shapes[requests], made.datatype)))
        return arrays

    def _alone(self, request: BatchRequest) -> dict[str, Array]:
        arrays = {name: self._input_of(request, name) for name in self.inputs}
        for name in self._ragged_parts:
            arrays[name] = arrays[name].reshape(-1)
        return arrays | self._made_for(slice(request.index, request.index + 1))

    def _make_sequence_inputs(self, sequences: BatchSequences) -> None:
        names = list(self.inputs)
        if sequences.sparse:
            given = {name: self.inputs[name] for name in names if name not in self._model.made}
            for name, array in sequences.expand(given).items():
                self.inputs.make(name, array)
        for name, array in sequences.made_inputs(names).items():
            self.inputs.make(name, array)

    def cancel(self, request: int) -> None:
        """Note that nobody waits for `request` (or ALL_REQUESTS) and tell the backend. For another thread to call."""
        self._cancelled.update(range(len(self._message.requests)) if request == ALL_REQUESTS else (request,))
        with self._model.changed:
            self._model.changed.notify_all()
        if self._on_cancel is not None:
            self._on_cancel()

    def flow(self, request: int, *, paused: bool) -> None:
        """Note that `request` is to send no more for now, or may go on. For another thread to call."""

    def finish(self, error: InferError | None) -> tuple[Responses | None, list[int]]:
        """Return what is left to send, with the descriptors that go with it (the caller closes them).

        A request without an answer fails with `error`, or with CANCELLED where it was cancelled; one whose shared
        memory was shortened while it ran fails with that, whatever came of it.
        """
        self._on_cancel = None
        lost = self._lost_memory()
        if lost is not None:
            error = lost
            self._batched = None
            self._answers.clear()
        if self._batched is None:
            for index in range(len(self._message.requests)):
                if index not in self._answers:
                    missing = cancelled() if index in self._cancelled else error or UNANSWERED
                    self._answers[index] = Response(index, error=error_message(missing))
        states: tuple[tuple[int, int], ...] = ()
        if self._sequences is not None:
            self._sequences.commit({index for index, answer in self._answers.items() if answer.error is not None})
            states = self._sequences.take_keys()
        responses = Responses(self._message.batch, self._batched, tuple(self._answers.values()), states)
        return responses, self._space.take_descriptors()

    def _lost_memory(self) -> InferError | None:
        """Return the error of a request that ran in shared memory which went meanwhile."""
        return self._model.regions.lost(self._regions) if self._regions else None

    def _input_of(self, request: BatchRequest, name: str) -> Array:
        view = self.inputs[name]
        if name in self._ragged_parts:
            start, end, shape = self._ragged_parts[name][request.index]
            return view[start:end].reshape(shape)
        if self.rows == request.rows or name in self._model.made:
            return view
        return view[request.start : request.start + request.rows]

    @cached_property
    def _ragged_parts(self) -> dict[str, list[tuple[int, int, tuple[int, ...]]]]:
        """Of each ragged input, where each request's elements begin and end, and their shape."""
        parts = {}
        for name, shapes in self.item_shapes.items():
            ends = list(accumulate(map(element_count, shapes)))
            parts[name] = list(zip([0, *ends[:-1]], ends, shapes, strict=True))
        return parts

    def _is_answered(self, index: int) -> bool:
        return index in self._answers

    def _deferrals(self) -> set[int]:
        raise self._not_decoupled()

    def _not_decoupled(self) -> InferError:
        return internal("the model is not decoupled: each request gets exactly one response, before execute returns")

    def _send_to(
        self,
        request: BatchRequest,
        outputs: Mapping[str, Array],
        parameters: dict[str, Parameter] | None,
        *,
        final: bool,
    ) -> None:
        if not final:
            raise self._not_decoupled()
        self._respond_to(request, outputs, parameters)

    def _respond_to(
        self, request: BatchRequest, outputs: Mapping[str, Array], parameters: dict[str, Parameter] | None
    ) -> None:
        wanted = self._message.outputs if request.wanted is None else request.wanted
        if self._sequences is not None:
            outputs = self._sequences.take(request.index, outputs)
        placed = self._place_all(outputs, wanted, request.rows, self._model.scattered)
        self._answer(Response(request.index, placed, None, parameters))

    def _reschedule(self, request: BatchRequest, states: Mapping[str, Array]) -> None:
        if self._sequences is not None:
            self._sequences.take(request.index, states, partial=True)
        self._answer(Response(request.index, reschedule=True))

    def _answer(self, response: Response) -> None:
        if response.empty:
            raise self._not_decoupled()
        if response.request in self._answers:
            raise internal(f"request {response.request} of the batch was answered twice")
        self._answers[response.request] = response

    def _place_all(
        self,
        outputs: Mapping[str, Array],
        wanted: Sequence[str] | None,
        rows: int,
        of_any_shape: Collection[str] = (),
    ) -> tuple[Tensor, ...]:
        started = time.perf_counter_ns()
        placed = tuple(
            self._place(name, array, None if name in of_any_shape else rows)
            for name, array in outputs.items()
            if wanted is None or name in wanted
        )
        self.output_ns += time.perf_counter_ns() - started
        return placed

    def _place(self, name: str, array: Array, rows: int | None) -> Tensor:
        """Put one output where the server can read it, unless it is there already. `rows` None: any shape will do."""
        datatype = wire_type(name, array, self._model.datatypes)
        if self._checks_rows and rows is not None and (not array.ndim or array.shape[0] != rows):
            raise internal(f"output '{name}' has shape {list(array.shape)}, expected a first dimension of {rows}")
        allocated = self._allocated.get(id(array))
        place = self._places.get(name)
        if allocated is not None and allocated[1].name == name and (place is None or allocated[1].ref.source == REGION):
            return allocated[1]
        stored = None if place is None else place.store(from_numpy(array, datatype))
        if stored is not None:
            return Tensor(name, datatype.name, array.shape, stored)
        if datatype is BYTES:
            data = from_numpy(array, BYTES)
            buffer, offset, ref = self._space.reserve(len(data))
            buffer[offset : offset + len(data)] = data
            return Tensor(name, datatype.name, array.shape, ref)
        buffer, offset, ref = self._space.reserve(array.nbytes)
        np.ndarray(array.shape, datatype.numpy, buffer, offset)[...] = array
        return Tensor(name, datatype.name, array.shape, ref)


def _is_ragged(tensor: Tensor) -> bool:
    """Whether an input is flat; one that has the shapes of its requests for another reason has a batch dimension more."""
    return tensor.item_shapes is not None and len(tensor.shape) == 1


UNANSWERED: Final = internal("the backend did not answer this request of the batch")
