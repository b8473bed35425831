"""The closed set of messages between the server and a backend process.

Server to backend: Initialize, Execute, Cancel, Flow, AttachRegion, DetachRegion, EndSequences, Finalize, Ping, TellMetrics,
and the answers CallResponse and ControlResult. Backend to server: Ready, Responses, BatchDone, Pong, Log, and what it asks for: Call,
CancelCall, CallRead, Control, DefineFamily, MetricValues. Anything else closes the channel. Large tensors are never in a
message: they lie in the arena, or in a descriptor that travels with the frame. PROTOCOL is raised whenever the set or the
meaning of a field changes.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from headrace_protocol.errors import ErrorCode, ErrorDetail, FailureReason, InferError
from headrace_protocol.tensor import Tensor, TensorRef, TensorSpec

PROTOCOL = 4

MAX_CALLS = 1024
"""Calls to models that a process may have under way."""
MAX_CONTROLS = 16
"""Controls and DefineFamilies of a process that are not answered yet."""
MAX_FAMILIES = 256
"""Families of metrics that a process may define."""
MAX_SERIES = 4096
"""Metrics that a process may have, over all its families."""

_DETAILS: Final = {detail.value: detail for detail in ErrorDetail}

Parameter = str | int | bool | float


class Error(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A failure: `code` is an ErrorCode name, `detail` an ErrorDetail value or empty, `param` the field that is wrong."""

    code: str
    message: str
    detail: str = ""
    param: str = ""


def error_message(error: InferError) -> Error:
    """Return the error as it crosses the boundary."""
    return Error(error.code.value, error.message, "" if error.detail is None else error.detail.value, error.param or "")


def infer_error(error: Error, reason: FailureReason = FailureReason.OTHER) -> InferError:
    """Return the error that crossed the boundary; a code or detail that is not known becomes INTERNAL, or none."""
    return InferError(
        ErrorCode.__members__.get(error.code, ErrorCode.INTERNAL),
        error.message,
        reason,
        detail=_DETAILS.get(error.detail),
        param=error.param or None,
    )


class Initialize(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """Load the model. Answered by one Ready. The arena's descriptor travels with this frame."""

    protocol: int
    backend: str
    model_name: str
    version: int
    model_directory: str
    """The model's directory: what `$$TRITON_MODEL_DIRECTORY` stands for."""
    version_directory: str
    config: dict[str, Any]
    """The model's configuration as JSON-ready values (proto field names, enums as names)."""
    backend_config: dict[str, str]
    """--backend-config settings of this backend."""
    instances: tuple[str, ...]
    """Instance names; one slot each."""
    kind: str
    """KIND_CPU, KIND_GPU or KIND_MODEL."""
    device: int
    """GPU number for KIND_GPU, else 0."""
    auto_complete: bool
    sharing: int = 0
    """How many instances share the cores, those of other processes included; 0 = those of this one."""
    memory_limit: int = 0
    """Bytes of private memory that the process may take; 0 = as much as there is."""


class RequestHeader(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One request of a batch: `rows` of the batch dimension are its own (1 where the model does not batch)."""

    rows: int
    id: str = ""
    parameters: dict[str, Parameter] | None = None
    correlation_id: int | str = 0
    flags: int = 0
    """1 = sequence start, 2 = sequence end."""
    timeout_us: int = 0
    outputs: tuple[str, ...] | None = None
    """Names the client asked for; None = all."""
    regions: tuple[tuple[str, TensorRef], ...] = ()
    """Outputs, by name, whose bytes go into a client's shared memory; only in a batch of one request."""
    sequence: int = 0
    """The sequence that it is a part of, by a number that is never used again in this process; 0 = none."""
    slot: int = 0
    """The sequence's place in its instance; of a direct strategy also the row of the batch."""


class Execute(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """Run one batch in one slot. Inputs hold the rows of all requests in order."""

    batch: int
    instance: int
    """Which instance (slot) of this process runs it."""
    inputs: tuple[Tensor, ...]
    requests: tuple[RequestHeader, ...]
    outputs: tuple[str, ...] | None
    """Output names that some request of the batch wants; None = all."""
    space: TensorRef
    """Where outputs go. What does not fit travels back in a descriptor of the backend's own."""


class Cancel(msgspec.Struct, array_like=True, tag=3, frozen=True, gc=False):
    """Nobody waits for request `request` (index into Execute.requests) of `batch` any more; -1 = the whole batch."""

    batch: int
    request: int


class Flow(msgspec.Struct, array_like=True, tag=6, frozen=True, gc=False):
    """The client of request `request` of `batch` reads too slowly (`paused`), or has caught up: send no more, go on."""

    batch: int
    request: int
    paused: bool


class AttachRegion(msgspec.Struct, array_like=True, tag=7, frozen=True, gc=False):
    """A client's shared memory, which later Executes name by `number`.

    System memory: the descriptor of the whole object travels with this frame, one for each AttachRegion of it, in
    order. CUDA memory: `cuda_handle` is the 64 bytes of a cudaIpcMemHandle_t, and no descriptor comes.
    """

    number: int
    offset: int
    """Where the region begins in the object, bytes; any value, not only whole pages."""
    nbytes: int
    cuda_handle: bytes = b""
    device: int = 0
    readonly: bool = False
    """The descriptor only reads: it is the arena of another backend process, where inputs of an ensemble's step lie."""


class DetachRegion(msgspec.Struct, array_like=True, tag=8, frozen=True, gc=False):
    """No Execute will name region `number` again, and none that did still runs."""

    number: int


class EndSequences(msgspec.Struct, array_like=True, tag=9, frozen=True, gc=False):
    """These sequences, by RequestHeader.sequence, get no further request, though none of theirs had the end flag."""

    sequences: tuple[int, ...]


class Finalize(msgspec.Struct, array_like=True, tag=4, frozen=True, gc=False):
    """Finish what runs, free the model and exit."""


class Ping(msgspec.Struct, array_like=True, tag=5, frozen=True, gc=False):
    """Are you there? Answered by Pong, also while a batch runs."""

    nonce: int


class CallResponse(msgspec.Struct, array_like=True, tag=30, frozen=True):
    """One response to a Call. Outputs are INLINE or in the frame's descriptor. The call is over where it is `final`."""

    number: int
    outputs: tuple[Tensor, ...] = ()
    error: Error | None = None
    """Always `final`."""
    parameters: dict[str, Parameter] | None = None
    final: bool = True
    empty: bool = False
    """Says nothing but that the call has come to its end."""


class ControlResult(msgspec.Struct, array_like=True, tag=31, frozen=True, gc=False):
    """The answer to a Control or a DefineFamily."""

    number: int
    error: Error | None = None
    value: float = 0.0
    """Of READY, 1 or 0; of READ_METRIC, the metric's value."""


class TellMetrics(msgspec.Struct, array_like=True, tag=32, frozen=True, gc=False):
    """What has changed in your metrics? Answered by MetricValues."""

    number: int


class Ready(msgspec.Struct, array_like=True, tag=10, frozen=True):
    """The answer to Initialize: either `error`, or what was found in the model."""

    error: Error | None = None
    inputs: tuple[TensorSpec, ...] = ()
    """As the model file declares them, full shape (batch dimension included where the model has one)."""
    outputs: tuple[TensorSpec, ...] = ()
    batching: bool | None = None
    """Whether the model can batch along its first dimension; None = the file does not say."""
    config: dict[str, Any] | None = None
    """Configuration fields that the backend adds where the user gave none (JSON-ready)."""
    concurrency: int = 1
    """How many executions it takes at once (its slots)."""
    replaces: bool = False
    """Whether the fields of `config` stand for what the user gave, which the backend has seen and kept to."""


class Response(msgspec.Struct, array_like=True, frozen=True):
    """One response for request `request` (index into Execute.requests)."""

    request: int
    outputs: tuple[Tensor, ...] = ()
    error: Error | None = None
    parameters: dict[str, Parameter] | None = None
    final: bool = True
    """False only from a decoupled model."""
    empty: bool = False
    """Says nothing but that the request has come to its end; `final`, and only from a decoupled model."""
    reschedule: bool = False
    """No response, but the wish to be given the request once more; `final` as far as this batch goes."""


class Responses(msgspec.Struct, array_like=True, tag=11, frozen=True):
    """As many responses as one step made.

    `batched` outputs hold the rows of every request of the batch that has no entry in `responses`, in order of the
    batch and including the rows of those that have (whose rows are ignored).
    """

    batch: int
    batched: tuple[Tensor, ...] | None = None
    responses: tuple[Response, ...] = ()
    states: tuple[tuple[int, int], ...] = ()
    """(request, key): sequences whose states have equal shapes have equal keys. Only where those shapes vary."""


class BatchDone(msgspec.Struct, array_like=True, tag=12, frozen=True, gc=False):
    """The slot is free. Durations in nanoseconds.

    Every slice borrowed for `batch` is given back, unless requests of a decoupled model are still open: then it is with
    the last final response.
    """

    batch: int
    compute_input_ns: int
    compute_infer_ns: int
    compute_output_ns: int


class Pong(msgspec.Struct, array_like=True, tag=13, frozen=True, gc=False):
    """The answer to Ping. Sent again, for the last Ping, when `ready` has changed."""

    nonce: int
    ready: bool = True
    """Whether the model says that it can serve."""


class Log(msgspec.Struct, array_like=True, tag=14, frozen=True, gc=False):
    """A line for the server's log; `level` is a name of the logging module."""

    level: str
    text: str


class Call(msgspec.Struct, array_like=True, tag=20, frozen=True):
    """Run a request on another model of this server. Answered by CallResponses, the last of them `final`.

    Inputs are INLINE or in the frame's descriptor, a memfd sealed against shrinking.
    """

    number: int
    """The process's own name for it; not that of a call which is under way."""
    model: str
    version: int
    """-1 = the server chooses."""
    inputs: tuple[Tensor, ...]
    batch: int = 0
    """The batch that waits for it in `execute`; 0 = none that is known."""
    decoupled: bool = False
    """Whether any number of responses will do; if not, a decoupled model refuses."""
    outputs: tuple[str, ...] | None = None
    """Names of the outputs that are wanted; None = all."""
    id: str = ""
    parameters: dict[str, Parameter] | None = None
    correlation_id: int | str = 0
    flags: int = 0
    """As in RequestHeader."""
    timeout_us: int = 0
    priority: int = 0


class CancelCall(msgspec.Struct, array_like=True, tag=21, frozen=True, gc=False):
    """Nobody waits for the call any more, if it is not over; no response that comes still is read."""

    number: int


class CallRead(msgspec.Struct, array_like=True, tag=22, frozen=True, gc=False):
    """So many more responses to a decoupled call were read: the model may send as many more."""

    number: int
    responses: int


LOAD: Final = "load"
UNLOAD: Final = "unload"
READY: Final = "ready"
READ_METRIC: Final = "metric"


class Control(msgspec.Struct, array_like=True, tag=23, frozen=True):
    """Load, unload or ask after a model, or read a metric. Answered by one ControlResult."""

    number: int
    """As of Call, but counted apart."""
    action: Literal["load", "unload", "ready", "metric"]
    model: str = ""
    version: int = -1
    config: str = ""
    """Of LOAD: the configuration as JSON text, "" = that of the repository."""
    files: tuple[tuple[str, TensorRef], ...] = ()
    """Of LOAD: paths in the model's directory and where their contents lie in the frame's descriptor."""
    unload_dependents: bool = False
    series: int = 0
    """Of READ_METRIC: a number out of MetricSeries."""


class DefineFamily(msgspec.Struct, array_like=True, tag=24, frozen=True, gc=False):
    """Make a family of metrics, or share one of the same name and kind. Answered by one ControlResult.

    `number` is counted with those of Control, and names the family in MetricSeries.
    """

    number: int
    name: str
    description: str
    kind: Literal["counter", "gauge", "histogram"]


class MetricSeries(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One metric of a family."""

    number: int
    """The process's own name for it."""
    family: int
    labels: tuple[tuple[str, str], ...]
    """In any order; none twice."""
    buckets: tuple[float, ...] = ()
    """Of a histogram: upper bounds, ascending, without the infinite one."""


class MetricValue(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What was done to a metric since it was told last."""

    series: int
    change: float = 0.0
    """What was added to a counter or a gauge, or to the sum of a histogram."""
    base: float | None = None
    """Of a gauge: what it was set to before `change` was added; None = it was not set."""
    counts: tuple[int, ...] = ()
    """Of a histogram: values that fell into each bucket and into none."""


class MetricValues(msgspec.Struct, array_like=True, tag=25, frozen=True, gc=False):
    """New metrics, then changes of values."""

    series: tuple[MetricSeries, ...] = ()
    values: tuple[MetricValue, ...] = ()
    answers: int = 0
    """The number of the TellMetrics that asked for it; 0 = none."""


ToBackend = (
    Initialize
    | Execute
    | Cancel
    | Flow
    | AttachRegion
    | DetachRegion
    | EndSequences
    | Finalize
    | Ping
    | CallResponse
    | ControlResult
    | TellMetrics
)
Service = Call | CancelCall | CallRead | Control | DefineFamily | MetricValues
"""What a backend asks of the server."""
ToServer = Ready | Responses | BatchDone | Pong | Log | Service
