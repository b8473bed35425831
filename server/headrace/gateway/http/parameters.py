"""The parameters of a request in JSON: those that the protocol gives a meaning, and those that go to the backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from headrace.gateway.http.json_text import describe
from headrace.types import SEQUENCE_END, SEQUENCE_START, InferenceRequest, Parameter
from headrace_protocol.errors import invalid

_MAX_UINT64: Final = 2**64 - 1
_MIN_INT64: Final = -(2**63)
_MAX_CORRELATION_TEXT: Final = 128


def take_parameters(request: InferenceRequest, parameters: Mapping[str, Any]) -> bool:
    """Sort the request's parameters into its fields; return `binary_data_output`."""
    binary = False
    custom: dict[str, Parameter] = {}
    for key, value in parameters.items():
        match key:
            case "binary_data_output":
                binary = _boolean(key, value)
            case "priority":
                request.priority = _unsigned(key, value)
            case "timeout":
                request.timeout_us = _unsigned(key, value)
            case "sequence_id":
                request.correlation_id = _correlation_id(value)
            case "sequence_start":
                request.flags |= SEQUENCE_START if _boolean(key, value) else 0
            case "sequence_end":
                request.flags |= SEQUENCE_END if _boolean(key, value) else 0
            case "headers":
                pass  # reserved: a client library's own bag, never the model's
            case _:
                if key.startswith("triton_"):
                    raise invalid(f"parameters: '{key}': names that begin with 'triton_' are reserved")
                custom[key] = scalar(f"parameters: '{key}'", value)
    if custom:
        request.parameters = custom
    return binary


def _boolean(key: str, value: Any) -> bool:
    if value is True or value is False:
        return bool(value)
    raise invalid(f"parameters: '{key}': expected true or false, got {describe(value)}")


def _unsigned(key: str, value: Any) -> int:
    if type(value) is int and 0 <= value <= _MAX_UINT64:
        return value
    raise invalid(f"parameters: '{key}': expected an integer between 0 and {_MAX_UINT64}, got {describe(value)}")


def _correlation_id(value: Any) -> int | str:
    if type(value) is str:
        if len(value) > _MAX_CORRELATION_TEXT:
            raise invalid(
                f"parameters: 'sequence_id': a string of {len(value)} characters, at most {_MAX_CORRELATION_TEXT} allowed"
            )
        return value or 0
    if type(value) is int and 0 <= value <= _MAX_UINT64:
        return value
    raise invalid(
        f"parameters: 'sequence_id': expected a string or an integer between 0 and {_MAX_UINT64}, got {describe(value)}"
    )


def scalar(where: str, value: Any) -> Parameter:
    """Return a parameter for the backend: a string, boolean, 64-bit integer or finite number."""
    kind = type(value)
    if kind is str or kind is bool or kind is float:
        return value  # type: ignore[no-any-return]
    if kind is int and _MIN_INT64 <= value <= _MAX_UINT64:
        return value  # type: ignore[no-any-return]
    raise invalid(f"{where}: expected a string, a boolean, a number or a 64-bit integer, got {describe(value)}")
