"""How the identity backend reads numbers and switches among parameters, those of a configuration or of a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from headrace_protocol.errors import invalid
from headrace_protocol.messages import Parameter

FOREVER_S: Final = 1e6


def asked(parameters: Mapping[str, Parameter], name: str) -> bool:
    """Return whether `name` is given, and is not "false" or False."""
    return parameters.get(name, False) not in (False, "false")


def number(parameters: Mapping[str, Parameter], name: str, default: float = 0) -> float:
    """Return the parameter as a number >= 0. Raises INVALID_ARG."""
    try:
        value = float(parameters.get(name, default))
    except ValueError:
        value = -1.0
    if not 0 <= value < FOREVER_S:
        raise invalid(f"parameter '{name}': expected a number >= 0, got {parameters[name]!r}")
    return value
