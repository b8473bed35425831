"""Products of rows with weights that are kept as narrow as they are known: fp32, bf16, integers of 8 and of 4 bits.

Weights are widened to fp32 in registers, or for many rows once into a buffer, and sums are in fp32. Every sum is taken in the
order of the inputs, one multiplication and addition after the other, whatever the number of rows: so a row's products do not
depend, in any bit, on what else is computed with it. Widths are parted into groups of `GROUP` outputs, whose weights for one
input lie side by side, as vectors of `LANES` outputs.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from headrace_backends.llm.kernels.emitting import SOURCES, at, compiled, narrow, prefetch_line, take
from headrace_backends.llm.kernels.pool import Kernel
from headrace_backends.llm.kernels.products import BF16, FP32, INT8, load, pointer_to, splat, wide_registers

INT4: Final = 3
"""How weights may be kept besides what `products` has for the cache. Of integers each `SHARED` weights of an output have a factor in fp16, and those of 4 bits a number too,
that is added: what Q8_0, Q4_0 and Q4_1 of GGUF files have."""
LANES: Final = 16
GROUP: Final = 64
SHARED: Final = 32
SCALES: Final = {FP32: 0, BF16: 0, INT8: 1, INT4: 2}
"""Numbers in fp16 that such weights share."""
FEW_ROWS: Final = 6
"""Rows that one pass over weights multiplies, at most: so many sums fit into registers."""
BITS: Final = {FP32: 32, BF16: 16, INT8: 8, INT4: 4}
_PANELS: Final = GROUP // LANES
_DEPTH: Final = 512
"""Inputs that are gone through at a time where there are many rows: what is widened for them stays in the second cache."""
_ROWS: Final = 64
"""Rows that a thread takes at a time."""
_TOGETHER: Final = 8
"""Groups of outputs that a thread takes at a time, at most: what it asked for ahead is then for itself."""
_PARTS: Final = 12
"""Tasks of a product at least, if it has so many groups."""
_AHEAD: Final = 8192
"""Bytes that weights are asked for before they are used: the processor's own guess is too short to keep memory busy."""

_I8: Final = ir.IntType(8)
_I32: Final = ir.IntType(32)
_I64: Final = ir.IntType(64)
_F32: Final = ir.FloatType()
_VECTOR: Final = ir.VectorType(_F32, LANES)
_WIDE: Final = ir.VectorType(_I32, LANES)


def _panels_at_once(rows: int) -> int:
    """Return how many vectors of outputs are summed at once for so many rows: a sum waits for the one before it."""
    most = (12 if wide_registers() else 6) // rows  # sums that registers have room for
    return 4 if most >= 4 else 2 if most >= 2 else 1


def _fused(builder: Any, one: Any, other: Any, to: Any) -> Any:
    """Return one * other + to, rounded once."""
    kind = one.type
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [kind] * 3), f"llvm.fma.v{kind.count}f32"
    )
    return builder.call(function, [one, other, to])


def _whole(value: int) -> Any:
    return ir.Constant(_WIDE, [value] * LANES)


def _unpacked(builder: Any, address: Any, offset: int, kind: int) -> list[Any]:
    """Return the numbers of a vector's line, as fp32 or integers in fp32; two lines' of INT4."""
    if kind in {FP32, INT8}:
        return [load(builder, builder.add(address, ir.Constant(_I64, offset)), 0, LANES, kind)]
    if kind == BF16:
        half = ir.VectorType(_I32, LANES // 2)
        pairs = builder.load(pointer_to(builder, address, offset, half), align=2)
        low = builder.shl(pairs, ir.Constant(half, [16] * (LANES // 2)))
        high = builder.and_(pairs, ir.Constant(half, [0xFFFF0000] * (LANES // 2)))
        both = builder.shuffle_vector(low, high, ir.Constant(_WIDE, list(range(LANES))))
        return [builder.bitcast(both, _VECTOR)]
    packed = builder.load(pointer_to(builder, address, offset, ir.VectorType(_I8, LANES)), align=1)
    wide = builder.zext(packed, _WIDE)
    parts = (builder.and_(wide, _whole(15)), builder.lshr(wide, _whole(4)))
    return [builder.sitofp(part, _VECTOR) for part in parts]


def _line(kind: int, outputs: int) -> int:
    """Return the bytes of the weights for one input, of so many outputs."""
    return outputs * BITS[kind] // 8


def _lines(builder: Any, kind: int, lines: Any, at_input: int, width: int, panel: int, scale: Any) -> list[Any]:
    """Return the weights of a vector of outputs for the next inputs, one vector each: one, or two of INT4.

    `lines` are of `width` outputs; `scale` of INT4 are the factor and what is added.
    """
    offset = at_input * _line(kind, width) + panel * panel_bytes(kind)
    numbers = _unpacked(builder, lines, offset, kind)
    if not SCALES[kind]:
        return numbers
    factor, *least = (builder.load(one) for one in scale)
    if least:
        return [_fused(builder, factor, number, least[0]) for number in numbers]
    return [builder.fmul(factor, number) for number in numbers]


def _loop(builder: Any, kind: int, depth: Any, scales: Any, panels: int, together: int, go_on: Any) -> None:
    """Emit a loop over `depth` inputs, `together` at a time, of each of which `go_on` emits what is done.

    It is called with the first input, and for each vector of outputs with the places where its scales are.
    """

    def loop_over(first: Any, many: Any, given: Any) -> None:
        with cgutils.for_range(builder, builder.udiv(many, ir.Constant(_I64, together)), intp=_I64) as loop:
            go_on(builder.add(first, builder.mul(loop.index, ir.Constant(_I64, together))), given)

    count = SCALES[kind]
    if not count:
        loop_over(ir.Constant(_I64, 0), depth, [()] * panels)
        return
    kept = [[cgutils.alloca_once(builder, _VECTOR) for _ in range(count)] for _ in range(panels)]
    half = ir.VectorType(ir.HalfType(), LANES)
    with cgutils.for_range(builder, builder.udiv(depth, ir.Constant(_I64, SHARED)), intp=_I64) as shared:
        given = builder.add(scales, builder.mul(shared.index, ir.Constant(_I64, scale_bytes(kind, GROUP))))
        for p, places in enumerate(kept):
            for which, place in enumerate(places):
                at_scale = pointer_to(builder, given, (count * p + which) * LANES * 2, half)
                builder.store(builder.fpext(builder.load(at_scale, align=2), _VECTOR), place)
        loop_over(builder.mul(shared.index, ir.Constant(_I64, SHARED)), ir.Constant(_I64, SHARED), kept)


def panel_bytes(kind: int) -> int:
    """Return how far the weights of a vector of outputs lie from those of the next one, in a line."""
    return LANES if kind == INT4 else _line(kind, LANES)


def scale_bytes(kind: int, outputs: int) -> int:
    """Return the bytes of what `SHARED` weights of so many outputs share."""
    return SCALES[kind] * outputs * 2


def _emit_products(
    builder: Any, given: tuple[Any, ...], kind: int, width: int, rows: int, panels: int, fetched: int
) -> None:
    """Emit the addition of products of so many rows with `panels` vectors of outputs.

    `given` are as `_add_products` has them; lines of `fetched` bytes are asked for on the way, one for each input.
    """
    weights, scales, depth, inputs, stride, sums, ahead = given
    together = (4 if rows <= 2 else 2) * (2 if kind == INT4 else 1)  # with few rows the loop itself costs more
    places = {
        (r, p): pointer_to(builder, sums, (r * GROUP + p * LANES) * 4, _VECTOR)
        for r in range(rows)
        for p in range(panels)
    }
    kept = {at_sum: cgutils.alloca_once(builder, _VECTOR) for at_sum in places}
    for at_sum, place in places.items():
        builder.store(builder.load(place, align=4), kept[at_sum])
    bases = [builder.add(inputs, builder.mul(stride, ir.Constant(_I64, 4 * r))) for r in range(rows)]

    def go_on(first: Any, shared: Any) -> None:
        lines = builder.add(weights, builder.mul(first, ir.Constant(_I64, _line(kind, width))))
        begin = builder.mul(first, ir.Constant(_I64, 4))
        rows_at = [builder.add(base, begin) for base in bases]
        for k in range(0, together, 2 if kind == INT4 else 1):
            parts = [_lines(builder, kind, lines, k, width, p, shared[p]) for p in range(panels)]
            for step in range(len(parts[0])):
                for r in range(rows):
                    one = builder.load(pointer_to(builder, rows_at[r], (k + step) * 4, _F32), align=4)
                    spread = splat(builder, one, LANES)
                    for p in range(panels):
                        total = _fused(builder, spread, parts[p][step], builder.load(kept[r, p]))
                        builder.store(total, kept[r, p])
        asked = builder.add(ahead, builder.mul(first, ir.Constant(_I64, fetched)))
        for line in range(0, together * fetched, 64):
            prefetch_line(builder, builder.add(asked, ir.Constant(_I64, line)))

    _loop(builder, kind, depth, scales, panels, together, go_on)
    for at_sum, place in places.items():
        builder.store(builder.load(kept[at_sum]), place, align=4)


@intrinsic(prefer_literal=True)
def _add_group(
    _context: Any, weights: Any, scales: Any, depth: Any, inputs: Any, stride: Any, sums: Any, ahead: Any, rows: Any, kind: Any
) -> Any:  # fmt: skip
    """Add the products of up to `FEW_ROWS` rows [rows, stride] of fp32, `depth` of each, with a group to sums [rows, GROUP].

    All by their addresses. `ahead` are lines that are needed next.
    """
    number = int(kind.literal_value)

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        weights, scales, depth, inputs, stride, sums, ahead, rows = args[:8]
        for count in range(1, FEW_ROWS + 1):
            panels = _panels_at_once(count)
            fetched = _line(number, LANES * panels)
            with builder.if_then(builder.icmp_unsigned("==", rows, ir.Constant(_I64, count))):
                if panels == _PANELS:  # one pass, over lines as they lie
                    near = builder.add(weights, ir.Constant(_I64, _AHEAD))
                    given = (weights, scales, depth, inputs, stride, sums, near)
                    _emit_products(builder, given, number, GROUP, count, panels, fetched)
                    continue
                with cgutils.for_range(builder, ir.Constant(_I64, _PANELS // panels), intp=_I64) as loop:

                    def plus(address: Any, size: int, index: Any = loop.index) -> Any:
                        return builder.add(address, builder.mul(index, ir.Constant(_I64, size)))

                    given = (
                        plus(weights, panel_bytes(number) * panels), plus(scales, scale_bytes(number, LANES * panels)),
                        depth, inputs, stride, plus(sums, LANES * panels * 4),
                        builder.add(ahead, builder.mul(loop.index, builder.mul(depth, ir.Constant(_I64, fetched)))),
                    )  # fmt: skip
                    _emit_products(builder, given, number, GROUP, count, panels, fetched)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8, kind), emit


@intrinsic(prefer_literal=True)
def _add_widened(
    _context: Any, widened: Any, depth: Any, inputs: Any, stride: Any, sums: Any, ahead: Any, rows: Any, kind: Any
) -> Any:  # fmt: skip
    """Do the same with the vectors of outputs of which `_widen_lines` has widened the weights, kept as `kind` says."""
    number = int(kind.literal_value)

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        panels = _panels_at_once(FEW_ROWS)
        widened, depth, inputs, stride, sums, ahead, rows = args[:7]
        given = (widened, ir.Constant(_I64, 0), depth, inputs, stride, sums, ahead)
        for count in range(1, FEW_ROWS + 1):
            with builder.if_then(builder.icmp_unsigned("==", rows, ir.Constant(_I64, count))):
                _emit_products(builder, given, FP32, LANES * panels, count, panels, _line(number, LANES * panels))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7, kind), emit


@intrinsic(prefer_literal=True)
def _widen_lines(_context: Any, weights: Any, scales: Any, depth: Any, out: Any, kind: Any) -> Any:
    """Put the weights of as many vectors of outputs as are multiplied at once, for `depth` inputs, side by side as fp32."""
    number = int(kind.literal_value)

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        vectors = _panels_at_once(FEW_ROWS)
        weights, scales, depth, out = args[:4]

        def go_on(first: Any, pairs: Any) -> None:
            lines = builder.add(weights, builder.mul(first, ir.Constant(_I64, _line(number, GROUP))))
            wide = builder.add(out, builder.mul(first, ir.Constant(_I64, LANES * vectors * 4)))
            for p in range(vectors):
                for step, numbers in enumerate(_lines(builder, number, lines, 0, GROUP, p, pairs[p])):
                    place = pointer_to(builder, wide, (step * vectors + p) * LANES * 4, _VECTOR)
                    builder.store(numbers, place, align=4)

        _loop(builder, number, depth, scales, vectors, 2 if number == INT4 else 1, go_on)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, kind), emit


@cache
def product(kind: int) -> Kernel:
    """Return the product of rows with weights that are kept as `kind` says.

    Arguments: 0 a counter at 0, 1 inputs of fp32 [rows, stride], 2 their stride, 3 how many rows, 4 depth, a multiple of
    `SHARED`, 5 weights [groups, depth, GROUP], 6 scales of fp16 [groups, depth / SHARED, panels, scales, LANES], 7 biases in
    fp32 [outputs] or 0, 8 how many outputs, 9 output [rows, stride], 10 its stride, 11 whether it is bf16, not fp32.
    """
    source = SOURCES
    lanes, group, row_block, depth_block, shared, few = LANES, GROUP, _ROWS, _DEPTH, SHARED, FEW_ROWS
    line, line_scales = _line(kind, GROUP), scale_bytes(kind, GROUP)
    panel, panel_scales = panel_bytes(kind), scale_bytes(kind, LANES)
    at_once = _panels_at_once(FEW_ROWS)
    wide, panels, fetched = LANES * at_once, _PANELS, _line(kind, LANES)
    most_together, parts = _TOGETHER, _PARTS

    def kernel(args: Any) -> None:
        of = carray(args, (12 + source * 0,))
        stride, rows, depth, outputs = of[2], of[3], of[4], of[8]
        groups, blocks = (outputs + group - 1) // group, (rows + row_block - 1) // row_block
        sums = np.empty((min(rows, row_block), group), dtype=np.float32)
        widened = np.empty(depth_block * wide if rows > few else 1, dtype=np.float32)
        together = max(1, min(most_together, groups // parts))
        shares = (groups + together - 1) // together
        number = end_number = block = np.int64(0)
        while True:
            if number == end_number:
                task = take(of.ctypes.data)
                if task >= shares * blocks:
                    break
                block, number = task // shares, task % shares * together
                end_number = min(number + together, groups)
            here = min(row_block, rows - block * row_block)
            inputs = of[1] + block * row_block * stride * 4
            weights = of[5] + number * depth * line
            scales = of[6] + number * (depth // shared) * line_scales
            sums[:here] = np.float32(0.0)
            for first in range(0, depth, depth_block):
                many = min(depth_block, depth - first)
                begin = inputs + first * 4
                block_weights = weights + first * line
                block_scales = scales + first // shared * line_scales
                ahead = block_weights + many * line
                if rows <= few:
                    sums_at = sums.ctypes.data
                    _add_group(block_weights, block_scales, many, begin, stride, sums_at, ahead, rows, kind)
                    continue
                for p in range(0, panels, at_once):
                    _widen_lines(
                        block_weights + p * panel, block_scales + p * panel_scales, many, widened.ctypes.data, kind
                    )
                    asked = ahead + p * many * fetched
                    row = 0
                    while row < here:  # as even parts as can be
                        count = (here - row + few - 1) // few
                        size = (here - row + count - 1) // count
                        end = sums.ctypes.data + (row * group + p * lanes) * 4
                        rows_at = begin + row * stride * 4
                        _add_widened(widened.ctypes.data, many, rows_at, stride, end, asked, size, kind)
                        asked = widened.ctypes.data
                        row += size
            begin_out = number * group
            width = min(group, outputs - begin_out)
            if of[7] != 0:
                biases = at(of[7] + begin_out * 4, (width,), np.float32)
                for r in range(here):
                    for n in range(width):
                        sums[r, n] += biases[n]
            number += 1
            for r in range(here):
                place = (block * row_block + r) * of[10] + begin_out
                if of[11] != 0:
                    few_bits = at(of[9] + place * 2, (width,), np.uint16)
                    for n in range(width):
                        few_bits[n] = narrow(sums[r, n], few_bits)
                else:
                    out = at(of[9] + place * 4, (width,), np.float32)
                    for n in range(width):
                        out[n] = sums[r, n]

    return compiled(kernel)
