"""ProcessCalls: the requests that one backend process makes to models of this server.

Each becomes an InferenceRequest like any client's, and its responses go back over the channel, as fast as the process reads
them. A process is not trusted: nonsense raises INTERNAL, and the channel is closed; what it may ask but cannot have is an
error in the answer. Knows nothing of sockets.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Final, Protocol

from headrace.clock import Clock
from headrace.instances.frame import map_sealed, nonsense
from headrace.instances.waiting import WaitGraph
from headrace.observability.trace import Trace
from headrace.planes import Cancellable, Outcome
from headrace.types import MAX_RANK, InferenceRequest, InferenceResponse, InputTensor, RequestedOutput
from headrace_protocol.arena import PAGE
from headrace_protocol.datatype import BY_NAME, Buffer
from headrace_protocol.errors import InferError, unavailable
from headrace_protocol.messages import (
    MAX_CALLS,
    Call,
    CallRead,
    CallResponse,
    CancelCall,
    ToBackend,
    error_message,
)
from headrace_protocol.tensor import INLINE, Tensor, TensorRef

INLINE_BYTES: Final = 32 << 10
"""Bytes of the outputs of a response, all together, that travel in the message."""


class InstanceSet(Hashable, Protocol):
    """The instances that serve a model version, as far as those who wait for them must know."""

    def slots(self) -> int:
        """Return how many there are. More than can be busy where some are being started."""
        ...


class CallPlane(Protocol):
    """The data plane, as far as models may use it. See planes.DataPlane."""

    def submit(self, request: InferenceRequest, done: Callable[[Outcome], None]) -> Cancellable: ...

    def stream(self, request: InferenceRequest, on_outcome: Callable[[Outcome], None]) -> Cancellable: ...

    def model_ready(self, name: str, version: int) -> bool: ...

    def instances_of(self, name: str, version: int, outputs: Sequence[str] | None) -> Sequence[InstanceSet]:
        """Return the instances that a request for these outputs (None = all) would wait for.

        Those of an ensemble are its members'. Raises NOT_FOUND, UNAVAILABLE.
        """
        ...


class Caller(Protocol):
    """The process that asks."""

    def executes(self, batch: int) -> bool:
        """Return whether a batch of this number occupies an instance."""
        ...

    def trace_of(self, batch: int) -> Trace | None:
        """Return the trace of a request of a batch that runs; None where none is traced, or it does not run."""
        ...

    @property
    def reading(self) -> bool:
        """Whether all that it was sent is on its way: nothing waits here for it to read."""
        ...

    def send(self, messages: Sequence[ToBackend], descriptors: Sequence[int] = ()) -> None:
        """Send one frame; the descriptors stay the sender's."""
        ...


class _CallUnderWay:
    __slots__ = ("cancelled", "number", "pending", "unread", "waits")

    def __init__(self, number: int) -> None:
        self.number = number
        self.pending: Cancellable | None = None
        self.waits: tuple[Hashable, Sequence[InstanceSet]] | None = None
        """The batch that waits for it, and for what; as noted in the graph."""
        self.unread: deque[InferenceResponse] = deque()
        """Responses of a stream that were sent but not read; the model is held back while they are too many."""
        self.cancelled = False


class ProcessCalls:
    """Owned by the process's services; `close` ends every call."""

    def __init__(self, caller: Caller, instances: InstanceSet, graph: WaitGraph, clock: Clock) -> None:
        self.plane: CallPlane | None = None
        """None until the server has one."""
        self._caller: Final = caller
        self._instances: Final = instances
        self._graph: Final = graph
        self._clock: Final = clock
        self._calls: Final[dict[int, _CallUnderWay]] = {}
        self._outbox: Final[deque[tuple[_CallUnderWay, Outcome]]] = deque()
        """Outcomes that wait until the process has read what it was sent."""

    def begin(self, message: Call, descriptors: Sequence[int]) -> None:
        """Begin a call; the descriptors stay the caller's to close. Raises INTERNAL for nonsense."""
        if message.number in self._calls:
            raise nonsense(f"call {message.number} was begun twice")
        request = _request(message, descriptors, self._clock.now_ns())
        if len(self._calls) >= MAX_CALLS:
            refusal = unavailable(f"{MAX_CALLS} calls of this process to other models are under way already")
            self._caller.send([_failed(message.number, refusal)])
            return
        call = _CallUnderWay(message.number)
        try:
            if self.plane is None:
                raise unavailable("there are no other models here")
            if message.batch and self._caller.executes(message.batch):
                self._wait(call, message, self.plane)
            request.parent_trace = self._caller.trace_of(message.batch) if message.batch else None
            begin = self.plane.stream if message.decoupled else self.plane.submit
            call.pending = begin(request, partial(self._outcome, call))
        except InferError as error:
            self._outcome(call, error.with_traceback(None))  # its frames would keep the inputs
        self._calls[message.number] = call
        self.flush()

    def cancel(self, message: CancelCall) -> None:
        """End a call. One that is over already is no nonsense: the two crossed."""
        call = self._calls.pop(message.number, None)
        if call is not None:
            self._drop(call)

    def read(self, message: CallRead) -> None:
        """Count responses as read. Raises INTERNAL for more than were sent."""
        call = self._calls.get(message.number)
        if call is None:
            return
        if not 0 < message.responses <= len(call.unread):
            raise nonsense(f"{message.responses} responses of call {message.number} read, of {len(call.unread)} sent")
        for _ in range(message.responses):
            call.unread.popleft().release()

    def flush(self) -> None:
        """Send what waits, as far as the process reads."""
        while self._outbox and self._caller.reading:
            call, outcome = self._outbox.popleft()
            message = self._send(call.number, outcome)
            if message.final:
                self._calls.pop(call.number, None)
                self._drop(call)  # more may come still where this response could not be handed over
                _release(outcome)
            elif isinstance(outcome, InferenceResponse):
                call.unread.append(outcome)

    def _send(self, number: int, outcome: Outcome) -> CallResponse:
        """Send an outcome, or why it cannot be sent; return the message."""
        message, descriptor = _encode(number, outcome)
        try:
            self._caller.send([message], [descriptor] if descriptor >= 0 else ())
        except OSError as error:
            message = _failed(number, _not_handed_over(error))
            self._caller.send([message])
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return message

    def close(self) -> None:
        """End every call: the process is gone. Idempotent."""
        while self._outbox:
            _release(self._outbox.popleft()[1])
        calls = list(self._calls.values())
        self._calls.clear()
        for call in calls:
            self._drop(call)

    def _wait(self, call: _CallUnderWay, message: Call, plane: CallPlane) -> None:
        """Note that a batch waits for this call. Raises UNAVAILABLE where it would wait for ever."""
        targets = plane.instances_of(message.model, message.version, message.outputs)
        batch = (id(self._caller), message.batch)
        if any(self._graph.closes_circle(self._instances, batch, target, _slots) for target in targets):
            raise unavailable(
                f"the call to model '{message.model}' would wait for ever: every instance that could answer it waits, "
                "through calls like this one, for an instance to become free; more instances would help"
            )
        for target in targets:
            self._graph.add(self._instances, batch, target)
        call.waits = (batch, targets)

    def _outcome(self, call: _CallUnderWay, outcome: Outcome) -> None:
        if call.cancelled:
            _release(outcome)
            return
        self._outbox.append((call, outcome))
        if isinstance(outcome, InferError) or outcome.final:
            call.pending = None
            self._stop_waiting(call)
        if call.number in self._calls:
            self.flush()

    def _drop(self, call: _CallUnderWay) -> None:
        call.cancelled = True
        pending, call.pending = call.pending, None
        if pending is not None:
            pending.cancel()
        self._stop_waiting(call)
        while call.unread:
            call.unread.popleft().release()
        for _ in range(len(self._outbox)):
            other, outcome = self._outbox.popleft()
            if other is call:
                _release(outcome)
            else:
                self._outbox.append((other, outcome))

    def _stop_waiting(self, call: _CallUnderWay) -> None:
        waits, call.waits = call.waits, None
        if waits is not None:
            batch, targets = waits
            for target in targets:
                self._graph.remove(self._instances, batch, target)


def _slots(instances: Hashable) -> int:
    return instances.slots()  # type: ignore[attr-defined,no-any-return]  # the graph holds nothing else


def _release(outcome: Outcome) -> None:
    if isinstance(outcome, InferenceResponse):
        outcome.release()


# --- a message becomes a request ----------------------------------------------------------------------------------


def _request(message: Call, descriptors: Sequence[int], now_ns: int) -> InferenceRequest:
    request = InferenceRequest(message.model, message.version, now_ns)
    memory = SealedMemory(descriptors)
    request.inputs = [_input(tensor, memory) for tensor in message.inputs]
    if message.outputs is not None:
        request.outputs = [RequestedOutput(name) for name in message.outputs]
    request.id = message.id
    request.parameters = message.parameters or None
    request.correlation_id = message.correlation_id
    request.flags = message.flags
    request.timeout_us = message.timeout_us
    request.priority = message.priority
    request.nested = True
    if message.version < -1 or message.timeout_us < 0 or message.priority < 0:
        raise nonsense(f"call {message.number} with a version, timeout or priority below its least")
    return request


def _input(tensor: Tensor, memory: SealedMemory) -> InputTensor:
    datatype = BY_NAME.get(tensor.datatype)
    if datatype is None or len(tensor.shape) > MAX_RANK or any(dim < 0 for dim in tensor.shape):
        raise nonsense(f"input '{tensor.name}' of datatype '{tensor.datatype}' and shape {list(tensor.shape)}")
    if tensor.ref.source == INLINE:
        data: Buffer = tensor.data
    else:
        data = memory.bytes_at(tensor.ref)
    return InputTensor(tensor.name, datatype, tensor.shape, data)


class SealedMemory:
    """The memfd that came with a frame of a backend, mapped when first needed."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._descriptors = descriptors
        self._mapped: memoryview | None = None

    def bytes_at(self, ref: TensorRef) -> memoryview:
        """Return the bytes of a reference. Raises INTERNAL where they are not in a sealed descriptor."""
        if not ref.nbytes:
            return memoryview(b"")
        if self._mapped is None:
            self._mapped = self._map()
        if ref.source != 0 or ref.offset < 0 or ref.nbytes < 0 or ref.offset + ref.nbytes > len(self._mapped):
            raise nonsense("bytes outside of the descriptor that came with them")
        return self._mapped[ref.offset : ref.offset + ref.nbytes]

    def _map(self) -> memoryview:
        try:
            return map_sealed(self._descriptors[0])
        except (IndexError, OSError, ValueError) as error:
            raise nonsense(f"a descriptor that cannot be mapped: {error}") from error


# --- an outcome becomes a message ---------------------------------------------------------------------------------


def _encode(number: int, outcome: Outcome) -> tuple[CallResponse, int]:
    """Return the message, and the descriptor that goes with it (the caller closes it), or -1."""
    if isinstance(outcome, InferError):
        return _failed(number, outcome), -1
    total = sum(len(output.data) for output in outcome.outputs)
    descriptor, tensors, position = -1, [], 0
    try:
        if total > INLINE_BYTES:
            descriptor = os.memfd_create("headrace-call", os.MFD_CLOEXEC)
        for output in outcome.outputs:
            nbytes = len(output.data)
            if descriptor < 0:
                ref, data = TensorRef(0, nbytes, INLINE), bytes(output.data)
            else:
                _write(descriptor, output.data, position)
                ref, data = TensorRef(position, nbytes, 0), b""
                position += (nbytes + PAGE - 1) // PAGE * PAGE
            tensors.append(Tensor(output.name, output.datatype.name, output.shape, ref, None, data))
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        return _failed(number, _not_handed_over(error)), -1
    parameters = outcome.parameters or None
    return CallResponse(number, tuple(tensors), None, parameters, outcome.final, outcome.empty), descriptor


def _failed(number: int, error: InferError) -> CallResponse:
    return CallResponse(number, error=error_message(error))


def _not_handed_over(error: OSError) -> InferError:
    return unavailable(f"the response cannot be handed to the caller: {error.strerror}")


def _write(descriptor: int, data: Buffer, position: int) -> None:
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, position)
        left = left[written:]
        position += written
