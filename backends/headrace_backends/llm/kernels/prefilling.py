"""Attention of many queries of a sequence over the block table: prompts, and chunks of them.

Works on tiles of `ROWS` rows, each a query of one head of those that share a KV head, and of `_KEYS` keys. Rows are the vectors'
lanes, so that maxima and sums along the keys need no shuffling; tiles of keys and values are unpacked to fp32 once for all rows
of a tile. With the running maximum and sum of Milakov and Gimelshein (2018), as `attending`; the order of the loops is that of
FlashAttention (Dao et al. 2022).
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from headrace_backends.llm.kernels.emitting import (
    SOURCES,
    at,
    compiled,
    float_of_bits,
    narrow,
    take,
    tangent,
    widen,
)
from headrace_backends.llm.kernels.pool import Kernel
from headrace_backends.llm.kernels.products import (
    BYTES,
    FP32,
    INT8,
    exponential_of,
    highest_of,
    load,
    multiply_add,
    pointer_to,
    splat,
    wide_registers,
)

ROWS: Final = 32
"""Of a tile: two vectors."""
_KEYS: Final = 64
_BLOCK: Final = 8
"""Keys, or elements of values, whose sums are in registers at a time: twice so many vectors, or in four parts."""
_WIDTH: Final = 16
_UNSEEN: Final = -1e30
"""The score of a key that a row does not see."""
_TABLE: Final = 1 << 40
_I64: Final = ir.IntType(64)


@intrinsic
def _add_product(_context: Any, left: Any, step: Any, stride: Any, right: Any, out: Any, count: Any) -> Any:
    """Add to out [_BLOCK, ROWS] the product of left [_BLOCK, count] and right [count, ROWS], all fp32 by their addresses.

    Elements of `left` lie `step` bytes apart along the first axis and `stride` bytes along the second.
    """
    most_rows, most_lanes = (_BLOCK, ROWS) if wide_registers() else (_BLOCK // 2, _WIDTH)

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        for first in range(0, _BLOCK, most_rows):
            for lane in range(0, ROWS, most_lanes):
                emit_part(builder, args, range(first, first + most_rows), range(lane, lane + most_lanes, _WIDTH))
        return context.get_dummy_value()

    def emit_part(builder: Any, args: Any, rows: range, lanes: range) -> None:
        left, step, stride, right, out, count = args
        vector = ir.VectorType(ir.FloatType(), _WIDTH)
        places = [(i, lane) for i in rows for lane in lanes]
        sums = {place: cgutils.alloca_once(builder, vector) for place in places}
        for (i, lane), kept in sums.items():
            builder.store(load(builder, out, i * ROWS + lane, _WIDTH, FP32), kept)
        with cgutils.for_range(builder, count, intp=_I64) as loop:
            line = builder.add(right, builder.mul(loop.index, ir.Constant(_I64, ROWS * 4)))
            others = {lane: load(builder, line, lane, _WIDTH, FP32) for lane in lanes}
            column = builder.add(left, builder.mul(loop.index, stride))
            for i in rows:
                place = builder.add(column, builder.mul(step, ir.Constant(_I64, i)))
                number = splat(builder, builder.load(pointer_to(builder, place, 0, ir.FloatType()), align=4), _WIDTH)
                for lane, other in others.items():
                    kept = sums[i, lane]
                    builder.store(multiply_add(builder, number, other, builder.load(kept)), kept)
        for (i, lane), kept in sums.items():
            place = pointer_to(builder, out, (i * ROWS + lane) * 4, vector)
            builder.store(builder.load(kept), place, align=4)

    return types.void(*[types.int64] * 6), emit


@intrinsic
def _soften(_context: Any, scores: Any, count: Any, peak: Any, mass: Any, total: Any, dim: Any) -> Any:
    """Make weights of scores [count, ROWS] by the maximum so far, and take what is there of it back to the new maximum.

    `peak` and `mass` [ROWS] are the maximum and the sum of weights, `total` [dim, ROWS] the weighted values.
    """

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        scores, count, peak, mass, total, dim = args
        vector = ir.VectorType(ir.FloatType(), _WIDTH)

        def line(address: Any, index: Any, lane: int) -> Any:
            place = builder.add(address, builder.mul(index, ir.Constant(_I64, ROWS * 4)))
            return pointer_to(builder, place, lane * 4, vector)

        for lane in range(0, ROWS, _WIDTH):
            before = load(builder, peak, lane, _WIDTH, FP32)
            most = cgutils.alloca_once(builder, vector)
            builder.store(before, most)
            with cgutils.for_range(builder, count, intp=_I64) as loop:
                score = builder.load(line(scores, loop.index, lane), align=4)
                builder.store(highest_of(builder, builder.load(most), score), most)
            now = builder.load(most)
            shrink = exponential_of(builder, builder.fsub(before, now))
            weights = cgutils.alloca_once(builder, vector)
            builder.store(builder.fmul(load(builder, mass, lane, _WIDTH, FP32), shrink), weights)
            with cgutils.for_range(builder, count, intp=_I64) as loop:
                place = line(scores, loop.index, lane)
                weight = exponential_of(builder, builder.fsub(builder.load(place, align=4), now))
                builder.store(weight, place, align=4)
                builder.store(builder.fadd(builder.load(weights), weight), weights)
            with cgutils.for_range(builder, dim, intp=_I64) as loop:
                place = line(total, loop.index, lane)
                builder.store(builder.fmul(builder.load(place, align=4), shrink), place, align=4)
            builder.store(now, pointer_to(builder, peak, lane * 4, vector), align=4)
            builder.store(builder.load(weights), pointer_to(builder, mass, lane * 4, vector), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), emit


@cache
def prefilling(numbers: int, narrow_model: bool, dim_k: int, dim_v: int, group: int) -> Kernel:
    """Return attention over a cache of such numbers and head widths, `group` query heads to a KV head.

    Arguments are those of `attending.attention`, but that 8 and 9 are tiles. A tile is five integers: the first query's number
    among the step's tokens, its position, how many queries the sequence has, where its block numbers begin, and which row
    the tile begins with: `group` rows to a query.
    """
    source = SOURCES
    element = np.uint16 if narrow_model else np.float32
    element_bytes = 2 if narrow_model else 4
    stored = np.float32 if numbers == FP32 else np.int8 if numbers == INT8 else np.uint16
    integers = numbers == INT8
    value_at = dim_k * BYTES[numbers]
    factors_at = dim_k + dim_v
    lanes, most_keys, block = ROWS, _KEYS, _BLOCK
    unseen, table_length = np.float32(_UNSEEN), _TABLE

    def kernel(args: Any) -> None:
        of = carray(args, (15 + source * 0,))
        heads, token, size = of[6], of[7], of[14]
        tiles = at(of[8], (of[9], 5), np.int64)
        window, scaling, softcap = of[11], float_of_bits(of[12]), float_of_bits(of[13])
        queries = np.empty((dim_k, lanes), dtype=np.float32)
        keys = np.zeros((most_keys, dim_k), dtype=np.float32)
        values = np.zeros((most_keys, dim_v), dtype=np.float32)
        scores = np.empty((most_keys, lanes), dtype=np.float32)
        total = np.empty((dim_v, lanes), dtype=np.float32)
        peak = np.empty(lanes, dtype=np.float32)
        mass = np.empty(lanes, dtype=np.float32)
        last = np.empty(lanes, dtype=np.int64)
        while True:
            task = take(of.ctypes.data)
            if task >= of[9] * heads:
                break
            tile, head = tiles[task // heads], task % heads
            table = at(of[10] + 4 * tile[3], (table_length,), np.int32)
            rows = min(lanes, tile[2] * group - tile[4])
            for r in range(lanes):
                row = tile[4] + min(r, rows - 1)
                last[r] = tile[1] + row // group
                place = (tile[0] + row // group) * of[2] + (head * group + row % group) * dim_k
                given = at(of[1] + place * element_bytes, (dim_k,), element)
                for d in range(dim_k):
                    queries[d, r] = widen(given[d]) * scaling
            total[:] = np.float32(0.0)
            peak[:] = unseen
            mass[:] = np.float32(0.0)
            first = max(0, last[0] - window + 1) if window > 0 else 0
            first = first // most_keys * most_keys  # a row's sums are in the same order whatever tile it is in
            end = last[lanes - 1] + 1
            while first < end:
                count = min(most_keys, end - first)
                for t in range(count):
                    key = first + t
                    slot = np.int64(table[key // size]) * size + key % size
                    place = of[5] + (slot * heads + head) * token
                    kept_key, kept_value = at(place, (dim_k,), stored), at(place + value_at, (dim_v,), stored)
                    factor_k = factor_v = np.float32(1.0)
                    if integers:
                        factors = at(place + factors_at, (2,), np.uint16)
                        factor_k, factor_v = widen(factors[0]), widen(factors[1])
                    for d in range(dim_k):
                        keys[t, d] = widen(kept_key[d]) * factor_k
                    for d in range(dim_v):
                        values[t, d] = widen(kept_value[d]) * factor_v
                whole = (count + block - 1) // block * block
                for t in range(count, whole):
                    values[t, :] = np.float32(0.0)
                scores[:whole] = np.float32(0.0)
                for t in range(0, whole, block):
                    _add_product(
                        keys.ctypes.data + t * dim_k * 4,
                        dim_k * 4,
                        4,
                        queries.ctypes.data,
                        scores.ctypes.data + t * lanes * 4,
                        dim_k,
                    )
                if softcap > np.float32(0.0):
                    for t in range(whole):
                        for r in range(lanes):
                            scores[t, r] = softcap * tangent(scores[t, r] / softcap)
                if first + whole > last[0] + 1 or (window > 0 and first <= last[lanes - 1] - window):
                    for t in range(whole):
                        for r in range(lanes):
                            if first + t > last[r] or (window > 0 and first + t <= last[r] - window):
                                scores[t, r] = unseen
                _soften(scores.ctypes.data, whole, peak.ctypes.data, mass.ctypes.data, total.ctypes.data, dim_v)
                for d in range(0, dim_v, block):
                    _add_product(
                        values.ctypes.data + d * 4,
                        4,
                        dim_v * 4,
                        scores.ctypes.data,
                        total.ctypes.data + d * lanes * 4,
                        whole,
                    )
                first += count
            for r in range(rows):
                row = tile[4] + r
                place = (tile[0] + row // group) * of[4] + (head * group + row % group) * dim_v
                out = at(of[3] + place * element_bytes, (dim_v,), element)
                for d in range(dim_v):
                    out[d] = narrow(total[d, r] / mass[r], out)

    return compiled(kernel)
