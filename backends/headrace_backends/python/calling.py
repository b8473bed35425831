"""Requests of a model to other models of the server: `exec` and `async_exec` of InferenceRequest.

What fails in the other model, or is refused by the server, is a response with an error; nothing is raised for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from headrace_backends.calls import Call, CallRequest, CallResult, CallTensor
from headrace_backends.python.errors import TritonModelException, as_triton_error
from headrace_backends.python.process import EXECUTING, PROCESS
from headrace_backends.python.response import InferenceResponse
from headrace_backends.python.tensor import tensor_of
from headrace_protocol.datatype import BY_NAME, of_numpy
from headrace_protocol.errors import InferError

if TYPE_CHECKING:
    from headrace_backends.python.request import InferenceRequest


class ResponseIterator(Iterator[InferenceResponse], AsyncIterator[InferenceResponse]):
    """The responses of one call: `for` waits in this thread, `async for` in its event loop. An error is the last."""

    def __init__(self, call: Call, arrived: asyncio.Event | None = None) -> None:
        self._call = call
        self._arrived = arrived
        """Set whenever there may be a response to read; there for calls of async_exec."""

    def __next__(self) -> InferenceResponse:
        while (result := self._call.next()) is not None:
            if not result.empty:
                return _response(result)
        raise StopIteration

    async def __anext__(self) -> InferenceResponse:
        if self._arrived is None:
            raise TritonModelException(
                "the responses of exec are read by `for`; those of async_exec by `async for` too"
            )
        while (result := await self.next_result()) is not None:
            if not result.empty:
                return _response(result)
        raise StopAsyncIteration

    def cancel(self) -> None:
        """Tell the other model that nobody waits for its responses any more; CANCELLED is what is read next."""
        self._call.cancel()

    async def next_result(self) -> CallResult | None:
        """Return the next response, waiting without holding up the loop; None after the last."""
        assert self._arrived is not None
        while True:
            self._arrived.clear()
            result = self._call.poll()
            if result is not None or self._call.over:
                return result
            await self._arrived.wait()

    async def begun(self) -> ResponseIterator:
        """Wait for the first response, without reading it; return this."""
        assert self._arrived is not None
        await self._arrived.wait()
        return self


def run(request: InferenceRequest, *, decoupled: bool) -> InferenceResponse | Iterator[InferenceResponse]:
    """Run a request and wait for its response; with `decoupled`, return its responses to come."""
    server = PROCESS.require_server()
    try:
        if decoupled:
            return ResponseIterator(server.stream(_call_request(request), on_behalf=EXECUTING.get()))
        return _response(server.infer(_call_request(request), on_behalf=EXECUTING.get()))
    except InferError as error:
        refused = InferenceResponse(error=as_triton_error(error))
        return _Refusal(refused) if decoupled else refused


def run_async(request: InferenceRequest, *, decoupled: bool) -> asyncio.Task[Any]:
    """Begin a request now; return a task for what `run` returns. Raises RuntimeError outside of an event loop."""
    loop = asyncio.get_running_loop()
    arrived = asyncio.Event()

    def on_arrival() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and whoever waited with it
            loop.call_soon_threadsafe(arrived.set)

    try:
        call = PROCESS.require_server().begin(
            _call_request(request), decoupled=decoupled, on_behalf=EXECUTING.get(), on_arrival=on_arrival
        )
    except InferError as error:
        return loop.create_task(_refused(InferenceResponse(error=as_triton_error(error)), decoupled=decoupled))
    responses = ResponseIterator(call, arrived)
    return loop.create_task(responses.begun() if decoupled else _only(responses))


async def _only(responses: ResponseIterator) -> InferenceResponse:
    try:
        result = await responses.next_result()
    except asyncio.CancelledError:
        responses.cancel()
        raise
    assert result is not None
    return _response(result)


async def _refused(response: InferenceResponse, *, decoupled: bool) -> Any:
    return _Refusal(response) if decoupled else response


class _Refusal(Iterator[InferenceResponse], AsyncIterator[InferenceResponse]):
    """The responses of a call of async_exec that could not be made: its error."""

    def __init__(self, response: InferenceResponse) -> None:
        self._left = [response]

    def __next__(self) -> InferenceResponse:
        if not self._left:
            raise StopIteration
        return self._left.pop()

    async def __anext__(self) -> InferenceResponse:
        if not self._left:
            raise StopAsyncIteration
        return self._left.pop()

    def cancel(self) -> None:
        """Nothing runs that could be cancelled."""


def _call_request(request: InferenceRequest) -> CallRequest:
    return CallRequest(
        request._model_name,
        [CallTensor(tensor._name, tensor._array, tensor._datatype) for tensor in request._tensors],
        version=request._model_version,
        outputs=request._wanted or None,
        id=request._id,
        correlation_id=request._correlation_id,
        flags=request._flags,
        timeout_us=request._timeout,
        parameters=request._parameters,
    )


def _response(result: CallResult) -> InferenceResponse:
    if result.error is not None:
        return InferenceResponse(error=as_triton_error(result.error))
    tensors = [
        tensor_of(tensor.name, tensor.array, tensor.datatype or of_numpy(tensor.array.dtype) or BY_NAME["BYTES"])
        for tensor in result.outputs
    ]
    return InferenceResponse(tensors, parameters=result.parameters)
