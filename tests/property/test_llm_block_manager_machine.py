"""Whatever requests come, grow and go: each block has the holders that are known, and a found prefix is what it was."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace_backends.llm.block_manager import BlockManager
from headrace_backends.llm.request import GenerationRequest
from headrace_backends.llm.sampling_params import SamplingParams

Content = tuple[str | None, tuple[int, ...]]


class Blocks(RuleBasedStateMachine):
    """Keeps, in the plainest way, what each block was last written with and in which order blocks were freed."""

    @initialize(num_blocks=st.integers(2, 9), block_size=st.integers(1, 3), caching=st.booleans())
    def start(self, num_blocks: int, block_size: int, caching: bool) -> None:
        self.blocks = BlockManager(num_blocks, block_size, prefix_caching=caching)
        self.size, self.caching = block_size, caching
        self.held: list[GenerationRequest] = []
        self.content: dict[int, Content] = {}
        """Of full, computed blocks: the whole prefix up to the block's end."""
        self.made = 0

    def prefix(self, request: GenerationRequest, block_at: int) -> Content:
        return request.cache_salt, tuple(request.token_ids[: (block_at + 1) * self.size])

    def write(self, request: GenerationRequest, start: int) -> None:
        for at in range(start // self.size, request.num_computed_tokens // self.size):
            self.content[request.block_table[at]] = self.prefix(request, at)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=10),
        salt=st.sampled_from([None, "s"]),
        part=st.integers(1, 10),
    )
    def allocate(self, prompt: list[int], salt: str | None, part: int) -> None:
        self.made += 1
        request = GenerationRequest(f"r{self.made}", prompt, SamplingParams(), 0, cache_salt=salt)
        cached = self.blocks.lookup(request)
        assert self.caching or not cached
        assert len(cached) * self.size < len(prompt), "nothing is left to compute"
        for at, block in enumerate(cached):
            assert self.content[block] == self.prefix(request, at), "a block of another prefix was found"
        hit = len(cached) * self.size
        end = min(len(prompt), hit + part)
        free_before = self.blocks.num_free
        new = -(-end // self.size) - len(cached)
        taken = {block for other in self.held for block in other.block_table}
        room = new + len(set(cached) - taken) <= free_before
        assert self.blocks.can_allocate(cached, end) is room
        assert self.blocks.can_allocate(cached, end, spare=1) is (new + len(set(cached) - taken) + 1 <= free_before)
        if not room:
            return
        self.blocks.allocate(request, cached, end)
        assert request.block_table[: len(cached)] == cached
        assert not set(request.block_table[len(cached) :]) & taken
        for block in request.block_table[len(cached) :]:
            self.content.pop(block, None)
        request.num_computed_tokens = end
        self.blocks.register(request, hit)
        self.write(request, hit)
        self.held.append(request)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), max_size=4), drafts=st.integers(0, 3))
    def grow(self, data: st.DataObject, tokens: list[int], drafts: int) -> None:
        request = data.draw(st.sampled_from(self.held))
        start = request.num_computed_tokens
        for token in tokens:
            request.append(token)
        end = request.num_tokens + drafts
        room = self.blocks.blocks_of(end) - len(request.block_table) <= self.blocks.num_free
        assert self.blocks.can_append(request, end) is room
        if not room:
            return
        table = list(request.block_table)
        self.blocks.append(request, end)
        assert request.block_table[: len(table)] == table, "a table lost blocks"
        for block in request.block_table[len(table) :]:
            self.content.pop(block, None)
        request.num_computed_tokens = end
        self.blocks.register(request, start)
        request.num_computed_tokens = request.num_tokens
        self.write(request, start)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.held))
        self.held.remove(request)
        self.blocks.free(request)
        assert not request.block_table

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.held))
        self.blocks.forget(request.block_table)
        copy = GenerationRequest("copy", [*request.token_ids, 0], SamplingParams(), 0, cache_salt=request.cache_salt)
        assert not set(self.blocks.lookup(copy)) & set(request.block_table)

    @rule()
    def reset(self) -> None:
        assert self.blocks.reset() is not any(request.block_table for request in self.held)
        if not self.held:
            assert not self.blocks._by_hash

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "blocks"):
            self.blocks.check_integrity(self.held)
            free = self.blocks.num_free
            assert (
                free + len({block for request in self.held for block in request.block_table}) == self.blocks.num_usable
            )
            assert self.blocks.usage == 1 - free / self.blocks.num_usable

    def teardown(self) -> None:
        for request in getattr(self, "held", []):
            self.blocks.free(request)
        if hasattr(self, "blocks"):
            assert self.blocks.num_free == self.blocks.num_usable
            assert self.blocks.reset()


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
