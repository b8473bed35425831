"""The identity backend: outputs are the inputs, and it misbehaves on demand.

It makes schedulers, queues, deadlines, lifecycles and metrics testable without a framework. Output `OUTPUT<x>` is
input `INPUT<x>`; an output of another name is the input at the same place of the configuration.

Configuration parameters: `execute_delay_ms`; `instance_wise_delay_multiplier` (instance i waits max(1, i * multiplier)
times as long); `creation_delay_sec`; `echo_parameters` ("true": request parameters come back as response parameters);
`echo_request` ("true": so do `sequence_id`, `sequence_start`, `sequence_end` and `timeout`, as the backend got them, and
`execution`, the number of the batch in this process);
`accumulate` ("true": outputs are sums over the sequence, see accumulator.py; one execution after the other);
`fail_load` (a message); `hang_load`. The parameters in misbehaviour.py and `delay_ms` may be given in the
configuration, for every request; a request may give them for itself only where the configuration parameter
`allow_misbehaviour` is "true", so that no client can harm a model that was not made for it.

Where the model is decoupled, streams.py says what its requests get. They are answered after `execute` has returned, so
that one instance serves many at once; with the configuration parameter `hold_instance` it is theirs to the end.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from typing import ClassVar, Final, NamedTuple

from headrace_backends.api import Batch, BatchRequest, EndedSequence, ModelContext, ModelDescription
from headrace_backends.identity.accumulator import Accumulator
from headrace_backends.identity.misbehaviour import alter, fail, misbehave
from headrace_backends.identity.parameters import FOREVER_S, asked, number
from headrace_backends.identity.player import StreamPlayer
from headrace_backends.identity.streams import Part, copied, repeated, repeats
from headrace_protocol.datatype import Array
from headrace_protocol.errors import InferError, cancelled, invalid
from headrace_protocol.messages import Parameter

_SEQUENCE_START: Final = 1
_SEQUENCE_END: Final = 2
_TOGETHER: Final = frozenset(
    {"execute_delay_ms", "instance_wise_delay_multiplier", "creation_delay_sec", "allow_misbehaviour"}
)
"""Configuration parameters under which a batch is still answered as a whole."""


class _Job(NamedTuple):
    """A request that is answered by itself."""

    request: BatchRequest
    parameters: Mapping[str, Parameter]
    delay_s: float
    execution: int


class IdentityBackend:
    """Copies inputs to outputs."""

    fork_safe: ClassVar[bool] = True
    threads: ClassVar[bool] = True

    def initialize(self, model: ModelContext) -> ModelDescription:
        """Read the parameters; describes nothing, since any tensors will do."""
        self._defaults: dict[str, Parameter] = {
            name: str(value["string_value"]) for name, value in model.config.get("parameters", {}).items()
        }
        self._inputs: list[str] = [tensor["name"] for tensor in model.config.get("input", ())]
        self._outputs: list[str] = [tensor["name"] for tensor in model.config.get("output", ())]
        self._echo = model.parameter("echo_parameters") == "true"
        self._echo_request = model.parameter("echo_request") == "true"
        self._executions = itertools.count(1)
        self._allowed = model.parameter("allow_misbehaviour") == "true"
        self._delay_s = number(self._defaults, "execute_delay_ms") / 1000
        self._multiplier = number(self._defaults, "instance_wise_delay_multiplier")
        self._together = self._defaults.keys() <= _TOGETHER
        self._decoupled = model.decoupled
        self._repeats = self._decoupled and repeats(self._inputs, self._outputs)
        self._holds = asked(self._defaults, "hold_instance")
        self._player = StreamPlayer()
        self._accumulator = Accumulator(model.config) if asked(self._defaults, "accumulate") else None
        time.sleep(number(self._defaults, "creation_delay_sec"))
        if asked(self._defaults, "hang_load"):
            threading.Event().wait()
        if asked(self._defaults, "fail_load"):
            raise invalid(str(self._defaults["fail_load"]))
        return ModelDescription()

    def execute(self, batch: Batch) -> None:
        """Wait, misbehave, and answer each request with its inputs."""
        delay_s = self._delay_s * max(1.0, batch.instance * self._multiplier)
        if self._decoupled:
            self._stream(batch, delay_s)
            return
        apart = batch.item_shapes or (self._allowed and any(request.parameters for request in batch.requests))
        if self._together and not apart:
            if delay_s:
                _wait(batch, dict.fromkeys(batch.requests, delay_s))
            wanted = self._outputs if batch.wanted is None else batch.wanted
            sources = {name: self._source(name) for name in wanted}
            batch.respond({name: batch.inputs[source] for name, source in sources.items() if source in batch.inputs})
            return
        jobs: list[_Job] = []
        execution = next(self._executions)
        for request in batch.requests:
            if not request.ready:
                continue
            parameters = self._parameters(request)
            misbehave(parameters)
            try:
                wait_s = FOREVER_S if asked(parameters, "hang") else number(parameters, "delay_ms") / 1000
                jobs.append(_Job(request, parameters, delay_s + wait_s, execution))
            except InferError as error:
                request.fail(error)
        _wait(batch, {job.request: job.delay_s for job in jobs})
        for job in jobs:
            self._answer(job, batch.inputs)

    def finalize(self) -> None:
        """End the thread that sends streams."""
        self._player.stop()

    def end_sequence(self, sequence: EndedSequence) -> None:
        """Forget the sums of a sequence that ended early."""
        if self._accumulator is not None:
            self._accumulator.end(sequence)

    def _stream(self, batch: Batch, delay_s: float) -> None:
        if delay_s:
            _wait(batch, dict.fromkeys(batch.requests, delay_s))
        for request in batch.requests:
            try:
                self._player.play(batch, request, self._parts(request, batch.inputs))
            except InferError as error:
                request.fail(error)
        if self._holds:
            self._player.wait_for(batch)

    def _parts(self, request: BatchRequest, given: Mapping[str, Array]) -> Iterator[Part]:
        if self._repeats:
            return repeated(request, given)
        parameters = self._parameters(request)
        sources = {name: self._source(name) for name in self._outputs}
        outputs: dict[str, Array] = {name: request.input(src) for name, src in sources.items() if src in given}
        return copied(parameters, lambda: alter(outputs, parameters))

    def _parameters(self, request: BatchRequest) -> Mapping[str, Parameter]:
        return self._defaults | dict(request.parameters) if self._allowed else self._defaults

    def _source(self, output: str) -> str:
        """Return the name of the input that `output` copies."""
        if output.startswith("OUTPUT") and "INPUT" + output[6:] in self._inputs:
            return "INPUT" + output[6:]
        position = self._outputs.index(output) if output in self._outputs else len(self._inputs)
        if position >= len(self._inputs):
            raise invalid(f"output '{output}' has no input to copy: the model has {len(self._inputs)} inputs")
        return self._inputs[position]

    def _answer(self, job: _Job, given: Collection[str]) -> None:
        request, parameters = job.request, job.parameters
        try:
            if request.cancelled:
                raise cancelled()
            fail(parameters)
            sources = {name: self._source(name) for name in self._outputs}
            outputs: dict[str, Array] = {name: request.input(src) for name, src in sources.items() if src in given}
            if self._accumulator is not None:
                outputs = self._accumulator.add(request, outputs)
            request.respond(alter(outputs, parameters), self._echoed(job))
        except InferError as error:
            request.fail(error)

    def _echoed(self, job: _Job) -> dict[str, Parameter] | None:
        """Return the response parameters."""
        request = job.request
        echoed = dict(request.parameters) if self._echo else {}
        if self._echo_request:
            echoed["sequence_id"] = request.correlation_id
            echoed["sequence_start"] = bool(request.flags & _SEQUENCE_START)
            echoed["sequence_end"] = bool(request.flags & _SEQUENCE_END)
            echoed["timeout"] = request.timeout_us
            echoed["execution"] = job.execution
        return echoed or None


def _wait(batch: Batch, delays_s: Mapping[BatchRequest, float]) -> None:
    """Wait until the longest delay of those requests that are not cancelled is over."""
    started = time.monotonic()
    changed = threading.Event()
    batch.on_cancel(changed.set)
    while True:
        waits = [delay_s for request, delay_s in delays_s.items() if not request.cancelled]
        left = started + max(waits, default=0.0) - time.monotonic()
        if left <= 0:
            return
        changed.wait(left)
        changed.clear()
