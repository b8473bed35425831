"""Requests under way, as the data plane hands them to the doors: what cancels them, counts them and holds their model back.

They know a plane by what it is told of their end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

from headrace import classification
from headrace.access.caller import Caller
from headrace.instances.loaded_model import LoadedModel
from headrace.scheduling.batch_driver import Outcome
from headrace.types import (
    InferenceRequest,
    InferenceResponse,
)
from headrace_protocol.errors import InferError

MAX_UNREAD: Final = 128
"""Responses of one request that its client has not read, above which the model is held back until half are."""
MAX_UNREAD_BYTES: Final = 16 << 20


class Plane(Protocol):
    """What is told of the end of a request."""

    def leave_model(self, model: LoadedModel, caller: Caller | None) -> None:
        """Take note that a request of a door is over."""
        ...


class _UnderWay:
    """What every request under way has: a lease on its model until it is over, or cancelled, whichever is first."""

    __slots__ = ("_access", "_caller", "_classes", "_model", "_over", "_plane", "pending")

    def __init__(
        self, plane: Plane, model: LoadedModel, classes: dict[str, int] | None, request: InferenceRequest
    ) -> None:
        self._plane = plane
        self._access = request.access
        self._caller = request.caller
        self._model = model
        self._classes = classes
        self._over = False
        self.pending: Any = None

    def cancel(self) -> None:
        """Nobody waits for it any more; nothing is handed over then. Does nothing once it is over."""
        pending, self.pending = self.pending, None
        if pending is not None:
            self._over = True
            if self._access is not None:
                self._access.end(None)
            self._model.driver.cancel(pending)
            self._plane.leave_model(self._model, self._caller)

    def _end(self, outcome: Outcome) -> None:
        """Note the end; nothing where it was noted before: a door that fails to take an outcome is told an error too."""
        if self._over:
            return
        self._over = True
        self.pending = None
        if self._access is not None:
            self._access.end(outcome)
        self._plane.leave_model(self._model, self._caller)


class Inference(_UnderWay):
    """One request under way that has one response."""

    __slots__ = ("_done",)

    def __init__(
        self,
        plane: Plane,
        model: LoadedModel,
        classes: dict[str, int] | None,
        done: Callable[[Outcome], None],
        request: InferenceRequest,
    ) -> None:
        super().__init__(plane, model, classes, request)
        self._done = done

    def finish(self, outcome: Outcome) -> None:
        """Hand the outcome over."""
        self._end(outcome)
        if self._classes is not None and isinstance(outcome, InferenceResponse):
            try:
                outcome = _classified(self._model, self._classes, outcome)
            except InferError as error:
                outcome = error
        self._done(outcome)


class Stream(_UnderWay):
    """One request under way that may have many responses.

    It counts what was handed over and not released yet, and holds the model back while that is too much.
    """

    __slots__ = ("_on_outcome", "_paused", "_unread", "_unread_bytes")

    def __init__(
        self,
        plane: Plane,
        model: LoadedModel,
        classes: dict[str, int] | None,
        on_outcome: Callable[[Outcome], None],
        request: InferenceRequest,
    ) -> None:
        super().__init__(plane, model, classes, request)
        self._on_outcome = on_outcome
        self._unread = 0
        self._unread_bytes = 0
        self._paused = False

    def deliver(self, outcome: Outcome) -> None:
        """Hand one outcome over."""
        if isinstance(outcome, InferenceResponse) and self._classes is not None:
            try:
                outcome = _classified(self._model, self._classes, outcome)
            except InferError as error:
                if not outcome.final and self.pending is not None:
                    self._model.driver.cancel(self.pending)
                outcome = error
        if isinstance(outcome, InferError) or outcome.final:
            self._end(outcome)
        else:
            if self._access is not None:
                self._access.responded(outcome)
            self._count(outcome)
        self._on_outcome(outcome)

    def _count(self, response: InferenceResponse) -> None:
        nbytes = sum(len(output.data) for output in response.outputs)
        self._unread += 1
        self._unread_bytes += nbytes
        response.on_release(partial(self._read, nbytes))
        if not self._paused and (self._unread >= MAX_UNREAD or self._unread_bytes >= MAX_UNREAD_BYTES):
            self._set_paused(paused=True)

    def _read(self, nbytes: int) -> None:
        self._unread -= 1
        self._unread_bytes -= nbytes
        if self._paused and self._unread <= MAX_UNREAD // 2 and self._unread_bytes <= MAX_UNREAD_BYTES // 2:
            self._set_paused(paused=False)

    def _set_paused(self, *, paused: bool) -> None:
        self._paused = paused
        if self.pending is not None:
            self._model.driver.flow(self.pending, paused=paused)


def _classified(model: LoadedModel, classes: dict[str, int], response: InferenceResponse) -> InferenceResponse:
    try:
        response.outputs = [
            classification.top_classes(
                output, classes[output.name], model.labels.get(output.name, ()), model.signature.batches
            )
            if output.name in classes
            else output
            for output in response.outputs
        ]
    except InferError:
        response.release()
        raise
    return response
