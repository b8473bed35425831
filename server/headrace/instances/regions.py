"""Clients' shared memory as the server uses it: by descriptor, never by mapping.

A client may shorten its object at any time; whoever then touches a mapping of it gets SIGBUS. So the server reads and
writes with system calls, which answer with a short count, and hands the descriptor to the backend process that works in
the memory (docs/adr/0007). Knows nothing of how regions are registered.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from headrace.types import OutputTensor
from headrace_protocol.datatype import Buffer
from headrace_protocol.errors import FailureReason, InferError, internal, invalid
from headrace_protocol.framing import MAX_DESCRIPTORS
from headrace_protocol.messages import AttachRegion, DetachRegion, ToBackend
from headrace_protocol.tensor import REGION, TensorRef

IN_REGION: Final = memoryview(b"")
"""Stands for the bytes of an output that the backend put into the client's memory itself."""
_NONE: Final = -1


class Region:
    """One registered region. Held by the table and by every request that uses it; closed when the last lets go."""

    def __init__(
        self,
        number: int,
        name: str,
        nbytes: int,
        *,
        fd: int = _NONE,
        start: int = 0,
        cuda_handle: bytes = b"",
        device: int = 0,
        readonly: bool = False,
        on_closed: Callable[[], None] = lambda: None,
    ) -> None:
        self.number: Final = number
        """Never used again for another region, so that backend processes may know it by this."""
        self.name: Final = name
        self.nbytes: Final = nbytes
        self.fd = fd
        """The whole object's descriptor, owned; -1 for GPU memory and once closed."""
        self.start: Final = start
        """Where the region begins in the object."""
        self.cuda_handle: Final = cuda_handle
        self.device: Final = device
        self.readonly: Final = readonly
        """Whether it is the server's own, which others may only read; else it is a client's."""
        self._holders = 1
        self._on_closed = on_closed
        self._watchers: dict[object, Callable[[Region], None]] = {}

    @property
    def is_cuda(self) -> bool:
        """Whether it is GPU memory, which the server cannot read."""
        return bool(self.cuda_handle)

    def hold(self) -> None:
        """Keep it open until `drop`."""
        self._holders += 1

    def drop(self) -> None:
        """Let go of it; the last one closes the descriptor and tells those that watch."""
        self._holders -= 1
        if self._holders:
            return
        if self.fd != _NONE:
            os.close(self.fd)
            self.fd = _NONE
        watchers, self._watchers = self._watchers, {}
        for closed in watchers.values():
            closed(self)
        self._on_closed()

    def watch(self, watcher: object, closed: Callable[[Region], None]) -> None:
        """Have `closed` called when the region is closed."""
        self._watchers[watcher] = closed

    def unwatch(self, watcher: object) -> None:
        """Undo `watch`."""
        self._watchers.pop(watcher, None)

    def check(self, offset: int, nbytes: int) -> None:
        """Raise INVALID_ARG where the client's object no longer has these bytes of the region."""
        if not self.is_cuda:
            size = os.fstat(self.fd).st_size
            if size < self.start + offset + nbytes:
                raise self._shrank(offset + nbytes, max(0, size - self.start))

    def read(self, offset: int, nbytes: int) -> bytearray:
        """Return a copy of bytes of the region. Raises INVALID_ARG where they are no longer there."""
        data = bytearray(nbytes)
        self.read_into(memoryview(data), offset)
        return data

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` from the region. Raises INVALID_ARG where the object has become too short."""
        done = 0
        try:
            while done < len(view):
                got = os.preadv(self.fd, [view[done:]], self.start + offset + done)
                if not got:
                    raise self._shrank(offset + len(view), offset + done)
                done += got
        except OSError as error:
            raise invalid(f"shared memory region '{self.name}' cannot be read: {error.strerror}") from None

    def write(self, offset: int, data: Buffer) -> None:
        """Write `data` into the region. Raises INVALID_ARG where the object is too short, or cannot be written."""
        view = memoryview(data)
        self.check(offset, len(view))  # a write past the end would make the object longer
        done = 0
        try:
            while done < len(view):
                done += os.pwritev(self.fd, [view[done:]], self.start + offset + done)
        except OSError as error:
            raise invalid(f"shared memory region '{self.name}' cannot be written: {error.strerror}") from None

    def _shrank(self, needed: int, there: int) -> InferError:
        return invalid(
            f"shared memory region '{self.name}' was registered with {self.nbytes} bytes, and its object has shrunk: "
            f"{needed} bytes are needed, {there} are there"
        )


class Slice(NamedTuple):
    """Bytes of a region that a tensor of a request lies in; checked to be within the region."""

    region: Region
    offset: int
    """From the region's start."""
    nbytes: int

    def ref(self) -> TensorRef:
        """Return the place as backend processes name it."""
        return TensorRef(self.offset, self.nbytes, REGION, self.region.number)


class RequestRegions:
    """The regions of one request, by tensor. Holds each open from construction until the last `drop`."""

    __slots__ = ("_holders", "_regions", "inputs", "outputs")

    def __init__(self, inputs: Mapping[str, Slice], outputs: Mapping[str, Slice]) -> None:
        self.inputs = inputs
        """Without strings, which were copied when the request came."""
        self.outputs = outputs
        self._regions = {place.region for place in (*inputs.values(), *outputs.values())}
        self._holders = 1
        for region in self._regions:
            region.hold()

    @property
    def regions(self) -> Iterable[Region]:
        """Every region once."""
        return self._regions

    @property
    def is_cuda(self) -> bool:
        """Whether some of it is GPU memory: the request must then run alone, for the server cannot copy it."""
        return any(region.is_cuda for region in self._regions)

    @property
    def may_change(self) -> bool:
        """Whether somebody else may change inputs while the request runs."""
        return any(not place.region.readonly for place in self.inputs.values())

    @property
    def fills_cuda(self) -> bool:
        """Whether outputs are to go into GPU memory."""
        return any(place.region.is_cuda for place in self.outputs.values())

    def output_refs(self) -> tuple[tuple[str, TensorRef], ...]:
        """Return where the outputs go, as backend processes name it."""
        return tuple([(name, place.ref()) for name, place in self.outputs.items()])

    def check(self) -> None:
        """Raise INVALID_ARG where some of it is no longer there."""
        for place in (*self.inputs.values(), *self.outputs.values()):
            place.region.check(place.offset, place.nbytes)

    def hold(self) -> None:
        """Keep the regions open until one more `drop`."""
        self._holders += 1

    def drop(self) -> None:
        """Let go of them."""
        self._holders -= 1
        if not self._holders:
            for region in self._regions:
                region.drop()


def deliver(regions: RequestRegions, outputs: list[OutputTensor]) -> None:
    """Put outputs where their client wants them, unless they are there. Raises INVALID_ARG where one does not fit."""
    for output in outputs:
        place = regions.outputs.get(output.name)
        if place is None:
            continue
        if output.data is not IN_REGION:
            nbytes = len(output.data)
            if nbytes > place.nbytes:
                raise invalid(
                    f"output '{output.name}' has {nbytes} bytes, more than the {place.nbytes} bytes of shared memory "
                    f"region '{place.region.name}' that the request gives it"
                )
            if place.region.is_cuda:
                raise internal(f"the backend did not put output '{output.name}' into GPU memory", FailureReason.BACKEND)
            place.region.write(place.offset, output.data)
        output.data = b""
        output.in_region = True


class Attachments:
    """Which regions one backend process was given. Owned by its ModelProcess."""

    def __init__(self, send: Callable[[list[ToBackend], list[int]], None]) -> None:
        self._send = send
        self._attached: set[Region] = set()
        self._over = False

    def attach(self, regions: Iterable[Region]) -> None:
        """Give the process those of `regions` that it does not have. Raises OSError where descriptors run out."""
        new = [region for region in regions if region not in self._attached]
        for first in range(0, len(new), MAX_DESCRIPTORS):
            part = new[first : first + MAX_DESCRIPTORS]
            self._send([_attach(region) for region in part], [region.fd for region in part if not region.is_cuda])
            if self._over:
                return
            for region in part:
                self._attached.add(region)
                region.watch(self, self._closed)

    def close(self) -> None:
        """Forget what was attached: the process is gone."""
        self._over = True
        for region in self._attached:
            region.unwatch(self)
        self._attached.clear()

    def _closed(self, region: Region) -> None:
        self._attached.discard(region)
        self._send([DetachRegion(region.number)], [])


def _attach(region: Region) -> AttachRegion:
    return AttachRegion(region.number, region.start, region.nbytes, region.cuda_handle, region.device, region.readonly)
