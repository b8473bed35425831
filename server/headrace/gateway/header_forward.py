"""Headers that mean something for a model's requests: those that become parameters, by a pattern that the operator gives.

The same rules at both doors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from headrace_protocol.errors import invalid

if TYPE_CHECKING:  # the table of options takes the pattern from here, and help is to be told at once: no numpy
    from headrace.types import InferenceRequest

_RESERVED: Final = frozenset(
    ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output")
)
STICKY_HEADER: Final = "x-headrace-sticky"
"""By whose value callers stay with a version of a model, unless the operator chose another."""
MINDING_CASE: Final = "(?-i)"
"""What RE2 takes at the beginning of a pattern and Python's `re` does not."""
_MOST: Final = 128
"""Headers forwarded of one request; HTTP takes no more in all."""


def compile_pattern(pattern: str) -> re.Pattern[str] | None:
    """Return the compiled setting, None where it is empty; case counts where it begins with `(?-i)`. Raises re.error."""
    if not pattern:
        return None
    minding_case = pattern.removeprefix(MINDING_CASE)
    return re.compile(minding_case) if minding_case != pattern else re.compile(pattern, re.IGNORECASE)


def forward(
    request: InferenceRequest, headers: Iterable[tuple[bytes | str, bytes | str]], pattern: re.Pattern[str]
) -> None:
    """Add every header whose name `pattern` finds to the request's parameters; one of the same name is replaced.

    Raises INVALID_ARG for reserved names and for too many.
    """
    forwarded = 0
    for raw_name, raw_value in headers:
        name = raw_name if isinstance(raw_name, str) else raw_name.decode("latin-1")
        if pattern.search(name):
            if name in _RESERVED or name.startswith("triton_"):
                raise invalid(f"header '{name}' matches the forward pattern, but is the name of a reserved parameter")
            forwarded += 1
            if forwarded > _MOST:
                raise invalid(f"more than {_MOST} headers match the forward pattern, of which the last is '{name}'")
            if request.parameters is None:
                request.parameters = {}
            request.parameters[name] = raw_value if isinstance(raw_value, str) else _text(raw_value)


def _text(value: bytes) -> str:
    """Return a header's value: UTF-8 where it is that, otherwise ISO 8859-1, which every value can be."""
    try:
        return value.decode().strip()
    except UnicodeDecodeError:
        return value.decode("latin-1").strip()
