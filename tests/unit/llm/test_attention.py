"""Paged attention against the same written plainly, and the cache's size."""

import itertools

import pytest
import torch

from headrace_backends.llm.attention import Attending, PagedStep, ReferenceStep, SequenceSpan
from headrace_backends.llm.kv_cache import KvCache, LayerShape, blocks_that_fit, bytes_per_block, memory_budget
from headrace_protocol.errors import InferError

SCATTERED = [[7, 2, 11, 4], [3, 9, 1, 12], [5, 6, 8, 10]]
IN_A_ROW = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
SHAPES = [(4, 1, 16, 16), (4, 2, 8, 8), (3, 3, 16, 16), (4, 2, 16, 8)]


def _slots(span: SequenceSpan) -> list[int]:
    return [span.blocks[p // 8] * 8 + p % 8 for p in range(span.start, span.start + span.count)]


def _attended(step_class, steps, shape, how, tables, dtype=torch.float32):
    """Attend step by step; a step says how many tokens of each sequence it has. Returns each sequence's outputs."""
    heads, kv_heads, dim_k, dim_v = shape
    cache = KvCache({0: LayerShape(kv_heads, dim_k, dim_v)}, 13, 8, dtype)
    starts, outputs = [0] * len(tables), [[] for _ in tables]
    for counts in steps:
        spans, first = [], 0
        for sequence, count in enumerate(counts):
            if count:
                spans.append((sequence, SequenceSpan(first, count, starts[sequence], tables[sequence])))
                first += count
        at = [(sequence, span.start + row) for sequence, span in spans for row in range(span.count)]
        tensors = [
            torch.stack([_random((n, dim), 1000 * s + 10 * p + i).to(dtype) for s, p in at])
            for i, (n, dim) in enumerate([(heads, dim_k), (kv_heads, dim_k), (kv_heads, dim_v)])
        ]
        step = step_class(cache, [span for _, span in spans], [slot for _, span in spans for slot in _slots(span)])
        out = step.attend(how, *tensors)
        for sequence, span in spans:
            outputs[sequence].append(out[span.first : span.first + span.count])
            starts[sequence] += span.count
    return [torch.cat(each) for each in outputs]


def _random(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


STEPS = [(9, 0, 1), (5, 17, 1), (1, 1, 1), (1, 3, 1), (7, 1, 12)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (None, 3.0), (9, 3.0)])
@pytest.mark.parametrize("tables", [SCATTERED, IN_A_ROW], ids=["scattered", "in_a_row"])
def test_it_equals_plain_attention(shape, window, softcap, tables):
    how = Attending(0, 0.3, window, softcap)
    paged, plain = (_attended(c, STEPS, shape, how, tables) for c in (PagedStep, ReferenceStep))
    for one, other in zip(paged, plain, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 6])
def test_chunks_change_nothing(window):
    how = Attending(0, 0.3, window)
    whole = _attended(PagedStep, [(24, 24, 24)], SHAPES[1], how, SCATTERED)
    for size in (1, 5, 8, 16):
        steps = [(min(size, 24 - at),) * 3 for at in range(0, 24, size)]
        for one, other in zip(whole, _attended(PagedStep, steps, SHAPES[1], how, SCATTERED), strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neighbours_change_no_bit_of_a_sequence(dtype):
    how = Attending(0, 0.3)
    alone = [(9, 0, 0), (5, 0, 0), (1, 0, 0), (1, 0, 0), (7, 0, 0)]
    for steps, table in itertools.product((STEPS,), (SCATTERED, IN_A_ROW)):
        together = _attended(PagedStep, steps, SHAPES[0], how, table, dtype)[0]
        (by_itself,) = _attended(PagedStep, [each[:1] for each in alone], SHAPES[0], how, table[:1], dtype)
        assert torch.equal(together, by_itself)


def test_a_block_that_one_sequence_fills_is_read_by_another_in_the_same_step():
    cache = KvCache({0: LayerShape(1, 4, 4)}, 4, 8, torch.float32)
    first, second = SequenceSpan(0, 8, 0, [2]), SequenceSpan(8, 1, 8, [2, 3])
    key = _random((9, 1, 4), 1)
    step = PagedStep(cache, [second, first], [*_slots(first), *_slots(second)])
    out = step.attend(Attending(0, 1.0), key, key, key)
    whole = KvCache({0: LayerShape(1, 4, 4)}, 4, 8, torch.float32)
    span = SequenceSpan(0, 9, 0, [1, 2])
    torch.testing.assert_close(
        out[8], PagedStep(whole, [span], _slots(span)).attend(Attending(0, 1.0), key, key, key)[8]
    )


def test_a_block_has_the_size_that_is_told():
    shapes = {0: LayerShape(3, 64, 64), 1: LayerShape(1, 32, 16)}
    cache = KvCache(shapes, 10, 16, torch.bfloat16)
    assert cache.num_bytes == 10 * bytes_per_block(shapes, 16, torch.bfloat16)


def test_a_cache_too_small_for_one_request_is_refused_with_what_it_needs():
    assert blocks_that_fit(100 * 11, 100, 16, 160) == 11
    with pytest.raises(InferError, match=r"has 10 blocks of 16 tokens; one request of max_model_len 160 needs 11"):
        blocks_that_fit(100 * 11 - 1, 100, 16, 160)
    with pytest.raises(InferError, match="has 0 blocks"):
        blocks_that_fit(-5, 100, 16, 160)


def test_a_fraction_of_the_memory_is_what_may_be_taken():
    assert 0 < memory_budget(0.5) < memory_budget(1.0)
    with pytest.raises(InferError, match="memory fraction: expected more than 0 and at most 1, got 1.5"):
        memory_budget(1.5)
