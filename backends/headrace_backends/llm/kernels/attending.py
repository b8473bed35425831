"""Attention of single queries over the block table: all sequences of a step in one call.

A query of one KV head, with the query heads that share it, is a task, or of all KV heads where there are many queries; threads
take tasks until none is left. A task's
numbers depend on nothing but its own queries and keys. Scores and sums are in fp32; keys are gone through `_SPAN` at a time
with the running maximum and sum of Milakov and Gimelshein (2018, "Online normalizer calculation for softmax").
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
from numba import carray

from headrace_backends.llm.kernels.emitting import (
    SOURCES,
    at,
    compiled,
    exponential,
    float_of_bits,
    highest,
    narrow,
    prefetch,
    take,
    tangent,
    widen,
)
from headrace_backends.llm.kernels.pool import Kernel
from headrace_backends.llm.kernels.products import BYTES, query_products, weighted_sums

_SPAN: Final = 256
"""Keys at a time: their scores stay in the first cache, their K and V in the second."""
_MANY_ROWS: Final = 8
"""From so many on a thread takes a row with all its heads: what the cache keeps of them lies side by side."""
_TABLE: Final = 1 << 40
"""The block numbers' array is as long as it is."""


@cache
def attention(numbers: int, narrow_model: bool, dim_k: int, dim_v: int, group: int) -> Kernel:
    """Return attention over a cache of such numbers and head widths, `group` query heads to a KV head.

    `narrow_model`: queries and output are bf16, not fp32. Arguments: 0 a counter at 0, 1 query, 2 its elements
    a row, 3 output, 4 its elements a row, 5 cache, 6 KV heads, 7 bytes that the cache keeps of a token and head, 8 rows,
    9 how many, 10 block numbers, 11 window or 0, 12 scaling and 13 soft cap or 0 as the bits of fp32, 14 tokens of a block. A row is three
    integers: its number in query and output, where its block numbers begin, how many keys it has.
    """
    source = SOURCES
    element = np.uint16 if narrow_model else np.float32
    element_bytes = 2 if narrow_model else 4
    span, many_rows = _SPAN, _MANY_ROWS
    lines = -(-((dim_k + dim_v) * BYTES[numbers]) // 64)
    value_at = dim_k * BYTES[numbers]
    # 8-bit rows end with two factors, one of the keys and one of the values: from the row's and from the values' begin.
    scale_k, scale_v = dim_k + dim_v, dim_v + 2

    def kernel(args: Any) -> None:
        of = carray(args, (15 + source * 0,))
        heads, token = of[6], of[7]
        step, size = heads * token, of[14]
        rows = at(of[8], (of[9], 3), np.int64)
        window, scaling, softcap = of[11], float_of_bits(of[12]), float_of_bits(of[13])
        together = heads if of[9] >= many_rows else 1
        shares = heads // together
        query = np.empty((together * group, dim_k), dtype=np.float32)
        total = np.empty((together * group, dim_v), dtype=np.float32)
        scores = np.empty((together * group, span), dtype=np.float32)
        peak = np.empty(together * group, dtype=np.float32)
        mass = np.empty(together * group, dtype=np.float32)
        while True:
            task = take(of.ctypes.data)
            if task >= of[9] * shares:
                break
            number, head = task // shares, task % shares * together
            row = rows[number]
            table = at(of[10] + 4 * row[1], (_TABLE,), np.int32)
            begin, end = of[5] + head * token, row[2]
            place = of[1] + (row[0] * of[2] + head * group * dim_k) * element_bytes
            given = at(place, (together * group, dim_k), element)
            for g in range(together * group):
                for d in range(dim_k):
                    query[g, d] = widen(given[g, d]) * scaling
            total[:] = np.float32(0.0)
            peak[:] = np.float32(-np.inf)
            mass[:] = np.float32(0.0)
            first = max(0, end - window) if window > 0 else 0
            while first < end:
                last = min(first + span, end)
                key = first
                while key < last:
                    many = min(size - key % size, last - key)
                    place = begin + (np.int64(table[key // size]) * size + key % size) * step
                    out_at = scores.ctypes.data + 4 * (key - first)
                    key += many
                    # Blocks lie anywhere: only we know which comes next.
                    ahead = begin + np.int64(table[key // size]) * size * step if key < end else place
                    for h in range(together):
                        query_products(
                            place + h * token, step, many, query.ctypes.data + h * group * dim_k * 4,
                            out_at + h * group * span * 4, span, ahead + h * token, numbers, dim_k, group, scale_k, lines,
                        )  # fmt: skip
                count = last - first
                for g in range(together * group):
                    line = scores[g]
                    if softcap > np.float32(0.0):
                        for key in range(count):
                            line[key] = softcap * tangent(line[key] / softcap)
                    most = max(peak[g], highest(line, count))
                    shrink = exponential(peak[g] - most)
                    here = np.float32(0.0)
                    for key in range(count):
                        line[key] = exponential(line[key] - most)
                        here += line[key]
                    mass[g] = mass[g] * shrink + here
                    peak[g] = most
                    for d in range(dim_v):
                        total[g, d] *= shrink
                if last == end and together > 1 and number + 1 < of[9]:
                    key = max(0, rows[number + 1, 2] - window) if window > 0 else 0
                    block = np.int64(at(of[10] + 4 * rows[number + 1, 1], (_TABLE,), np.int32)[key // size])
                    for line_at in range(key % size * step, size * step, 64):
                        prefetch(of[5] + block * size * step + line_at)
                key = first
                while key < last:
                    many = min(size - key % size, last - key)
                    place = begin + (np.int64(table[key // size]) * size + key % size) * step + value_at
                    for h in range(together):
                        weighted_sums(
                            place + h * token, step, many, scores.ctypes.data + (h * group * span + key - first) * 4, span,
                            total.ctypes.data + h * group * dim_v * 4, numbers, dim_v, group, scale_v,
                        )  # fmt: skip
                    key += many
                first = last
            place = of[3] + (row[0] * of[4] + head * group * dim_v) * element_bytes
            out = at(place, (together * group, dim_v), element)
            for g in range(together * group):
                for d in range(dim_v):
                    out[g, d] = narrow(total[g, d] / mass[g], out)

    return compiled(kernel)
