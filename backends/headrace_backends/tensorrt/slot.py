"""One instance: a stream, contexts, buffers and captured graphs. It runs one batch at a time, in any thread."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from headrace_backends.batch import Batch
from headrace_backends.tensorrt.contexts import Buffers, ReadyContext, copy_in, copy_out
from headrace_backends.tensorrt.cuda import Cuda, CudaError
from headrace_backends.tensorrt.engine import Engine
from headrace_backends.tensorrt.graphs import Graph, Graphs, given_by
from headrace_backends.tensorrt.layout import Layout
from headrace_backends.tensorrt.options import GraphSpec, InstanceOptions, TensorRtOptions
from headrace_backends.tensorrt.signature import EngineSignature, EngineTensor, Given, shape_values
from headrace_protocol.datatype import Array
from headrace_protocol.errors import InferError, cancelled, invalid

_LOG: Final = logging.getLogger(__name__)


class Slot:
    """Owns everything of the device that an instance uses, but for the engine."""

    def __init__(
        self, cuda: Cuda, engine: Engine, instance: InstanceOptions, options: TensorRtOptions, *, batching: bool
    ) -> None:
        self._cuda: Final = cuda
        self._engine: Final = engine
        self._signature: Final = engine.signature
        self._options: Final = options
        self._batching: Final = batching
        self._profiles: Final = profiles_of(instance, engine.signature)
        self._name: Final = instance.name
        self._buffers: Final = Buffers(cuda, self._signature.outputs)
        self._contexts: dict[int, ReadyContext] = {}
        self._graphs: Final = Graphs(cuda)
        self._specs: list[GraphSpec] = []
        """Of the configuration, those that could be captured."""
        self._last: tuple[Given, int, Given] | None = None
        """What was chosen for the inputs that came last."""
        self._captures = options.graphs
        """Whether graphs are still captured: an engine that cannot be captured once never can."""
        self._stream: Final = cuda.stream(_priority(cuda, options.priority))
        self._copies: Final = cuda.stream() if options.output_copy_stream else self._stream
        self._computed: Final = cuda.event(busy_wait=options.busy_wait)
        self._copied: Final = cuda.event(busy_wait=options.busy_wait)
        if not options.memory_on_profile_change:
            self._buffers.ensure_activations(max(map(engine.memory, self._profiles)))
        for number in self._profiles:
            self._contexts[number] = ReadyContext(engine, number, self._stream)
        cuda.synchronize(self._stream)

    def run(self, batch: Batch) -> dict[str, Array]:
        """Run a batch and return the outputs that are wanted.

        Raises INVALID_ARG for inputs that no profile takes; after other failures the slot works on, unless they are fatal.
        """
        if batch.cancelled:
            raise cancelled()
        given = self._given(batch)
        graph = self._graph_for(given) if len(self._graphs) else None
        if graph is None:
            number, taken = self._choose(given, batch.rows)
            graph = self._graphs.get(taken)
        try:
            if graph is not None:
                self._stage(graph.layout, batch.inputs)
                self._cuda.launch(graph.executable, self._stream)
                return self._collect(batch, given, graph.ready, graph.layout)
            outputs = self._run_in_context(batch, given, number, taken)
            if self._captures and not self._options.graph_specs and self._graphs.came_before(taken):
                self._capture_lazily(number, taken)
            return outputs
        except BaseException:
            self._recover()
            raise

    def capture(self, spec: GraphSpec) -> None:
        """Capture a graph for the sizes of `spec`. Raises InferError or CudaError where that cannot be done."""
        given = given_by(spec, self._signature, batching=self._batching)
        number, given = self._signature.choose(self._profiles, given, batching=self._batching)
        try:
            self._capture(number, given, spec.lower_batch)
        except BaseException:
            self._recover()
            raise
        self._specs.append(spec)

    def close(self) -> None:
        """Give everything back to the device. Nothing runs."""
        self._graphs.drop()
        self._contexts.clear()
        self._buffers.close()
        for event in (self._computed, self._copied):
            self._cuda.destroy_event(event)
        for stream in {self._stream, self._copies}:
            self._cuda.destroy_stream(stream)

    def _choose(self, given: Given, rows: int) -> tuple[int, Given]:
        """Return the profile for these inputs and what it is given; see EngineSignature.choose."""
        if self._last is None or self._last[0] != given:
            batching = self._batching and self._rows(given) == rows
            self._last = (given, *self._signature.choose(self._profiles, given, batching=batching))
        return self._last[1:]

    def _rows(self, given: Given) -> int | None:
        """Return the first dimension of the first input that has the batch's."""
        for tensor, shape in zip(self._signature.inputs, given.shapes, strict=True):
            if tensor.on_device and shape and tensor.name not in self._signature.unbatched:
                return shape[0]
        return None

    def _run_in_context(self, batch: Batch, given: Given, number: int, taken: Given) -> dict[str, Array]:
        ready = self._contexts[number]
        if not ready.is_ready_for(taken, self._buffers):
            ready.prepare(taken, self._buffers)
        assert ready.layout is not None
        self._stage(ready.layout, batch.inputs)
        ready.enqueue()
        return self._collect(batch, given, ready, ready.layout)

    # --- inputs ---------------------------------------------------------------------------------------------------

    def _given(self, batch: Batch) -> Given:
        shapes: list[tuple[int, ...]] = []
        values: list[tuple[int, ...] | None] = []
        for tensor in self._signature.inputs:
            array = batch.inputs.get(tensor.name)
            if array is None:
                raise invalid(f"the engine needs its input '{tensor.name}'")
            if tensor.is_shape_tensor:
                numbers = shape_values(tensor, array, batch.rows)
                shapes.append(tensor.shape if not tensor.shape else (len(numbers),))
                values.append(numbers)
            else:
                shapes.append(array.shape)
                values.append(None)
        return Given(tuple(shapes), tuple(values))

    def _stage(self, layout: Layout, inputs: Mapping[str, Array]) -> None:
        """Begin to copy the inputs to where they belong; a batch smaller than the layout fills its first rows."""
        target = self._buffers.inputs.address
        if not self._options.pinned_input:
            for name, place in layout.inputs.items():
                array = inputs[name]
                if array.nbytes:
                    source = int(array.ctypes.data)
                    self._cuda.copy_to_device(target + place.offset, source, array.nbytes, self._stream)
            return
        staging = self._buffers.pinned_inputs
        staging.ensure(layout.input_bytes)
        for name, place in layout.inputs.items():
            copy_in(staging, place.offset, inputs[name])
        if layout.input_bytes:
            self._cuda.copy_to_device(target, staging.address, layout.input_bytes, self._stream)

    # --- outputs --------------------------------------------------------------------------------------------------

    def _collect(self, batch: Batch, given: Given, ready: ReadyContext, layout: Layout) -> dict[str, Array]:
        """Wait for the execution and return the outputs that are wanted; of a larger layout the rows that were given."""
        names = list(self._signature.outputs) if batch.wanted is None else list(batch.wanted)
        padded = ready.given is not None and ready.given.shapes != given.shapes
        if self._copies != self._stream:
            self._cuda.record(self._computed, self._stream)
            self._cuda.stream_waits(self._copies, self._computed)
        staging, position = self._buffers.pinned_outputs, 0
        if self._options.pinned_output:
            staging.ensure(sum(_padded(self._size(name, ready, layout)) for name in names))
        outputs: dict[str, Array] = {}
        staged: list[tuple[int, Array]] = []
        for name in names:
            tensor = self._signature.outputs[name]
            if not tensor.on_device:
                continue
            source, shape = self._source(name, ready, layout)
            if padded and shape:
                shape = (batch.rows, *shape[1:])
            array = outputs[name] = batch.allocate(name, shape, tensor.datatype)
            if not array.nbytes:
                continue
            if self._options.pinned_output:
                self._cuda.copy_to_host(staging.address + position, source, array.nbytes, self._copies)
                staged.append((position, array))
                position += _padded(array.nbytes)
            else:
                self._cuda.copy_to_host(int(array.ctypes.data), source, array.nbytes, self._copies)
        self._cuda.record(self._copied, self._copies)
        self._cuda.wait(self._copied)
        for offset, array in staged:
            copy_out(staging, offset, array)
        for name in names:
            tensor = self._signature.outputs[name]
            if not tensor.on_device:
                outputs[name] = self._host_output(tensor, batch, ready)
        return outputs

    def _source(self, name: str, ready: ReadyContext, layout: Layout) -> tuple[int, tuple[int, ...]]:
        """Return the address in GPU memory and the shape of an output."""
        place = layout.outputs.get(name)
        if place is not None:
            return self._buffers.outputs.address + place.offset, place.shape
        return self._buffers.varying[name].address, ready.varying_shape(name)

    def _size(self, name: str, ready: ReadyContext, layout: Layout) -> int:
        tensor = self._signature.outputs[name]
        return tensor.nbytes(self._source(name, ready, layout)[1]) if tensor.on_device else 0

    def _host_output(self, tensor: EngineTensor, batch: Batch, ready: ReadyContext) -> Array:
        """Return a shape tensor: of a batch, each row has its values without the first, the number of rows."""
        shape = tuple(ready.context.get_tensor_shape(tensor.name))
        values = ready.host.read(tensor.name, shape[0] if shape else 1)
        if not self._batching:
            return values.reshape(shape)
        return np.tile(values[1:] if shape else values, (batch.rows, 1))

    # --- graphs ---------------------------------------------------------------------------------------------------

    def _graph_for(self, given: Given) -> Graph | None:
        if self._graphs.are_stale(self._buffers.generation):
            self._graphs.drop()
            specs, self._specs = self._specs, []
            for spec in specs:
                self.try_capture(spec)
        return self._graphs.find(given, batching=self._batching)

    def try_capture(self, spec: GraphSpec) -> str:
        """Capture a graph; return why that could not be done, "" = it was. Raises CudaError that is fatal."""
        try:
            self.capture(spec)
        except CudaError as error:
            if error.fatal:
                raise
            return str(error)
        except InferError as error:
            return error.message
        return ""

    def _capture_lazily(self, number: int, given: Given) -> None:
        try:
            self._capture(number, given, None)
        except CudaError as error:
            if error.fatal:
                raise
            self._cannot_capture(str(error))
        except InferError as error:
            self._cannot_capture(error.message)

    def _cannot_capture(self, why: str) -> None:
        self._captures = False
        self._recover()
        _LOG.warning("instance %s runs without CUDA graphs, its engine cannot be captured: %s", self._name, why)

    def _capture(self, number: int, given: Given, lower_batch: int | None) -> None:
        """Capture one execution, in a context of its own that has run once, so that nothing is left to set up."""
        ready = ReadyContext(self._engine, number, self._stream)
        layout = ready.prepare(given, self._buffers)
        if layout.varying:
            raise invalid(f"the shapes of outputs depend on the data: {', '.join(layout.varying)}")
        ready.enqueue()
        self._cuda.synchronize(self._stream)
        self._cuda.begin_capture(self._stream)
        try:
            ready.enqueue()
        except BaseException:
            with contextlib.suppress(CudaError):
                self._cuda.destroy_graph(self._cuda.end_capture(self._stream))
            raise
        executable = self._cuda.end_capture(self._stream)
        self._graphs.add(Graph(ready, layout, given, executable, lower_batch), self._buffers.generation)

    def _recover(self) -> None:
        """Leave the slot fit for the next batch: nothing under way, nothing half set up."""
        with contextlib.suppress(CudaError):
            self._cuda.synchronize(self._stream)
            self._cuda.synchronize(self._copies)
        self._buffers.generation += 1


def profiles_of(instance: InstanceOptions, signature: EngineSignature) -> Sequence[int]:
    """Return the profiles that an instance or group uses. Raises INVALID_ARG for one that the engine lacks."""
    count = len(signature.profiles)
    for number in instance.profiles:
        if number >= count:
            raise invalid(f"instance '{instance.name}' is to use profile {number}, the engine has 0 to {count - 1}")
    return instance.profiles or range(count)


def _padded(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


def _priority(cuda: Cuda, name: str) -> int:
    least, greatest = cuda.priorities()
    return {"PRIORITY_MAX": greatest, "PRIORITY_MIN": least}.get(name, 0)
