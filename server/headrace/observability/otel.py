"""Traces as spans of OpenTelemetry, sent to a collector over OTLP/HTTP by the SDK's own batches.

Takes the same records that trace files are written of: a request of a client becomes `InferRequest` and, below it, a span
named after the model; one that is made for another (an ensemble's member, a call of a model) becomes a span below that
other's. Below the model's: `queue`, `batch` with `compute` in it, and of a language model `llm.queue`, `llm.prefill` and
`llm.decode`. Conversion has a thread of its own. Knows no settings but its own.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from headrace.observability import trace as names
from headrace.observability.otel_settings import OtelSettings
from headrace.observability.span_context import new_span_id
from headrace.observability.trace import TraceRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

_log: Final = logging.getLogger(__name__)

SCOPE: Final = "headrace"
MAX_HELD: Final = 8192
"""Traces that are under way or wait to be converted, at most."""
_EXPORT_S: Final = 10
"""Seconds that a collector gets to take a batch."""
_FLUSH_S: Final = 2
"""Seconds that a stop waits for the collector."""
_OF_THE_DOOR: Final = frozenset(
    (
        names.HTTP_RECV_START,
        names.HTTP_RECV_END,
        names.HTTP_SEND_START,
        names.HTTP_SEND_END,
        names.GRPC_WAITREAD_START,
        names.GRPC_WAITREAD_END,
        names.GRPC_SEND_START,
        names.GRPC_SEND_END,
        names.INFER_RESPONSE_COMPLETE,
    )
)
_OF_THE_MODEL: Final = frozenset((names.REQUEST_START, names.QUEUE_START, names.REQUEST_END))
_COMPUTE: Final = (names.COMPUTE_START, names.COMPUTE_INPUT_END, names.COMPUTE_OUTPUT_START, names.COMPUTE_END)


class OtelError(Exception):
    """Spans cannot be sent; the message is for the person who started the server."""


class SpanSink:
    """Implements tracing.TraceSink. `start` and `close` belong together; `put` may be called from any thread."""

    def __init__(self, settings: OtelSettings, exporter: Any = None) -> None:
        """Send by `exporter`; None = over OTLP."""
        self._settings: Final = settings
        self._exporter = exporter
        self._queue: queue.SimpleQueue[TraceRecord | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._processor: Any = None
        self._resource: Any = None
        self._admitted = 0
        self._done = 0
        self.lost = 0
        """Traces that could not be made spans of. What the collector does not take, the SDK logs."""

    def start(self) -> None:
        """Make ready to send. Raises OtelError where the packages for it are missing."""
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            if self._exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                self._exporter = OTLPSpanExporter(endpoint=self._settings.url, timeout=_EXPORT_S)
        except ImportError as error:
            raise OtelError(
                f"--trace-config mode=opentelemetry: {error.name} is missing: pip install 'headrace[otlp]'"
            ) from error
        given = {"service.name": SCOPE, **self._settings.resource}
        self._resource = Resource.create(given)
        settings = self._settings
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=settings.max_queue_size,
            schedule_delay_millis=settings.schedule_delay_ms,
            max_export_batch_size=settings.max_export_batch_size,
        )
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send what was put so far, and return when that is done, or takes too long."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
            flushing = threading.Thread(target=self._processor.force_flush, name="spans-flush", daemon=True)
            flushing.start()
            flushing.join(_FLUSH_S)
            self._exporter.shutdown()  # ends the tries at a collector that is not there
            self._processor.shutdown()

    def admit(self) -> bool:
        """Return whether one more trace may begin; `put` must follow."""
        if self._admitted - self._done >= MAX_HELD:
            return False
        self._admitted += 1
        return True

    def grant(self, nbytes: int) -> int:  # noqa: ARG002
        """Return 0: tensors do not go into spans."""
        return 0

    def put(self, record: TraceRecord) -> None:
        """Take a trace that has ended."""
        self._queue.put(record)

    def _run(self) -> None:
        while (record := self._queue.get()) is not None:
            try:
                offset = time.time_ns() - time.monotonic_ns()
                for span in spans(record, offset, self._resource):
                    self._processor.on_end(span)
            except Exception:
                self.lost += 1
                _log.exception("a trace could not be made spans of")
            finally:
                self._done += 1


def spans(record: TraceRecord, offset_ns: int, resource: Any) -> Iterator[ReadableSpan]:
    """Yield the spans of one request. `offset_ns` takes the times of a record to those of the wall."""
    maker = _Maker(record, offset_ns, resource)
    events = sorted(record.events, key=lambda event: event[1])
    if not events:
        return
    at = dict(reversed(events))  # the first of each name
    first, last = events[0][1], events[-1][1]
    model_parent = record.parent_span_id
    if record.parent_id == 0:
        root = new_span_id()
        model_parent = root
        door = [event for event in events if event[0] in _OF_THE_DOOR]
        yield maker.span("InferRequest", root, record.parent_span_id, first, last, door, server=True)
    start = at.get(names.REQUEST_START, first)
    end = max(at.get(names.REQUEST_END, last), start)
    own = [event for event in events if event[0] in _OF_THE_MODEL]
    yield maker.span(record.model, record.span_id, model_parent, start, end, own, maker.model_attributes())
    computed = at.get(names.COMPUTE_START)
    queued = at.get(names.QUEUE_START)
    if queued is not None:
        yield maker.span("queue", new_span_id(), record.span_id, queued, end if computed is None else computed)
    if computed is None:
        return
    batch = new_span_id()
    done = at.get(names.COMPUTE_END, end)
    rows, requests, number, returned = record.batch or (0, 0, 0, done)
    attributes = {"headrace.batch.rows": rows, "headrace.batch.requests": requests, "headrace.batch.number": number}
    yield maker.span("batch", batch, record.span_id, computed, max(returned, done), (), attributes if rows else {})
    steps = [(name, at[name]) for name in _COMPUTE if name in at]
    compute = new_span_id()
    yield maker.span("compute", compute, batch, computed, done, steps)
    yield from _generation(maker, record, compute, computed)


def _generation(maker: _Maker, record: TraceRecord, parent: int, start: int) -> Iterator[ReadableSpan]:
    told = record.generation
    if told is None:
        return
    parts: tuple[tuple[str, int, Mapping[str, Any]], ...] = (
        ("llm.queue", told.queue_ns, {}),
        ("llm.prefill", told.prefill_ns, {"gen_ai.usage.input_tokens": told.input_tokens}),
        ("llm.decode", told.decode_ns, {"gen_ai.usage.output_tokens": told.output_tokens}),
    )
    for name, duration, attributes in parts:
        yield maker.span(name, new_span_id(), parent, start, start + duration, (), attributes)
        start += duration


class _Maker:
    """Makes the spans of one record."""

    def __init__(self, record: TraceRecord, offset_ns: int, resource: Any) -> None:
        from opentelemetry import trace as api
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._api, self._event, self._readable = api, Event, ReadableSpan
        self._scope = InstrumentationScope(SCOPE)
        self._record = record
        self._offset = offset_ns
        self._resource = resource

    def span(
        self,
        name: str,
        span_id: int,
        parent_id: int,
        start: int,
        end: int,
        events: Any = (),
        attributes: Mapping[str, Any] | None = None,
        *,
        server: bool = False,
    ) -> ReadableSpan:
        """Return a span that has ended."""
        api, offset = self._api, self._offset
        failed = self._record.error
        status = (
            api.Status(api.StatusCode.ERROR, failed)
            if failed and name in ("InferRequest", self._record.model)
            else None
        )
        return self._readable(
            name=name,
            context=self._context(span_id, remote=False),
            parent=self._context(parent_id, remote=server) if parent_id else None,
            resource=self._resource,
            attributes=dict(attributes or {}),
            events=[self._event(event, timestamp=at + offset) for event, at in events],
            kind=api.SpanKind.SERVER if server else api.SpanKind.INTERNAL,
            status=status or api.Status(api.StatusCode.UNSET),
            start_time=start + offset,
            end_time=max(end, start) + offset,
            instrumentation_scope=self._scope,
        )

    def model_attributes(self) -> dict[str, Any]:
        """Return the attributes of the model's span: Triton's names, and those that OpenTelemetry has for generation."""
        record = self._record
        found: dict[str, Any] = {"triton.model_name": record.model, "triton.model_version": record.version}
        found["triton.trace_id"] = record.id
        if record.parent_id:
            found["triton.trace_parent_id"] = record.parent_id
        if record.request_id:
            found["triton.request_id"] = record.request_id
        if record.caller:
            found["enduser.id"] = record.caller
        told = record.generation
        if told is not None:
            found |= {
                "gen_ai.operation.name": told.operation,
                "gen_ai.provider.name": SCOPE,
                "gen_ai.request.model": told.asked_model,
                "gen_ai.response.model": record.model,
                "gen_ai.usage.input_tokens": told.input_tokens,
                "gen_ai.usage.output_tokens": told.output_tokens,
                "gen_ai.response.finish_reasons": list(told.finish_reasons),
                "headrace.cached_tokens": told.cached_tokens,
                "headrace.preemptions": told.preemptions,
            }
        return found

    def _context(self, span_id: int, *, remote: bool) -> Any:
        api = self._api
        flags = api.TraceFlags(api.TraceFlags.SAMPLED)
        return api.SpanContext(self._record.trace_id, span_id, remote, flags)
