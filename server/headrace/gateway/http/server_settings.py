"""The bodies of the trace and log settings. Pure: bytes to changes of the right JSON kinds.

What a setting may be is the control plane's to say, for both doors alike.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from headrace.gateway.http.bodies import decode_body
from headrace.gateway.http.json_text import describe
from headrace.gateway.http.request import Body
from headrace.planes import LogValue
from headrace_protocol.errors import invalid

_LEVEL: Final = "trace_level"
_decoder: Final = msgspec.json.Decoder(dict[str, Any])


def decode_trace(body: Body) -> dict[str, list[str] | None]:
    """Return the trace settings to change; None takes one back to what it was without the change.

    trace_level is an array of strings, every other setting a string.
    """
    changes: dict[str, list[str] | None] = {}
    for key, value in _members(body, "the trace settings").items():
        if value is None:
            changes[key] = None
        elif key == _LEVEL:
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise invalid(f"trace setting '{key}': expected an array of strings, got {describe(value)}")
            changes[key] = value
        elif isinstance(value, str):
            changes[key] = [value]
        else:
            raise invalid(f"trace setting '{key[:80]}': expected a string, got {describe(value)}")
    return changes


def decode_log(body: Body) -> dict[str, LogValue]:
    """Return the log settings to change; those that are null are not."""
    changes: dict[str, LogValue] = {}
    for key, value in _members(body, "the log settings").items():
        if value is None:
            continue
        if not isinstance(value, str | bool | int):
            raise invalid(
                f"log setting '{key[:80]}': expected a string, true, false or an integer, got {describe(value)}"
            )
        changes[key] = value
    return changes


def _members(body: Body, what: str) -> dict[str, Any]:
    return decode_body(_decoder, body, what) if body else {}
