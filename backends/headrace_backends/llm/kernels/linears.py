"""Products of few rows with weights of 8 bits: what they cost is reading the weights.

Written as LLVM's vectors, as `products` is: four outputs at a time, so that an input that was loaded is used four times.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from headrace_backends.llm.kernels.emitting import SOURCES, at, compiled, narrow, prefetch_line, take, widen
from headrace_backends.llm.kernels.pool import Kernel
from headrace_backends.llm.kernels.products import FP32, INT8, load, multiply_add, pointer_to, total_of

_AT_ONCE: Final = 4
"""Outputs."""
_WIDTH: Final = 16
_TASK: Final = 64
"""Outputs that a thread takes at a time."""
MOST_ROWS: Final = 4
"""Of inputs: for more the sums do not fit into registers, and bf16 products are as fast."""
_AHEAD: Final = 8192
"""Bytes that weights are asked for before they are used: the processor's own guess is too short to keep memory busy."""
_I64: Final = ir.IntType(64)


@intrinsic(prefer_literal=True)
def _four_outputs(_context: Any, weights: Any, depth: Any, inputs: Any, out: Any, rows: Any) -> Any:
    """Put the products of `rows` inputs [rows, depth] of fp32 with four rows of weights into out [rows, 4]."""
    count = int(rows.literal_value)

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        weights, depth, inputs, out = args[:4]
        vector = ir.VectorType(ir.FloatType(), _WIDTH)
        sums = [[cgutils.alloca_once(builder, vector) for _ in range(_AT_ONCE)] for _ in range(count)]
        for kept in (kept for row in sums for kept in row):
            builder.store(ir.Constant(vector, [0.0] * _WIDTH), kept)
        steps = builder.udiv(depth, ir.Constant(_I64, _WIDTH))
        with cgutils.for_range(builder, steps, intp=_I64) as loop:
            first = builder.mul(loop.index, ir.Constant(_I64, _WIDTH))
            parts = []
            for row in range(count):
                place = builder.add(first, builder.mul(depth, ir.Constant(_I64, row)))
                address = builder.add(inputs, builder.mul(place, ir.Constant(_I64, 4)))
                parts.append(load(builder, address, 0, _WIDTH, FP32))
            for output in range(_AT_ONCE):
                address = builder.add(weights, builder.add(first, builder.mul(depth, ir.Constant(_I64, output))))
                weight = load(builder, address, 0, _WIDTH, INT8)
                prefetch_line(builder, builder.add(address, ir.Constant(_I64, _AHEAD)))
                for row in range(count):
                    kept = sums[row][output]
                    builder.store(multiply_add(builder, weight, parts[row], builder.load(kept)), kept)
        for row in range(count):
            for output in range(_AT_ONCE):
                place = pointer_to(builder, out, (row * _AT_ONCE + output) * 4, ir.FloatType())
                builder.store(total_of(builder, builder.load(sums[row][output])), place, align=4)
        return context.get_dummy_value()

    ints = [types.int64] * 4
    return types.void(*ints, rows), emit


@cache
def eight_bit_product(narrow_model: bool, rows: int) -> Kernel:
    """Return the product of so many rows with 8-bit weights, `MOST_ROWS` at most.

    Arguments: 0 a counter at 0, 1 inputs [rows, depth], 2 depth, a multiple of 16, 3 weights [outputs, depth], 4 their
    factors in fp32 [outputs], 5 biases [outputs] or 0, 6 how many outputs, a multiple of 4, 7 output [rows, outputs].
    """
    source = SOURCES
    element = np.uint16 if narrow_model else np.float32
    four, task = _AT_ONCE, _TASK

    def kernel(args: Any) -> None:
        of = carray(args, (8 + source * 0,))
        depth, outputs = of[2], of[6]
        given = at(of[1], (rows * depth,), element)
        inputs = np.empty(rows * depth, dtype=np.float32)
        for d in range(rows * depth):
            inputs[d] = widen(given[d])
        factors = at(of[4], (outputs,), np.float32)
        biases = at(of[5], (outputs,), element)
        out = at(of[7], (rows, outputs), element)
        sums = np.empty((rows, four), dtype=np.float32)
        while True:
            first = take(of.ctypes.data) * task
            if first >= outputs:
                break
            for n in range(first, min(first + task, outputs), four):
                _four_outputs(of[3] + n * depth, depth, inputs.ctypes.data, sums.ctypes.data, rows)
                for row in range(rows):
                    for output in range(four):
                        value = sums[row, output] * factors[n + output]
                        if of[5] != 0:
                            value += widen(biases[n + output])
                        out[row, n + output] = narrow(value, out)

    return compiled(kernel)
