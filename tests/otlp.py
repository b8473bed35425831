"""A collector: takes spans over OTLP/HTTP, as a real one does, and waits for those that a test wants to see."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass
class Span:
    name: str
    trace: str
    id: str
    parent: str
    start: int
    end: int
    kind: int
    error: str
    attributes: dict[str, Any]
    events: list[str]
    resource: dict[str, Any]
    children: list[Span] = field(default_factory=list)

    def path(self) -> tuple[str, ...]:
        """Its name, and those below it, depth first, by start."""
        below = sorted(self.children, key=lambda span: (span.start, span.name))
        return (self.name, *(name for child in below for name in child.path()))

    def child(self, name: str) -> Span:
        (found,) = [span for span in self.children if span.name == name]
        return found


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def _attributes(found: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in found}


class Collector:
    """Use as a context; `url` is what the server is told."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._changed = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.take(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def take(self, request: ExportTraceServiceRequest) -> None:
        with self._changed:
            for of_resource in request.resource_spans:
                resource = _attributes(of_resource.resource.attributes)
                for scope in of_resource.scope_spans:
                    self.spans += [
                        Span(
                            span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(),
                            span.start_time_unix_nano, span.end_time_unix_nano, span.kind, span.status.message,
                            _attributes(span.attributes), [event.name for event in span.events], resource,
                        )
                        for span in scope.spans
                    ]  # fmt: skip
            self._changed.notify_all()

    def wait(self, ready: Callable[[list[Span]], bool], timeout: float = 20) -> None:
        with self._changed:
            done = self._changed.wait_for(lambda: ready(self.spans), timeout)
        assert done, [(span.name, span.trace) for span in self.spans]

    def tree(self, trace: str, count: int) -> Span:
        """Wait for `count` spans of a trace; return the one root that they hang on, each below its parent."""
        self.wait(lambda spans: sum(span.trace == trace for span in spans) >= count)
        mine = [span for span in self.spans if span.trace == trace]
        by_id = {span.id: span for span in mine}
        assert len(by_id) == len(mine)
        roots = []
        for span in mine:
            span.children = [child for child in mine if child.parent == span.id]
            if span.parent not in by_id:
                roots.append(span)
        assert len(roots) == 1, [root.name for root in roots]
        return roots[0]
