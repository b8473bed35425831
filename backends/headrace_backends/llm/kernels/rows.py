"""What is done to each row of a step by itself: kept in the cache, turned by its position, normed, activated, ranked.

Rows are shared out among threads by number. Sums are in fp32, and are rounded where transformers' modules round, so that
results are theirs.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
from numba import carray, njit

from headrace_backends.llm.kernels.emitting import (
    LOOSE,
    SOURCES,
    at,
    compiled,
    exponential,
    float_of_bits,
    narrow,
    take,
    tangent,
    widen,
)
from headrace_backends.llm.kernels.pool import Kernel
from headrace_backends.llm.kernels.products import BYTES, FP32, INT8

_ROWS: Final = 8
"""Rows that a thread takes at a time."""


@njit(fastmath=LOOSE, error_model="numpy")
def _in_eight_bits(values: Any, kept: Any, factors: Any, which: Any) -> None:
    """Keep a head's numbers as integers of 8 bits, and in `factors[which]` the bf16 number to multiply them by."""
    peak = np.float32(0.0)
    for value in values:
        peak = max(peak, abs(widen(value)))
    factors[which] = narrow(peak / np.float32(127.0), factors)
    factor = widen(factors[which])
    inverse = np.float32(1.0) / factor if factor > np.float32(0.0) else np.float32(0.0)
    for d in range(len(values)):
        kept[d] = np.int8(np.rint(min(max(widen(values[d]) * inverse, np.float32(-127.0)), np.float32(127.0))))


@cache
def keeping(numbers: int, narrow_model: bool, dim_k: int, dim_v: int) -> Kernel:
    """Return what writes K and V into the cache: as they are, or as 8-bit integers with a factor of each head and token.

    Arguments: 0 a counter at 0, 1 keys, 2 their elements a row, 3 values, 4 their elements a row, 5 slots,
    6 how many rows, 7 cache, 8 KV heads, 9 bytes that the cache keeps of a token and head. Heads of a row lie in a row.
    """
    source = SOURCES
    element = np.uint16 if narrow_model else np.float32
    stored = {FP32: np.float32, INT8: np.int8}.get(numbers, np.uint16)
    element_bytes = 2 if narrow_model else 4
    value_at = dim_k * BYTES[numbers]
    integers = numbers == INT8
    factors_at = dim_k + dim_v
    together = _ROWS

    def kernel(args: Any) -> None:
        of = carray(args, (10 + source * 0,))
        slots = at(of[5], (of[6],), np.int64)
        while True:
            first = take(of.ctypes.data) * together
            if first >= of[6]:
                break
            for row in range(first, min(first + together, of[6])):
                for head in range(of[8]):
                    key = at(of[1] + (row * of[2] + head * dim_k) * element_bytes, (dim_k,), element)
                    value = at(of[3] + (row * of[4] + head * dim_v) * element_bytes, (dim_v,), element)
                    place = of[7] + (slots[row] * of[8] + head) * of[9]
                    kept_key, kept_value = at(place, (dim_k,), stored), at(place + value_at, (dim_v,), stored)
                    if integers:
                        factors = at(place + factors_at, (2,), np.uint16)
                        _in_eight_bits(key, kept_key, factors, 0)
                        _in_eight_bits(value, kept_value, factors, 1)
                    else:
                        for d in range(dim_k):
                            kept_key[d] = key[d]
                        for d in range(dim_v):
                            kept_value[d] = value[d]

    return compiled(kernel)


@cache
def turning(narrow_model: bool, dim: int, turned: int, one_more: bool) -> Kernel:
    """Return what norms queries and keys, if they are normed, and turns their first `turned` elements by their position.

    `one_more`: a norm's weights are one more than what is stored, as Gemma has it. Arguments: 0 a counter at 0, 1 rows, 2 how many, 3 elements of a row, 4 query heads and 5 key heads, which follow each other, 6 cosines and
    7 sines [rows, turned], 8 and 9 the norms' weights or 0, 10 their epsilon as the bits of fp32.
    """
    source = SOURCES
    element = np.uint16 if narrow_model else np.float32
    element_bytes = 2 if narrow_model else 4
    half = turned // 2
    together = _ROWS

    def kernel(args: Any) -> None:
        of = carray(args, (11 + source * 0,))
        line = np.empty(dim, dtype=np.float32)
        epsilon = float_of_bits(of[10])
        while True:
            begin = take(of.ctypes.data) * together
            if begin >= of[2]:
                break
            for row in range(begin, min(begin + together, of[2])):
                cosines = at(of[6] + row * turned * element_bytes, (turned,), element)
                sines = at(of[7] + row * turned * element_bytes, (turned,), element)
                for head in range(of[4] + of[5]):
                    values = at(of[1] + (row * of[3] + head * dim) * element_bytes, (dim,), element)
                    norm = of[8] if head < of[4] else of[9]
                    if norm != 0:
                        _normed(values, at(norm, (dim,), element), values, line, epsilon, one_more)
                    for d in range(turned):
                        line[d] = widen(values[d])
                    for d in range(half):
                        one, other = line[d], line[d + half]
                        values[d] = _plus(one, widen(cosines[d]), -other, widen(sines[d]), values)
                        values[d + half] = _plus(other, widen(cosines[d + half]), one, widen(sines[d + half]), values)

    return compiled(kernel)


@njit(fastmath=LOOSE, error_model="numpy", inline="always")
def _plus(a: Any, b: Any, c: Any, d: Any, like: Any) -> Any:
    """Return a b + c d, each product rounded to `like`'s elements as PyTorch's single operators do."""
    return narrow(widen(narrow(a * b, like)) + widen(narrow(c * d, like)), like)


@njit(fastmath=LOOSE, error_model="numpy")
def _normed(values: Any, weights: Any, out: Any, line: Any, epsilon: Any, one_more: Any) -> None:
    """Put values / sqrt(mean of their squares + epsilon) times weights into `out`; `line` is room for them in fp32.

    Llama's rounds before it multiplies by the weights, Gemma's does not.
    """
    dim = len(values)
    squares = np.float32(0.0)
    for d in range(dim):
        line[d] = widen(values[d])
        squares += line[d] * line[d]
    factor = np.float32(1.0) / np.sqrt(squares / np.float32(dim) + epsilon)
    if one_more:
        for d in range(dim):
            out[d] = narrow(line[d] * factor * (np.float32(1.0) + widen(weights[d])), out)
    else:
        for d in range(dim):
            out[d] = narrow(widen(narrow(line[d] * factor, out)) * widen(weights[d]), out)


@cache
def norming(narrow_model: bool, one_more: bool) -> Kernel:
    """Return what adds a layer's part to the residual, and norms the sum for the next.

    Arguments: 0 a counter at 0, 1 how many rows, 2 their elements, 3 residual [rows, elements], 4 addend of
    that shape or 0, 5 weights of the addend's own norm or 0, 6 weights of the sum's norm, 7 output, 8 epsilon as the bits
    of fp32. The addend is overwritten where it has a norm.
    """
    source = SOURCES
    element = np.uint16 if narrow_model else np.float32
    element_bytes = 2 if narrow_model else 4

    def kernel(args: Any) -> None:
        of = carray(args, (9 + source * 0,))
        dim = of[2]
        line = np.empty(dim, dtype=np.float32)
        epsilon = float_of_bits(of[8])
        while True:
            row = take(of.ctypes.data)
            if row >= of[1]:
                break
            offset = row * dim * element_bytes
            residual = at(of[3] + offset, (dim,), element)
            if of[4] != 0:
                addend = at(of[4] + offset, (dim,), element)
                if of[5] != 0:
                    _normed(addend, at(of[5], (dim,), element), addend, line, epsilon, one_more)
                for d in range(dim):
                    residual[d] = narrow(widen(residual[d]) + widen(addend[d]), residual)
            _normed(residual, at(of[6], (dim,), element), at(of[7] + offset, (dim,), element), line, epsilon, one_more)

    return compiled(kernel)


@cache
def gating(narrow_model: bool, by_tangent: bool) -> Kernel:
    """Return activation(gate) * up of rows that hold gate and up side by side.

    The activation is SiLU, or GELU by its tangent's formula. Arguments: 0 a counter at 0, 1 how many rows,
    2 elements of a gate, 3 rows [rows, 2, elements], 4 output [rows, elements].
    """
    source = SOURCES
    element = np.uint16 if narrow_model else np.float32
    element_bytes = 2 if narrow_model else 4

    def kernel(args: Any) -> None:
        of = carray(args, (5 + source * 0,))
        dim = of[2]
        while True:
            row = take(of.ctypes.data)
            if row >= of[1]:
                break
            gates = at(of[3] + row * dim * 2 * element_bytes, (dim,), element)
            ups = at(of[3] + (row * 2 + 1) * dim * element_bytes, (dim,), element)
            out = at(of[4] + row * dim * element_bytes, (dim,), element)
            for d in range(dim):
                gate = widen(gates[d])
                if by_tangent:
                    cubed = gate + np.float32(0.044715) * gate * gate * gate
                    active = np.float32(0.5) * gate * (np.float32(1.0) + tangent(np.float32(0.7978845608) * cubed))
                else:
                    active = gate / (np.float32(1.0) + exponential(-gate))
                out[d] = narrow(widen(narrow(active, out)) * widen(ups[d]), out)

    return compiled(kernel)


@cache
def widening() -> Kernel:
    """Return what makes rows of bf16 rows of fp32.

    Arguments: 0 a counter at 0, 1 rows, 2 how many, 3 their elements, 4 output, of that shape.
    """
    source = SOURCES

    def kernel(args: Any) -> None:
        of = carray(args, (5 + source * 0,))
        dim = of[3]
        while True:
            row = take(of.ctypes.data)
            if row >= of[2]:
                break
            given = at(of[1] + row * dim * 2, (dim,), np.uint16)
            out = at(of[4] + row * dim * 4, (dim,), np.float32)
            for d in range(dim):
                out[d] = widen(given[d])

    return compiled(kernel)
