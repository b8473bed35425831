"""Which blocks of the KV cache belong to whom, and which of them hold a prefix that can be used again. Pure.

Knows block ids only: the tensors are the runner's. Full blocks are named by a chain of SHA-256 hashes, so that a name stands
for the whole prefix up to the block's end; freed blocks keep their name until they are taken for something else (the hash
chain with lazy eviction of vLLM's V1, Kwon et al. 2023 for the paging).
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from headrace_backends.llm.request import GenerationRequest

NULL_BLOCK = 0
"""Belongs to nobody: what pads a table or a batch may write there."""


@dataclass(slots=True)
class _Block:
    ref_count: int = 0
    hash: bytes | None = None
    """Set while the block can be found by its prefix."""


class BlockManager:
    """Owns all blocks but the null block. Ask `can_allocate` or `can_append` before `allocate` or `append`.

    A prefix has one block in the index at most: where two requests computed it at once, the second's block stays nameless.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        """`num_blocks` counts the null block; `block_size` is in tokens."""
        if num_blocks < 2 or block_size < 1:
            raise ValueError(f"a KV cache needs 2 blocks of 1 token at least, not {num_blocks} of {block_size}")
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._caching = prefix_caching
        self._blocks = [_Block() for _ in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        """Taken from the front. Nameless blocks are put there, named ones at the back."""
        self._by_hash: dict[bytes, int] = {}
        self.evictions = 0
        """Prefixes that were given up for new tokens."""

    @property
    def num_usable(self) -> int:
        """Blocks that requests can have."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that no request holds; a part of them may hold prefixes."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """The part of all blocks that requests hold, from 0 to 1."""
        return 1 - len(self._free) / self.num_usable

    def blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def lookup(self, request: GenerationRequest) -> list[int]:
        """Return the blocks that hold the request's first tokens, without taking them.

        One token at least is left to be computed: the next one comes out of it.
        """
        if not self._caching:
            return []
        self._name_blocks(request)
        found = []
        for name in request.block_hashes[: (request.num_tokens - 1) // self.block_size]:
            block = self._by_hash.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def can_allocate(self, cached: Sequence[int], end: int, *, spare: int = 0) -> bool:
        """Tell whether a request without blocks can have `cached` and room for tokens up to `end`, `spare` blocks left."""
        unheld = sum(1 for block in cached if not self._blocks[block].ref_count)
        return self.blocks_of(end) - len(cached) + unheld + spare <= len(self._free)

    def allocate(self, request: GenerationRequest, cached: Sequence[int], end: int) -> None:
        """Give a request without blocks the `cached` ones that `lookup` found, and room for tokens up to `end`."""
        for block in cached:
            if not self._blocks[block].ref_count:
                del self._free[block]
            self._blocks[block].ref_count += 1
        request.block_table.extend(cached)
        self.append(request, end)

    def can_append(self, request: GenerationRequest, end: int) -> bool:
        """Tell whether the request's table can be made to reach `end` tokens."""
        return self.blocks_of(end) - len(request.block_table) <= len(self._free)

    def append(self, request: GenerationRequest, end: int) -> None:
        for _ in range(self.blocks_of(end) - len(request.block_table)):
            number, _ = self._free.popitem(last=False)
            block = self._blocks[number]
            if block.hash is not None:
                del self._by_hash[block.hash]
                block.hash = None
                self.evictions += 1
            block.ref_count = 1
            request.block_table.append(number)

    def register(self, request: GenerationRequest, start: int = 0) -> None:
        """Let others find the request's full blocks from token `start` on, as far as computed and certain.

        Called when a step is scheduled, before the blocks are written: see `step` for why that is right, and `forget`.
        """
        if not self._caching:
            return
        full = min(request.num_computed_tokens, request.num_tokens) // self.block_size
        first = start // self.block_size
        if first >= full:
            return
        self._name_blocks(request)
        for at in range(first, full):
            name, block = request.block_hashes[at], self._blocks[request.block_table[at]]
            if block.hash is None and name not in self._by_hash:
                block.hash = name
                self._by_hash[name] = request.block_table[at]

    def forget(self, blocks: Iterable[int]) -> None:
        """Take the names off blocks, held or not: they may not hold what was to be written."""
        for number in blocks:
            block = self._blocks[number]
            if block.hash is not None:
                del self._by_hash[block.hash]
                block.hash = None

    def free(self, request: GenerationRequest) -> None:
        """Take the request's blocks back. The deepest are the first to be given to others."""
        for number in reversed(request.block_table):
            block = self._blocks[number]
            block.ref_count -= 1
            if block.ref_count:
                continue
            self._free[number] = None
            if block.hash is None:
                self._free.move_to_end(number, last=False)
        request.block_table.clear()

    def reset(self) -> bool:
        """Forget all prefixes; refused while a request holds a block."""
        if self.num_free != self.num_usable:
            return False
        for number in self._by_hash.values():
            self._blocks[number].hash = None
        self._by_hash.clear()
        return True

    def check_integrity(self, requests: Iterable[GenerationRequest]) -> None:
        """Assert that the blocks' state is what the given requests, all there are, account for."""
        held = Counter(block for request in requests for block in request.block_table)
        assert NULL_BLOCK not in held, "somebody holds the null block"
        for number, block in enumerate(self._blocks):
            assert block.ref_count == held[number], (
                f"block {number}: {block.ref_count} references, {held[number]} holders"
            )
            assert (number in self._free) == (number != NULL_BLOCK and not held[number]), (
                f"block {number} is free and held"
            )
            if block.hash is not None:
                assert self._by_hash.get(block.hash) == number, f"block {number} has a name by which it is not found"
        for name, number in self._by_hash.items():
            assert self._blocks[number].hash == name, f"block {number} is found by a name that is not its own"

    def _name_blocks(self, request: GenerationRequest) -> None:
        """Extend the request's chain of hashes to its last full block."""
        hashes, size = request.block_hashes, self.block_size
        full = request.num_tokens // size
        if len(hashes) >= full:
            return
        parent = hashes[-1] if hashes else sha256(repr((request.cache_salt, request.lora)).encode()).digest()
        for at in range(len(hashes), full):
            parent = sha256(parent + array("I", request.token_ids[at * size : (at + 1) * size]).tobytes()).digest()
            hashes.append(parent)
