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


def forward(request: InferenceRequest, headers: Iterable[tuple[bytes, bytes]], pattern: re.Pattern[str]) -> None:
    """Add every header whose name `pattern` finds to the request's parameters. Raises INVALID_ARG for reserved names."""
    for raw_name, raw_value in headers:
        name = raw_name.decode("latin-1")
        if pattern.search(name):
            if name in _RESERVED or name.startswith("triton_"):
                raise invalid(f"header '{name}' matches the forward pattern, but is the name of a reserved parameter")
            if request.parameters is None:
                request.parameters = {}
            request.parameters[name] = _text(raw_value)


def _text(value: bytes) -> str:
    """Return a header's value: UTF-8 where it is that, otherwise ISO 8859-1, which every value can be."""
    try:
        return value.decode().strip()
    except UnicodeDecodeError:
        return value.decode("latin-1").strip()
