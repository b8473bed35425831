"""The closed set of messages between the server and a backend process.

Server to backend: Initialize, Execute, Cancel, Flow, AttachRegion, DetachRegion, Finalize, Ping. Backend to server:
Ready, Responses, BatchDone, Pong, Log. Anything else closes the channel. Tensors are never in a message: they lie in the arena, or in a descriptor that
travels with the frame. PROTOCOL is raised whenever a field changes its meaning.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace_protocol.tensor import Tensor, TensorRef, TensorSpec

PROTOCOL = 2

Parameter = str | int | bool | float


class Error(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A failure: `code` is an ErrorCode name."""

    code: str
    message: str


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


class DetachRegion(msgspec.Struct, array_like=True, tag=8, frozen=True, gc=False):
    """No Execute will name region `number` again, and none that did still runs."""

    number: int


class Finalize(msgspec.Struct, array_like=True, tag=4, frozen=True, gc=False):
    """Finish what runs, free the model and exit."""


class Ping(msgspec.Struct, array_like=True, tag=5, frozen=True, gc=False):
    """Are you there? Answered by Pong, also while a batch runs."""

    nonce: int


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


class Responses(msgspec.Struct, array_like=True, tag=11, frozen=True):
    """As many responses as one step made.

    `batched` outputs hold the rows of every request of the batch that has no entry in `responses`, in order of the
    batch and including the rows of those that have (whose rows are ignored).
    """

    batch: int
    batched: tuple[Tensor, ...] | None = None
    responses: tuple[Response, ...] = ()


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
    """The answer to Ping."""

    nonce: int


class Log(msgspec.Struct, array_like=True, tag=14, frozen=True, gc=False):
    """A line for the server's log; `level` is a name of the logging module."""

    level: str
    text: str


ToBackend = Initialize | Execute | Cancel | Flow | AttachRegion | DetachRegion | Finalize | Ping
ToServer = Ready | Responses | BatchDone | Pong | Log
