"""What the author of a backend writes and is given: plain synchronous Python, no sockets, no asyncio.

A backend is a class named in the entry-point group `headrace.backends`. Its process makes one instance of it, calls
`initialize` once, then `execute` for every batch, and `finalize` at the end. The package `conformance` is this contract
in executable form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from headrace_backends.batch import Batch
from headrace_backends.batch_request import BatchRequest
from headrace_backends.calls import Call, CallRequest, CallResult, CallTensor, ServerCalls
from headrace_backends.sequences import EndedSequence
from headrace_backends.streaming import StreamResponse, send_many
from headrace_protocol.tensor import TensorSpec

__all__ = [
    "Backend",
    "Batch",
    "BatchRequest",
    "Call",
    "CallRequest",
    "CallResult",
    "CallTensor",
    "EndedSequence",
    "ModelContext",
    "ModelDescription",
    "ServerCalls",
    "StreamResponse",
    "send_many",
]


@dataclass(frozen=True, slots=True)
class ModelContext:
    """Everything a backend may know about the model that it loads."""

    name: str
    version: int
    model_directory: Path
    version_directory: Path
    config: dict[str, Any]
    """The model's configuration as JSON-ready values, as the user wrote it plus the server's defaults."""
    backend_config: dict[str, str]
    """--backend-config settings of this backend."""
    instances: tuple[str, ...]
    """Names of the instances that this process serves: as many executions may be asked for at once."""
    kind: str
    """KIND_CPU, KIND_GPU or KIND_MODEL."""
    device: int
    """GPU number for KIND_GPU, else 0."""
    auto_complete: bool
    """Whether what the backend finds in the model may complete the configuration."""
    threads: int
    """Threads that one execution may use when all instances of the model on this device run: the cores shared out, at
    least 1."""
    server: ServerCalls = field(default_factory=ServerCalls, compare=False, repr=False)
    """Other models, what is loaded, and metrics."""

    @property
    def decoupled(self) -> bool:
        """Whether a request may have any number of responses."""
        return bool(self.config.get("model_transaction_policy", {}).get("decoupled", False))

    def parameter(self, name: str) -> str | None:
        """Return the configuration parameter `name`, or None where it is not set."""
        value = self.config.get("parameters", {}).get(name)
        return None if value is None else str(value["string_value"])


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What `initialize` found in the model; empty where the model's files do not say."""

    inputs: tuple[TensorSpec, ...] = ()
    """Full shapes: the batch dimension is included where the model has one."""
    outputs: tuple[TensorSpec, ...] = ()
    batching: bool | None = None
    """Whether the model can batch along its first dimension; None = not known."""
    config: dict[str, Any] | None = None
    """Configuration fields to add where the user gave none (JSON-ready)."""
    concurrency: int | None = None
    """How many instances this process can serve, where that is fewer than it was asked to; others get processes too."""
    replaces: bool = False
    """Whether the fields of `config` stand for what the user gave: the backend has seen that, and kept to it."""
    is_ready: Callable[[], bool] | None = None
    """Asked after loading and every few seconds, by a thread of its own: whether the model can serve, which is what
    readiness tells. What raises, or takes until it would be asked again, says that it cannot. None = it always can."""


class Backend(Protocol):
    """A way to run models. One instance serves one model version on one device, in a process of its own.

    It may have a method `end_sequence(sequence: EndedSequence) -> None`. That is told of each sequence that ends though
    none of its requests had the end flag: it was idle for too long, cancelled, or started anew. No request of it runs
    then, and the next one in its slot is another's; those of other sequences may run, and it must not block.
    """

    fork_safe: ClassVar[bool]
    """Whether the module may be imported once and then forked for every model (on CPU)."""
    threads: ClassVar[bool]
    """Whether `execute` may run in several threads at once over one model. If not, it is called for one batch at a
    time, by the thread that called `initialize`."""

    def initialize(self, model: ModelContext) -> ModelDescription:
        """Load the model. Raises InferError with the reason; any other exception is reported as INTERNAL."""
        ...

    def execute(self, batch: Batch) -> None:
        """Run one batch and answer its requests. An exception fails those that are not answered yet.

        A request to a decoupled model that is open when this returns, and was not deferred, is ended: with an error
        where it has had no response.
        """
        ...

    def finalize(self) -> None:
        """Free the model. Nothing is executing or open, and the process ends afterwards."""
        ...
