"""InferenceResponse: what a model gives to one request, or gets from a model that it has called."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace_backends.python.errors import TritonError
from headrace_backends.python.tensor import Tensor
from headrace_protocol.messages import Parameter

_NO_PARAMETERS: Mapping[str, Parameter] = {}


class InferenceResponse:
    """Output tensors, or an error."""

    __slots__ = ("_error", "_parameters", "_tensors")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        """Raise TypeError where something is of another type."""
        if not isinstance(output_tensors, (list, tuple)):
            raise TypeError(f"InferenceResponse: expected a list of tensors, got {type(output_tensors).__name__}")
        for tensor in output_tensors:
            if not isinstance(tensor, Tensor):
                raise TypeError(f"InferenceResponse: expected a list of tensors, one is a {type(tensor).__name__}")
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(f"InferenceResponse: expected the error as TritonError, got {type(error).__name__}")
        self._tensors = output_tensors
        self._error = error
        self._parameters = _NO_PARAMETERS if parameters is None else checked_parameters(parameters)

    def output_tensors(self) -> list[Tensor]:
        """Return the tensors."""
        return list(self._tensors)

    def has_error(self) -> bool:
        """Return whether it is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """Return the error, or None."""
        return self._error

    def parameters(self) -> str:
        """Return the parameters as a JSON object."""
        return json.dumps(self._parameters)

    def __repr__(self) -> str:
        return f"InferenceResponse({list(self._tensors)}, {self._error!r})"


def checked_parameters(parameters: Mapping[str, Any]) -> dict[str, Parameter]:
    """Return the parameters of a request or response. Raises TypeError for what none can be."""
    if not isinstance(parameters, Mapping):
        raise TypeError(f"parameters: expected a dict, got {type(parameters).__name__}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TypeError(f"parameters: expected names of type str, got {key!r}")
        if not isinstance(value, (str, int, float)):  # a bool is an int
            raise TypeError(f"parameter '{key}': expected bool, int, float or str, got {type(value).__name__}")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise TypeError(f"parameter '{key}': {value} has more than 64 bits")
    return dict(parameters)
