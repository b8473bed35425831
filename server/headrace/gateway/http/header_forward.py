"""Headers that become request parameters: which, by a pattern that the operator gives."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from headrace.types import InferenceRequest
from headrace_protocol.errors import invalid

_RESERVED: Final = frozenset(
    ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output")
)


def compile_pattern(pattern: str) -> re.Pattern[str] | None:
    """Return the compiled setting, None where it is empty. Raises re.error."""
    return re.compile(pattern, re.IGNORECASE) if pattern else None


def forward(request: InferenceRequest, headers: Iterable[tuple[str, str]], pattern: re.Pattern[str]) -> None:
    """Add every header whose name `pattern` finds to the request's parameters. Raises INVALID_ARG for reserved names."""
    for name, value in headers:
        if pattern.search(name):
            if name in _RESERVED or name.startswith("triton_"):
                raise invalid(f"header '{name}' matches the forward pattern, but is the name of a reserved parameter")
            if request.parameters is None:
                request.parameters = {}
            request.parameters[name] = value
