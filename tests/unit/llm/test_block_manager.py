"""Blocks and prefixes, case by case."""

from __future__ import annotations

import pytest

from headrace_backends.llm.block_manager import BlockManager
from headrace_backends.llm.request import GenerationRequest
from headrace_backends.llm.sampling_params import SamplingParams


def a_request(tokens: list[int], salt: str | None = None, lora: str | None = None) -> GenerationRequest:
    return GenerationRequest("r", tokens, SamplingParams(), 0, cache_salt=salt, lora=lora)


def run(blocks: BlockManager, request: GenerationRequest) -> GenerationRequest:
    blocks.allocate(request, blocks.lookup(request), request.num_tokens)
    request.num_computed_tokens = request.num_tokens
    blocks.register(request)
    return request


def test_a_prompt_of_whole_blocks_leaves_its_last_to_be_computed() -> None:
    blocks = BlockManager(10, 2)
    first = run(blocks, a_request([1, 2, 3, 4]))
    assert blocks.lookup(a_request([1, 2, 3, 4])) == first.block_table[:1]
    assert blocks.lookup(a_request([1, 2, 3, 4, 5])) == first.block_table


def test_equal_tokens_after_other_tokens_are_another_prefix() -> None:
    blocks = BlockManager(10, 2)
    run(blocks, a_request([1, 2, 3, 4]))
    run(blocks, a_request([5, 6]))
    assert len(blocks.lookup(a_request([5, 6, 3, 4, 0]))) == 1


@pytest.mark.parametrize(("salt", "lora"), [("a", None), (None, "a"), ("a", "a")])
def test_other_salts_and_adapters_share_nothing(salt: str | None, lora: str | None) -> None:
    blocks = BlockManager(10, 2)
    run(blocks, a_request([1, 2, 3], salt, lora))
    assert blocks.lookup(a_request([1, 2, 3])) == []
    assert blocks.lookup(a_request([1, 2, 3], lora, salt if lora != salt else None)) == []
    assert len(blocks.lookup(a_request([1, 2, 3], salt, lora))) == 1


def test_the_deepest_block_of_the_earliest_freed_is_given_up_first() -> None:
    blocks = BlockManager(7, 1)
    first, second = run(blocks, a_request([1, 2, 3])), run(blocks, a_request([4, 5, 6]))
    blocks.free(first)
    blocks.free(second)
    run(blocks, a_request([7, 8]))
    assert blocks.evictions == 2
    assert len(blocks.lookup(a_request([1, 2, 3, 0]))) == 1
    assert len(blocks.lookup(a_request([4, 5, 6, 0]))) == 3


def test_blocks_without_a_prefix_are_taken_before_any_prefix_is_given_up() -> None:
    blocks = BlockManager(5, 2)
    first = run(blocks, a_request([1, 2, 3]))
    blocks.free(first)
    run(blocks, a_request([4, 5, 6, 7, 8]))
    assert blocks.evictions == 0
    assert len(blocks.lookup(a_request([1, 2, 3]))) == 1


def test_a_prefix_that_was_used_again_outlives_others() -> None:
    blocks = BlockManager(4, 1)
    for tokens in ([1], [2], [1, 9]):
        blocks.free(run(blocks, a_request(tokens)))
    run(blocks, a_request([3, 4]))
    assert len(blocks.lookup(a_request([1, 0]))) == 1
    assert blocks.lookup(a_request([2, 0])) == []


def test_cached_blocks_that_nobody_holds_are_not_counted_as_room() -> None:
    blocks = BlockManager(4, 1)
    blocks.free(run(blocks, a_request([1, 2, 3])))
    request = a_request([1, 2, 3, 4])
    cached = blocks.lookup(request)
    assert len(cached) == 3
    assert not blocks.can_allocate(cached, 4)


def test_drafts_are_no_prefix() -> None:
    blocks = BlockManager(10, 2)
    request = a_request([1, 2, 3])
    request.draft_token_ids = [4, 5]
    blocks.allocate(request, [], 5)
    request.num_computed_tokens = 5
    blocks.register(request)
    assert len(blocks.lookup(a_request([1, 2, 3, 4, 5]))) == 1


def test_a_cache_without_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="2 blocks of 1 token at least"):
        BlockManager(1, 16)
