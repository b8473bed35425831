"""The CUDA runtime, as far as running engines needs it: memory, copies, streams, events, captured graphs.

ctypes on libcudart, which comes with the wheels of TensorRT itself: a second binding would be one more package whose
version has to fit the driver. ctypes lets other threads run during every call, those that wait above all.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from headrace_backends.cuda_library import LIBRARIES, load_cudart
from headrace_protocol.errors import InferError, internal, unavailable

_HOST_TO_DEVICE: Final = 1
_DEVICE_TO_HOST: Final = 2
_NON_BLOCKING: Final = 1
"""Of streams: it does not wait for the default stream."""
_BLOCKING_SYNC: Final = 1
_DISABLE_TIMING: Final = 2
"""Of events."""
_THREAD_LOCAL: Final = 1
"""Of captures: what other threads do meanwhile does not disturb them."""
_MAJOR: Final = 75
_MINOR: Final = 76
"""cudaDeviceAttr numbers of the compute capability."""
_OUT_OF_MEMORY: Final = 2
_NO_DEVICE: Final = 100
_UNAVAILABLE: Final = frozenset({_OUT_OF_MEMORY, 3, 35, 46, _NO_DEVICE, 101, 802, 804})
"""cudaError_t of what another machine, driver or time may have: memory, a driver that is new enough, a GPU."""
_FATAL: Final = frozenset({4, 46, 214, 220, 700, 702, 708, 709, 710, 714, 715, 716, 717, 718, 719, 999})
"""cudaError_t after which no call of the process succeeds any more: illegal addresses, failed launches, ECC errors."""

_PROTOTYPES: Final[dict[str, tuple[Any, ...]]] = {
    "cudaGetDeviceCount": (POINTER(c_int),),
    "cudaSetDevice": (c_int,),
    "cudaDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cudaDeviceGetStreamPriorityRange": (POINTER(c_int), POINTER(c_int)),
    "cudaMemGetInfo": (POINTER(c_size_t), POINTER(c_size_t)),
    "cudaMalloc": (POINTER(c_void_p), c_size_t),
    "cudaFree": (c_void_p,),
    "cudaHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cudaFreeHost": (c_void_p,),
    "cudaMemcpyAsync": (c_void_p, c_void_p, c_size_t, c_int, c_void_p),
    "cudaStreamCreateWithPriority": (POINTER(c_void_p), c_uint, c_int),
    "cudaStreamDestroy": (c_void_p,),
    "cudaStreamSynchronize": (c_void_p,),
    "cudaStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cudaEventCreateWithFlags": (POINTER(c_void_p), c_uint),
    "cudaEventRecord": (c_void_p, c_void_p),
    "cudaEventSynchronize": (c_void_p,),
    "cudaEventDestroy": (c_void_p,),
    "cudaStreamBeginCapture": (c_void_p, c_int),
    "cudaStreamEndCapture": (c_void_p, POINTER(c_void_p)),
    "cudaGraphInstantiateWithFlags": (POINTER(c_void_p), c_void_p, c_ulonglong),
    "cudaGraphDestroy": (c_void_p,),
    "cudaGraphExecDestroy": (c_void_p,),
    "cudaGraphLaunch": (c_void_p, c_void_p),
}
"""Every function that is called, with the types of its arguments. All return a cudaError_t."""


class CudaError(Exception):
    """A call of the CUDA runtime that failed."""

    def __init__(self, status: int, what: str, text: str) -> None:
        super().__init__(f"{what} failed: {text}")
        self.status: Final = status
        self.fatal: Final = status in _FATAL
        """Whether the process cannot use the GPU any more."""

    def as_infer_error(self, where: str) -> InferError:
        """Return it as a request or the loading of a model is told it."""
        make = unavailable if self.status in _UNAVAILABLE else internal
        return make(f"{where}: {self}")


class Cuda:
    """One CUDA runtime. Addresses, streams, events and graphs are plain integers; whoever made one destroys it."""

    def __init__(self, library: Any) -> None:
        self._library = library
        for name, types in _PROTOTYPES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, c_int
        library.cudaGetErrorString.argtypes, library.cudaGetErrorString.restype = (c_int,), c_char_p
        library.cudaGetLastError.argtypes, library.cudaGetLastError.restype = (), c_int

    def device_count(self) -> int:
        """Return how many GPUs there are. Raises CudaError where there is no driver, or too old a one."""
        count = c_int()
        status = self._library.cudaGetDeviceCount(byref(count))
        if status == _NO_DEVICE:
            return 0
        self._check(status, "looking for GPUs")
        return count.value

    def select(self, device: int) -> None:
        """Make `device` the one that this thread's calls are about."""
        self._check(self._library.cudaSetDevice(device), f"selecting GPU {device}")

    def capability(self, device: int) -> tuple[int, int]:
        """Return the compute capability of `device`: major, minor."""
        values = []
        for attribute in (_MAJOR, _MINOR):
            value = c_int()
            status = self._library.cudaDeviceGetAttribute(byref(value), attribute, device)
            self._check(status, f"asking GPU {device} for its compute capability")
            values.append(value.value)
        return values[0], values[1]

    def allocate(self, nbytes: int) -> int:
        """Return the address of `nbytes` > 0 of GPU memory, aligned to 256."""
        address = c_void_p()
        status = self._library.cudaMalloc(byref(address), nbytes)
        self._check(status, f"allocating {nbytes} bytes of GPU memory{self._free_bytes(status)}")
        return address.value or 0

    def _free_bytes(self, status: int) -> str:
        """Return how much memory the GPU has left, for the error of who found none."""
        free, total = c_size_t(), c_size_t()
        if status != _OUT_OF_MEMORY or self._library.cudaMemGetInfo(byref(free), byref(total)):
            return ""
        return f", of which {free.value} are free,"

    def free(self, address: int) -> None:
        """Free what `allocate` gave. Waits for what the GPU does."""
        self._check(self._library.cudaFree(address), "freeing GPU memory")

    def allocate_host(self, nbytes: int) -> int:
        """Return the address of `nbytes` > 0 of pinned host memory."""
        address = c_void_p()
        status = self._library.cudaHostAlloc(byref(address), nbytes, 0)
        self._check(status, f"allocating {nbytes} bytes of pinned memory")
        return address.value or 0

    def free_host(self, address: int) -> None:
        """Free what `allocate_host` gave."""
        self._check(self._library.cudaFreeHost(address), "freeing pinned memory")

    def copy_to_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Begin to copy host memory to GPU memory. `source` stays as it is until the stream has come there."""
        status = self._library.cudaMemcpyAsync(target, source, nbytes, _HOST_TO_DEVICE, stream)
        self._check(status, "copying to the GPU")

    def copy_to_host(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Begin to copy GPU memory to host memory."""
        status = self._library.cudaMemcpyAsync(target, source, nbytes, _DEVICE_TO_HOST, stream)
        self._check(status, "copying from the GPU")

    def priorities(self) -> tuple[int, int]:
        """Return the lowest and the highest priority that a stream can have; the highest is the smaller number."""
        least, greatest = c_int(), c_int()
        status = self._library.cudaDeviceGetStreamPriorityRange(byref(least), byref(greatest))
        self._check(status, "asking for the priorities of streams")
        return least.value, greatest.value

    def stream(self, priority: int = 0) -> int:
        """Return a new stream."""
        stream = c_void_p()
        status = self._library.cudaStreamCreateWithPriority(byref(stream), _NON_BLOCKING, priority)
        self._check(status, "creating a stream")
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream that has nothing left to do."""
        self._check(self._library.cudaStreamDestroy(stream), "destroying a stream")

    def synchronize(self, stream: int) -> None:
        """Wait until the stream has done all it was given; tells the errors of that."""
        self._check(self._library.cudaStreamSynchronize(stream), "running on the GPU")

    def stream_waits(self, stream: int, event: int) -> None:
        """Have the stream go on only when the event has come."""
        self._check(self._library.cudaStreamWaitEvent(stream, event, 0), "making a stream wait")

    def event(self, *, busy_wait: bool) -> int:
        """Return a new event. `busy_wait`: who waits for it spends a core on hearing of it sooner."""
        event = c_void_p()
        flags = _DISABLE_TIMING if busy_wait else _DISABLE_TIMING | _BLOCKING_SYNC
        self._check(self._library.cudaEventCreateWithFlags(byref(event), flags), "creating an event")
        return event.value or 0

    def destroy_event(self, event: int) -> None:
        """Destroy an event that nobody waits for."""
        self._check(self._library.cudaEventDestroy(event), "destroying an event")

    def record(self, event: int, stream: int) -> None:
        """Have the event come when the stream has got here."""
        self._check(self._library.cudaEventRecord(event, stream), "recording an event")

    def wait(self, event: int) -> None:
        """Wait for the event; tells the errors of what the stream did before."""
        self._check(self._library.cudaEventSynchronize(event), "running on the GPU")

    def begin_capture(self, stream: int) -> None:
        """Have what the stream is given written down instead of done."""
        self._check(self._library.cudaStreamBeginCapture(stream, _THREAD_LOCAL), "beginning to capture a graph")

    def end_capture(self, stream: int) -> int:
        """Return what was written down, as a graph to launch. Raises CudaError where it cannot be captured."""
        graph, executable = c_void_p(), c_void_p()
        status = self._library.cudaStreamEndCapture(stream, byref(graph))
        if status or not graph.value:
            self._library.cudaGetLastError()  # else the next call would tell of it
            self._check(status or 1, "capturing a graph")
        try:
            status = self._library.cudaGraphInstantiateWithFlags(byref(executable), graph, 0)
            self._check(status, "making a graph ready")
        finally:
            self._library.cudaGraphDestroy(graph)
        return executable.value or 0

    def launch(self, graph: int, stream: int) -> None:
        """Give the stream a graph to run."""
        self._check(self._library.cudaGraphLaunch(graph, stream), "launching a graph")

    def destroy_graph(self, graph: int) -> None:
        """Destroy what `end_capture` gave."""
        self._check(self._library.cudaGraphExecDestroy(graph), "destroying a graph")

    def _check(self, status: int, what: str) -> None:
        if status:
            text = (self._library.cudaGetErrorString(status) or b"unknown").decode(errors="replace")
            raise CudaError(status, what, f"{text} (CUDA error {status})")


_loaded: list[Cuda] = []


def use(library: Any) -> None:
    """Take `library` for libcudart: for a build of TensorRT that brings its own."""
    _loaded[:] = [Cuda(library)]


def load_cuda() -> Cuda:
    """Return the CUDA runtime of this process. Raises UNAVAILABLE where there is none."""
    if not _loaded:
        library = load_cudart()
        if library is None:
            raise unavailable(f"there is no CUDA runtime library here ({', '.join(LIBRARIES)})")
        _loaded.append(Cuda(library))
    return _loaded[0]


class DeviceBuffer:
    """GPU memory that grows. It moves when it does, so nothing may be under way in it then."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda: Final = cuda
        self._capacity = 0
        self.address = 0

    def ensure(self, nbytes: int) -> bool:
        """Make room for `nbytes` (at least 1); return whether it moved. What was in it is gone then."""
        if max(1, nbytes) <= self._capacity:
            return False
        self.close()
        capacity = _rounded(nbytes)
        self.address = self._cuda.allocate(capacity)
        self._capacity = capacity
        return True

    def close(self) -> None:
        """Free it."""
        address, self.address, self._capacity = self.address, 0, 0
        if address:
            self._cuda.free(address)


class PinnedBuffer:
    """Host memory that the GPU copies from and to by itself. Grows as DeviceBuffer does."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda: Final = cuda
        self._capacity = 0
        self._whole: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self.address = 0

    def ensure(self, nbytes: int) -> None:
        """Make room for `nbytes`. What was in it is gone where it has to grow."""
        if max(1, nbytes) <= self._capacity:
            return
        self.close()
        capacity = _rounded(nbytes)
        self.address = self._cuda.allocate_host(capacity)
        self._whole = np.ctypeslib.as_array((ctypes.c_ubyte * capacity).from_address(self.address))
        self._capacity = capacity

    def view(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return a part of it, to be used while it does not grow."""
        assert offset + nbytes <= self._capacity
        return self._whole[offset : offset + nbytes]

    def close(self) -> None:
        """Free it."""
        address, self.address, self._capacity = self.address, 0, 0
        self._whole = np.empty(0, np.uint8)
        if address:
            self._cuda.free_host(address)


def _rounded(nbytes: int) -> int:
    unit = 1 << 20 if nbytes > 1 << 20 else 1 << 12
    return max(1, -(-nbytes // unit)) * unit
