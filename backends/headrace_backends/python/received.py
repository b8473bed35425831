"""The requests that a model is given: lazy views of a batch.

The inputs of a batch are copied once, when the first of its requests asks for one: the server's memory is only lent
for the batch, and models may keep arrays, and write into them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from headrace_backends.api import Batch, BatchRequest
from headrace_backends.python.answers import Answers
from headrace_backends.python.errors import TritonModelException
from headrace_backends.python.request import (
    RELEASE_ALL,
    RELEASE_RESCHEDULE,
    InferenceRequest,
    InferenceTrace,
)
from headrace_backends.python.sender import InferenceResponseSender, Reply
from headrace_backends.python.single_replies import SingleReplies, SingleReply
from headrace_backends.python.tensor import Tensor, tensor_of
from headrace_protocol.datatype import BF16, Array
from headrace_protocol.errors import invalid

_making_replies: Final = threading.Lock()


class ModelTensors(NamedTuple):
    """What the configuration says of a model's tensors, as far as requests need it."""

    bf16_inputs: frozenset[str]
    outputs: tuple[str, ...]
    answers: Answers
    iterative: bool
    """Whether requests may be given to the model again."""

    def reschedule(self, request: BatchRequest) -> None:
        """Have a request, which the model released for that, given to it again."""
        if request.answered:
            return
        if self.iterative:
            request.reschedule()
        else:
            request.fail(
                invalid(
                    "the model released this request to be scheduled again, but its configuration has no iterative "
                    "sequences (sequence_batching { iterative_sequence: true })"
                )
            )


class ReceivedBatch:
    """What the requests of one batch share: their inputs, and how they are answered by senders."""

    __slots__ = ("_alone", "_arrays", "_batch", "_closed", "_model", "_ragged", "replies", "special")

    def __init__(self, batch: Batch, model: ModelTensors) -> None:
        self._batch = batch
        self._model = model
        self._arrays: dict[str, Array | None] = {}
        self._ragged: Final = batch.item_shapes
        self._alone = len(batch.requests) == 1 and not batch.item_shapes
        self._closed = False
        self.replies: SingleReplies | None = None
        """Once a sender was asked for, of a model that is not decoupled."""
        self.special = False
        """Whether some request has a sender, or is to be given again."""

    def close(self) -> None:
        """Note that the batch was answered: its memory is lent to another now."""
        self._closed = True
        if self.replies is not None:
            self.replies.close()

    @property
    def names(self) -> list[str]:
        """Names of the inputs that were given."""
        if self._closed:
            raise TritonModelException("the inputs were not read before the request was answered: they are gone")
        made = self._batch.made
        return [name for name in self._batch.inputs if name not in made]

    @property
    def outputs(self) -> Sequence[str]:
        """Names of the model's outputs."""
        return self._model.outputs

    def tensor(self, request: BatchRequest, name: str) -> Tensor | None:
        """Return a request's part of an input, None where there is no such input."""
        try:
            array = self._arrays[name]
        except KeyError:
            array = self._arrays[name] = self._copied(name)
        if array is None:
            return None
        if not self._alone or self._ragged:
            array = self._part(array, request, name)
        if name in self._model.bf16_inputs:
            return tensor_of(name, array, BF16)
        return Tensor(name, array)

    def single_reply(self, request: BatchRequest) -> SingleReply:
        """Return how `request` is answered by a sender where the model is not decoupled."""
        with _making_replies:
            if self.replies is None:
                self.replies = SingleReplies(self._model.answers)
                self.special = True
        return SingleReply(self.replies, request)

    def _copied(self, name: str) -> Array | None:
        if self._closed:
            raise TritonModelException(f"input '{name}' was not read before its request was answered: it is gone")
        array = None if name in self._batch.made else self._batch.inputs.get(name)
        if array is None or array.dtype.hasobject:
            return array  # strings were made for this batch
        return array.copy()

    def _part(self, array: Array, request: BatchRequest, name: str) -> Array:
        if name in self._ragged:  # the elements of all requests lie one after another
            self._check_open(name)
            return request.input(name).copy()
        if self._alone or name in self._batch.made:
            return array
        return array[request.start : request.start + request.rows]

    def _check_open(self, name: str) -> None:
        if self._closed:
            raise TritonModelException(f"input '{name}' was not read before its request was answered: it is gone")


class ReceivedRequest(InferenceRequest):
    """One request of a batch. Models hold it for as long as they like; its inputs are their own."""

    __slots__ = ("_batch", "_inputs", "_release", "_reply", "_request")

    def __init__(self, batch: ReceivedBatch, request: BatchRequest, reply: Reply | None = None) -> None:
        self._batch = batch
        self._request = request
        self._reply = reply
        """How it is answered by a sender; made on demand where the model is not decoupled."""
        self._release = RELEASE_ALL
        self._inputs: list[Tensor] | None = None
        self._flags = -1
        """Those that the model has set, -1 = none."""

    def inputs(self) -> list[Tensor]:
        if self._inputs is None:
            found = [self._batch.tensor(self._request, name) for name in self._batch.names]
            self._inputs = [tensor for tensor in found if tensor is not None]
        return list(self._inputs)

    def request_id(self) -> str:
        return self._request.id

    def correlation_id(self) -> int | str:
        return self._request.correlation_id

    def flags(self) -> int:
        return self._request.flags if self._flags < 0 else self._flags

    def timeout(self) -> int:
        return self._request.timeout_us

    def parameters(self) -> str:
        parameters = self._request.parameters
        return json.dumps(parameters) if parameters else "{}"

    def trace(self) -> InferenceTrace:
        return InferenceTrace()

    def requested_output_names(self) -> set[str]:
        wanted = self._request.wanted
        return set(self._batch.outputs if wanted is None else wanted)

    def get_response_sender(self) -> InferenceResponseSender:
        """Return what answers this request: any number of times where the model is decoupled, else once."""
        if self._reply is None:
            self._reply = self._batch.single_reply(self._request)
        return InferenceResponseSender(self._reply)

    def is_cancelled(self) -> bool:
        return self._request.cancelled

    def set_release_flags(self, flags: int) -> None:
        """Say what becomes of the request when `execute` returns: RELEASE_ALL, or RELEASE_RESCHEDULE to get it again."""
        if flags not in (RELEASE_ALL, RELEASE_RESCHEDULE):
            raise TritonModelException(
                f"set_release_flags: expected TRITONSERVER_REQUEST_RELEASE_ALL ({RELEASE_ALL}) or "
                f"TRITONSERVER_REQUEST_RELEASE_RESCHEDULE ({RELEASE_RESCHEDULE}), got {flags!r}"
            )
        self._release = flags
        self._batch.special = True

    def exec(self, decoupled: bool = False) -> Any:
        """Raise TritonModelException: a request is run once, by the model that was given it."""
        del decoupled
        raise TritonModelException(
            "a request that the model was given cannot be run: make an InferenceRequest of its own"
        )

    def async_exec(self, decoupled: bool = False) -> Any:
        """Raise TritonModelException, as `exec`."""
        return self.exec(decoupled)

    def _input(self, name: str) -> Tensor | None:
        return self._batch.tensor(self._request, name)
