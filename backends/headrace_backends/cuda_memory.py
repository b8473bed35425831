"""Clients' GPU memory: opened by its CUDA IPC handle and copied from and to the host.

Through ctypes on the CUDA runtime library: processes that are never given GPU memory never load it.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Final

from headrace_backends.cuda_library import LIBRARIES, load_cudart
from headrace_protocol.datatype import Buffer
from headrace_protocol.errors import InferError, invalid
from headrace_protocol.tensor import TensorRef

HANDLE_BYTES: Final = 64
_LAZY_PEER_ACCESS: Final = 1
_HOST_TO_DEVICE: Final = 1
_DEVICE_TO_HOST: Final = 2


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaRuntime:
    """The calls that are needed of libcudart. Every error of theirs becomes INVALID_ARG: it is about a client's handle."""

    def __init__(self, library: Any) -> None:
        self._library = library
        library.cudaGetErrorString.restype = ctypes.c_char_p
        library.cudaIpcOpenMemHandle.argtypes = [ctypes.POINTER(ctypes.c_void_p), _Handle, ctypes.c_uint]
        library.cudaIpcCloseMemHandle.argtypes = [ctypes.c_void_p]
        library.cudaMemcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def open(self, handle: bytes, device: int) -> int:
        """Return the address of the memory that another process's handle names."""
        self._check(self._library.cudaSetDevice(device), f"selecting GPU {device}")
        address = ctypes.c_void_p()
        self._check(
            self._library.cudaIpcOpenMemHandle(
                ctypes.byref(address), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS
            ),
            "opening the memory handle",
        )
        return address.value or 0

    def close(self, address: int) -> None:
        """Close what `open` returned."""
        self._check(self._library.cudaIpcCloseMemHandle(address), "closing the memory handle")

    def to_host(self, address: int, nbytes: int) -> bytearray:
        """Return a copy of GPU memory."""
        data = bytearray(nbytes)
        if nbytes:
            target = ctypes.addressof(ctypes.c_char.from_buffer(data))
            self._check(self._library.cudaMemcpy(target, address, nbytes, _DEVICE_TO_HOST), "reading GPU memory")
        return data

    def to_device(self, address: int, data: Buffer) -> None:
        """Copy `data` to GPU memory."""
        if data:
            source = (ctypes.c_char * len(data)).from_buffer_copy(data)
            self._check(self._library.cudaMemcpy(address, source, len(data), _HOST_TO_DEVICE), "writing GPU memory")

    def _check(self, status: int, what: str) -> None:
        if status:
            text = (self._library.cudaGetErrorString(status) or b"unknown").decode(errors="replace")
            raise invalid(f"CUDA shared memory: {what} failed: {text}")


_loading: Final = threading.Lock()
_runtime: list[CudaRuntime] = []


def load_runtime() -> CudaRuntime:
    """Return the CUDA runtime of this process. Raises INVALID_ARG where there is none."""
    with _loading:
        if not _runtime:
            _runtime.append(CudaRuntime(_load_library()))
        return _runtime[0]


def _load_library() -> ctypes.CDLL:
    library = load_cudart()
    if library is None:
        raise invalid(f"CUDA shared memory: this backend has no CUDA runtime library ({', '.join(LIBRARIES)})")
    return library


class CudaRegion:
    """GPU memory of a client (regions.Region). Opened when it is first used, in the thread that uses it."""

    def __init__(self, handle: bytes, device: int, nbytes: int) -> None:
        self._handle: Final = handle
        self._device: Final = device
        self._nbytes: Final = nbytes
        self._lock: Final = threading.Lock()
        self._opened: tuple[CudaRuntime, int] | None = None

    def read(self, ref: TensorRef, alignment: int) -> memoryview:  # noqa: ARG002 - a copy is aligned to anything
        runtime, address = self._memory()
        return memoryview(runtime.to_host(address + ref.offset, ref.nbytes)).toreadonly()

    def window(self, ref: TensorRef, alignment: int) -> memoryview | None:  # noqa: ARG002 - never in place
        return None

    def write(self, ref: TensorRef, data: Buffer) -> None:
        runtime, address = self._memory()
        runtime.to_device(address + ref.offset, data)

    def lost(self, ref: TensorRef) -> bool:  # noqa: ARG002 - GPU memory stays while a handle to it is open
        return False

    def close(self) -> None:
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None:
            runtime, address = opened
            try:
                runtime.close(address)
            except InferError:
                return  # the client has freed it, which is its right

    def _memory(self) -> tuple[CudaRuntime, int]:
        with self._lock:
            if self._opened is None:
                runtime = load_runtime()
                self._opened = runtime, runtime.open(self._handle, self._device)
            return self._opened
