"""One request of a batch as a backend sees it. Knows its batch, which does the work; any thread may call it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from headrace_protocol.datatype import Array
from headrace_protocol.errors import InferError
from headrace_protocol.messages import Parameter, RequestHeader, Response, error_message

if TYPE_CHECKING:
    from headrace_backends.batch import Batch

NOBODY: Final = RequestHeader(1)
"""Of the request that a NullRequest stands for."""


class BatchRequest:
    """One request of a batch. Answer it with the whole batch (Batch.respond), or alone by `respond` or `fail`.

    A request to a decoupled model (`model_transaction_policy.decoupled` in its configuration) has any number of
    responses, by `send`, and then one end: `complete`, `fail`, `respond`, or `send` with `final`. Its methods may be
    called by any thread, and after `execute` has returned too where `defer` was called before.
    """

    __slots__ = ("_batch", "_header", "index", "start")

    def __init__(self, batch: Batch, index: int, header: RequestHeader, start: int) -> None:
        self._batch = batch
        self._header = header
        self.index = index
        self.start = start
        """Its first row in the batch."""

    @property
    def rows(self) -> int:
        """Rows of the batch dimension that are its own; 1 where the model does not batch."""
        return self._header.rows

    @property
    def id(self) -> str:
        """The client's name for it; may be empty or not unique."""
        return self._header.id

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """The client's parameters."""
        return self._header.parameters or {}

    @property
    def correlation_id(self) -> int | str:
        """The sequence that it belongs to; 0 = none."""
        return self._header.correlation_id

    @property
    def flags(self) -> int:
        """1 = sequence start, 2 = sequence end."""
        return self._header.flags

    @property
    def slot(self) -> int:
        """The place of its sequence in the instance; 0 where it belongs to none."""
        return self._header.slot

    @property
    def timeout_us(self) -> int:
        """Microseconds that the client gave the request; 0 = no limit."""
        return self._header.timeout_us

    @property
    def wanted(self) -> Sequence[str] | None:
        """Names of the outputs that it asks for; None = all."""
        return self._header.outputs

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the answer any more. May turn true at any time."""
        return self.index in self._batch._cancelled

    @property
    def answered(self) -> bool:
        """Whether it has had its last response; by itself, not together with the batch."""
        return self._batch._is_answered(self.index)

    @property
    def paused(self) -> bool:
        """Whether its client reads too slowly, so that `send` would wait. For who sends many streams at once."""
        return self.index in self._batch._paused

    def input(self, name: str) -> Array:
        """Return this request's part of the input; all of one that was made for the batch (`Batch.made`)."""
        return self._batch._input_of(self, name)

    def alone(self) -> dict[str, Array]:
        """Return the inputs as a batch of this request alone has them: ragged ones flat, and what is made for a batch.

        For who runs requests one by one, of a batch that could not be run together.
        """
        return self._batch._alone(self)

    def respond(self, outputs: Mapping[str, Array], parameters: dict[str, Parameter] | None = None) -> None:
        """Answer this request alone, with outputs that hold its own rows; no response follows."""
        self._batch._respond_to(self, outputs, parameters)

    def fail(self, error: InferError) -> None:
        """Answer this request with an error; no response follows, and the others of the batch are not touched."""
        self._batch._answer(Response(self.index, error=error_message(error)))

    def send(
        self, outputs: Mapping[str, Array], parameters: dict[str, Parameter] | None = None, *, final: bool = False
    ) -> None:
        """Send one response of several, with any outputs of a decoupled model, now. `final`: no response follows.

        Waits while the request is `paused`. Raises CANCELLED once it is cancelled, also while it waits, and INTERNAL
        where the request has had its last response, or the model is not decoupled and this is not `final`. Raises
        UNAVAILABLE where the system has no descriptor or memory left: nothing is sent, and `fail` may still end it.
        """
        self._batch._send_to(self, outputs, parameters, final=final)

    def complete(self) -> None:
        """End this request to a decoupled model without another response. Raises INTERNAL as `send` does."""
        self._batch._answer(Response(self.index, final=True, empty=True))

    def defer(self) -> None:
        """Leave this request to a decoupled model open when `execute` returns; whoever it was left to ends it.

        Hand it over first and call this last: an exception out of `execute` still fails what was deferred.
        """
        self._batch._deferrals().add(self.index)

    @property
    def ready(self) -> bool:
        """Whether there is a request at all.

        A row of a sequence's slot may be without one, and its answer goes nowhere.
        """
        return True

    def reschedule(self, states: Mapping[str, Array] | None = None) -> None:
        """Ask to be given this request once more, instead of answering it now. For models with `iterative_sequence`.

        `states`: the outputs that hold states of its sequence. A decoupled model may have sent responses before.
        """
        self._batch._reschedule(self, states or {})

    def wait(self, seconds: float) -> bool:
        """Sleep until this request is cancelled, `seconds` at most; return whether it is."""
        changed = self._batch._model.changed
        with changed:
            return changed.wait_for(lambda: self.cancelled, seconds)


class NullRequest(BatchRequest):
    """Stands in a batch of sequences for a slot that has no request now. What it is answered goes nowhere."""

    __slots__ = ()

    @property
    def ready(self) -> bool:
        return False

    @property
    def cancelled(self) -> bool:
        return False

    @property
    def answered(self) -> bool:
        return False

    def respond(self, outputs: Mapping[str, Array], parameters: dict[str, Parameter] | None = None) -> None:
        pass

    def fail(self, error: InferError) -> None:
        pass

    def send(
        self, outputs: Mapping[str, Array], parameters: dict[str, Parameter] | None = None, *, final: bool = False
    ) -> None:
        pass

    def complete(self) -> None:
        pass

    def defer(self) -> None:
        pass

    def reschedule(self, states: Mapping[str, Array] | None = None) -> None:
        pass
