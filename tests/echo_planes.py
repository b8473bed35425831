"""Planes for tests of a gateway alone: a data plane that answers with its inputs, a control plane that takes notes.

`echo` gives every input INPUTx back as OUTPUTx; `slow` does so once `release_slow` is set; `broken` raises what no
caller expects; what `stream...` answers, any number of responses, the test decides. Any other model is unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping

from headrace.planes import Cancellable, LogValue, Outcome, Setting
from headrace.scheduling.handing_over import hand_over
from headrace.types import (
    LATEST,
    CudaRegion,
    IndexEntry,
    InferenceRequest,
    InferenceResponse,
    ModelMetadata,
    OutputTensor,
    Parameter,
    ServerMetadata,
    SystemRegion,
    TensorMetadata,
)
from headrace_protocol import datatype as dt
from headrace_protocol._generated import grpc_service_pb2, model_config_pb2
from headrace_protocol.errors import ErrorCode, InferError, invalid, not_found, unavailable, unsupported


class SubmitsByInfer:
    """Gives a data plane of a test its `submit`, by way of its `infer`."""

    infer: Callable[[InferenceRequest], Coroutine[None, None, InferenceResponse]]

    def submit(self, request: InferenceRequest, done: Callable[[Outcome], None]) -> Cancellable:
        faults = {"boom": RuntimeError("a secret of ours"), "broken": ZeroDivisionError("a fault of the server's own")}
        if request.model_name in faults:
            raise faults[request.model_name]  # a fault of a real plane comes from its submit too

        def over(task: asyncio.Task[InferenceResponse]) -> None:
            if not task.cancelled():
                hand_over(done, task.exception() or task.result())  # type: ignore[arg-type]

        task = asyncio.ensure_future(self.infer(request))
        task.add_done_callback(over)
        return task


class StreamCall:
    """A request of a stream whose outcomes the test sends. `unread` counts what was sent and is not released."""

    def __init__(self, request: InferenceRequest, on_outcome: Callable[[Outcome], None]) -> None:
        self.request = request
        self.cancelled = asyncio.Event()
        self.unread = 0
        self._on_outcome = on_outcome

    def send(
        self,
        data: bytes | None = b"",
        *,
        final: bool = False,
        datatype: dt.DataType = dt.UINT8,
        parameters: dict[str, Parameter] | None = None,
    ) -> None:
        """Send a response with OUTPUT0 holding `data`; None = an end without a response."""
        outputs = [] if data is None else [OutputTensor("OUTPUT0", datatype, (len(data) // datatype.itemsize,), data)]
        response = InferenceResponse(self.request.model_name, 1, outputs, parameters, self._released)
        response.id = self.request.id
        response.final = final or data is None
        response.empty = data is None
        self.unread += 1
        hand_over(self._on_outcome, response)

    def fail(self, error: InferError) -> None:
        """Send a failure, the last outcome."""
        hand_over(self._on_outcome, error)

    def cancel(self) -> None:
        self.cancelled.set()

    def _released(self) -> None:
        self.unread -= 1


class ScriptedStreams:
    """Gives a data plane of a test its `stream`. The test drives those of models whose name begins with `stream`.

    Those of other models have the one answer that `submit` gives; so have `held...` models, for the test to drive too.
    """

    submit: Callable[[InferenceRequest, Callable[[Outcome], None]], Cancellable]

    def __init__(self) -> None:
        self.streams: dict[str, StreamCall] = {}
        """By request id."""
        self._begun = asyncio.Condition()

    def decoupled(self, name: str, version: int) -> bool:
        if name in ("missing", "unknown"):
            raise not_found(f"model '{name}' is unknown")
        return name.startswith("stream")

    def stream(self, request: InferenceRequest, on_outcome: Callable[[Outcome], None]) -> Cancellable:
        if not request.model_name.startswith(("stream", "held")):
            return self.submit(request, on_outcome)
        call = self.streams[request.id] = StreamCall(request, on_outcome)
        self._told = asyncio.ensure_future(self._tell())
        return call

    async def begun(self, count: int = 1) -> list[StreamCall]:
        """Wait until the test has this many streams to drive; return them as they began."""
        async with self._begun, asyncio.timeout(5):
            await self._begun.wait_for(lambda: len(self.streams) >= count)
        return list(self.streams.values())

    async def _tell(self) -> None:
        async with self._begun:
            self._begun.notify_all()


class EchoDataPlane(SubmitsByInfer, ScriptedStreams):
    """A planes.DataPlane. What happened to its answers can be read from the counters."""

    def __init__(self) -> None:
        super().__init__()
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

    def under_way(self) -> int:
        return len(self.requests) - self.answered

    def models(self) -> list[tuple[str, int]]:
        return [("echo", 1), ("slow", 1)]

    def server_metadata(self) -> ServerMetadata:
        return ServerMetadata("echo", "1.0", ("binary_tensor_data",))

    def model_metadata(self, name: str, version: int) -> ModelMetadata:
        self._check(name, version)
        if name.startswith(("stream", "held")):
            text = (TensorMetadata("text", "BYTES", (1,)), TensorMetadata("numbers", "INT32", (-1, 2)))
            return ModelMetadata(name, ("1",), "identity", text, (TensorMetadata("OUTPUT0", "UINT8", (-1,)),))
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
        if name not in ("echo", "slow", "broken", "name with é") and not name.startswith(("stream", "held")):
            raise not_found(f"model '{name}' is unknown")
        if version not in (LATEST, 1):
            raise not_found(f"model '{name}' has no version {version}")


class NotingMemory:
    """A planes.SharedMemory that remembers what it was asked. Region `taken` is registered already, `missing` is not."""

    def __init__(self, calls: list[tuple[object, ...]]) -> None:
        self._calls = calls

    def register_system(self, name: str, key: str, offset: int, nbytes: int) -> None:
        self._register("register_system", name, key, offset, nbytes)

    def register_cuda(self, name: str, handle: bytes, device: int, nbytes: int) -> None:
        self._register("register_cuda", name, handle, device, nbytes)

    def _register(self, what: str, name: str, *rest: object) -> None:
        if name == "taken":
            raise InferError(ErrorCode.ALREADY_EXISTS, "region 'taken' is registered already")
        self._calls.append((what, name, *rest))

    def unregister_system(self, name: str) -> None:
        self._calls.append(("unregister_system", name))

    def unregister_cuda(self, name: str) -> None:
        self._calls.append(("unregister_cuda", name))

    def system_status(self, name: str) -> list[SystemRegion]:
        if name == "missing":
            raise not_found("region 'missing' is not registered")
        return [SystemRegion(one, f"/{one}", 4096, 2**40) for one in ([name] if name else ["a", "b"])]

    def cuda_status(self, name: str) -> list[CudaRegion]:
        if name == "missing":
            raise not_found("region 'missing' is not registered")
        return [CudaRegion(one, 3, 2**40) for one in ([name] if name else ["a", "b"])]


class NotingTrace:
    """A planes.TraceSettings that remembers what it was asked."""

    def __init__(self, calls: list[tuple[object, ...]]) -> None:
        self._calls = calls

    def get(self, model: str) -> dict[str, Setting]:
        if model == "missing":
            raise not_found("model 'missing' is unknown")
        return {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "1000", "trace_mode": "triton"}

    def update(self, model: str, changes: Mapping[str, list[str] | None]) -> dict[str, Setting]:
        settings = self.get(model)
        if "trace_file" in changes:
            raise unsupported("trace_file is set on the command line alone")
        if changes.get("trace_rate") == ["-1"]:
            raise invalid("trace_rate is from 0 to 4294967295, got '-1'")
        self._calls.append(("trace", model, dict(changes)))
        return settings


class NotingLog:
    """A planes.LogSettings that remembers what it was asked."""

    def __init__(self, calls: list[tuple[object, ...]]) -> None:
        self._calls = calls

    def get(self) -> dict[str, LogValue]:
        return {
            "log_file": "",
            "log_info": True,
            "log_warning": True,
            "log_error": False,
            "log_verbose_level": 2,
            "log_format": "default",
        }

    def update(self, changes: Mapping[str, LogValue]) -> dict[str, LogValue]:
        if "log_file" in changes:
            raise unsupported("log_file is set on the command line alone")
        if changes.get("log_format", "default") not in ("default", "ISO8601", "json"):
            raise invalid(f"log_format is default, ISO8601 or json, got {changes['log_format']!r}")
        self._calls.append(("log", dict(changes)))
        return self.get() | changes


class NotingTraffic:
    """A planes.TrafficControl that remembers what it was asked."""

    def __init__(self, calls: list[tuple[object, ...]]) -> None:
        self._calls = calls

    def get(self, model: str) -> dict[str, object]:
        if model == "missing":
            raise not_found("model 'missing' is unknown")
        return {
            "model": model,
            "policy": {},
            "default": 1,
            "versions": [{"version": 1, "ready": True, "weight": 100.0, "answered": 0, "failed": 0}],
            "set_by": "configuration",
            "shadow_in_flight": 0,
            "shadows": {},
            "rollbacks": [],
        }

    async def update(self, model: str, changes: Mapping[str, object]) -> dict[str, object]:
        told = self.get(model)
        if "version" in changes:
            raise invalid("version: is unknown")
        self._calls.append(("traffic", model, dict(changes)))
        return told


class NotingControlPlane:
    """A planes.ControlPlane that remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.memory = NotingMemory(self.calls)
        self.trace = NotingTrace(self.calls)
        self.log = NotingLog(self.calls)
        self.traffic = NotingTraffic(self.calls)

    def index(self, *, ready_only: bool) -> list[IndexEntry]:
        ready = [IndexEntry("echo", "1", "READY"), IndexEntry("echo", "2", "READY")]
        return ready if ready_only else [*ready, IndexEntry("bad", "1", "UNAVAILABLE", "no file"), IndexEntry("new")]

    async def load(self, name: str, parameters: dict[str, str | bytes | int | bool]) -> None:
        if name == "missing":
            raise not_found("model 'missing' is in no repository")
        if name == "cancelled":
            raise asyncio.CancelledError
        self.calls.append(("load", name, parameters))

    async def unload(self, name: str, *, unload_dependents: bool, version: int | None = None) -> None:
        self.calls.append(("unload", name, unload_dependents, *(() if version is None else (version,))))
