"""What backend processes may ask of the server, beside answering: calls to models, control, metrics.

BackendServices is joined to the planes once they exist; each loaded model has its ModelServices, and each process of it
its ProcessServices. Knows nothing of sockets, nor where models come from.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, Final, Protocol

from headrace.clock import Clock
from headrace.instances.calls import Caller, CallPlane, InstanceSet, ProcessCalls, SealedMemory
from headrace.instances.frame import nonsense
from headrace.instances.waiting import WaitGraph
from headrace.observability.custom_metrics import CustomMetrics, MetricScope, ProcessMetrics
from headrace.planes import LoadParameters
from headrace_protocol.errors import ErrorCode, InferError, internal, unavailable
from headrace_protocol.messages import (
    MAX_CONTROLS,
    READ_METRIC,
    READY,
    UNLOAD,
    Call,
    CallRead,
    CancelCall,
    Control,
    ControlResult,
    DefineFamily,
    MetricValues,
    Service,
    TellMetrics,
    error_message,
)

_log = logging.getLogger("headrace.instances")


class ModelControl(Protocol):
    """The control plane, as far as models may use it. See planes.ControlPlane."""

    async def load(self, name: str, parameters: LoadParameters) -> None: ...

    async def unload(self, name: str, *, unload_dependents: bool) -> None: ...


class BackendServices:
    """One a server. Borrows the planes from `connect` to `close`; until then nothing can be asked but metrics."""

    def __init__(self, clock: Clock) -> None:
        self.metrics: Final = CustomMetrics()
        self.graph: Final = WaitGraph()
        self.clock: Final = clock
        self.plane: CallPlane | None = None
        self.control: ModelControl | None = None
        self._tasks: Final[set[asyncio.Task[None]]] = set()

    def connect(self, plane: CallPlane, control: ModelControl) -> None:
        """Let models use the planes from now on."""
        self.plane, self.control = plane, control

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run what was asked for to its end, also if the process that asked goes away."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel what still runs."""
        self.plane = self.control = None
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class ModelServices:
    """What the processes of one loaded model version share."""

    def __init__(self, services: BackendServices, instances: InstanceSet) -> None:
        self.services: Final = services
        self.instances: Final = instances
        self.scope: Final = MetricScope(services.metrics)
        self.loaded = False
        """Whether its load has ended well: warm-up included, all processes there."""

    def of_process(self, caller: Caller) -> ProcessServices:
        """Return what a new process may ask. `close` follows."""
        return ProcessServices(self, caller)

    def close(self) -> None:
        """Take the metrics of the model away, which is gone."""
        self.scope.close()


class ProcessServices:
    """Takes what one process asks, and answers it."""

    def __init__(self, model: ModelServices, caller: Caller) -> None:
        self._model: Final = model
        self._services: Final = model.services
        self._caller: Final = caller
        self._calls: Final = ProcessCalls(caller, model.instances, model.services.graph, model.services.clock)
        self._metrics: Final = ProcessMetrics(model.scope)
        self._controls: Final[set[int]] = set()
        """Numbers of those that are not answered."""
        self._told: Final[dict[int, asyncio.Future[None]]] = {}
        self._numbers: Final = itertools.count(1)
        self._closed = False

    def take(self, message: Service, descriptors: Sequence[int]) -> None:
        """Take one message; the descriptors stay the caller's to close. Raises INTERNAL for nonsense."""
        if isinstance(message, Call):
            self._calls.plane = self._services.plane
            self._calls.begin(message, descriptors)
        elif isinstance(message, CancelCall):
            self._calls.cancel(message)
        elif isinstance(message, CallRead):
            self._calls.read(message)
        elif isinstance(message, MetricValues):
            self._take_values(message)
        elif isinstance(message, DefineFamily):
            self._define(message)
        else:
            self._take_control(message, descriptors)

    def flush(self) -> None:
        """Go on sending: the process has read what it was sent."""
        self._calls.flush()

    def close(self) -> None:
        """End what the process, which is gone, asked for; loads and unloads go on. Idempotent."""
        self._closed = True
        self._calls.close()
        self._services.metrics.tellers.discard(self._ask)
        while self._told:
            _set(self._told.popitem()[1])

    # --- control --------------------------------------------------------------------------------------------------

    def _take_control(self, message: Control, descriptors: Sequence[int]) -> None:
        if message.action == READ_METRIC:
            self._answer(message.number, None, self._metrics.value(message.series))
        elif message.action == READY:
            try:
                self._answer(message.number, None, float(self._is_ready(message)))
            except InferError as error:
                self._answer(message.number, error)
        else:
            self._change(message, descriptors)

    def _is_ready(self, message: Control) -> bool:
        plane = self._services.plane
        try:
            return plane is not None and plane.model_ready(message.model, message.version)
        except InferError as error:
            if error.code in {ErrorCode.NOT_FOUND, ErrorCode.UNAVAILABLE}:
                return False
            raise

    def _change(self, message: Control, descriptors: Sequence[int]) -> None:
        """Load or unload a model."""
        if message.number in self._controls:
            raise nonsense(f"control {message.number} was begun twice")
        memory = SealedMemory(descriptors)
        files = {f"file:{path}": memory.bytes_at(ref) for path, ref in message.files}
        control = self._services.control
        refusal = ""
        if control is None:
            refusal = "there are no other models here"
        elif not self._model.loaded:
            # A load waits for its turn: if the loads that have one wait for others, none ever ends.
            refusal = "a model can load and unload others only once it is loaded itself"
        elif len(self._controls) >= MAX_CONTROLS:
            refusal = f"{MAX_CONTROLS} controls of this process are not answered yet"
        if control is None or refusal:
            self._answer(message.number, unavailable(refusal))
            return
        self._controls.add(message.number)
        self._services.run(self._carry_out(control, message, files))

    async def _carry_out(self, control: ModelControl, message: Control, files: dict[str, memoryview]) -> None:
        failure: InferError | None = None
        try:
            if message.action == UNLOAD:
                await control.unload(message.model, unload_dependents=message.unload_dependents)
            else:
                parameters: LoadParameters = {"config": message.config} if message.config else {}
                for name, content in files.items():
                    parameters[name] = await asyncio.to_thread(bytes, content)
                await control.load(message.model, parameters)
        except InferError as error:
            failure = error
        except Exception as error:
            _log.exception("model %s could not be %sed as another asked", message.model, message.action)
            failure = internal(f"{type(error).__name__}: {error}")
        self._controls.discard(message.number)
        self._answer(message.number, failure)

    def _answer(self, number: int, error: InferError | None, value: float = 0.0) -> None:
        if not self._closed:
            told = None if error is None else error_message(error)
            self._caller.send([ControlResult(number, told, value)])

    # --- metrics --------------------------------------------------------------------------------------------------

    def _define(self, message: DefineFamily) -> None:
        try:
            self._metrics.define(message.number, message.name, message.description, message.kind)
        except InferError as error:
            if error.code is ErrorCode.INTERNAL:
                raise
            self._answer(message.number, error)
            return
        self._services.metrics.tellers.add(self._ask)
        self._answer(message.number, None)

    def _take_values(self, message: MetricValues) -> None:
        for series in message.series:
            self._metrics.add_series(series)
        for value in message.values:
            self._metrics.change(value)
        told = self._told.pop(message.answers, None)
        if told is not None:
            _set(told)

    async def _ask(self) -> None:
        """Have the process tell what has changed in its metrics; returns once it has, or is gone."""
        number = next(self._numbers)
        told = self._told[number] = asyncio.get_running_loop().create_future()
        try:
            self._caller.send([TellMetrics(number)])
            await told
        finally:
            self._told.pop(number, None)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
