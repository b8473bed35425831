"""Answers kept for requests that come again: what a request's key is, how an answer is kept, and the local store.

Pure: no clock, no task, no thread. It knows neither schedulers nor doors. An answer is kept as one block of bytes, so
that it costs the garbage collector nothing and can be kept in another process just as well.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

from headrace.instances.signature import PreparedRequest
from headrace.types import OutputTensor, Parameter
from headrace_protocol.datatype import BY_NAME, BYTES, element_count

KEY_BYTES: Final = 32
"""Long enough that nobody finds two requests of one key, be it on purpose."""
ENTRY_OVERHEAD: Final = 320
"""Bytes that an entry costs beside its block: key, place in the order, allocation."""
_LENGTH: Final = 4

_Outputs = tuple[tuple[str, str, tuple[int, ...], int], ...]
_Head = tuple[_Outputs, dict[str, Parameter] | None]
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Head)


class DamagedEntryError(Exception):
    """A block that is no answer: something else wrote to a shared store."""


def request_key(identity: bytes, prepared: PreparedRequest) -> bytes:
    """Return the key of a request to the model of this `identity`, whose inputs all came over the wire.

    In it is all that an answer may depend on: each input's name, datatype, shape and bytes, which outputs are asked for,
    the parameters that reach the backend, correlation id and flags. Not in it: the request's id, priority and timeout,
    the order in which inputs and outputs are named, and classification, which is made of the answer.
    """
    request = prepared.request
    inputs = [
        None if tensor is None else (tensor.name, tensor.datatype.name, tensor.shape, len(tensor.data))
        for tensor in prepared.inputs
    ]
    wanted = None if prepared.wanted is None else sorted(prepared.wanted)
    parameters = sorted(request.parameters.items()) if request.parameters else ()
    head = repr((inputs, wanted, parameters, request.correlation_id, request.flags))
    digest = hashlib.blake2b(identity, digest_size=KEY_BYTES)
    digest.update(b"\0")
    digest.update(head.encode("utf-8", "surrogatepass"))
    for tensor in prepared.inputs:
        if tensor is not None:
            digest.update(tensor.data)
    return digest.digest()


def encode_entry(outputs: Sequence[OutputTensor], parameters: dict[str, Parameter] | None) -> bytes:
    """Return an answer as one block; the bytes of its outputs are copied."""
    described = [(output.name, output.datatype.name, output.shape, len(output.data)) for output in outputs]
    head = _encoder.encode((described, parameters))
    return b"".join([len(head).to_bytes(_LENGTH, "little"), head, *(output.data for output in outputs)])


def decode_entry(block: bytes) -> tuple[list[OutputTensor], dict[str, Parameter] | None]:
    """Return the outputs, as views of `block`, and the parameters. Raises DamagedEntryError."""
    start = _LENGTH + int.from_bytes(block[:_LENGTH], "little")
    view = memoryview(block)
    try:
        described, parameters = _decoder.decode(view[_LENGTH:start])
    except msgspec.DecodeError as error:
        raise DamagedEntryError(str(error)) from None
    outputs = []
    for name, datatype, shape, nbytes in described:
        data = view[start : start + nbytes]
        start += nbytes
        known = BY_NAME.get(datatype)
        fits = known is not None and min(shape, default=0) >= 0 and len(data) == nbytes >= 0
        if not fits or known is None or (known is not BYTES and element_count(shape) * known.itemsize != nbytes):
            raise DamagedEntryError(f"output {name!r} of {datatype} {list(shape)} with {len(data)} bytes")
        outputs.append(OutputTensor(name, known, shape, data))
    if start != len(block):
        raise DamagedEntryError(f"{len(block)} bytes, {start} are described")
    return outputs, parameters


class CacheCounts:
    """What a store did since the server's start. Times in nanoseconds."""

    __slots__ = ("errors", "evictions", "hits", "insertion_ns", "lookup_ns", "lookups", "misses", "skipped")

    def __init__(self) -> None:
        self.lookups = 0
        self.hits = 0
        self.misses = 0
        """Lookups that found nothing, for whatever reason."""
        self.lookup_ns = 0
        self.insertion_ns = 0
        self.evictions = 0
        """Answers that made room for newer ones."""
        self.skipped = 0
        """Answers that were not kept: larger than the store takes, or too many at once."""
        self.errors = 0
        """Times that a store elsewhere could not be reached, or did not answer in time."""

    def looked_up(self, ns: int, *, hit: bool) -> None:
        """Count a lookup."""
        self.lookups += 1
        self.lookup_ns += ns
        if hit:
            self.hits += 1
        else:
            self.misses += 1


class ResponseCache(Protocol):
    """Where answers are kept. One for the whole server."""

    name: str
    counts: CacheCounts
    immediate: bool
    """Whether `get` answers, without waiting; otherwise `fetch` has to be asked."""
    largest: int
    """Bytes of an answer that it may take; it takes none that is larger."""
    shared: bool
    """Whether other servers read what this one writes: a model is then told by its content."""

    def get(self, key: bytes) -> bytes | None:
        """Return the block kept for `key`, at once."""
        ...

    async def fetch(self, key: bytes) -> bytes | None:
        """Return the block kept for `key`. Never raises, and takes a bounded time."""
        ...

    def put(self, key: bytes, block: bytes) -> None:
        """Keep a block, if there is room for it. Never raises, and does not wait."""
        ...

    async def close(self) -> None:
        """Let go of everything."""
        ...


class LocalCache:
    """Keeps blocks in this process, up to `capacity` bytes; what was used least recently makes room.

    Every call costs the same whether it is full or not: an insertion evicts what it needs room for, and no more.
    """

    name = "local"
    immediate = True
    shared = False

    def __init__(self, capacity: int) -> None:
        self.capacity: Final = capacity
        self.largest = capacity
        self.used = 0
        """Bytes taken, the overhead of entries included."""
        self.counts = CacheCounts()
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict()
        """Used least recently first."""

    @property
    def entries(self) -> int:
        """How many answers are kept."""
        return len(self._blocks)

    def get(self, key: bytes) -> bytes | None:
        block = self._blocks.get(key)
        if block is not None:
            self._blocks.move_to_end(key)
        return block

    async def fetch(self, key: bytes) -> bytes | None:
        return self.get(key)

    def put(self, key: bytes, block: bytes) -> None:
        cost = len(block) + ENTRY_OVERHEAD
        if cost > self.capacity:
            self.counts.skipped += 1
            return
        old = self._blocks.pop(key, None)
        if old is not None:
            self.used -= len(old) + ENTRY_OVERHEAD
        while self.used + cost > self.capacity:
            _, evicted = self._blocks.popitem(last=False)
            self.used -= len(evicted) + ENTRY_OVERHEAD
            self.counts.evictions += 1
        self._blocks[key] = block
        self.used += cost

    async def close(self) -> None:
        self._blocks.clear()
        self.used = 0

    def check_integrity(self) -> None:
        """Assert the invariants; slow, for tests."""
        assert self.used == sum(len(block) + ENTRY_OVERHEAD for block in self._blocks.values())
        assert 0 <= self.used <= self.capacity
