"""What a backend may ask of the server while it runs: other models, what is loaded, metrics of its own.

`ModelContext.server` is the one object. Everything here may be called by any thread, from `initialize` until `finalize`
is called, while something executes and while nothing does. Knows nothing of sockets: a Wire carries the messages.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple, Protocol

import msgspec
import numpy as np

from headrace_backends.batch import Batch, BatchRequest
from headrace_backends.metrics import MetricFamily, MetricKind, MetricRegistry
from headrace_backends.outputs import FrameSpace, SpillFile
from headrace_protocol.datatype import BY_NAME, Array, Buffer, DataType, of_numpy, to_numpy
from headrace_protocol.errors import ErrorCode, InferError, cancelled, internal, invalid, unavailable
from headrace_protocol.messages import (
    LOAD,
    MAX_CALLS,
    MAX_CONTROLS,
    READ_METRIC,
    READY,
    UNLOAD,
    CallRead,
    CallResponse,
    CancelCall,
    Control,
    ControlResult,
    DefineFamily,
    Error,
    Parameter,
)
from headrace_protocol.messages import Call as CallMessage
from headrace_protocol.tensor import INLINE, Tensor, TensorRef

LATEST: Final = -1
"""Version of a model that stands for the one the server chooses."""
_READ_AT_ONCE: Final = 16
"""Responses of a stream that are read before the server is told."""
_READ_BYTES: Final = 1 << 20
_MAP_BYTES: Final = 1 << 20
"""Bytes of responses in a descriptor from which on it is mapped, not read: a mapping keeps a descriptor open."""


class CallTensor(NamedTuple):
    """A tensor that a call brings or gets."""

    name: str
    array: Array
    """BYTES: any elements that BYTES outputs may have; those that came are bytes. What came is the caller's to change."""
    datatype: DataType | None = None
    """None = by the array's own type. BF16 has to be named: its elements are uint16 here. Always set in what came."""


@dataclass(frozen=True, slots=True)
class CallRequest:
    """A request to a model of this server."""

    model: str
    inputs: Sequence[CallTensor]
    version: int = LATEST
    outputs: Sequence[str] | None = None
    """Names of the outputs that are wanted; None = all."""
    id: str = ""
    correlation_id: int | str = 0
    flags: int = 0
    """1 = sequence start, 2 = sequence end."""
    timeout_us: int = 0
    """Microseconds that it may wait in the model's queue, where the model lets requests say so; 0 = its own limit."""
    priority: int = 0
    parameters: Mapping[str, Parameter] | None = None


@dataclass(frozen=True, slots=True)
class CallResult:
    """One response to a call. An error is the last one."""

    outputs: tuple[CallTensor, ...] = ()
    parameters: Mapping[str, Parameter] | None = None
    error: InferError | None = None
    final: bool = True
    """Whether no response follows."""
    empty: bool = False
    """Whether it says nothing but that a stream has come to its end."""


class Wire(Protocol):
    """How messages get to the server and back."""

    def send(self, messages: Sequence[msgspec.Struct], descriptors: Sequence[int]) -> None:
        """Send one frame. The descriptors stay the caller's."""
        ...

    def executing(self) -> Batch | None:
        """Return the batch that this thread executes, if it does."""
        ...

    def watch(self) -> None:
        """Make sure that some other thread reads the channel, without delay."""
        ...

    def read_until(self, arrived: Callable[[], bool]) -> None:
        """Read the channel in this thread until `arrived`, or make sure that another does."""
        ...


class NoServer:
    """The Wire of a backend that runs without a server, as in the conformance suite: whatever is asked fails."""

    def send(self, messages: Sequence[msgspec.Struct], descriptors: Sequence[int]) -> None:  # noqa: ARG002
        raise unavailable("this backend runs without a server: there are no other models, nor metrics")

    def executing(self) -> Batch | None:
        return None

    def watch(self) -> None:
        return

    def read_until(self, arrived: Callable[[], bool]) -> None:  # noqa: ARG002
        return


class Call:
    """One call under way. Dropping it without having read its end cancels it.

    Read it by one thread at a time: `next` blocks, `poll` does not, and iteration is `next` with errors raised.
    """

    __slots__ = ("__weakref__", "_calls", "_state")

    def __init__(self, calls: ServerCalls, state: _State) -> None:
        self._calls = calls
        self._state = state

    @property
    def over(self) -> bool:
        """Whether its last response was read."""
        return self._state.over

    def next(self) -> CallResult | None:
        """Return the next response, waiting for it; None after the last. An error is returned, not raised."""
        state = self._state
        if state.over:
            return None
        if state.arrived.empty():
            self._calls._wire.read_until(state.has_arrived)
        return self._calls._read(state, state.arrived.get())

    def poll(self) -> CallResult | None:
        """Return the next response if it is there, else None. `over` tells whether one may still come."""
        state = self._state
        if state.over:
            return None
        try:
            return self._calls._read(state, state.arrived.get_nowait())
        except Empty:
            self._calls._wire.watch()
            return None

    def cancel(self) -> None:
        """Nobody waits any more: the model is told, and CANCELLED is what is read next. Nothing, once it is over."""
        self._calls._cancel(self._state, cancelled())

    def __iter__(self) -> Iterator[CallResult]:
        """Yield the responses, without an empty last one. Raises InferError where the call fails."""
        while (result := self.next()) is not None:
            if result.error is not None:
                raise result.error
            if not result.empty:
                yield result

    def __del__(self) -> None:
        if not self._state.over:
            self._calls._cancel(self._state, cancelled())


class _State:
    """What is known of a call: the client's part of it, which does not keep the Call itself alive."""

    __slots__ = ("arrived", "decoupled", "number", "on_arrival", "on_behalf", "over", "unread", "unread_bytes")

    def __init__(self, number: int, *, decoupled: bool, on_behalf: Batch | BatchRequest | None) -> None:
        self.number = number
        self.decoupled = decoupled
        self.on_behalf = on_behalf
        """The call is cancelled with it."""
        self.arrived: SimpleQueue[CallResult] = SimpleQueue()
        self.over = False
        self.unread = 0
        """Responses read that the server has not been told of."""
        self.unread_bytes = 0
        self.on_arrival: Callable[[], None] | None = None

    def has_arrived(self) -> bool:
        return not self.arrived.empty()

    def put(self, result: CallResult) -> None:
        self.arrived.put(result)
        if self.on_arrival is not None:
            self.on_arrival()


class ServerCalls:
    """The server, as a backend sees it. Owns the calls under way; made by the runner, one a process."""

    def __init__(self, wire: Wire | None = None) -> None:
        self._wire: Final[Wire] = NoServer() if wire is None else wire
        self._numbers: Final = itertools.count(1)
        self._calls: Final[dict[int, _State]] = {}
        self._controls: Final[dict[int, SimpleQueue[ControlResult]]] = {}
        self._closed: InferError | None = None
        self._metrics: Final = MetricRegistry(self._define, self._read_metric, self._wire.send)

    # --- other models ---------------------------------------------------------------------------------------------

    def infer(self, request: CallRequest, *, on_behalf: Batch | BatchRequest | None = None) -> CallResult:
        """Run a request on another model and return its response. Blocks; arguments and errors as of `begin`.

        A request that fails raises InferError too, with the code that a client would get.
        """
        result = self._begin(request, on_behalf=on_behalf).next()
        assert result is not None
        if result.error is not None:
            raise result.error
        return result

    def stream(self, request: CallRequest, *, on_behalf: Batch | BatchRequest | None = None) -> Call:
        """Begin a request that may have many responses; iterate over what this returns. As `begin`, decoupled."""
        return self._begin(request, decoupled=True, on_behalf=on_behalf)

    def begin(
        self,
        request: CallRequest,
        *,
        decoupled: bool = False,
        on_behalf: Batch | BatchRequest | None = None,
        on_arrival: Callable[[], None] | None = None,
    ) -> Call:
        """Begin a request and return at once; the inputs are copied before.

        `decoupled`: any number of responses will do. If not, there is one, and a decoupled model refuses (UNSUPPORTED).
        `on_behalf`: the batch or request that this is for, whose cancel is its cancel; None = the batch that this thread
        executes, if it does. `on_arrival` is called by another thread whenever a response has arrived, and must not
        block: for event loops, which then `poll`.

        Raises INVALID_ARG for arrays that are no tensors, UNAVAILABLE beyond MAX_CALLS, or where the process is to end.
        What the server says against the request comes as the response.
        """
        call = self._begin(request, decoupled=decoupled, on_behalf=on_behalf, on_arrival=on_arrival)
        self._wire.watch()
        return call

    def _begin(
        self,
        request: CallRequest,
        *,
        decoupled: bool = False,
        on_behalf: Batch | BatchRequest | None = None,
        on_arrival: Callable[[], None] | None = None,
    ) -> Call:
        if self._closed is not None:
            raise self._closed
        if len(self._calls) >= MAX_CALLS:
            raise unavailable(f"{MAX_CALLS} calls of this process to other models are under way already")
        waits = on_behalf or self._wire.executing()
        state = _State(next(self._numbers), decoupled=decoupled, on_behalf=waits)
        state.on_arrival = on_arrival
        with FrameSpace() as space:
            inputs = tuple(_place(space, tensor) for tensor in request.inputs)
            message = _message(request, state, inputs)
            self._calls[state.number] = state
            try:
                self._wire.send([message], space.descriptors())
            except BaseException:
                self._calls.pop(state.number, None)
                raise
        call = Call(self, state)
        if self._closed is not None:
            self._cancel(state, self._closed)
        elif waits is not None and waits.cancelled:
            self._cancel(state, cancelled())
        return call

    # --- control --------------------------------------------------------------------------------------------------

    def load(self, model: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
        """Load or reload a model and return once it serves. Blocks.

        `config`: its configuration as JSON text, "" = the repository's. `files`: contents by path below the model's
        directory, which then stands for the repository's; with or without the prefix "file:". Raises InferError as the
        repository API does, and UNAVAILABLE in `initialize`.
        """
        spill, refs = _spill(files or {})
        try:
            self._control(
                lambda number: Control(number, LOAD, model, config=config, files=refs),
                () if spill is None else (spill.seal(),),
            )
        finally:
            if spill is not None:
                os.close(spill.fd)

    def unload(self, model: str, *, unload_dependents: bool = False) -> None:
        """Stop serving a model; requests in it end in peace. Blocks until it takes none. Raises as `load`."""
        self._control(lambda number: Control(number, UNLOAD, model, unload_dependents=unload_dependents))

    def ready(self, model: str, version: int = LATEST) -> bool:
        """Return whether the model would serve a request now; False for one that is not there. Blocks."""
        return bool(self._control(lambda number: Control(number, READY, model, version)))

    # --- metrics --------------------------------------------------------------------------------------------------

    def metric_family(self, name: str, description: str, kind: MetricKind) -> MetricFamily:
        """Make a family of metrics, or return one that is shared by name and kind. Blocks.

        Raises INVALID_ARG for a name that is none or is the server's own, ALREADY_EXISTS for one of another kind,
        UNAVAILABLE beyond MAX_FAMILIES.
        """
        return self._metrics.family(name, description, kind)

    # What follows is not for authors: the runner calls it.

    @property
    def waiting(self) -> bool:
        """Whether something has been asked that is not answered."""
        return bool(self._calls or self._controls)

    def tell_metrics(self, number: int) -> None:
        """Answer the server, which asked for what has changed."""
        self._metrics.tell(number)

    def on_response(self, message: CallResponse, descriptors: Sequence[int]) -> None:
        """Take a response; the descriptors stay the caller's to close."""
        state = self._calls.get(message.number)
        if state is None:
            return  # it was cancelled meanwhile
        if message.final:
            self._calls.pop(message.number, None)
        state.put(_result(message, descriptors))

    def on_control_result(self, message: ControlResult) -> None:
        """Take the answer to a control."""
        answer = self._controls.pop(message.number, None)
        if answer is not None:
            answer.put(message)

    def cancel_with_batches(self) -> None:
        """Cancel the calls of those who were cancelled."""
        for state in list(self._calls.values()):
            if state.on_behalf is not None and state.on_behalf.cancelled:
                self._cancel(state, cancelled())

    def close(self, error: InferError) -> None:
        """Fail what is under way and whatever is asked from now on: the process is to end."""
        self._closed = error
        self._metrics.close()
        for state in list(self._calls.values()):
            self._cancel(state, error)
        for number in list(self._controls):
            self.on_control_result(ControlResult(number, Error(error.code.value, error.message)))

    def _read(self, state: _State, result: CallResult) -> CallResult:
        """Note that a response was read; tell the server where that matters to the model."""
        if result.final:
            state.over = True
        elif state.decoupled:
            state.unread += 1
            state.unread_bytes += sum(tensor.array.nbytes for tensor in result.outputs)
            if state.unread >= _READ_AT_ONCE or state.unread_bytes >= _READ_BYTES:
                self._wire.send([CallRead(state.number, state.unread)], ())
                state.unread = state.unread_bytes = 0
        return result

    def _cancel(self, state: _State, error: InferError) -> None:
        if self._calls.pop(state.number, None) is not None:
            self._wire.send([CancelCall(state.number)], ())
            state.put(CallResult(error=error))

    def _control(
        self, make: Callable[[int], Control | DefineFamily], descriptors: Sequence[int] = (), number: int | None = None
    ) -> float:
        if self._closed is not None:
            raise self._closed
        if len(self._controls) >= MAX_CONTROLS:
            raise unavailable(f"{MAX_CONTROLS} controls of this process are not answered yet")
        number = next(self._numbers) if number is None else number
        answer = self._controls[number] = SimpleQueue()
        try:
            self._wire.send([make(number)], descriptors)
        except BaseException:
            self._controls.pop(number, None)
            raise
        if self._closed is not None:
            raise self._closed
        self._wire.read_until(lambda: not answer.empty())
        result = answer.get()
        if result.error is not None:
            raise _error(result.error)
        return result.value

    def _define(self, name: str, description: str, kind: MetricKind) -> int:
        number = next(self._numbers)
        self._control(lambda _: DefineFamily(number, name, description, kind), number=number)
        return number

    def _read_metric(self, series: int) -> float:
        return self._control(lambda number: Control(number, READ_METRIC, series=series))


def _message(request: CallRequest, state: _State, inputs: tuple[Tensor, ...]) -> CallMessage:
    waits = state.on_behalf
    return CallMessage(
        state.number,
        request.model,
        request.version,
        inputs,
        0 if waits is None else waits.number if isinstance(waits, Batch) else waits._batch.number,
        state.decoupled,
        None if request.outputs is None else tuple(request.outputs),
        request.id,
        dict(request.parameters) if request.parameters else None,
        request.correlation_id,
        request.flags,
        request.timeout_us,
        request.priority,
    )


def _place(space: FrameSpace, tensor: CallTensor) -> Tensor:
    array = tensor.array
    if not isinstance(array, np.ndarray):
        raise invalid(f"input '{tensor.name}' is of type {type(array).__name__}, expected a numpy array")
    natural = of_numpy(array.dtype)
    datatype = natural if tensor.datatype is None else tensor.datatype
    if natural is None or datatype is None or datatype.numpy != natural.numpy:
        expected = "which is no tensor datatype" if datatype is None else f"which is not {datatype.name}"
        raise invalid(f"input '{tensor.name}' has numpy type {array.dtype}, {expected}")
    return space.place(tensor.name, array, {tensor.name: datatype})


def _spill(files: Mapping[str, bytes]) -> tuple[SpillFile | None, tuple[tuple[str, TensorRef], ...]]:
    """Write the contents of files into memory that travels with a message."""
    if not files:
        return None, ()
    spill = SpillFile()
    refs = []
    for path, content in files.items():
        if content:
            mapping, offset = spill.reserve(len(content))
            mapping[:] = content
        else:
            offset = 0
        refs.append((path.removeprefix("file:"), TensorRef(offset, len(content), 0)))
    return spill, tuple(refs)


def _result(message: CallResponse, descriptors: Sequence[int]) -> CallResult:
    if message.error is not None:
        return CallResult(error=_error(message.error))
    try:
        memory = _contents(descriptors[0]) if descriptors else memoryview(b"")
        outputs = tuple(_tensor(tensor, memory) for tensor in message.outputs)
    except (OSError, InferError) as error:
        text = error.message if isinstance(error, InferError) else str(error)
        return CallResult(error=internal(f"the response of the model cannot be read: {text}"), final=message.final)
    return CallResult(outputs, message.parameters, None, message.final, message.empty)


def _contents(descriptor: int) -> memoryview:
    """Return the bytes of a response's descriptor, private to this process: what is written to them is nobody's."""
    size = os.fstat(descriptor).st_size
    if size >= _MAP_BYTES:
        return memoryview(mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY))
    buffer = bytearray(size)
    os.preadv(descriptor, [buffer], 0)
    return memoryview(buffer)


def _tensor(tensor: Tensor, memory: memoryview) -> CallTensor:
    ref, datatype = tensor.ref, BY_NAME[tensor.datatype]
    data: Buffer = bytearray(tensor.data) if ref.source == INLINE else memory[ref.offset : ref.offset + ref.nbytes]
    return CallTensor(tensor.name, to_numpy(datatype, tensor.shape, data), datatype)


def _error(error: Error) -> InferError:
    return InferError(ErrorCode.__members__.get(error.code, ErrorCode.INTERNAL), error.message)
