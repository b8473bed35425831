"""Tracer: picks the requests that are traced, and shows and changes the settings by which it does.

Off, it costs a request one look at `active`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from headrace.clock import Clock, SystemClock
from headrace.observability.otel import SpanSink
from headrace.observability.span_context import SpanContext, new_span_id, new_trace_id, parse_traceparent
from headrace.observability.trace import (
    BACKEND_OUTPUT,
    QUEUE_INPUT,
    REQUEST_END,
    REQUEST_START,
    Trace,
    TraceRecord,
)
from headrace.observability.trace_file import TraceFile
from headrace.observability.trace_settings import MODE, OTEL_MODE, TraceBook, TraceValues, shown
from headrace.planes import Setting
from headrace.types import InferenceRequest, InferenceResponse
from headrace_protocol.errors import ErrorCode, InferError

_log = logging.getLogger(__name__)

Find = Callable[[str], object]
"""Looks a model up by its name; raises InferError where there is none."""


class TraceSink(Protocol):
    """Where traces go: a file, or a collector."""

    @property
    def lost(self) -> int:
        """Traces that did not get there."""
        ...

    def start(self) -> None: ...

    def close(self) -> None: ...

    def admit(self) -> bool:
        """Return whether one more trace may begin; `put` must follow."""
        ...

    def grant(self, nbytes: int) -> int: ...

    def put(self, record: TraceRecord) -> None: ...


class Tracer:
    """Implements planes.TraceSettings. Owns the trace file, from `start` to `close`; used from the event loop."""

    def __init__(self, values: TraceValues, path: str, find: Find, clock: Clock, spans: SpanSink | None = None) -> None:
        """`spans`: where traces go as spans of OpenTelemetry, in place of a file."""
        self._path = path
        self._find = find
        self._now_ns = clock.now_ns
        self._mode = MODE if spans is None else OTEL_MODE
        self._book = TraceBook(values, has_file=bool(path) or spans is not None, mode=self._mode)
        self._file: TraceSink = TraceFile(path) if spans is None else spans
        self.spans: Final = spans is not None
        """Whether traces are spans, which hang together with those of callers and of models that models call."""
        self.active = self._may_pick()
        """Whether any request may be picked."""
        self._closed = False
        self.picked = 0
        """Requests traced so far."""
        self.skipped = 0
        """Requests that were to be traced, where too many traces were waiting to be written."""

    @classmethod
    def off(cls) -> Tracer:
        """Return one that never traces anything."""
        return cls(TraceValues(), "", lambda name: name, SystemClock())

    @property
    def lost(self) -> int:
        """Traces that could not be written."""
        return self._file.lost

    def start(self) -> None:
        """Make ready to write."""
        if self._path or self.spans:
            self._file.start()

    def close(self) -> None:
        """Trace no further request; return when all traces that have ended are written."""
        self.active = False
        self._closed = True
        self._file.close()

    def _may_pick(self) -> bool:
        """Whether any request may be picked: by counting, or because its caller traces it."""
        return self._book.live or (self.spans and self._book.on)

    # --- settings -----------------------------------------------------------------------------------------------------

    def get(self, model: str) -> dict[str, Setting]:
        """Return the settings in force; see planes.TraceSettings."""
        if model:
            self._check(model)
        return shown(self._book.sampler(model), self._path, self._mode)

    def update(self, model: str, changes: Mapping[str, list[str] | None]) -> dict[str, Setting]:
        """Change settings, all or none, and return those in force; see planes.TraceSettings."""
        if model:
            self._check(model)
        self._forget_models()
        self._book.update(model, changes)
        self.active = self._may_pick()
        if changes:
            told = ", ".join(f"{name}={'none' if not texts else '+'.join(texts)}" for name, texts in changes.items())
            whose = f"of model '{model}' " if model else ""
            _log.info("trace settings %sare changed by a call: %s", whose, told)
        return self.get(model)

    def _check(self, model: str) -> None:
        """Raise where there is no such model. One that does not serve just now is known all the same."""
        try:
            self._find(model)
        except InferError as error:
            if error.code is not ErrorCode.UNAVAILABLE:
                raise

    def _forget_models(self) -> None:
        """Drop what is set for models that are there no more."""
        for model in self._book.models:
            try:
                self._check(model)
            except InferError:
                self._book.forget(model)

    # --- requests -----------------------------------------------------------------------------------------------------

    def pick(self, request: InferenceRequest, model: str, version: int) -> Trace | None:
        """Return the trace of a request that was accepted; None where it is not to be traced."""
        sampler = self._book.sampler(model)
        context: SpanContext | None = None
        if self.spans:
            if request.parent_trace is not None:
                return self.child(request.parent_trace, request, model, version)
            context = parse_traceparent(request.trace_context) if sampler.values.level else None
        if context is not None:
            if not context.sampled:
                return None
        elif not sampler.pick():
            return None
        if not sampler.remaining:
            self.active = self._may_pick()
        values, series = sampler.values, self._book.series(model)
        record = TraceRecord(0, model, version, request.id, series, values.log_frequency)
        if self.spans:
            record.trace_id = new_trace_id() if context is None else context.trace_id
            record.parent_span_id = 0 if context is None else context.span_id
        return self._begin(request, record, values.level)

    def child(self, parent: Trace, request: InferenceRequest, model: str, version: int) -> Trace | None:
        """Return the trace of a request that is made for another, as that one is traced, into the same file.

        None where too many traces are under way, or the server stops.
        """
        return (
            None if self._closed else self._begin(request, parent.record_of(model, version, request.id), parent.levels)
        )

    def _begin(self, request: InferenceRequest, record: TraceRecord, levels: Sequence[str]) -> Trace | None:
        if not self._file.admit():
            self.skipped += 1
            return None
        self.picked += 1
        record.id = self.picked
        if self.spans:
            record.span_id = new_span_id()
            record.caller = "" if request.caller is None else request.caller.name
        trace = Trace(record, levels, self._now_ns, self._file)
        trace.mark(REQUEST_START)
        for tensor in request.inputs:
            data = tensor.data if tensor.region is None else None
            trace.tensor(QUEUE_INPUT, tensor.name, tensor.datatype, tensor.shape, data)
        return trace


def trace_response(trace: Trace, response: InferenceResponse) -> None:
    """Note a response down. It holds the trace from here on."""
    trace.responded()
    for output in response.outputs:
        data = None if output.in_region else output.data
        trace.tensor(BACKEND_OUTPUT, output.name, output.datatype, output.shape, data)
    response.trace = trace


def trace_end(trace: Trace, outcome: InferenceResponse | InferError | None) -> None:
    """Note the end of a request down, with its last response; None where nobody waits for that any more."""
    if isinstance(outcome, InferenceResponse):
        trace_response(trace, outcome)
    elif outcome is not None:
        trace.failed(outcome.message)
    trace.mark(REQUEST_END)
