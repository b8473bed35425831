"""A batch of a decoupled model: its requests have any number of responses, each sent as soon as it is there.

Knows nothing of sockets; an Outlet takes what is to be sent. Everything here may be called by any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Final, NamedTuple, Protocol

import msgspec
import numpy as np

from headrace_backends.batch import UNANSWERED, Batch
from headrace_backends.batch_request import BatchRequest
from headrace_backends.model_memory import ModelMemory
from headrace_backends.outputs import FrameSpace, exhausted
from headrace_protocol.datatype import BYTES, Array, DataType
from headrace_protocol.errors import ErrorCode, InferError, cancelled, internal
from headrace_protocol.messages import Execute, Parameter, Response, Responses, error_message


class StreamResponse(NamedTuple):
    """One response for `send_many`. Without outputs it only ends the request, and `final` has to be set."""

    request: BatchRequest
    outputs: Mapping[str, Array] | None = None
    parameters: dict[str, Parameter] | None = None
    final: bool = False


class Outlet(Protocol):
    """Where a process sends the responses of its streams. One for all batches of a model."""

    @property
    def sending(self) -> Lock:
        """Held from the look at whether a request is open until its response is sent: so the last one is the last."""
        ...

    def send(self, messages: Sequence[msgspec.Struct], descriptors: Sequence[int]) -> None:
        """Send one frame; may block for as long as the server does not read. The descriptors stay the caller's.

        Raises OSError, having sent nothing, where the system has no descriptor or no memory left.
        """
        ...

    def closed(self, batch: StreamingBatch) -> None:
        """Take note that every request of the batch has had its last response."""
        ...


class StreamingBatch(Batch):
    """What one `execute` of a decoupled model works on. Owned by the runner until every request is closed."""

    def __init__(self, message: Execute, model: ModelMemory, outlet: Outlet) -> None:
        super().__init__(message, model)
        self._outlet: Final = outlet
        self._unfinished: Final = set(range(len(message.requests)))
        """Requests that have not had their last response. Changed with `outlet.sending` held."""
        self._begun: Final[set[int]] = set()
        """Requests that have had a response."""
        self._deferred: Final[set[int]] = set()
        self._paused: set[int] = set()
        self._on_flow: Callable[[], None] | None = None

    @property
    def open(self) -> bool:
        return bool(self._unfinished)

    def on_flow(self, callback: Callable[[], None]) -> None:
        self._on_flow = callback
        if self._paused:
            callback()

    def allocate(self, name: str, shape: Sequence[int], datatype: DataType) -> Array:
        """Return memory for an output. It is copied when it is sent: the server lends none for streams."""
        if datatype is BYTES:
            raise internal(f"output '{name}': BYTES elements vary in size and cannot be allocated beforehand")
        return np.empty(shape, datatype.numpy)

    def respond(self, outputs: Mapping[str, Array]) -> None:
        """Give every open request its rows of the outputs as its last response, all in one frame."""
        for name, array in outputs.items():
            if self._checks_rows and (not array.ndim or array.shape[0] != self.rows):
                raise internal(
                    f"output '{name}' has shape {list(array.shape)}, expected a first dimension of {self.rows}"
                )
        whole = len(self.requests) == 1
        send_many(
            [
                StreamResponse(
                    request,
                    outputs if whole else {name: array[_rows(request)] for name, array in outputs.items()},
                    final=True,
                )
                for request in self.requests
                if request.index in self._unfinished
            ]
        )

    def flow(self, request: int, *, paused: bool) -> None:
        if paused:
            self._paused.add(request)
        else:
            self._paused.discard(request)
        with self._model.changed:
            self._model.changed.notify_all()
        if self._on_flow is not None:
            self._on_flow()

    def finish(self, error: InferError | None) -> tuple[Responses | None, list[int]]:
        """End what `execute` left open without deferring it, and all that is open where it raised `error`."""
        error = error or self._lost_memory()
        with self._outlet.sending:
            left = sorted(self._unfinished if error is not None else self._unfinished - self._deferred)
            self._unfinished.difference_update(left)
        responses = tuple(self._ending(index, error) for index in left)
        for response in responses:
            self._end_in_sequence(response)
        return self._responses(responses) if responses else None, []

    def _responses(self, responses: tuple[Response, ...]) -> Responses:
        states = () if self._sequences is None else self._sequences.take_keys()
        return Responses(self._message.batch, None, responses, states)

    def _ending(self, index: int, error: InferError | None) -> Response:
        """Return the last response of a request that its backend did not end."""
        if index in self._cancelled:
            error = cancelled()
        elif error is not None and error.code is ErrorCode.CANCELLED:
            error = internal("the backend gave the batch up when another request of it was cancelled")
        elif error is None and index not in self._begun:
            error = UNANSWERED
        if error is None:
            return Response(index, empty=True)
        return Response(index, error=error_message(error))

    def _is_answered(self, index: int) -> bool:
        return index not in self._unfinished

    def _deferrals(self) -> set[int]:
        return self._deferred

    def _respond_to(
        self, request: BatchRequest, outputs: Mapping[str, Array], parameters: dict[str, Parameter] | None
    ) -> None:
        self._send_to(request, outputs, parameters, final=True)

    def _send_to(
        self,
        request: BatchRequest,
        outputs: Mapping[str, Array],
        parameters: dict[str, Parameter] | None,
        *,
        final: bool,
    ) -> None:
        index, changed = request.index, self._model.changed
        if index in self._paused:
            with changed:
                changed.wait_for(lambda: index not in self._paused or index in self._cancelled)
        if index in self._cancelled and index in self._unfinished:
            raise cancelled()
        with FrameSpace() as space:
            response = self._response(StreamResponse(request, outputs, parameters, final), space)
            _send([(self, response)], space.descriptors())

    def _answer(self, response: Response) -> None:
        _send([(self, response)], ())

    def _response(self, part: StreamResponse, space: FrameSpace) -> Response:
        """Place the outputs of one response in `space`."""
        index = part.request.index
        if part.outputs is None:
            if not part.final:
                raise internal("a response without outputs that is not final")
            return Response(index, parameters=part.parameters, empty=True)
        given = part.outputs
        if self._sequences is not None:
            given = self._sequences.take(index, given, partial=True)
        wanted = self._message.outputs if part.request.wanted is None else part.request.wanted
        outputs = tuple(
            space.place(name, array, self._model.datatypes)
            for name, array in given.items()
            if wanted is None or name in wanted
        )
        return Response(index, outputs, None, part.parameters, part.final)

    def _note(self, response: Response) -> None:
        self._begun.add(response.request)
        if response.final:
            self._unfinished.discard(response.request)

    def _end_in_sequence(self, response: Response) -> None:
        if self._sequences is not None:
            self._sequences.keep(response.request, failed=response.error is not None)


def send_many(responses: Sequence[StreamResponse]) -> None:
    """Send a response to each of many requests, of any batches of one decoupled model, in one frame.

    It never waits: a request that is `paused` gets its response all the same, so leave it out. What is for a cancelled
    request is not sent; `final` ends that request all the same. Where one response cannot be sent it sends nothing, and
    raises INTERNAL, or UNAVAILABLE where it is for want of descriptors or memory; every request may be answered still.
    """
    parts: list[tuple[StreamingBatch, Response]] = []
    with FrameSpace() as space:
        for part in responses:
            batch = part.request._batch
            if not isinstance(batch, StreamingBatch):
                raise batch._not_decoupled()
            if not part.request.ready:
                continue
            if not part.request.cancelled:
                parts.append((batch, batch._response(part, space)))
            elif part.final:
                parts.append((batch, batch._ending(part.request.index, None)))
        if parts:
            _send(parts, space.descriptors())


def _send(parts: Sequence[tuple[StreamingBatch, Response]], descriptors: Sequence[int]) -> None:
    """Send one frame, unless a response in it follows the last one of its request.

    Raises UNAVAILABLE where the system cannot take it: then no request counts as answered.
    """
    outlet = parts[0][0]._outlet
    ending: set[tuple[int, int]] = set()
    by_batch: dict[StreamingBatch, list[Response]] = {}
    with outlet.sending:
        for batch, response in parts:
            key = (batch.number, response.request)
            if response.request not in batch._unfinished or key in ending:
                raise internal(f"a response after the last one of request {response.request} of the batch")
            if response.final:
                ending.add(key)
            by_batch.setdefault(batch, []).append(response)
        for batch, response in parts:
            if response.final:
                batch._end_in_sequence(response)
        messages = [batch._responses(tuple(own)) for batch, own in by_batch.items()]
        try:
            outlet.send(messages, descriptors)
        except (OSError, MemoryError) as error:
            raise exhausted(error) from error
        for batch, response in parts:
            batch._note(response)
    for batch in by_batch:
        if not batch.open:
            outlet.closed(batch)


def _rows(request: BatchRequest) -> slice:
    return slice(request.start, request.start + request.rows)
