"""Clients' GPU memory, with a library that stands for the CUDA runtime at the device's edge; and the real one, if any."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace_backends import cuda_memory
from headrace_backends.cuda_memory import CudaRegion, CudaRuntime
from headrace_backends.regions import RegionMap
from headrace_protocol.errors import ErrorCode, InferError
from headrace_protocol.messages import AttachRegion
from headrace_protocol.tensor import REGION, Tensor, TensorRef

HANDLE = bytes(range(64))
SIZE = 64
NO_DEVICE, BAD_HANDLE, BAD_ARGUMENT = 101, 400, 1


class Call:
    """A function of the library: it may be given types, as those of ctypes are."""

    def __init__(self, function) -> None:
        self._function = function
        self.argtypes = self.restype = None

    def __call__(self, *arguments):
        return self._function(*arguments)


class FakeLibrary:
    """The calls of libcudart over host memory that plays the GPU's."""

    def __init__(self) -> None:
        self.memory = (ctypes.c_ubyte * SIZE)()
        self.address = ctypes.addressof(self.memory)
        self.devices: list[int] = []
        self.open: list[int] = []
        self.copies: list[tuple[int, int]] = []
        self.cudaSetDevice = Call(self._set_device)
        self.cudaIpcOpenMemHandle = Call(self._open)
        self.cudaIpcCloseMemHandle = Call(self._close)
        self.cudaMemcpy = Call(self._copy)
        self.cudaGetErrorString = Call(lambda status: f"error {status}".encode())

    def _set_device(self, device: int) -> int:
        self.devices.append(device)
        return 0 if device < 2 else NO_DEVICE

    def _open(self, where, handle, flags: int) -> int:
        if bytes(handle) != HANDLE or flags != 1:
            return BAD_HANDLE
        ctypes.cast(where, ctypes.POINTER(ctypes.c_void_p))[0] = self.address
        self.open.append(self.address)
        return 0

    def _close(self, address: int) -> int:
        self.open.remove(address)
        return 0

    def _copy(self, target, source, nbytes: int, direction: int) -> int:
        there = target if direction == 1 else source
        if not self.address <= there <= self.address + SIZE - nbytes:
            return BAD_ARGUMENT
        ctypes.memmove(target, source, nbytes)
        self.copies.append((direction, nbytes))
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    library = FakeLibrary()
    monkeypatch.setattr(cuda_memory, "_runtime", [CudaRuntime(library)])
    return library


def ref(offset: int, nbytes: int) -> TensorRef:
    return TensorRef(offset, nbytes, REGION, 1)


def test_memory_is_opened_once_when_it_is_first_used_and_closed_with_its_region(library: FakeLibrary) -> None:
    region = CudaRegion(HANDLE, 1, SIZE)
    assert not library.open
    region.write(ref(8, 4), b"four")
    assert bytes(region.read(ref(8, 4), 1)) == b"four"
    assert bytes(library.memory)[8:12] == b"four"
    assert (library.devices, library.open) == ([1], [library.address])
    region.close()
    region.close()
    assert not library.open


def test_nothing_of_it_is_in_place_or_ever_lost(library: FakeLibrary) -> None:
    region = CudaRegion(HANDLE, 0, SIZE)
    assert region.window(ref(0, 4), 1) is None
    assert not region.lost(ref(0, 4))
    assert not library.open


@pytest.mark.parametrize(
    ("handle", "device", "place", "code"),
    [
        (bytes(64), 0, ref(0, 4), BAD_HANDLE),
        (HANDLE, 2, ref(0, 4), NO_DEVICE),
        (HANDLE, 0, ref(62, 4), BAD_ARGUMENT),
    ],
)
def test_what_cuda_refuses_is_the_clients_mistake_in_cudas_words(
    library: FakeLibrary, handle: bytes, device: int, place: TensorRef, code: int
) -> None:
    region = CudaRegion(handle, device, SIZE)
    for call in (lambda: region.read(place, 1), lambda: region.write(place, bytes(4))):
        with pytest.raises(InferError) as caught:
            call()
        assert (caught.value.code, f"error {code}" in caught.value.message) == (ErrorCode.INVALID_ARG, True)


def test_a_process_without_the_library_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_memory, "_runtime", [])
    monkeypatch.setattr(cuda_memory, "load_cudart", lambda: None)
    with pytest.raises(InferError) as caught:
        CudaRegion(HANDLE, 0, SIZE).read(ref(0, 4), 1)
    assert (caught.value.code, "libcudart.so.12" in caught.value.message) == (ErrorCode.INVALID_ARG, True)


def test_a_batch_finds_gpu_memory_as_it_finds_any_region(library: FakeLibrary) -> None:
    regions = RegionMap()
    regions.attach(AttachRegion(1, 0, SIZE, HANDLE, 0), [])
    values = np.arange(4, dtype=np.float32)
    (place,) = regions.places((("OUT", ref(16, 32)),)).values()
    assert place.reserve(16, 4) is None
    assert place.store(bytes(33)) is None
    assert place.store(memoryview(values).cast("B")) == ref(16, 16)
    assert bytes(regions.read(Tensor("IN", "FP32", (4,), ref(16, 16)))) == values.tobytes()
    assert regions.lost({"IN": ref(16, 16)}) is None
    regions.detach(1)
    assert not library.open


OWNER = """
import ctypes, sys
sys.path[:0] = sys.argv[1].split(":")
from headrace_backends.cuda_memory import _load_library
cuda = _load_library()
address, handle = ctypes.c_void_p(), (ctypes.c_ubyte * 64)()
data = bytes(range(256))
assert cuda.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(256)) == 0
assert cuda.cudaMemcpy(address, data, ctypes.c_size_t(256), 1) == 0
assert cuda.cudaIpcGetMemHandle(ctypes.byref(handle), address) == 0
print(bytes(handle).hex(), flush=True)
sys.stdin.readline()
back = ctypes.create_string_buffer(256)
assert cuda.cudaMemcpy(back, address, ctypes.c_size_t(256), 2) == 0
print(back.raw.hex(), flush=True)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not any(Path("/dev").glob("nvidia[0-9]*")), reason="there is no GPU")
def test_memory_of_a_real_gpu_is_read_and_written_over_its_handle() -> None:
    argv = [sys.executable, "-c", OWNER, ":".join(sys.path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        region = CudaRegion(bytes.fromhex(owner.stdout.readline()), 0, 256)
        assert bytes(region.read(ref(16, 16), 1)) == bytes(range(16, 32))
        region.write(ref(0, 4), b"four")
        region.close()
        owner.stdin.write("\n")
        owner.stdin.flush()
        assert bytes.fromhex(owner.stdout.readline())[:8] == b"four\4\5\6\7"
