"""RegionTable: the shared memory that clients registered, by name, and what requests say of it turned into places.

It opens objects below one folder and nowhere else, and it decides who may have them opened. It maps nothing, and knows
nothing of doors, models and processes.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Container
from pathlib import Path
from typing import Final

from headrace.instances.regions import Region, RequestRegions, Slice
from headrace.types import CudaRegion, InferenceRequest, RegionRef, SystemRegion
from headrace_protocol.datatype import BYTES
from headrace_protocol.errors import ErrorCode, InferError, invalid, not_found, unavailable, unsupported

FOLDER: Final = Path("/dev/shm")  # noqa: S108 - it is where POSIX shared memory lives on Linux, not a place for files
MAX_REGIONS: Final = 4096
"""Regions at once, where the limit of open files allows them."""
MAX_NAME: Final = 255
"""Characters of a region's name, and bytes of a key: what a file name may have."""
MAX_STRING_BYTES: Final = 256 << 20
"""Bytes of all BYTES inputs of a request in regions: they are copied when it comes, also where the object has no pages."""
CUDA_HANDLE_BYTES: Final = 64
RESERVED: Final = ("sem.", "headrace", "triton_python_backend_shm_region_")
"""How names of objects begin that are no client's: semaphores, what belongs to servers."""
_MOST_BYTES: Final = (1 << 63) - 1


class _Registered:
    """A region with what its status tells."""

    __slots__ = ("key", "region")

    def __init__(self, region: Region, key: str) -> None:
        self.region = region
        self.key = key


class RegionTable:
    """Implements planes.SharedMemory. Regions that were forgotten live on until the requests that use them end."""

    def __init__(
        self,
        *,
        enabled: bool,
        limit: int = 256,
        gpus: int = 0,
        owners: Container[int] | None = None,
        folder: Path = FOLDER,
    ) -> None:
        """`owners` are the users, by number, whose objects may be registered; None = everybody's."""
        self._enabled = enabled
        self._limit = limit
        self._gpus = gpus
        self._owners = owners
        self._folder = folder
        self._regions: dict[str, _Registered] = {}
        self._next_number = 1
        self.open = 0
        """Regions that are registered, or forgotten and still in use."""

    # --- registering ----------------------------------------------------------------------------------------------

    def register_system(self, name: str, key: str, offset: int, nbytes: int) -> None:
        """Register part of a POSIX shared memory object; see planes.SharedMemory."""
        self._check_new(name, "system", nbytes)
        if not 0 <= offset <= _MOST_BYTES:
            raise _refused(name, f"the offset must be from 0 to {_MOST_BYTES}, got {offset}")
        fd = self._open(name, key)
        try:
            size = os.fstat(fd).st_size
            if offset + nbytes > size:
                raise _refused(name, f"object '{key}' has {size} bytes, offset {offset} and size {nbytes} exceed it")
        except BaseException:
            os.close(fd)
            raise
        self._add(name, key, Region(self._number(), name, nbytes, fd=fd, start=offset, on_closed=self._closed))

    def register_cuda(self, name: str, handle: bytes, device: int, nbytes: int) -> None:
        """Register GPU memory; see planes.SharedMemory. The handle is opened by the processes that use it."""
        self._check_new(name, "CUDA", nbytes)
        if len(handle) != CUDA_HANDLE_BYTES:
            raise _refused(name, f"a CUDA memory handle has {CUDA_HANDLE_BYTES} bytes, got {len(handle)}")
        if not self._gpus:
            raise _refused(name, "this server has no GPU that its backends can use")
        if not 0 <= device < self._gpus:
            raise _refused(name, f"the device must be from 0 to {self._gpus - 1}, got {device}")
        region = Region(self._number(), name, nbytes, cuda_handle=handle, device=device, on_closed=self._closed)
        self._add(name, "", region)

    def unregister_system(self, name: str) -> None:
        """Forget a region, or all of this kind; see planes.SharedMemory."""
        self._forget(name, cuda=False)

    def unregister_cuda(self, name: str) -> None:
        """As unregister_system."""
        self._forget(name, cuda=True)

    def system_status(self, name: str) -> list[SystemRegion]:
        """Return one region, or all of this kind. Raises NOT_FOUND."""
        return [
            SystemRegion(entry.region.name, entry.key, entry.region.start, entry.region.nbytes)
            for entry in self._select(name, cuda=False)
        ]

    def cuda_status(self, name: str) -> list[CudaRegion]:
        """As system_status."""
        return [
            CudaRegion(entry.region.name, entry.region.device, entry.region.nbytes)
            for entry in self._select(name, cuda=True)
        ]

    def close(self) -> None:
        """Forget everything: the server stops."""
        self._forget("", cuda=False, always=True)
        self._forget("", cuda=True, always=True)

    # --- using ----------------------------------------------------------------------------------------------------

    def resolve(self, request: InferenceRequest) -> RequestRegions | None:
        """Find the places that `request` names, and copy its strings; None where it names none. The caller drops them.

        Raises NOT_FOUND for an unknown region, INVALID_ARG for bytes that are outside it or no longer there.
        """
        inputs: dict[str, Slice] = {}
        outputs: dict[str, Slice] = {}
        strings = 0
        for tensor in request.inputs:
            if tensor.region is None:
                continue
            place = self._place(tensor.region, f"input '{tensor.name}'")
            if tensor.datatype is BYTES and not place.region.is_cuda:
                strings += place.nbytes
                if strings > MAX_STRING_BYTES:
                    raise invalid(
                        f"input '{tensor.name}': the strings of a request that lie in shared memory may have "
                        f"{MAX_STRING_BYTES} bytes together, got {strings}"
                    )
                tensor.data = place.region.read(place.offset, place.nbytes)
                tensor.region = None
            else:
                inputs[tensor.name] = place
        for output in request.outputs or ():
            if output.region is not None:
                outputs[output.name] = self._place(output.region, f"output '{output.name}'")
        if not inputs and not outputs:
            return None
        return RequestRegions(inputs, outputs)

    def _place(self, ref: RegionRef, what: str) -> Slice:
        entry = self._regions.get(ref.name)
        if entry is None:
            why = "" if self._enabled else "; client shared memory is off (--allow-client-shm)"
            raise not_found(f"{what}: there is no shared memory region '{ref.name}'{why}")
        region = entry.region
        if ref.offset < 0 or ref.nbytes < 0 or ref.offset + ref.nbytes > region.nbytes or ref.offset >= region.nbytes:
            raise invalid(
                f"{what}: offset {ref.offset} and size {ref.nbytes} are outside shared memory region '{ref.name}' "
                f"of {region.nbytes} bytes"
            )
        region.check(ref.offset, ref.nbytes)
        return Slice(region, ref.offset, ref.nbytes)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _check_new(self, name: str, kind: str, nbytes: int) -> None:
        self._check_enabled()
        if not name:
            raise invalid(f"a {kind} shared memory region needs a name")
        if len(name) > MAX_NAME:
            raise invalid(f"the name of a shared memory region has at most {MAX_NAME} characters, got {len(name)}")
        if name in self._regions:
            raise InferError(ErrorCode.ALREADY_EXISTS, f"shared memory region '{name}' is registered already")
        if not 1 <= nbytes <= _MOST_BYTES:
            raise _refused(name, f"the size must be from 1 to {_MOST_BYTES} bytes, got {nbytes}")
        if self.open >= self._limit:
            raise unavailable(
                f"shared memory region '{name}' cannot be registered: {self.open} are in use, the most that this "
                "server's limit of open files allows"
            )

    def _check_enabled(self) -> None:
        if not self._enabled:
            raise unsupported("client shared memory is off: the server must be started with --allow-client-shm=true")

    def _open(self, name: str, key: str) -> int:
        """Return a descriptor of the object, which is the caller's."""
        path = key.removeprefix("/")
        problem = key_problem(path)
        if problem:
            raise _refused(name, f"{problem}, got key {key[: 2 * MAX_NAME]!r}")
        try:
            folder = os.open(self._folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self._check_file(name, key, os.stat(path, dir_fd=folder, follow_symlinks=False), os.fstat(folder))
                # NONBLOCK, should something else have been put there since the look at it
                flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
                fd = os.open(path, flags, dir_fd=folder)
                try:
                    self._check_file(name, key, os.fstat(fd), os.fstat(folder))
                except BaseException:
                    os.close(fd)
                    raise
                return fd
            finally:
                os.close(folder)
        except FileNotFoundError:
            raise _refused(name, f"there is no shared memory object '{key}'") from None
        except OSError as error:
            raise _refused(name, f"object '{key}' cannot be opened: {error.strerror}") from None

    def _check_file(self, name: str, key: str, found: os.stat_result, folder: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode) or found.st_dev != folder.st_dev:
            raise _refused(name, f"'{key}' is no shared memory object")
        if self._owners is not None and found.st_uid not in self._owners:
            raise _refused(name, f"object '{key}' belongs to a user whose memory this server does not open")

    def _number(self) -> int:
        number, self._next_number = self._next_number, self._next_number + 1
        return number

    def _add(self, name: str, key: str, region: Region) -> None:
        self._regions[name] = _Registered(region, key)
        self.open += 1

    def _closed(self) -> None:
        self.open -= 1

    def _forget(self, name: str, *, cuda: bool, always: bool = False) -> None:
        if not always:
            self._check_enabled()
        for found in [name] if name else list(self._regions):
            entry = self._regions.get(found)
            if entry is not None and entry.region.is_cuda is cuda:
                del self._regions[found]
                entry.region.drop()

    def _select(self, name: str, *, cuda: bool) -> list[_Registered]:
        if not name:
            return [entry for entry in self._regions.values() if entry.region.is_cuda is cuda]
        entry = self._regions.get(name)
        kind = "CUDA" if cuda else "system"
        if entry is None:
            raise not_found(f"there is no {kind} shared memory region '{name}'")
        if entry.region.is_cuda is not cuda:
            other = "system" if cuda else "CUDA"
            raise not_found(f"region '{name}' is registered as {other} shared memory, not {kind} shared memory")
        return [entry]


def key_problem(path: str) -> str:
    """Return why `path` (a key without its leading slash) names no client's object; "" where it may."""
    if not path.strip("/"):
        return "the key names nothing"
    if "/" in path or "\0" in path or path in {".", ".."}:
        return "the key must be the name of an object, one component of a path"
    if not path.isprintable() or len(path.encode()) > MAX_NAME:
        return f"the key must be printable text of at most {MAX_NAME} bytes"
    reserved = next((prefix for prefix in RESERVED if path.startswith(prefix)), "")
    return f"the prefix '{reserved}' is reserved" if reserved else ""


def _refused(name: str, why: str) -> InferError:
    return invalid(f"shared memory region '{name}' cannot be registered: {why}")
