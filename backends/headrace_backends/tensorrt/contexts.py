"""An execution context that is ready for inputs of certain shapes, and the buffers that its addresses point into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from headrace_backends.tensorrt.cuda import Cuda, CudaError, DeviceBuffer, PinnedBuffer
from headrace_backends.tensorrt.engine import Engine
from headrace_backends.tensorrt.layout import HOST_BYTES, Layout, lay_out
from headrace_backends.tensorrt.signature import Given, Shape
from headrace_protocol.datatype import Array
from headrace_protocol.errors import InferError, internal, invalid


class Buffers:
    """The memory of one instance, which all of its contexts share, for it runs one batch at a time.

    `generation` is raised whenever something moves: contexts and graphs that know an older one point nowhere.
    """

    def __init__(self, cuda: Cuda, outputs: Mapping[str, object]) -> None:
        self.inputs: Final = DeviceBuffer(cuda)
        self.outputs: Final = DeviceBuffer(cuda)
        self.activations: Final = DeviceBuffer(cuda)
        """What an engine works in."""
        self.varying: Final[dict[str, DeviceBuffer]] = {name: DeviceBuffer(cuda) for name in outputs}
        """Outputs whose shapes depend on the data."""
        self.pinned_inputs: Final = PinnedBuffer(cuda)
        self.pinned_outputs: Final = PinnedBuffer(cuda)
        self.generation = 0
        self.activation_bytes = 0

    def ensure_activations(self, nbytes: int) -> None:
        """Make room for an engine that works in `nbytes`."""
        self.activation_bytes = max(self.activation_bytes, nbytes)
        self.generation += self.activations.ensure(nbytes)

    def ensure(self, layout: Layout) -> None:
        """Make room for the tensors of `layout`."""
        self.generation += self.inputs.ensure(layout.input_bytes)
        self.generation += self.outputs.ensure(layout.output_bytes)

    def close(self) -> None:
        """Free everything."""
        for memory in (self.inputs, self.outputs, self.activations, *self.varying.values()):
            memory.close()
        for staging in (self.pinned_inputs, self.pinned_outputs):
            staging.close()


class HostTensors:
    """Host memory of an engine's shape tensors: TensorRT is given its addresses."""

    def __init__(self, engine: Engine) -> None:
        signature = engine.signature
        tensors = [tensor for tensor in (*signature.inputs, *signature.outputs.values()) if not tensor.on_device]
        self._memory: Final = {tensor.name: np.zeros(HOST_BYTES // 8, np.int64) for tensor in tensors}
        self._types: Final = {tensor.name: tensor.datatype.numpy for tensor in tensors}

    def address(self, name: str) -> int:
        """Return where the tensor lies."""
        return int(self._memory[name].ctypes.data)

    def write(self, name: str, values: tuple[int, ...]) -> None:
        """Set the values of an input. Raises INVALID_ARG where there are more than TensorRT takes."""
        if len(values) > HOST_BYTES // 8:
            raise invalid(f"shape tensor '{name}' has {len(values)} values, at most {HOST_BYTES // 8} are possible")
        self._memory[name].view(self._types[name])[: len(values)] = values

    def read(self, name: str, count: int) -> Array:
        """Return a copy of the values of an output."""
        return self._memory[name].view(self._types[name])[:count].copy()


class ReadyContext:
    """A context of one profile. Destroyed when nothing refers to it, which must be before the engine is."""

    def __init__(self, engine: Engine, profile: int, stream: int) -> None:
        self.profile: Final = profile
        self.context: Final = engine.new_context()
        self.host: Final = HostTensors(engine)
        self.layout: Layout | None = None
        self.given: Given | None = None
        """What it is ready for."""
        self._engine: Final = engine
        self._stream: Final = stream
        self._generation = -1
        self._allocators: dict[str, Any] = {}
        if not self.context.set_optimization_profile_async(profile, stream):
            raise self._refused(f"cannot use optimization profile {profile}")

    def is_ready_for(self, given: Given, buffers: Buffers) -> bool:
        """Whether it can run these inputs as it is."""
        return self._generation == buffers.generation and self.given == given

    def prepare(self, given: Given, buffers: Buffers) -> Layout:
        """Make it ready for these inputs, which its profile takes. Nothing may be under way in `buffers`."""
        self.given = None
        self._engine.log.clear()
        buffers.ensure_activations(self._engine.memory(self.profile))
        self.context.set_device_memory(buffers.activations.address, buffers.activation_bytes)
        self._set_inputs(given)
        layout = lay_out(self._engine.signature, given, self._output_shapes())
        buffers.ensure(layout)
        self._set_addresses(layout, buffers)
        self.layout, self.given, self._generation = layout, given, buffers.generation
        return layout

    def enqueue(self) -> None:
        """Give the stream one execution."""
        self._engine.log.clear()
        if not self.context.execute_async_v3(self._stream):
            for allocator in self._allocators.values():
                if allocator.failure is not None:
                    raise allocator.failure
            raise self._refused("cannot run the engine")

    def varying_shape(self, name: str) -> Shape:
        """Return the shape that an output got that depends on the data, after it ran."""
        shape: Shape | None = self._allocators[name].shape
        if shape is None:
            raise internal(f"TensorRT gave no shape for output '{name}'")
        return shape

    def _set_inputs(self, given: Given) -> None:
        for tensor, shape, values in zip(self._engine.signature.inputs, given.shapes, given.values, strict=True):
            if -1 in tensor.shape and not self.context.set_input_shape(tensor.name, shape):
                raise self._refused(f"does not take the shape {list(shape)} of input '{tensor.name}'")
            if values is not None:
                self.host.write(tensor.name, values)
                self._set_address(tensor.name, self.host.address(tensor.name))

    def _output_shapes(self) -> dict[str, Shape]:
        try:
            missing = self.context.infer_shapes()
        except RuntimeError as error:
            raise self._refused(f"cannot infer the shapes of outputs ({error})") from error
        if missing:
            raise self._refused(f"lacks what the shapes of outputs depend on: {', '.join(missing)}")
        return {name: tuple(self.context.get_tensor_shape(name)) for name in self._engine.signature.outputs}

    def _set_addresses(self, layout: Layout, buffers: Buffers) -> None:
        for name, place in layout.inputs.items():
            self._set_address(name, buffers.inputs.address + place.offset)
        for name, place in layout.outputs.items():
            self._set_address(name, buffers.outputs.address + place.offset)
        for name, tensor in self._engine.signature.outputs.items():
            if not tensor.on_device:
                self._set_address(name, self.host.address(name))
        for name in layout.varying:
            if name not in self._allocators:
                allocator = self._allocators[name] = _new_allocator(self._engine.trt, buffers.varying[name])
                if not self.context.set_output_allocator(name, allocator):
                    raise self._refused(f"takes no allocator for output '{name}'")

    def _set_address(self, name: str, address: int) -> None:
        if not self.context.set_tensor_address(name, address):
            raise self._refused(f"does not take the address of tensor '{name}'")

    def _refused(self, what: str) -> InferError:
        return internal(f"TensorRT {what}: {self._engine.log.take()}")


def _new_allocator(trt: Any, buffer: DeviceBuffer) -> Any:
    """Return an IOutputAllocator that gives TensorRT `buffer`, grown to what it asks for."""

    class Allocator(trt.IOutputAllocator):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)
            self.shape: Shape | None = None
            self.failure: CudaError | None = None

        def reallocate_output(self, name: str, memory: int, size: int, alignment: int) -> int:  # noqa: ARG002
            self.shape = self.failure = None
            try:
                buffer.ensure(size)
            except CudaError as error:
                self.failure = error  # an exception would go no further than TensorRT
                return 0
            return buffer.address

        def reallocate_output_async(self, name: str, memory: int, size: int, alignment: int, stream: int) -> int:  # noqa: ARG002
            return self.reallocate_output(name, memory, size, alignment)

        def notify_shape(self, name: str, shape: Any) -> None:  # noqa: ARG002
            self.shape = tuple(shape)

    return Allocator()


def copy_in(buffer: PinnedBuffer, offset: int, array: Array) -> None:
    """Copy the bytes of a contiguous array into pinned memory."""
    target = buffer.view(offset, array.nbytes)
    np.copyto(target, array.reshape(-1).view(np.uint8))  # lets other threads run, unlike an assignment to a view


def copy_out(buffer: PinnedBuffer, offset: int, array: Array) -> None:
    """Copy bytes of pinned memory into a contiguous array."""
    source = buffer.view(offset, array.nbytes)
    np.copyto(array.reshape(-1).view(np.uint8), source)
