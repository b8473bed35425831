"""Clients' shared memory in a backend process: regions that the server attached, mapped for as long as they are.

A client may change or shorten its memory at any time. Changes while a request runs give that request an undefined
answer; shortening makes it fail, and nothing else (bus_guard.py). Knows nothing of batches and sockets.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Mapping
from typing import Final, Protocol

import numpy as np

from headrace_backends.bus_guard import GUARD
from headrace_backends.cuda_memory import CudaRegion
from headrace_protocol.datatype import BY_NAME, Buffer
from headrace_protocol.errors import InferError, internal, invalid
from headrace_protocol.messages import AttachRegion
from headrace_protocol.tensor import Tensor, TensorRef


class Region(Protocol):
    """Memory of a client. Ranges come from the server, which has checked that they are within the region."""

    def read(self, ref: TensorRef, alignment: int) -> memoryview:
        """Return these bytes, read-only, at an address that `alignment` divides. Raises INVALID_ARG where that fails."""
        ...

    def window(self, ref: TensorRef, alignment: int) -> memoryview | None:
        """Return these bytes to write to; None where that cannot be done in place."""
        ...

    def write(self, ref: TensorRef, data: Buffer) -> None:
        """Write `data`, which is as long as `ref`, there. Raises INVALID_ARG where that cannot be done."""
        ...

    def lost(self, ref: TensorRef) -> bool:
        """Whether the region was found too short for its tensors, now or before."""
        ...

    def close(self) -> None:
        """Let go of the memory. Nobody uses it any more."""
        ...


class SystemRegion:
    """Part of a POSIX shared memory object, mapped shared, and writable unless it is the server's own."""

    def __init__(self, fd: int, offset: int, nbytes: int, *, readonly: bool = False) -> None:
        """Map it. Raises OSError or ValueError where the object is shorter, or memory is lacking."""
        self._start: Final = offset
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        access = mmap.ACCESS_READ if readonly else mmap.ACCESS_WRITE
        self._map: Final = mmap.mmap(fd, offset + nbytes - start, access=access, offset=start)
        self._view: Final = memoryview(self._map)[offset - start :]
        self._readonly: Final = self._view.toreadonly()
        self._lost = False
        self._address: Final = int(np.frombuffer(self._map, np.uint8).ctypes.data)
        pages = -(-len(self._map) // mmap.PAGESIZE) * mmap.PAGESIZE
        GUARD.watch(self._address, pages, self._fault)

    def _fault(self) -> None:
        self._lost = True

    def read(self, ref: TensorRef, alignment: int) -> memoryview:
        data = self._readonly[ref.offset : ref.offset + ref.nbytes]
        return data if self._aligned(ref, alignment) else memoryview(bytes(data))

    def window(self, ref: TensorRef, alignment: int) -> memoryview | None:
        if self._view.readonly or not self._aligned(ref, alignment):
            return None
        return self._view[ref.offset : ref.offset + ref.nbytes]

    def write(self, ref: TensorRef, data: Buffer) -> None:
        target = np.frombuffer(self._view, np.uint8, ref.nbytes, ref.offset)
        np.copyto(target, np.frombuffer(data, np.uint8))  # unlike assigning to a view, it lets other threads run

    def lost(self, ref: TensorRef) -> bool:
        self._lost = self._lost or self._map.size() < self._start + ref.offset + ref.nbytes
        return self._lost

    def _aligned(self, ref: TensorRef, alignment: int) -> bool:
        return not (self._start + ref.offset) % alignment  # pages are aligned to anything

    def close(self) -> None:
        GUARD.unwatch(self._address)
        self._readonly.release()
        self._view.release()
        with contextlib.suppress(BufferError):  # a backend has kept a view: the mapping goes with the last of them
            self._map.close()


class RegionMap:
    """Every region that the server attached, by number. Filled by whichever thread reads the channel."""

    def __init__(self) -> None:
        self._regions: dict[int, Region | InferError] = {}

    def attach(self, message: AttachRegion, descriptors: list[int]) -> None:
        """Take a region, and its descriptor from `descriptors`. Where that fails, the requests that use it will."""
        if message.cuda_handle:
            self._regions[message.number] = CudaRegion(message.cuda_handle, message.device, message.nbytes)
            return
        fd = descriptors.pop(0)
        try:
            self._regions[message.number] = SystemRegion(fd, message.offset, message.nbytes, readonly=message.readonly)
        except (OSError, ValueError, OverflowError) as error:
            self._regions[message.number] = invalid(f"the shared memory cannot be mapped: {error}")
        finally:
            os.close(fd)

    def detach(self, number: int) -> None:
        """Let go of a region."""
        region = self._regions.pop(number, None)
        if region is not None and not isinstance(region, InferError):
            region.close()

    def read(self, tensor: Tensor) -> memoryview:
        """Return the wire form of an input. Raises INVALID_ARG where its memory cannot be used."""
        lost = self.lost({tensor.name: tensor.ref})
        if lost is not None:
            raise lost
        return self._find(tensor.ref).read(tensor.ref, _alignment(tensor.datatype))

    def places(self, outputs: tuple[tuple[str, TensorRef], ...]) -> dict[str, Place]:
        """Return where outputs are to go. Raises INVALID_ARG where that memory cannot be used."""
        return {name: Place(self._find(ref), ref) for name, ref in outputs}

    def lost(self, refs: Mapping[str, TensorRef]) -> InferError | None:
        """Return the error for the first tensor whose memory cannot be used, or went while a request ran."""
        for name, ref in refs.items():
            try:
                lost = self._find(ref).lost(ref)
            except InferError as error:
                return error
            if lost:
                return invalid(
                    f"tensor '{name}': its shared memory cannot be used, because the object was shortened while it was "
                    "registered, or the system has no memory left for it; register it again"
                )
        return None

    def _find(self, ref: TensorRef) -> Region:
        region = self._regions.get(ref.region)
        if region is None:
            raise internal(f"region {ref.region} was not attached")
        if isinstance(region, InferError):
            raise invalid(region.message)
        return region


class Place:
    """Where a client wants an output."""

    __slots__ = ("_ref", "_region")

    def __init__(self, region: Region, ref: TensorRef) -> None:
        self._region = region
        self._ref = ref

    def reserve(self, nbytes: int, alignment: int) -> tuple[memoryview, int, TensorRef] | None:
        """Return (buffer, offset in it, reference) as OutputSpace does; None where `nbytes` cannot be put there directly."""
        if nbytes > self._ref.nbytes:
            return None  # the server sees it and says so
        ref = self._part(nbytes)
        window = self._region.window(ref, alignment)
        return None if window is None else (window, 0, ref)

    def store(self, data: Buffer) -> TensorRef | None:
        """Copy `data` there and return the reference; None where it does not fit."""
        if len(data) > self._ref.nbytes:
            return None
        ref = self._part(len(data))
        self._region.write(ref, data)
        return ref

    def _part(self, nbytes: int) -> TensorRef:
        return TensorRef(self._ref.offset, nbytes, self._ref.source, self._ref.region)


def _alignment(datatype: str) -> int:
    return BY_NAME[datatype].itemsize or 1
