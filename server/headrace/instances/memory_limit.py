"""How much private memory a model's processes may take: what its configuration says, and never more than the server allows."""

from __future__ import annotations

from typing import Final

from headrace_protocol._generated import model_config_pb2 as pb
from headrace_protocol.errors import invalid

PARAMETER: Final = "memory_limit_bytes"
SMALLEST: Final = 1 << 20


def memory_limit(proto: pb.ModelConfig, of_server: int) -> int:
    """Return the bytes that each process of a model may take; 0 = as much as there is.

    `of_server` is --backend-memory-limit, 0 = none. Raises INVALID_ARG where the parameter is no number of bytes.
    """
    if PARAMETER not in proto.parameters:
        return of_server
    text = proto.parameters[PARAMETER].string_value
    if not (text.isascii() and text.isdecimal() and len(text) < 19 and int(text) >= SMALLEST):
        raise invalid(f"parameters.{PARAMETER}: expected a number of bytes >= {SMALLEST}, got {text!r}")
    return min(int(text), of_server or int(text))
