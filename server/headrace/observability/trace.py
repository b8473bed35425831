"""Trace: what happened to one request, as it is noted down on the way, and how that reads in a trace file.

A trace ends with the last reference to it: whoever still has something to note down holds it, by the request or its
response. Nobody has to say that it is over, so that none is lost where a client goes away.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np

from headrace_protocol import datatype as dt
from headrace_protocol.datatype import Buffer, DataType

REQUEST_START: Final = "REQUEST_START"
QUEUE_START: Final = "QUEUE_START"
COMPUTE_START: Final = "COMPUTE_START"
COMPUTE_INPUT_END: Final = "COMPUTE_INPUT_END"
COMPUTE_OUTPUT_START: Final = "COMPUTE_OUTPUT_START"
COMPUTE_END: Final = "COMPUTE_END"
INFER_RESPONSE_COMPLETE: Final = "INFER_RESPONSE_COMPLETE"
REQUEST_END: Final = "REQUEST_END"
HTTP_RECV_START: Final = "HTTP_RECV_START"
HTTP_RECV_END: Final = "HTTP_RECV_END"
HTTP_SEND_START: Final = "HTTP_SEND_START"
HTTP_SEND_END: Final = "HTTP_SEND_END"
GRPC_WAITREAD_START: Final = "GRPC_WAITREAD_START"
GRPC_WAITREAD_END: Final = "GRPC_WAITREAD_END"
GRPC_SEND_START: Final = "GRPC_SEND_START"
GRPC_SEND_END: Final = "GRPC_SEND_END"
QUEUE_INPUT: Final = "TENSOR_QUEUE_INPUT"
BACKEND_OUTPUT: Final = "TENSOR_BACKEND_OUTPUT"

MAX_EVENTS: Final = 512
"""Moments noted down of one request, after which responses are no longer: a stream may have any number of them."""
MAX_TENSORS: Final = 256
MAX_TENSOR_BYTES: Final = 1 << 20
"""Bytes of one tensor that are written."""
MAX_REQUEST_BYTES: Final = 8 << 20
"""Bytes of all tensors of one request that are written."""
LONGEST_ID: Final = 1024
"""Characters of a client's request id that are written."""
_STEP: Final = 512
"""Elements written at once: other threads get to run between two steps."""


class TensorNote(NamedTuple):
    """A tensor, copied: the memory it lay in is used again before it is written."""

    activity: str
    name: str
    datatype: DataType
    shape: tuple[int, ...]
    data: bytes
    whole: bool
    """Whether `data` is all of it."""


class GenerationNote(NamedTuple):
    """What came of a request to a language model."""

    operation: str
    """As OpenTelemetry calls it: chat, text_completion or embeddings."""
    asked_model: str
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reasons: tuple[str, ...]
    queue_ns: int = 0
    prefill_ns: int = 0
    decode_ns: int = 0
    preemptions: int = 0


class TraceRecord:
    """What is known of one request."""

    __slots__ = (
        "batch",
        "caller",
        "error",
        "events",
        "generation",
        "id",
        "log_frequency",
        "model",
        "nbytes",
        "parent_id",
        "parent_span_id",
        "request_id",
        "series",
        "span_id",
        "tensors",
        "trace_id",
        "version",
    )

    def __init__(
        self,
        number: int,
        model: str,
        version: int,
        request_id: str,
        series: str,
        log_frequency: int,
        parent_id: int = 0,
    ) -> None:
        self.id = number
        """From 1, unlike that of any other trace of this server."""
        self.parent_id = parent_id
        """Of the request for which this one was made; 0 = a client made it."""
        self.model = model
        self.version = version
        self.request_id = request_id[:LONGEST_ID]
        self.series = series
        """Under whose name it counts into files."""
        self.log_frequency = log_frequency
        self.events: list[tuple[str, int]] = []
        """Names and monotonic times in nanoseconds, in the order they were noted down."""
        self.tensors: list[TensorNote] = []
        self.nbytes = 0
        """Of the tensors' data."""
        self.trace_id = self.span_id = self.parent_span_id = 0
        """Of OpenTelemetry; 0 = none. The span is the model's."""
        self.batch: tuple[int, int, int, int] | None = None
        """Of the batch it was in: rows, requests, a number that its batchmates share, and when its answers came."""
        self.generation: GenerationNote | None = None
        self.caller = ""
        self.error = ""
        """What it failed with."""


class Sink(Protocol):
    """Where traces go."""

    def grant(self, nbytes: int) -> int:
        """Return how many of so many bytes may be copied for a trace."""
        ...

    def put(self, record: TraceRecord) -> None:
        """Take a trace that has ended, from any thread."""
        ...


class Trace:
    """Notes down what happens to a request. Held by it and its response; used from the event loop."""

    __slots__ = ("_now_ns", "_record", "_sending", "_sink", "_tensors", "_timestamps")

    def __init__(self, record: TraceRecord, levels: Sequence[str], now_ns: Callable[[], int], sink: Sink) -> None:
        self._record = record
        self._timestamps = "TIMESTAMPS" in levels
        self._tensors = "TENSORS" in levels
        self._now_ns = now_ns
        self._sink = sink
        self._sending = False

    @property
    def trace_id(self) -> int:
        """The id that its collector knows it by; 0 = traces do not go to one."""
        return self._record.trace_id

    @property
    def levels(self) -> tuple[str, ...]:
        """What is noted down."""
        return tuple(level for level, noted in (("TIMESTAMPS", self._timestamps), ("TENSORS", self._tensors)) if noted)

    def record_of(self, model: str, version: int, request_id: str) -> TraceRecord:
        """Return the record, without a number yet, of a request that is made for this one."""
        parent = self._record
        record = TraceRecord(0, model, version, request_id, parent.series, parent.log_frequency, parent.id)
        record.trace_id, record.parent_span_id = parent.trace_id, parent.span_id
        return record

    def __del__(self) -> None:
        self._sink.put(self._record)

    def mark(self, name: str, at_ns: int = 0) -> None:
        """Note a moment down: `at_ns` of the monotonic clock, 0 = now."""
        if self._timestamps:
            self._record.events.append((name, at_ns or self._now_ns()))

    def responded(self) -> None:
        """Note down that a response is there; of very many only the first ones."""
        if len(self._record.events) < MAX_EVENTS:
            self.mark(INFER_RESPONSE_COMPLETE)

    def sending(self, name: str) -> None:
        """Note down, under this name, that an answer begins to be sent: where it has several parts, the first time."""
        if not self._sending:
            self._sending = True
            self.mark(name)

    def computed(self, start_ns: int, input_ns: int, infer_ns: int, output_ns: int) -> None:
        """Note down when a batch with the request began to execute, and how long each part of that took."""
        inputs_ready_ns = start_ns + input_ns
        computed_ns = inputs_ready_ns + infer_ns
        self.mark(COMPUTE_START, start_ns)
        self.mark(COMPUTE_INPUT_END, inputs_ready_ns)
        self.mark(COMPUTE_OUTPUT_START, computed_ns)
        self.mark(COMPUTE_END, computed_ns + output_ns)

    def batched(self, rows: int, requests: int, number: int, answered_ns: int) -> None:
        """Note down the batch that it was in."""
        self._record.batch = (rows, requests, number, answered_ns)

    def generated(self, note: GenerationNote) -> None:
        """Note down what a language model made of it."""
        self._record.generation = note

    def failed(self, message: str) -> None:
        """Note down that it failed."""
        self._record.error = message[:LONGEST_ID]

    def tensor(self, activity: str, name: str, datatype: DataType, shape: tuple[int, ...], data: Buffer | None) -> None:
        """Copy a tensor, or its beginning where it is large. None: its bytes are in the client's memory, and stay there."""
        record = self._record
        if not self._tensors or len(record.tensors) >= MAX_TENSORS:
            return
        nbytes = len(data) if data is not None else 0
        granted = self._sink.grant(min(nbytes, MAX_TENSOR_BYTES, MAX_REQUEST_BYTES - record.nbytes))
        copy = bytes(memoryview(data)[:granted]) if data is not None else b""
        record.nbytes += granted
        record.tensors.append(TensorNote(activity, name, datatype, shape, copy, data is not None and granted == nbytes))


def lines(record: TraceRecord) -> Iterator[str]:
    """Yield the JSON objects of a trace: what it is of, its moments by time, its tensors."""
    head: dict[str, str | int] = {"id": record.id, "model_name": record.model, "model_version": record.version}
    if record.request_id:
        head["request_id"] = record.request_id
    if record.parent_id:
        head["parent_id"] = record.parent_id
    yield json.dumps(head)
    number = record.id
    for name, at_ns in sorted(record.events, key=lambda event: event[1]):
        yield f'{{"id": {number}, "timestamps": [{{"name": "{name}", "ns": {at_ns}}}]}}'
    for note in record.tensors:
        tensor: dict[str, str | bool] = {
            "name": note.name,
            "data": ",".join(_elements(note.datatype, note.data)),
            "shape": ",".join(map(str, note.shape)),
            "dtype": note.datatype.name,
        }
        if not note.whole:
            tensor["truncated"] = True
        yield json.dumps({"id": number, "activity": note.activity, "tensor": tensor})


def _elements(datatype: DataType, data: bytes) -> Iterator[str]:
    """Yield the elements that are whole in `data`."""
    if datatype is dt.BYTES:
        yield from _strings(data)
        return
    count = len(data) // datatype.itemsize
    values = np.frombuffer(data, dtype=np.uint8 if datatype is dt.BOOL else datatype.numpy, count=count)
    for start in range(0, count, _STEP):
        step = values[start : start + _STEP]
        if datatype is dt.BF16:
            step = dt.bf16_to_fp32(step.astype(np.uint16))
        # As numpy writes them: the fewest digits that tell a value from its neighbours in its own datatype.
        yield from step.astype(str).tolist()
        time.sleep(0)


def _strings(data: bytes) -> Iterator[str]:
    start = 0
    while start + 4 <= len(data):
        end = start + 4 + int.from_bytes(data[start : start + 4], "little")
        if end > len(data):
            return
        yield '"' + data[start + 4 : end].decode("utf-8", "backslashreplace") + '"'
        start = end
