"""Planes for tests of a gateway alone: a data plane that answers with its inputs, a control plane that takes notes.

`echo` gives every input INPUTx back as OUTPUTx; `slow` does so once `release_slow` is set; `broken` raises what no
caller expects. Any other model is unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from headrace.planes import Cancellable, Outcome
from headrace.types import (
    LATEST,
    IndexEntry,
    InferenceRequest,
    InferenceResponse,
    ModelMetadata,
    OutputTensor,
    ServerMetadata,
    TensorMetadata,
)
from headrace_protocol import datatype as dt
from headrace_protocol._generated import grpc_service_pb2, model_config_pb2
from headrace_protocol.errors import InferError, invalid, not_found, unavailable


class SubmitsByInfer:
    """Gives a data plane of a test its `submit`, by way of its `infer`."""

    infer: Callable[[InferenceRequest], Coroutine[None, None, InferenceResponse]]

    def submit(self, request: InferenceRequest, done: Callable[[Outcome], None]) -> Cancellable:
        faults = {"boom": RuntimeError("a secret of ours"), "broken": ZeroDivisionError("a fault of the server's own")}
        if request.model_name in faults:
            raise faults[request.model_name]  # a fault of a real plane comes from its submit too

        def over(task: asyncio.Task[InferenceResponse]) -> None:
            if not task.cancelled():
                done(task.exception() or task.result())  # type: ignore[arg-type]

        task = asyncio.ensure_future(self.infer(request))
        task.add_done_callback(over)
        return task


class EchoDataPlane(SubmitsByInfer):
    """A planes.DataPlane. What happened to its answers can be read from the counters."""

    def __init__(self) -> None:
        self.is_live = True
        self.is_ready = True
        self.is_exiting = False
        self.requests: list[InferenceRequest] = []
        self.answered = 0
        self.released = 0
        self.cancelled = asyncio.Event()
        self.slow_began = asyncio.Event()
        self.release_slow = asyncio.Event()
        self.failure: InferError | None = None
        self.override: list[OutputTensor] | None = None

    def live(self) -> bool:
        return self.is_live

    def exiting(self) -> bool:
        return self.is_exiting

    def ready(self) -> bool:
        return self.is_ready

    def model_ready(self, name: str, version: int) -> bool:
        self._check(name, version)
        return True

    def server_metadata(self) -> ServerMetadata:
        return ServerMetadata("echo", "1.0", ("binary_tensor_data",))

    def model_metadata(self, name: str, version: int) -> ModelMetadata:
        self._check(name, version)
        tensor = (TensorMetadata("INPUT0", "FP32", (-1, 4)),)
        return ModelMetadata(name, ("1",), "identity", tensor, (TensorMetadata("OUTPUT0", "FP32", (-1, 4)),))

    def model_config(self, name: str, version: int) -> model_config_pb2.ModelConfig:
        self._check(name, version)
        return model_config_pb2.ModelConfig(name=name, backend="identity", max_batch_size=8)

    def statistics(self, name: str, version: int) -> grpc_service_pb2.ModelStatisticsResponse:
        if name:
            self._check(name, version)
        names = [name] if name else ["echo", "slow"]
        return grpc_service_pb2.ModelStatisticsResponse(
            model_stats=[grpc_service_pb2.ModelStatistics(name=n, version="1", inference_count=2**40) for n in names]
        )

    async def infer(self, request: InferenceRequest) -> InferenceResponse:
        self._check(request.model_name, request.model_version)
        self.requests.append(request)
        if self.failure is not None:
            raise self.failure
        if request.model_name == "broken":
            raise ZeroDivisionError("a fault of the server's own")
        if request.model_name == "slow":
            self.slow_began.set()
            try:
                await self.release_slow.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        if request.raw_body is not None:
            outputs = [OutputTensor("OUTPUT0", dt.UINT8, (len(request.raw_body),), request.raw_body)]
        elif not request.inputs:
            raise invalid("expected at least one input, got none")
        else:
            for tensor in request.inputs:
                if tensor.datatype is dt.BYTES:
                    dt.check_bytes(tensor.data, dt.element_count(tensor.shape))
            wanted = {output.name for output in request.outputs or ()}
            outputs = [
                OutputTensor(tensor.name.replace("INPUT", "OUTPUT"), tensor.datatype, tensor.shape, tensor.data)
                for tensor in request.inputs
            ]
            if wanted:
                outputs = [output for output in outputs if output.name in wanted]
        self.answered += 1
        return InferenceResponse(
            request.model_name, 1, self.override or outputs, request.parameters, release=self._release
        )

    def _release(self) -> None:
        self.released += 1

    def _check(self, name: str, version: int) -> None:
        if name == "loading":
            raise unavailable("model 'loading' is not ready")
        if name not in ("echo", "slow", "broken", "name with é"):
            raise not_found(f"model '{name}' is unknown")
        if version not in (LATEST, 1):
            raise not_found(f"model '{name}' has no version {version}")


class NotingControlPlane:
    """A planes.ControlPlane that remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def index(self, *, ready_only: bool) -> list[IndexEntry]:
        ready = [IndexEntry("echo", "1", "READY"), IndexEntry("echo", "2", "READY")]
        return ready if ready_only else [*ready, IndexEntry("bad", "1", "UNAVAILABLE", "no file"), IndexEntry("new")]

    async def load(self, name: str, parameters: dict[str, str | bytes | int | bool]) -> None:
        if name == "missing":
            raise not_found("model 'missing' is in no repository")
        self.calls.append(("load", name, parameters))

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        self.calls.append(("unload", name, unload_dependents))
