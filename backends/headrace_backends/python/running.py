"""The two ways of running a batch through a model's `execute`: one response to a request, or any number of them.

Each has two forms, by whether `execute` is a coroutine function. What the code raises or returns wrongly becomes the
error of the requests that it concerns, and names the model's instance.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Protocol

from headrace_backends.api import Batch
from headrace_backends.python.event_loop import EventLoop
from headrace_backends.python.failures import describe
from headrace_backends.python.process import EXECUTING
from headrace_backends.python.received import ModelTensors, ReceivedBatch, ReceivedRequest
from headrace_backends.python.request import RELEASE_RESCHEDULE
from headrace_backends.python.single_replies import SingleReply
from headrace_backends.python.streams import StreamReply, Streams
from headrace_protocol.errors import InferError, internal

MAX_OPEN: Final = 1024
"""Requests of a decoupled model that may be open in one instance; while there are as many, `execute` is not called."""
_LOG: Final = logging.getLogger(__name__)
Execute = Callable[[list[Any]], Any]


class Run(Protocol):
    """How the batches of a model are run."""

    def run(self, batch: Batch) -> None:
        """Run one batch. Raises InferError for what goes wrong with all of it."""
        ...

    def close(self, limit_s: float) -> None:
        """End what runs beside batches."""
        ...


class SingleRun:
    """Runs batches of a model that gives each request one response."""

    def __init__(self, instance: str, execute: Execute, tensors: ModelTensors) -> None:
        self._instance = instance
        self._execute = execute
        self._tensors = tensors
        self._loop = EventLoop() if inspect.iscoroutinefunction(execute) else None

    def run(self, batch: Batch) -> None:
        received = ReceivedBatch(batch, self._tensors)
        try:
            requests = [ReceivedRequest(received, request) for request in batch.requests]
            responses = self._checked(self._call(batch, list(requests)), requests)
            if not received.special:
                self._tensors.answers.give(batch, responses)
                return
            replies: list[Any] = [request._reply for request in requests]
            again = [request._release == RELEASE_RESCHEDULE for request in requests]
            del requests  # only the model's own references shall keep a sender alive
            self._answer_apart(batch, received, responses, replies, again)
        finally:
            received.close()

    def close(self, limit_s: float) -> None:
        if self._loop is not None:
            self._loop.close(limit_s)

    def _call(self, batch: Batch, requests: list[ReceivedRequest]) -> Any:
        """Return what the model's code returns; the list is its to change."""
        try:
            if self._loop is None:
                return self._execute(requests)
            return self._loop.start(executing(batch, self._execute(requests))).result()
        except BaseException as error:
            raise failed(self._instance, error) from None

    def _checked(self, result: Any, requests: list[ReceivedRequest]) -> list[Any]:
        """Return what `execute` returned where it is one entry for each request."""
        if result is None and all(request._reply or request._release == RELEASE_RESCHEDULE for request in requests):
            return [None] * len(requests)
        if not isinstance(result, list):
            raise internal(
                f"model instance '{self._instance}': execute has to return a list of InferenceResponse objects, "
                f"it returned {type(result).__name__}"
            )
        if len(result) != len(requests):
            raise internal(
                f"model instance '{self._instance}': execute returned {len(result)} InferenceResponse objects "
                f"for {len(requests)} InferenceRequest objects"
            )
        return result

    def _answer_apart(
        self,
        batch: Batch,
        received: ReceivedBatch,
        responses: Sequence[Any],
        replies: list[SingleReply | None],
        again: Sequence[bool],
    ) -> None:
        """Answer a batch some of whose requests have senders, or are to be given again."""
        waiting = set()
        for request, response, reply, rescheduled in zip(batch.requests, responses, replies, again, strict=True):
            if not request.ready:
                continue
            if rescheduled:
                self._tensors.reschedule(request)
            elif reply is None:
                self._tensors.answers.answer(request, response)
            elif response is None:
                if not reply.answered:
                    waiting.add(request.index)
            elif not reply.answer_unless_sent(response):
                _LOG.warning(
                    "model instance %s returned a response for a request that its sender had answered", self._instance
                )
        reply = None
        replies.clear()
        if waiting and received.replies is not None:
            batch.on_cancel(received.replies.look_for_cancels)
            received.replies.wait(set(waiting), batch.requests)
            for request in batch.requests:
                if request.index in waiting and not (request.answered or request.cancelled):
                    request.fail(internal("the model dropped this request's sender without having sent a response"))


class StreamRun:
    """Runs batches of a decoupled model. What `execute` leaves open is its senders' to end."""

    def __init__(self, instance: str, execute: Execute, tensors: ModelTensors, max_batch_size: int) -> None:
        self._instance = instance
        self._execute = execute
        self._tensors = tensors
        self._loop = EventLoop() if inspect.iscoroutinefunction(execute) else None
        self._streams = Streams(tensors.answers, max(MAX_OPEN, max_batch_size), waits=self._loop is None)

    def run(self, batch: Batch) -> None:
        received = ReceivedBatch(batch, self._tensors)
        replies = [self._streams.begin(request) for request in batch.requests]
        requests = [
            ReceivedRequest(received, request, reply) for request, reply in zip(batch.requests, replies, strict=True)
        ]
        if self._loop is not None:
            batch.on_flow(self._streams.changed)
            batch.on_cancel(self._streams.changed)
            batch.defer()
            self._loop.start(executing(batch, self._finish(requests, replies)))
            return
        try:
            self._end(self._execute(list(requests)), requests)
        except BaseException as error:
            self._fail(error, replies)
            return
        batch.defer()

    def close(self, limit_s: float) -> None:
        if self._loop is not None:
            self._loop.close(limit_s)

    async def _finish(self, requests: list[ReceivedRequest], replies: list[StreamReply]) -> None:
        try:
            self._end(await self._execute(list(requests)), requests)
        except BaseException as error:
            self._fail(error, replies)

    def _end(self, result: object, requests: Sequence[ReceivedRequest]) -> None:
        if result is not None:
            raise internal(
                f"model instance '{self._instance}' is decoupled: execute has to return None and answer by response "
                f"senders, it returned {type(result).__name__}"
            )
        for request in requests:
            if request._release == RELEASE_RESCHEDULE:
                self._tensors.reschedule(request._request)

    def _fail(self, error: BaseException, replies: Sequence[StreamReply]) -> None:
        if isinstance(error, asyncio.CancelledError) and all(reply.closed for reply in replies):
            return  # the model is unloaded, and has nothing left to do but to return
        failure = error if isinstance(error, InferError) else failed(self._instance, error)
        for reply in replies:
            reply.fail(failure)


async def executing(batch: Batch, coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine of the model with the batch known to what it calls."""
    EXECUTING.set(batch)
    return await coroutine


def failed(instance: str, error: BaseException) -> InferError:
    """Return the error of the requests for which a model's code raised `error`; the log has it too."""
    text = describe(error)
    _LOG.warning("model instance %s failed: %s", instance, text)
    return internal(f"model instance '{instance}' failed: {text}")
