"""What the gateways may ask of the server, whatever its door: the data plane and the control plane, as protocols.

Every method raises InferError with the code of the protocol's table. A version is an integer, or LATEST where the
caller named none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from headrace.types import (
    CudaRegion,
    IndexEntry,
    InferenceRequest,
    InferenceResponse,
    ModelMetadata,
    ServerMetadata,
    SystemRegion,
)
from headrace_protocol._generated import grpc_service_pb2, model_config_pb2
from headrace_protocol.errors import ErrorCode, InferError

Outcome = InferenceResponse | InferError


class Cancellable(Protocol):
    """A request under way."""

    def cancel(self) -> None:
        """Tell that nobody waits any more: it leaves the queue, or its backend is told. Idempotent."""
        ...


class NotInMemoryError(InferError):
    """Refusal of what is asked of a model that is loaded on demand and has never been, so that nothing of it is known.

    Whoever has time has it loaded by `wait`, and asks again.
    """

    def __init__(
        self,
        model: str,
        wait: Callable[[Callable[[], None], Callable[[InferError], None]], Cancellable],
    ) -> None:
        """`wait(there, failed)` has one of the two called, later, unless what it returns is cancelled; raises InferError."""
        text = (
            f"model {model!r} is loaded on demand and has not been asked for yet, so that nothing more is known of it"
        )
        super().__init__(ErrorCode.UNAVAILABLE, text)
        self.model = model
        self.wait = wait


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

    def under_way(self) -> int:
        """Return how many inference requests have begun and are not over."""
        ...

    def models(self) -> list[tuple[str, int]]:
        """Return name and version of every model that serves, in that order."""
        ...

    def model_metadata(self, name: str, version: int) -> ModelMetadata: ...

    def model_config(self, name: str, version: int) -> model_config_pb2.ModelConfig: ...

    def statistics(self, name: str, version: int) -> grpc_service_pb2.ModelStatisticsResponse:
        """Return the statistics of a model's version, of all its versions (LATEST), or of all models (name "")."""
        ...

    def submit(self, request: InferenceRequest, done: Callable[[Outcome], None]) -> Cancellable:
        """Begin one request: `done` is called once, on the loop, with its response or error, unless it is cancelled.

        It is not called before this returns. Raises InferError where the request cannot even be queued. Whoever gets a
        response releases it. UNSUPPORTED for a decoupled model.
        """
        ...

    def stream(self, request: InferenceRequest, on_outcome: Callable[[Outcome], None]) -> Cancellable:
        """Begin one request of any model, decoupled or not: `on_outcome` is called on the loop for each response.

        The last call brings a response with `final`, or an InferError; none comes after it, nor after a cancel. It is
        not called before this returns. Whoever gets a response releases it once its bytes are with the client: the
        model is held back while too many are unread.
        """
        ...

    def decoupled(self, name: str, version: int) -> bool:
        """Return whether the model may give any number of responses; raises NOT_FOUND, UNAVAILABLE."""
        ...

    async def infer(self, request: InferenceRequest) -> InferenceResponse:
        """Answer one request. The caller releases the response. Cancelling the awaiting task cancels the request."""
        ...


class SharedMemory(Protocol):
    """The regions that clients registered. Where client shared memory is off, registering raises UNSUPPORTED."""

    def register_system(self, name: str, key: str, offset: int, nbytes: int) -> None:
        """Register `nbytes` from `offset` of the POSIX shared memory object `key`; INVALID_ARG, ALREADY_EXISTS."""
        ...

    def register_cuda(self, name: str, handle: bytes, device: int, nbytes: int) -> None:
        """Register GPU memory by its cudaIpcMemHandle_t (64 bytes)."""
        ...

    def unregister_system(self, name: str) -> None:
        """Forget a region ("" = all of this kind); requests that use it end in peace. An unknown name is no error."""
        ...

    def unregister_cuda(self, name: str) -> None:
        """As unregister_system."""
        ...

    def system_status(self, name: str) -> list[SystemRegion]:
        """Return one region ("" = all of this kind). Raises NOT_FOUND."""
        ...

    def cuda_status(self, name: str) -> list[CudaRegion]:
        """As system_status."""
        ...


Setting = str | list[str]
"""A trace setting as the protocol shows it: text, or a list of texts."""


class TraceSettings(Protocol):
    """Which requests are traced, for all models and for single ones."""

    def get(self, model: str) -> dict[str, Setting]:
        """Return the settings in force for a model ("" = the global ones). Raises NOT_FOUND for an unknown model."""
        ...

    def update(self, model: str, changes: Mapping[str, list[str] | None]) -> dict[str, Setting]:
        """Change settings, all or none, and return those then in force.

        A value is the list of its texts; None (or an empty list) takes a model's setting back to the global one, a
        global one back to the command line's. Raises INVALID_ARG with the allowed range, UNSUPPORTED for trace_file.
        """
        ...


LogValue = str | bool | int


class LogSettings(Protocol):
    """What is logged."""

    def get(self) -> dict[str, LogValue]:
        """Return log_file, log_info, log_warning, log_error, log_verbose_level and log_format."""
        ...

    def update(self, changes: Mapping[str, LogValue]) -> dict[str, LogValue]:
        """Change settings, all or none, and return all. Raises INVALID_ARG, and UNSUPPORTED for log_file."""
        ...


class TrafficControl(Protocol):
    """Which version of a model gets the requests that name none."""

    def get(self, model: str) -> dict[str, Any]:
        """Return the policy of a model and how its versions do, JSON-ready. Raises NOT_FOUND, UNAVAILABLE."""
        ...

    async def update(self, model: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Change the policy, all or none, or switch, promote, roll back; return what `get` does then.

        Raises INVALID_ARG with every problem, NOT_FOUND and UNAVAILABLE for a version that does not serve.
        """
        ...

    def pinned(self, model: str) -> AbstractContextManager[None]:
        """Return what keeps the default where it is while another version is loaded beside it, and afterwards."""
        ...

    def unloading(self, model: str, version: int) -> None:
        """Note that a version is to be unloaded by a call. Raises INVALID_ARG where it is the default that was set."""
        ...


LoadParameters = dict[str, str | bytes | int | bool]


class ControlPlane(Protocol):
    """The repository API, and what else an operator changes while the server runs."""

    @property
    def memory(self) -> SharedMemory: ...

    @property
    def trace(self) -> TraceSettings: ...

    @property
    def log(self) -> LogSettings: ...

    @property
    def traffic(self) -> TrafficControl: ...

    def index(self, *, ready_only: bool) -> list[IndexEntry]: ...

    async def load(self, name: str, parameters: LoadParameters) -> None:
        """Load or reload a model and return once it serves.

        Parameters: "config" (a configuration as JSON text), "file:<path>" (content, bytes); or "version" (an integer), to
        load that one beside those that serve.
        """
        ...

    async def unload(self, name: str, *, unload_dependents: bool, version: int | None = None) -> None:
        """Stop serving a model, or one version of it beside others; return while requests in it end."""
        ...
