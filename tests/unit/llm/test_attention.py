"""Paged attention against the same written plainly, and the cache's size."""

import itertools
import os
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from headrace_backends.llm import kernels, kv_cache
from headrace_backends.llm.attention import Attending, SequenceSpan
from headrace_backends.llm.attention_paged import PagedStep
from headrace_backends.llm.attention_reference import ReferenceStep
from headrace_backends.llm.kv_cache import (
    KvCache,
    LayerShape,
    blocks_that_fit,
    bytes_per_block,
    memory_budget,
    takes_eight_bits,
)
from headrace_protocol.errors import InferError

SCATTERED = [[7, 2, 11, 4], [3, 9, 1, 12], [5, 6, 8, 10]]
IN_A_ROW = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
SHAPES = [(4, 1, 16, 16), (3, 3, 16, 8), (9, 3, 64, 64), (4, 2, 4, 4)]


def _slots(span: SequenceSpan) -> list[int]:
    return [span.blocks[p // 8] * 8 + p % 8 for p in range(span.start, span.start + span.count)]


def _by_pytorch(*step):
    return PagedStep(*step, compiled=False)


def _attended(step_class, steps, shape, how, tables, dtype=torch.float32, **of_cache):
    """Attend step by step; a step says how many tokens of each sequence it has. Returns each sequence's outputs."""
    heads, kv_heads, dim_k, dim_v = shape
    cache = KvCache({0: LayerShape(kv_heads, dim_k, dim_v)}, 13, 8, dtype, **of_cache)
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


WAYS = pytest.mark.parametrize("step_class", [PagedStep, _by_pytorch], ids=["compiled", "by_pytorch"])
STEPS = [(9, 0, 1), (5, 17, 1), (1, 1, 1), (1, 3, 1), (7, 1, 12)]


def test_compiled_loops_are_there_to_be_tested():
    assert kernels.available()


@WAYS
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (None, 3.0), (9, 3.0)])
@pytest.mark.parametrize("tables", [SCATTERED, IN_A_ROW], ids=["scattered", "in_a_row"])
def test_it_equals_plain_attention(step_class, shape, window, softcap, tables):
    how = Attending(0, 0.3, window, softcap)
    paged, plain = (_attended(c, STEPS, shape, how, tables) for c in (step_class, ReferenceStep))
    for one, other in zip(paged, plain, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@WAYS
@pytest.mark.parametrize("shape", SHAPES[2:3])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, 3.0)])
def test_in_bf16_it_equals_plain_attention_but_for_rounding(step_class, shape, window, softcap):
    how = Attending(0, 0.3, window, softcap)
    paged, plain = (_attended(c, STEPS, shape, how, SCATTERED, torch.bfloat16) for c in (step_class, ReferenceStep))
    for one, other in zip(paged, plain, strict=True):
        torch.testing.assert_close(one, other, atol=0.02, rtol=0.02)


@WAYS
@pytest.mark.parametrize(("shape", "dtype"), [(SHAPES[1], torch.float32), (SHAPES[2], torch.bfloat16)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (None, 3.0)])
def test_a_cache_of_8_bits_hardly_changes_what_is_attended_to(step_class, dtype, shape, window, softcap):
    how = Attending(0, 0.3, window, softcap)
    short = _attended(step_class, STEPS, shape, how, SCATTERED, dtype, eight_bits=True)
    exact = _attended(ReferenceStep, STEPS, shape, how, SCATTERED, dtype)
    for one, other in zip(short, exact, strict=True):
        assert F.cosine_similarity(one.flatten().float(), other.flatten().float(), dim=0) > 0.9995


def test_numbers_of_8_bits_are_the_same_by_either_way():
    shape = LayerShape(3, 16, 8)
    caches = [KvCache({0: shape}, 4, 8, torch.float32, eight_bits=True) for _ in range(2)]
    key, value = _random((12, 3, 16), 1), _random((12, 3, 8), 2)
    key[3] = 0
    span = SequenceSpan(0, 12, 3, [2, 1])
    for cache, step_class in zip(caches, (PagedStep, _by_pytorch), strict=True):
        step_class(cache, [span], _slots(span)).attend(Attending(0, 1.0), key, key, value)
    assert torch.equal(caches[0].layers[0], caches[1].layers[0])
    assert caches[0].layers[0].any()


def test_long_contexts_are_gone_through_in_parts():
    """More keys than the scores of which are kept at a time, and windows that begin anywhere among them."""
    for window, count in itertools.product((None, 300, 257, 31), (3, 70)):
        blocks = list(range(1, 42))
        random.Random(window).shuffle(blocks)
        outs = []
        for step_class in (PagedStep, ReferenceStep):
            cache = KvCache({0: LayerShape(2, 16, 16)}, 42, 16, torch.float32)
            cache.layers[0].copy_(_random(cache.layers[0].shape, 3))
            span = SequenceSpan(0, count, 573, blocks)
            slots = [span.blocks[p // 16] * 16 + p % 16 for p in range(573, 573 + count)]
            q, kv = _random((count, 4, 16), 4), _random((count, 2, 16), 5)
            outs.append(step_class(cache, [span], slots).attend(Attending(0, 0.5, window), q, kv, kv))
        torch.testing.assert_close(outs[0], outs[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 6])
def test_chunks_change_nothing(window):
    how = Attending(0, 0.3, window)
    whole = _attended(PagedStep, [(24, 24, 24)], SHAPES[1], how, SCATTERED)
    for size in (1, 5, 8, 16):
        steps = [(min(size, 24 - at),) * 3 for at in range(0, 24, size)]
        for one, other in zip(whole, _attended(PagedStep, steps, SHAPES[1], how, SCATTERED), strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@WAYS
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neighbours_change_no_bit_of_a_sequence(step_class, threads, dtype, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    how = Attending(0, 0.3)
    alone = [(9, 0, 0), (5, 0, 0), (1, 0, 0), (1, 0, 0), (7, 0, 0)]
    for steps, table in itertools.product((STEPS,), (SCATTERED, IN_A_ROW)):
        together = _attended(step_class, steps, SHAPES[2], how, table, dtype)[0]
        (by_itself,) = _attended(step_class, [each[:1] for each in alone], SHAPES[2], how, table[:1], dtype)
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
    for eight_bits in (False, True):
        cache = KvCache(shapes, 10, 16, torch.bfloat16, eight_bits=eight_bits)
        assert cache.num_bytes == 10 * bytes_per_block(shapes, 16, torch.bfloat16, eight_bits=eight_bits)
    wide = {0: LayerShape(3, 64, 64)}
    assert bytes_per_block(wide, 16, torch.bfloat16) / bytes_per_block(wide, 16, torch.bfloat16, eight_bits=True) > 1.9


def test_the_system_gives_the_cache_pages_as_they_are_written():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    cache = KvCache({0: LayerShape(8, 64, 64)}, 8192, 16, torch.bfloat16)
    assert cache.num_bytes == 2**28
    assert resident() - before < 2**26
    assert not cache.layers[0][5].any()


def test_a_dtype_of_the_cache_that_is_none_is_refused():
    assert takes_eight_bits("int8")
    assert not takes_eight_bits("auto")
    with pytest.raises(InferError, match="kv_cache_dtype: expected auto or int8, got 'int7'"):
        takes_eight_bits("int7")


def test_a_cache_too_small_for_one_request_is_refused_with_what_it_needs():
    assert blocks_that_fit(100 * 11, 100, 16, 160) == 11
    with pytest.raises(InferError, match=r"has 10 blocks of 16 tokens; one request of max_model_len 160 needs 11"):
        blocks_that_fit(100 * 11 - 1, 100, 16, 160)
    with pytest.raises(InferError, match="has 0 blocks"):
        blocks_that_fit(-5, 100, 16, 160)


def test_a_fraction_of_the_memory_is_what_may_be_taken(monkeypatch):
    monkeypatch.setattr(kv_cache, "_available_bytes", lambda total: total)
    assert 0 < memory_budget(0.5) < memory_budget(1.0)
    with pytest.raises(InferError, match="memory fraction: expected more than 0 and at most 1, got 1.5"):
        memory_budget(1.5)
