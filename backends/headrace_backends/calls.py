"""What a backend may ask of the server while it runs: other models, what is loaded, metrics of its own.

`ModelContext.server` is the one object. Everything here may be called by any thread, from `initialize` until `finalize`
is called, while something executes and while nothing does. Knows nothing of sockets: a Wire carries the messages.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Final, Protocol

import msgspec

from headrace_backends.batch import Batch
from headrace_backends.batch_request import BatchRequest
from headrace_backends.call_codec import (
    LATEST,
    CallRequest,
    CallResult,
    CallTensor,
    check_model,
    decode_error,
    decode_response,
    encode_files,
    encode_request,
)
from headrace_backends.metrics import MetricFamily, MetricKind, MetricRegistry
from headrace_backends.outputs import FrameSpace
from headrace_protocol.errors import InferError, cancelled, invalid, unavailable
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
    error_message,
)

__all__ = ["LATEST", "Call", "CallRequest", "CallResult", "CallTensor", "NoServer", "ServerCalls", "Wire"]

_READ_AT_ONCE: Final = 16
"""Responses of a stream that are read before the server is told."""
_READ_BYTES: Final = 1 << 20


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
            batch = 0 if waits is None else waits.number if isinstance(waits, Batch) else waits._batch.number
            message = encode_request(request, space, state.number, batch, decoupled=decoupled)
            self._calls[state.number] = state
            try:
                self._wire.send([message], space.descriptors())
            except BaseException as error:
                self._calls.pop(state.number, None)
                if isinstance(error, (TypeError, ValueError, OverflowError)):
                    raise invalid(f"a call to model '{request.model}' cannot be sent: {error}") from error
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
        check_model(model)
        if not isinstance(config, str):
            raise invalid(f"a configuration is JSON text, not of type {type(config).__name__}")
        spill, refs = encode_files(files or {})
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
        check_model(model)
        self._control(lambda number: Control(number, UNLOAD, model, unload_dependents=unload_dependents))

    def ready(self, model: str, version: int = LATEST) -> bool:
        """Return whether the model would serve a request now; False for one that is not there. Blocks."""
        check_model(model)
        if not isinstance(version, int):
            raise invalid(f"a version is {version!r}, expected an integer")
        return bool(self._control(lambda number: Control(number, READY, model, version)))

    # --- metrics --------------------------------------------------------------------------------------------------

    def metric_family(self, name: str, description: str, kind: MetricKind) -> MetricFamily:
        """Make a family of metrics, or return one that is shared by name and kind. Blocks.

        Raises INVALID_ARG for a name that is none or is the server's own, ALREADY_EXISTS for one of another kind,
        UNAVAILABLE beyond MAX_FAMILIES.
        """
        return self._metrics.family(name, description, kind)

    def before_metrics(self, read: Callable[[], None]) -> None:
        """Have `read` called each time before it is told what has changed, when somebody scrapes for example.

        For values that can be looked up: it sets what has changed, and only that, must not block and must not raise.
        """
        self._metrics.before_telling(read)

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
        state.put(decode_response(message, descriptors))

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
            self.on_control_result(ControlResult(number, error_message(error)))

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
            raise decode_error(result.error)
        return result.value

    def _define(self, name: str, description: str, kind: MetricKind) -> int:
        number = next(self._numbers)
        self._control(lambda _: DefineFamily(number, name, description, kind), number=number)
        return number

    def _read_metric(self, series: int) -> float:
        return self._control(lambda number: Control(number, READ_METRIC, series=series))
