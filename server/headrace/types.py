"""What the gateways give to the data plane and get back: protocol-neutral, parsed once, then trusted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from headrace_protocol.datatype import Buffer, DataType

Parameter = str | int | bool | float

SEQUENCE_START: Final = 1
SEQUENCE_END: Final = 2
LATEST: Final = -1
"""Model version meaning "the server chooses"."""


class InputTensor:
    """A tensor of a request. `data` is its wire form, borrowed from the request's body until the answer."""

    __slots__ = ("data", "datatype", "name", "shape")

    def __init__(self, name: str, datatype: DataType, shape: tuple[int, ...], data: Buffer) -> None:
        self.name = name
        self.datatype = datatype
        self.shape = shape
        self.data = data


class RequestedOutput:
    """An output the client asked for, with how it wants it; `binary` concerns HTTP alone."""

    __slots__ = ("binary", "classification", "name", "parameters")

    def __init__(
        self,
        name: str,
        binary: bool = False,
        classification: int = 0,
        parameters: dict[str, Parameter] | None = None,
    ) -> None:
        self.name = name
        self.binary = binary
        self.classification = classification
        """Top k classes instead of the tensor; 0 = the tensor."""
        self.parameters = parameters


class InferenceRequest:
    """One inference request. The gateway fills it; the data plane validates it against the model."""

    __slots__ = (
        "correlation_id",
        "flags",
        "id",
        "inputs",
        "model_name",
        "model_version",
        "outputs",
        "parameters",
        "priority",
        "raw_body",
        "received_ns",
        "timeout_us",
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
        self.flags = 0
        self.raw_body: Buffer | None = None
        """A raw binary request: the whole body is the model's one input, name and shape to be deduced."""
        self.trace_context: str | None = None
        """W3C traceparent, as received."""


class OutputTensor:
    """A tensor of a response. `data` is its wire form, valid until the response is released."""

    __slots__ = ("data", "datatype", "name", "shape")

    def __init__(self, name: str, datatype: DataType, shape: tuple[int, ...], data: Buffer) -> None:
        self.name = name
        self.datatype = datatype
        self.shape = shape
        self.data = data


def _nothing() -> None:
    return


class InferenceResponse:
    """One response. Whoever receives it calls `release` once its bytes are used: they may lie in an arena."""

    __slots__ = ("_release", "final", "id", "model_name", "model_version", "outputs", "parameters")

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
        self._release = release

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
