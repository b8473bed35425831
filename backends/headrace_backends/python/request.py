"""InferenceRequest: what a model is asked, by a client or by itself when it calls another model."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from headrace_backends.python.calling import run, run_async
from headrace_backends.python.errors import TritonModelException
from headrace_backends.python.response import checked_parameters
from headrace_backends.python.tensor import Tensor
from headrace_protocol.messages import Parameter

if TYPE_CHECKING:
    from headrace_backends.python.response import InferenceResponse
    from headrace_backends.python.sender import InferenceResponseSender

RELEASE_ALL: Final = 1
RELEASE_RESCHEDULE: Final = 2
FLAG_SEQUENCE_START: Final = 1
FLAG_SEQUENCE_END: Final = 2


class MemoryType(enum.IntEnum):
    """Where tensors are, with Triton's numbers."""

    TRITONSERVER_MEMORY_CPU = 0
    TRITONSERVER_MEMORY_GPU = 2


class PreferredMemory:
    """Where a model would like the outputs of a call to be. Outputs are always in host memory here."""

    __slots__ = ("_device", "_type")

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        self._type = MemoryType(preferred_memory_type)
        self._device = int(preferred_device_id)

    def __repr__(self) -> str:
        return f"PreferredMemory({self._type.name}, {self._device})"


class InferenceTrace:
    """Stands for a request's trace. It has no context that could be handed on."""

    __slots__ = ()

    def get_context(self) -> str | None:
        """Return None: the context of a trace is not passed to models."""
        return None


class InferenceRequest:
    """A request to another model. `exec` and `async_exec` run it."""

    __slots__ = (
        "__weakref__",
        "_correlation_id",
        "_flags",
        "_id",
        "_model_name",
        "_model_version",
        "_parameters",
        "_preferred_memory",
        "_tensors",
        "_timeout",
        "_trace",
        "_wanted",
    )

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] | None = None,
        requested_output_names: Sequence[str] | None = None,
        model_name: str | None = None,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        """`timeout` is in microseconds. Raises TypeError where something is missing or of another type."""
        for name, given in (
            ("inputs", inputs),
            ("requested_output_names", requested_output_names),
            ("model_name", model_name),
        ):
            if given is None:
                raise TypeError(f"InferenceRequest: {name} has to be given")
        assert inputs is not None
        assert requested_output_names is not None
        self._tensors: list[Tensor] = list(inputs)
        for tensor in self._tensors:
            if not isinstance(tensor, Tensor):
                raise TypeError(f"InferenceRequest: expected inputs as tensors, one is a {type(tensor).__name__}")
        self._wanted = [_text("a requested output name", name) for name in requested_output_names]
        self._model_name = _text("model_name", model_name)
        self._model_version = _number("model_version", model_version)
        self._id = _text("request_id", request_id)
        if isinstance(correlation_id, bool) or not isinstance(correlation_id, (int, str)):
            raise TypeError(f"InferenceRequest: correlation_id is an int or str, got {type(correlation_id).__name__}")
        self._correlation_id = correlation_id
        self._flags = _number("flags", flags)
        self._timeout = _number("timeout", timeout)
        self._preferred_memory = preferred_memory
        self._trace = trace
        self._parameters: Mapping[str, Parameter] = {} if parameters is None else checked_parameters(parameters)

    def inputs(self) -> list[Tensor]:
        """Return the input tensors."""
        return list(self._tensors)

    def request_id(self) -> str:
        """Return the client's name for the request; may be empty or not unique."""
        return self._id

    def correlation_id(self) -> int | str:
        """Return the sequence that it belongs to; 0 = none."""
        return self._correlation_id

    def flags(self) -> int:
        """Return 1 for the start of a sequence, 2 for its end, 3 for both, or 0."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        """Set what `flags` returns."""
        self._flags = _number("flags", flags)

    def timeout(self) -> int:
        """Return the microseconds that the request was given; 0 = no limit."""
        return self._timeout

    def parameters(self) -> str:
        """Return the request's parameters as a JSON object."""
        return json.dumps(self._parameters)

    def trace(self) -> InferenceTrace:
        """Return the request's trace."""
        return self._trace or InferenceTrace()

    def requested_output_names(self) -> set[str]:
        """Return the names of the outputs that are asked for."""
        return set(self._wanted)

    def get_response_sender(self) -> InferenceResponseSender:
        """Raise TritonModelException: only requests that a model was given are answered by it."""
        raise TritonModelException("this request was made by the model itself: there is nobody to send a response to")

    def is_cancelled(self) -> bool:
        """Return whether nobody waits for the answer any more."""
        return False

    def set_release_flags(self, flags: int) -> None:
        """Raise TritonModelException: only requests that a model was given are released by it."""
        del flags
        raise TritonModelException("this request was made by the model itself: it is not released")

    def exec(self, decoupled: bool = False) -> InferenceResponse | Iterator[InferenceResponse]:
        """Run the request and wait: return its response, or with `decoupled` an iterator over its responses."""
        return run(self, decoupled=decoupled)

    def async_exec(self, decoupled: bool = False) -> Any:
        """Run the request; return an awaitable of what `exec` returns."""
        return run_async(self, decoupled=decoupled)

    def _input(self, name: str) -> Tensor | None:
        return next((tensor for tensor in self._tensors if tensor._name == name), None)


def _text(what: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"InferenceRequest: expected {what} as str, got {type(value).__name__}")
    return value


def _number(what: str, value: object) -> int:
    if not isinstance(value, int):
        raise TypeError(f"InferenceRequest: expected {what} as int, got {type(value).__name__}")
    return int(value)
