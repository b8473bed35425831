"""Stands for TensorRT on machines without a GPU: the names and rules of its runtime API, over `cudart`'s memory.

An engine file is a plan's header and a JSON text (`engine_bytes`). Like the real one it wants a context set up in
order, refuses shapes beyond the profile, does its work when the stream does, and logs why it returned nothing.
"""

from __future__ import annotations

import enum
import json
import os
import struct

import numpy as np

from . import cudart as _cudart
from .programs import PROGRAMS, Computed

__version__ = "10.16.1.11"

cuda = _cudart.FakeCudart(gpus=int(os.environ.get("FAKE_GPUS", "2")))
MAX_ELEMENTS = 64

try:
    from headrace_backends.tensorrt.cuda import use
except ImportError:  # whoever only writes engines needs no GPU
    pass
else:
    use(cuda)


class DataType(enum.Enum):
    FLOAT = 0
    HALF = 1
    INT8 = 2
    INT32 = 3
    BOOL = 4
    UINT8 = 5
    FP8 = 6
    BF16 = 7
    INT64 = 8
    INT4 = 9


_NUMPY = {
    "FLOAT": np.float32,
    "HALF": np.float16,
    "INT8": np.int8,
    "INT32": np.int32,
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "BF16": np.uint16,
    "INT64": np.int64,
    "FP8": np.uint8,
    "INT4": np.uint8,
}


class TensorIOMode(enum.Enum):
    NONE = 0
    INPUT = 1
    OUTPUT = 2


class TensorLocation(enum.Enum):
    DEVICE = 0
    HOST = 1


class TensorFormat(enum.Enum):
    LINEAR = 0
    CHW2 = 1
    HWC = 8


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC = 0
    ON_PROFILE_CHANGE = 1
    USER_MANAGED = 2


class ILogger:
    class Severity(enum.Enum):
        INTERNAL_ERROR = 0
        ERROR = 1
        WARNING = 2
        INFO = 3
        VERBOSE = 4

    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = Severity

    def __init__(self) -> None:
        self._made = True

    def log(self, severity: object, msg: str) -> None:
        raise NotImplementedError


class IOutputAllocator:
    def __init__(self) -> None:
        self._made = True


class Dims(tuple):
    """Dimensions; iterates as the real one does."""

    __slots__ = ()


def init_libnvinfer_plugins(logger: ILogger, namespace: str) -> bool:
    return logger._made and namespace == ""


def engine_bytes(version: str = __version__, **spec: object) -> bytes:
    """Return an engine file. `spec`: program, tensors, profiles, and optionally capability, memory, compatible."""
    header = struct.pack("<4sIQQ4B", b"ftrt", 0, 0, 0, *(int(part) for part in version.split(".")))
    return header + json.dumps(spec).encode()


class Runtime:
    def __init__(self, logger: ILogger) -> None:
        assert logger._made
        self._logger = logger
        self.DLA_core = -1
        self.num_DLA_cores = int(os.environ.get("FAKE_DLA_CORES", "0"))
        self.engine_host_code_allowed = False
        if not cuda.gpus:
            logger.log(ILogger.ERROR, "CUDA initialization failure with error: 35")

    def deserialize_cuda_engine(self, serialized_engine: object) -> ICudaEngine | None:
        data = bytes(memoryview(serialized_engine))
        try:
            spec = json.loads(data[28:])
        except ValueError:
            return self._refuse("Serialization assertion plan->header.size == blobSize failed")
        built = ".".join(str(part) for part in data[24:28])
        if built != __version__ and not (spec.get("compatible") and self.engine_host_code_allowed):
            return self._refuse(
                "The engine plan file is not compatible with this version of TensorRT, expecting library version "
                f"{__version__} got {built}, please rebuild."
            )
        major, minor = cuda.capabilities[cuda.device]
        capability = f"{major}.{minor}"
        if spec.get("capability", capability) != capability:
            return self._refuse(
                "The engine plan file is generated on an incompatible device, expecting compute "
                f"{capability} got compute {spec['capability']}, please rebuild."
            )
        if self.DLA_core >= 0:
            spec["dla_core"] = self.DLA_core
        return ICudaEngine(spec, self._logger)

    def _refuse(self, text: str) -> None:
        self._logger.log(ILogger.ERROR, text)


class ICudaEngine:
    def __init__(self, spec: dict, logger: ILogger) -> None:
        self._spec, self._logger = spec, logger
        self._tensors = {tensor["name"]: tensor for tensor in spec["tensors"]}
        self._profiles = spec.get("profiles") or [{}]
        self.num_io_tensors = len(self._tensors)
        self.num_optimization_profiles = len(self._profiles)

    def get_tensor_name(self, index: int) -> str:
        return list(self._tensors)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode[self._tensors[name]["mode"]]

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType[self._tensors[name]["dtype"]]

    def get_tensor_shape(self, name: str) -> Dims:
        return Dims(self._tensors[name]["shape"])

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation.HOST if self.is_shape_inference_io(name) else TensorLocation.DEVICE

    def is_shape_inference_io(self, name: str) -> bool:
        return bool(self._tensors[name].get("shape_tensor"))

    def get_tensor_format(self, name: str) -> TensorFormat:
        return TensorFormat[self._tensors[name].get("format", "LINEAR")]

    def get_tensor_format_desc(self, name: str) -> str:
        linear = self.get_tensor_format(name) is TensorFormat.LINEAR
        return "Row major linear FP32 format" if linear else "Channel major FP16 format where C % 8 == 0"

    def get_tensor_vectorized_dim(self, name: str) -> int:
        return 1 if self.get_tensor_format(name) is TensorFormat.CHW2 else -1

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Dims]:
        fixed = self._tensors[name]["shape"]
        return [Dims(shape) for shape in self._profiles[profile_index].get(name, [fixed] * 3)]

    def get_tensor_profile_values(self, name: int, profile_index: str) -> list[list[int]]:
        assert isinstance(name, int), "the number of the profile goes first, whatever the arguments are called"
        return self._profiles[name].get(f"{profile_index} values", [])

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        memory = self._spec.get("memory", 1024)
        return memory[profile_index] if isinstance(memory, list) else memory

    def create_execution_context(
        self, strategy: ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy.STATIC
    ) -> IExecutionContext | None:
        assert strategy is ExecutionContextAllocationStrategy.USER_MANAGED
        if self._spec.get("no_context"):
            self._logger.log(ILogger.ERROR, "no memory for a context")
            return None
        return IExecutionContext(self)


class IExecutionContext:
    def __init__(self, engine: ICudaEngine) -> None:
        self._engine, self._logger = engine, engine._logger
        self._program = PROGRAMS[engine._spec["program"]]
        self._profile = 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._allocators: dict[str, IOutputAllocator] = {}
        self._memory = (0, 0)
        self._dirty = True
        self._version = 0

    def _changed(self) -> None:
        self._dirty = True
        self._version += 1

    def _refuse(self, text: str) -> bool:
        self._logger.log(ILogger.ERROR, text)
        return False

    def _inputs(self) -> list[str]:
        return [name for name in self._engine._tensors if self._engine.get_tensor_mode(name) is TensorIOMode.INPUT]

    def _outputs(self) -> list[str]:
        return [name for name in self._engine._tensors if self._engine.get_tensor_mode(name) is TensorIOMode.OUTPUT]

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        assert stream_handle in cuda.streams
        if not 0 <= profile_index < self._engine.num_optimization_profiles:
            return self._refuse(f"there is no profile {profile_index}")
        self._profile = profile_index
        self._shapes.clear()
        self._changed()
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        self._memory = (memory, size)
        self._version += 1

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        low, _, high = self._engine.get_tensor_profile_shape(name, self._profile)
        if len(shape) != len(low) or not all(a <= dim <= b for a, dim, b in zip(low, shape, high, strict=True)):
            return self._refuse(f"Set dimensions {list(shape)} of {name} are outside of profile {self._profile}")
        if self._shapes.get(name) != tuple(shape):
            self._shapes[name] = tuple(shape)
            self._changed()
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if not memory:
            return self._refuse(f"no address for {name}")
        if self._addresses.get(name) != memory:
            self._addresses[name] = memory
            self._version += 1
        return True

    def set_output_allocator(self, name: str, output_allocator: IOutputAllocator) -> bool:
        assert output_allocator._made
        self._allocators[name] = output_allocator
        return True

    def get_tensor_shape(self, name: str) -> Dims:
        if self._engine.get_tensor_mode(name) is TensorIOMode.INPUT:
            return Dims(self._shapes.get(name, self._engine._tensors[name]["shape"]))
        return Dims(self._output_shapes()[name])

    def _host(self, name: str) -> np.ndarray:
        import ctypes

        dtype = np.dtype(_NUMPY[self._engine._tensors[name]["dtype"]])
        count = int(np.prod(self._engine._tensors[name]["shape"]))
        memory = (ctypes.c_ubyte * (dtype.itemsize * count)).from_address(self._addresses[name])
        return np.frombuffer(memory, dtype)

    def _given(self) -> tuple[dict[str, tuple[int, ...]], dict[str, list[int]]]:
        shapes, values = {}, {}
        for name in self._inputs():
            shapes[name] = self._shapes.get(name, tuple(self._engine._tensors[name]["shape"]))
            if self._engine.is_shape_inference_io(name):
                values[name] = self._host(name).tolist()
        return shapes, values

    def _output_shapes(self) -> dict[str, tuple[int, ...]]:
        return self._program.shapes(*self._given())

    def infer_shapes(self) -> list[str]:
        missing = [
            name
            for name in self._inputs()
            if (-1 in self._engine._tensors[name]["shape"] and name not in self._shapes)
            or (self._engine.is_shape_inference_io(name) and name not in self._addresses)
        ]
        if not missing and self._engine._spec.get("infer_fails"):
            self._refuse("Error Code 7: shapes do not agree")
            raise RuntimeError("shape inference failed")
        return missing

    def execute_async_v3(self, stream_handle: int) -> bool:
        if self.infer_shapes():
            return self._refuse("shapes of inputs are missing")
        needed = self._engine.get_device_memory_size_for_profile_v2(self._profile)
        address, size = self._memory
        if size < needed or not address:
            return self._refuse(f"{needed} bytes of memory are needed, {size} were given")
        shapes = self._output_shapes()
        varying = [name for name, shape in shapes.items() if -1 in shape]
        for name in (*self._inputs(), *self._outputs()):
            if name not in self._addresses and name not in varying:
                return self._refuse(f"tensor {name} has no address")
        if cuda.capturing(stream_handle):
            if self._dirty or varying or self._engine._spec.get("no_capture"):
                cuda.spoil(stream_handle)
                return self._refuse("operation is not supported while the stream captures")
        self._dirty = False
        if self._engine._spec.get("enqueue_fails"):
            return self._refuse("Error Code 1: Cask (Cask convolution execution)")
        work = _Work(self, shapes, varying, *self._given())
        if varying:
            cuda.run(cuda.streams[stream_handle])  # the shape is known only once the inputs are there
            return work.run_varying()
        cuda.enqueue(stream_handle, work)
        return True


class _Work:
    """One execution, as the stream will do it."""

    def __init__(self, context: IExecutionContext, shapes, varying, input_shapes, values) -> None:
        self.context, self.engine, self.version = context, context._engine, context._version
        self.addresses, self.memory = dict(context._addresses), context._memory
        self.shapes, self.varying, self.input_shapes, self.values = shapes, varying, input_shapes, values

    def __call__(self) -> None:
        assert self.version == self.context._version, "the context of an execution was changed before it was done"
        for name, array in self._compute().items():
            self._put(self.addresses[name], name, array)

    def run_varying(self) -> bool:
        for name, array in self._compute().items():
            if name not in self.varying:
                self._put(self.addresses[name], name, array)
                continue
            allocator = self.context._allocators[name]
            address = allocator.reallocate_output_async(name, 0, array.nbytes, 256, 1)
            if not address:
                return self.context._refuse(f"no memory for output {name}")
            self._put(address, name, array)
            allocator.notify_shape(name, Dims(array.shape))
        return True

    def _compute(self) -> dict[str, np.ndarray]:
        address, size = self.memory
        if size:
            np.frombuffer(cuda.view(address, size), np.uint8)[:] = 0x5A  # it works there
        inputs = {}
        for name, shape in self.input_shapes.items():
            if name not in self.values:
                dtype = np.dtype(_NUMPY[self.engine._tensors[name]["dtype"]])
                nbytes = dtype.itemsize * int(np.prod(shape))
                inputs[name] = np.frombuffer(cuda.view(self.addresses[name], nbytes), dtype).reshape(shape)
        return self.context._program.compute(Computed(inputs, self.values, self.shapes))

    def _put(self, address: int, name: str, array: np.ndarray) -> None:
        tensor = self.engine._tensors[name]
        array = np.ascontiguousarray(array, _NUMPY[tensor["dtype"]])
        if tensor.get("shape_tensor"):
            import ctypes

            ctypes.memmove(address, array.tobytes(), array.nbytes)
            return
        np.frombuffer(cuda.view(address, array.nbytes), np.uint8)[:] = array.reshape(-1).view(np.uint8)
