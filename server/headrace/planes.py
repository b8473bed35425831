"""What the gateways may ask of the server, whatever its door: the data plane and the control plane, as protocols.

Every method raises InferError with the code of the protocol's table. A version is an integer, or LATEST where the
caller named none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from headrace.types import IndexEntry, InferenceRequest, InferenceResponse, ModelMetadata, ServerMetadata
from headrace_protocol._generated import grpc_service_pb2, model_config_pb2
from headrace_protocol.errors import InferError

Outcome = InferenceResponse | InferError


class Cancellable(Protocol):
    """A request under way."""

    def cancel(self) -> None:
        """Tell that nobody waits any more: it leaves the queue, or its backend is told. Idempotent."""
        ...


class DataPlane(Protocol):
    """Health, metadata, statistics, inference."""

    def live(self) -> bool:
        """Return whether the process works (it does, until it is told to stop)."""
        ...

    def exiting(self) -> bool:
        """Return whether the server was told to stop: health then answers UNAVAILABLE / 503."""
        ...

    def ready(self) -> bool:
        """Return whether a request would be served now, every model that should be loaded included (strict)."""
        ...

    def model_ready(self, name: str, version: int) -> bool:
        """Return whether this model would serve now; raises NOT_FOUND for an unknown model or version."""
        ...

    def server_metadata(self) -> ServerMetadata: ...

    def model_metadata(self, name: str, version: int) -> ModelMetadata: ...

    def model_config(self, name: str, version: int) -> model_config_pb2.ModelConfig: ...

    def statistics(self, name: str, version: int) -> grpc_service_pb2.ModelStatisticsResponse:
        """Return the statistics of a model's version, of all its versions (LATEST), or of all models (name "")."""
        ...

    def submit(self, request: InferenceRequest, done: Callable[[Outcome], None]) -> Cancellable:
        """Begin one request: `done` is called once, on the loop, with its response or error, unless it is cancelled.

        It is not called before this returns. Raises InferError where the request cannot even be queued. Whoever gets a
        response releases it.
        """
        ...

    async def infer(self, request: InferenceRequest) -> InferenceResponse:
        """Answer one request. The caller releases the response. Cancelling the awaiting task cancels the request."""
        ...


LoadParameters = dict[str, str | bytes | int | bool]


class ControlPlane(Protocol):
    """The repository API."""

    def index(self, *, ready_only: bool) -> list[IndexEntry]: ...

    async def load(self, name: str, parameters: LoadParameters) -> None:
        """Load or reload a model and return once it serves.

        Parameters: "config" (a configuration as JSON text), "file:<path>" (content, bytes).
        """
        ...

    async def unload(self, name: str, *, unload_dependents: bool) -> None: ...
