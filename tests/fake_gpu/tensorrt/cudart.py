"""Stands for libcudart: GPUs whose memory is host memory, streams that do nothing until somebody waits for them.

Stricter than a GPU: every copy is checked against what is allocated, pinned memory is read when the copy is done and
not when it is begun, calls that a capture forbids spoil it, and after an illegal access every call fails.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable

OK, OUT_OF_MEMORY, INVALID_VALUE, NO_DEVICE, INVALID_DEVICE = 0, 2, 1, 100, 101
ILLEGAL_ADDRESS, CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, DRIVER_TOO_OLD = 700, 900, 901, 35
TEXTS = {
    OUT_OF_MEMORY: "out of memory",
    INVALID_VALUE: "invalid argument",
    NO_DEVICE: "no CUDA-capable device is detected",
    INVALID_DEVICE: "invalid device ordinal",
    ILLEGAL_ADDRESS: "an illegal memory access was encountered",
    CAPTURE_UNSUPPORTED: "operation not permitted when stream is capturing",
    CAPTURE_INVALIDATED: "operation failed due to a previous error during capture",
    DRIVER_TOO_OLD: "CUDA driver version is insufficient for CUDA runtime version",
}
H2D, D2H = 1, 2


class Fault(Exception):
    """What a kernel or a copy did that the GPU does not survive."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Function:
    """A function of the library: it may be given types, as those of ctypes are."""

    def __init__(self, library: FakeCudart, name: str, body: Callable[..., int | bytes]) -> None:
        self.argtypes = self.restype = None
        self.library, self.name, self.body = library, name, body

    def __call__(self, *arguments):
        library = self.library
        if self.name == "cudaGetErrorString":
            return TEXTS.get(arguments[0], f"error {arguments[0]}").encode()
        with library.lock:
            library.calls.append(self.name)
            injected = library.failing.pop(self.name, OK)
            if injected:
                return injected
            if library.dead:
                return library.dead
            try:
                return self.body(*arguments)
            except Fault as fault:
                library.dead = fault.status
                return fault.status


class Stream:
    def __init__(self, device: int, priority: int) -> None:
        self.device, self.priority = device, priority
        self.queue: list[Callable[[], None]] = []
        self.captured: list[Callable[[], None]] | None = None
        self.capturing_thread = 0
        self.spoiled = False


class FakeCudart:
    """The library, and the GPUs."""

    def __init__(self, gpus: int = 2, memory: int = 1 << 28, capability: tuple[int, int] = (8, 9)) -> None:
        self.gpus, self.memory, self.capabilities = gpus, memory, dict.fromkeys(range(gpus), capability)
        self.lock = threading.RLock()
        self.calls: list[str] = []
        self.failing: dict[str, int] = {}
        """Name of a function -> what its next call returns."""
        self.dead = OK
        self.device_memory: dict[int, tuple[object, int, int]] = {}
        """Address -> (what holds it, bytes, GPU)."""
        self.pinned: dict[int, tuple[object, int]] = {}
        self.streams: dict[int, Stream] = {}
        self.events: dict[int, Stream | None] = {}
        self.event_flags: dict[int, int] = {}
        self.graphs: dict[int, list[Callable[[], None]]] = {}
        self.launched = 0
        self._next = 0x1000
        self._thread = threading.local()
        for name in dir(self):
            if name.startswith("_cuda"):
                setattr(self, name[1:], Function(self, name[1:], getattr(self, name)))
        self.cudaGetErrorString = Function(self, "cudaGetErrorString", lambda status: b"")

    # --- for the stand-in of TensorRT

    @property
    def device(self) -> int:
        return getattr(self._thread, "device", 0)

    def view(self, address: int, nbytes: int) -> ctypes.Array:
        """Return GPU memory of the current or any GPU; a Fault where it is not allocated."""
        for start, (_, size, _) in self.device_memory.items():
            if start <= address and address + nbytes <= start + size:
                return (ctypes.c_ubyte * nbytes).from_address(address)
        raise Fault(ILLEGAL_ADDRESS)

    def enqueue(self, stream: int, work: Callable[[], None]) -> None:
        found = self.streams[stream]
        (found.queue if found.captured is None else found.captured).append(work)

    def capturing(self, stream: int) -> bool:
        return self.streams[stream].captured is not None

    def spoil(self, stream: int) -> None:
        self.streams[stream].spoiled = True

    def run(self, stream: Stream) -> None:
        while stream.queue:
            work = stream.queue.pop(0)
            work()

    @property
    def idle(self) -> bool:
        """Whether nothing is left of what was created."""
        return not (self.device_memory or self.pinned or self.streams or self.events or self.graphs)

    # --- the functions

    def _handle(self) -> int:
        self._next += 0x10
        return self._next

    def _forbidden(self) -> bool:
        """Spoil the capture of this thread, if there is one."""
        mine = [
            s for s in self.streams.values() if s.captured is not None and s.capturing_thread == threading.get_ident()
        ]
        for stream in mine:
            stream.spoiled = True
        return bool(mine)

    def _cudaGetDeviceCount(self, count) -> int:
        if os.environ.get("FAKE_GPU_DRIVER") == "old":
            return DRIVER_TOO_OLD
        count._obj.value = self.gpus
        return OK if self.gpus else NO_DEVICE

    def _cudaSetDevice(self, device: int) -> int:
        if device >= self.gpus:
            return INVALID_DEVICE
        self._thread.device = device
        return OK

    def _cudaDeviceGetAttribute(self, value, attribute: int, device: int) -> int:
        value._obj.value = self.capabilities[device][{75: 0, 76: 1}[attribute]]
        return OK

    def _cudaDeviceGetStreamPriorityRange(self, least, greatest) -> int:
        least._obj.value, greatest._obj.value = 0, -5
        return OK

    def _cudaMemGetInfo(self, free, total) -> int:
        free._obj.value = self.memory - sum(size for _, size, _ in self.device_memory.values())
        total._obj.value = self.memory
        return OK

    def _cudaMalloc(self, where, nbytes: int) -> int:
        if self._forbidden():
            return CAPTURE_UNSUPPORTED
        if sum(size for _, size, _ in self.device_memory.values()) + nbytes > self.memory:
            return OUT_OF_MEMORY
        where._obj.value = self._take(self.device_memory, nbytes, self.device)
        return OK

    def _take(self, table: dict, nbytes: int, *more: object) -> int:
        memory = (ctypes.c_ubyte * (nbytes + 256))()
        address = (ctypes.addressof(memory) + 255) & -256
        table[address] = (memory, nbytes, *more)
        ctypes.memset(address, 0xA5, nbytes)
        return address

    def _cudaFree(self, address: int) -> int:
        for stream in self.streams.values():
            self.run(stream)
        return OK if self.device_memory.pop(address, None) else INVALID_VALUE

    def _cudaHostAlloc(self, where, nbytes: int, flags: int) -> int:
        where._obj.value = self._take(self.pinned, nbytes)
        return OK

    def _cudaFreeHost(self, address: int) -> int:
        return OK if self.pinned.pop(address, None) else INVALID_VALUE

    def _is_pinned(self, address: int, nbytes: int) -> bool:
        return any(a <= address and address + nbytes <= a + entry[1] for a, entry in self.pinned.items())

    def _cudaMemcpyAsync(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> int:
        host, device = (source, target) if kind == H2D else (target, source)

        def copy() -> None:
            self.view(device, nbytes)
            ctypes.memmove(target, source, nbytes)

        if self._is_pinned(host, nbytes):
            self.enqueue(stream, copy)
            return OK
        if self._forbidden():
            return CAPTURE_UNSUPPORTED
        self.run(self.streams[stream])
        copy()
        return OK

    def _cudaStreamCreateWithPriority(self, where, flags: int, priority: int) -> int:
        assert flags == 1
        where._obj.value = self._handle()
        self.streams[where._obj.value] = Stream(self.device, priority)
        return OK

    def _cudaStreamDestroy(self, stream: int) -> int:
        assert not self.streams[stream].queue, "a stream is destroyed that has work"
        del self.streams[stream]
        return OK

    def _cudaStreamSynchronize(self, stream: int) -> int:
        if self._forbidden():
            return CAPTURE_UNSUPPORTED
        self.run(self.streams[stream])
        return OK

    def _cudaStreamWaitEvent(self, stream: int, event: int, flags: int) -> int:
        recorded = self.events[event]
        self.enqueue(stream, lambda: None if recorded is None else self.run(recorded))
        return OK

    def _cudaEventCreateWithFlags(self, where, flags: int) -> int:
        where._obj.value = self._handle()
        self.events[where._obj.value] = None
        self.event_flags[where._obj.value] = flags
        return OK

    def _cudaEventRecord(self, event: int, stream: int) -> int:
        self.events[event] = self.streams[stream]
        return OK

    def _cudaEventSynchronize(self, event: int) -> int:
        recorded = self.events[event]
        if recorded is not None:
            self.run(recorded)
        return OK

    def _cudaEventDestroy(self, event: int) -> int:
        del self.events[event]
        return OK

    def _cudaStreamBeginCapture(self, stream: int, mode: int) -> int:
        found = self.streams[stream]
        assert mode == 1
        assert not found.queue, "what was given before the capture is not done"
        found.captured, found.spoiled, found.capturing_thread = [], False, threading.get_ident()
        return OK

    def _cudaStreamEndCapture(self, stream: int, where) -> int:
        found = self.streams[stream]
        work, found.captured = found.captured, None
        if found.spoiled or work is None:
            return CAPTURE_INVALIDATED
        where._obj.value = self._handle()
        self.graphs[where._obj.value] = work
        return OK

    def _cudaGraphInstantiateWithFlags(self, where, graph, flags: int) -> int:
        where._obj.value = self._handle()
        self.graphs[where._obj.value] = self.graphs[graph.value]
        return OK

    def _cudaGraphDestroy(self, graph) -> int:
        del self.graphs[graph.value]
        return OK

    def _cudaGraphExecDestroy(self, graph: int) -> int:
        del self.graphs[graph]
        return OK

    def _cudaGraphLaunch(self, graph: int, stream: int) -> int:
        self.launched += 1
        for work in self.graphs[graph]:
            self.enqueue(stream, work)
        return OK

    def _cudaGetLastError(self) -> int:
        return OK
