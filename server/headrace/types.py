"""What the gateways give to the data plane and get back: protocol-neutral, parsed once, then trusted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from headrace.access.caller import Caller
from headrace.observability.trace import Trace
from headrace_protocol.datatype import Buffer, DataType

if TYPE_CHECKING:  # which knows requests
    from headrace.observability.access_log import AccessEntry

Parameter = str | int | bool | float

SEQUENCE_START: Final = 1
SEQUENCE_END: Final = 2
LATEST: Final = -1
"""Model version meaning "the server chooses"."""
MAX_RANK: Final = 64
"""Dimensions of a tensor, at most: numpy's own limit."""


class RegionRef(NamedTuple):
    """A range of a registered shared-memory region, as a client names it: nothing of it is checked yet."""

    name: str
    offset: int
    """Bytes from the start of the region, >= 0."""
    nbytes: int
    """>= 0."""


class InputTensor:
    """A tensor of a request. `data` is its wire form, borrowed from the request's body until the answer."""

    __slots__ = ("data", "datatype", "name", "region", "shape")

    def __init__(
        self, name: str, datatype: DataType, shape: tuple[int, ...], data: Buffer, region: RegionRef | None = None
    ) -> None:
        self.name = name
        self.datatype = datatype
        self.shape = shape
        self.data = data
        """Empty where the bytes lie in `region`."""
        self.region = region


class RequestedOutput:
    """An output the client asked for, with how it wants it; `binary` concerns HTTP alone."""

    __slots__ = ("binary", "classification", "name", "parameters", "region")

    def __init__(
        self,
        name: str,
        binary: bool = False,
        classification: int = 0,
        parameters: dict[str, Parameter] | None = None,
        region: RegionRef | None = None,
    ) -> None:
        self.name = name
        self.region = region
        """Where its bytes are to be written; None = into the response."""
        self.binary = binary
        self.classification = classification
        """Top k classes instead of the tensor; 0 = the tensor."""
        self.parameters = parameters


class InferenceRequest:
    """One inference request. The gateway fills it; the data plane validates it against the model."""

    __slots__ = (
        "access",
        "caller",
        "correlation_id",
        "counts_tokens",
        "empty_final",
        "flags",
        "id",
        "inputs",
        "model_name",
        "model_version",
        "nested",
        "outputs",
        "parameters",
        "parent_trace",
        "priority",
        "raw_body",
        "received_ns",
        "sticky",
        "timeout_us",
        "trace",
        "trace_context",
    )

    def __init__(self, model_name: str, model_version: int = LATEST, received_ns: int = 0) -> None:
        self.model_name = model_name
        self.model_version = model_version
        self.received_ns = received_ns
        """Monotonic time at which the gateway saw the request: where its duration starts."""
        self.id = ""
        self.inputs: list[InputTensor] = []
        self.outputs: list[RequestedOutput] | None = None
        """None or empty = every output of the model."""
        self.parameters: dict[str, Parameter] | None = None
        """Parameters that no extension reserves; they reach the backend."""
        self.priority = 0
        self.timeout_us = 0
        self.correlation_id: int | str = 0
        self.sticky: str | bytes | None = None
        """What keeps a caller with a version of the model, as the header for that has it; None = it was not sent."""
        self.flags = 0
        self.empty_final = False
        """Whether a streaming client wants to be told of an end that comes without a response."""
        self.raw_body: Buffer | None = None
        """A raw binary request: the whole body is the model's one input, name and shape to be deduced."""
        self.trace_context: str | None = None
        """W3C traceparent, as received."""
        self.nested = False
        """Asked by a model, for a request that runs already: it is taken also while the server drains."""
        self.trace: Trace | None = None
        """Set by the data plane where the request is traced."""
        self.access: AccessEntry | None = None
        """What is written of it into the access log."""
        self.parent_trace: Trace | None = None
        """Of the request for which a model asks, where that is traced."""
        self.caller: Caller | None = None
        """Who asks, where callers are known; None = nobody is counted."""
        self.counts_tokens = False
        """Whether who sent it charges the caller for the tokens of a language model."""


class OutputTensor:
    """A tensor of a response. `data` is its wire form, valid until the response is released."""

    __slots__ = ("data", "datatype", "in_region", "name", "shape")

    def __init__(
        self, name: str, datatype: DataType, shape: tuple[int, ...], data: Buffer, in_region: bool = False
    ) -> None:
        self.name = name
        self.datatype = datatype
        self.shape = shape
        self.data = data
        self.in_region = in_region
        """Whether its bytes are in the client's shared memory: `data` is empty then."""


def _nothing() -> None:
    return


class InferenceResponse:
    """One response. Whoever receives it calls `release` once its bytes are used: they may lie in an arena.

    The responses of a stream count as unread until they are released; a model that is too far ahead has to wait.
    """

    __slots__ = ("_release", "empty", "final", "id", "model_name", "model_version", "outputs", "parameters", "trace")

    def __init__(
        self,
        model_name: str,
        model_version: int,
        outputs: list[OutputTensor],
        parameters: dict[str, Parameter] | None = None,
        release: Callable[[], None] = _nothing,
    ) -> None:
        self.model_name = model_name
        self.model_version = model_version
        self.id = ""
        self.outputs = outputs
        self.parameters = parameters
        self.final = True
        """Whether the request has no further response."""
        self.empty = False
        """Whether it only says that a decoupled model has come to its end: no outputs, and `final`."""
        self.trace: Trace | None = None
        """That of its request: whoever sends the response notes that down."""
        self._release = release

    def on_release(self, callback: Callable[[], None]) -> None:
        """Have `callback` called too once the response is released."""
        release = self._release

        def both() -> None:
            release()
            callback()

        self._release = both

    def release(self) -> None:
        """Give the memory of the outputs back. Idempotent; the tensors' data must not be read afterwards."""
        release, self._release = self._release, _nothing
        release()


class TensorMetadata(msgspec.Struct, frozen=True):
    """A tensor in a model's metadata: full shape, -1 for the batch dimension and every other that varies."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class ModelMetadata(msgspec.Struct, frozen=True):
    """What `GET /v2/models/{m}` tells."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


class ServerMetadata(msgspec.Struct, frozen=True):
    """What `GET /v2` tells."""

    name: str
    version: str
    extensions: tuple[str, ...]


class IndexEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the repository index. A model that was never loaded has a name alone."""

    name: str
    version: str = ""
    state: str = ""
    """READY, UNAVAILABLE, LOADING or UNLOADING."""
    reason: str = ""


class SystemRegion(msgspec.Struct, frozen=True):
    """A registered region of POSIX shared memory, as its status tells."""

    name: str
    key: str
    offset: int
    byte_size: int


class CudaRegion(msgspec.Struct, frozen=True):
    """A registered region of GPU memory, as its status tells."""

    name: str
    device_id: int
    byte_size: int
