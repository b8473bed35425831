"""The access log: a line for each inference request, when it is over. Knows no door and no format of lines."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from headrace.observability.span_context import parse_traceparent
from headrace.types import LATEST, InferenceRequest, InferenceResponse
from headrace_protocol.errors import InferError

_log: Final = logging.getLogger("headrace.access")
_NS_PER_MS: Final = 1e6
_LONGEST: Final = 256
"""Characters of what clients choose."""


class AccessLog:
    """Makes the entries of one server."""

    def __init__(self, now_ns: Callable[[], int], *, failures_only: bool = False) -> None:
        self.now_ns: Final = now_ns
        self.failures_only: Final = failures_only

    def entry(self, request: InferenceRequest) -> AccessEntry:
        """Return the entry of a request that is about to begin; `end` follows, once."""
        entry = AccessEntry(self, request)
        request.access = entry
        return entry


class AccessEntry:
    """What will be told of one request. Holds nothing of its tensors."""

    __slots__ = ("_fields", "_log", "_out", "_received_ns", "_responses")

    def __init__(self, log: AccessLog, request: InferenceRequest) -> None:
        self._log = log
        self._received_ns = request.received_ns
        self._out = self._responses = 0
        self._fields: dict[str, Any] = {"model": request.model_name[:_LONGEST]}
        if request.model_version != LATEST:
            self._fields["version"] = request.model_version
        if request.id:
            self._fields["request_id"] = request.id[:_LONGEST]
        context = parse_traceparent(request.trace_context)
        if context is not None:
            self._fields["trace_id"] = f"{context.trace_id:032x}"
        if request.caller is not None:
            self._fields["caller"] = request.caller.name
        if request.nested:
            self._fields["nested"] = True
        self._fields["bytes_in"] = sum(len(tensor.data) for tensor in request.inputs)

    def timed(self, queue_ns: int, compute_ns: int, rows: int) -> None:
        """Take how long it waited and its batch ran, and the rows of that batch."""
        self._fields |= {
            "queue_ms": round(queue_ns / _NS_PER_MS, 3),
            "compute_ms": round(compute_ns / _NS_PER_MS, 3),
            "batch_rows": rows,
        }

    def responded(self, response: InferenceResponse) -> None:
        """Take note of a response."""
        self._fields["version"] = response.model_version
        self._out += sum(len(output.data) for output in response.outputs)
        self._responses += not response.empty

    def end(self, outcome: InferenceResponse | BaseException | None) -> None:
        """Write the line; None where its client has gone."""
        if isinstance(outcome, InferenceResponse):
            self.responded(outcome)
            code, message = "OK", ""
        elif outcome is None:
            code, message = "CANCELLED", ""
        elif isinstance(outcome, InferError):
            code, message = outcome.code.value, outcome.message
            if outcome.detail is not None:
                code = outcome.detail.value.upper()
        else:
            code, message = "INTERNAL", type(outcome).__name__
        if code == "OK" and self._log.failures_only:
            return
        fields = self._fields | {"code": code, "bytes_out": self._out, "responses": self._responses}
        fields["total_ms"] = round((self._log.now_ns() - self._received_ns) / _NS_PER_MS, 3)
        if message:
            fields["error"] = message[:_LONGEST]
        _log.info("%s", _Line(fields), extra={"fields": fields})


class _Line:
    """Fields as a line for people, made only where one is written."""

    __slots__ = ("_fields",)

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def __str__(self) -> str:
        return " ".join(f"{name}={_shown(value)}" for name, value in self._fields.items())


def _shown(value: object) -> str:
    text = str(value)
    return repr(text) if isinstance(value, str) and (not text or any(c in text for c in " ='\"")) else text
