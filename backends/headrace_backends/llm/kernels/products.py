"""Two products with rows of the cache, written as LLVM's vectors: of queries with keys, of weights with values.

numba's own loops over rows of bf16 come out twenty times slower. Vectors are of `width` lanes of fp32; LLVM cuts them to what
the processor has, so nothing here depends on it.
"""

from __future__ import annotations

import math
from typing import Any, Final

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headrace_backends.llm.kernels.emitting import prefetch_line

FP32, BF16, INT8 = range(3)
"""How a cache keeps numbers."""
BYTES: Final = {FP32: 4, BF16: 2, INT8: 1}

_I8: Final = ir.IntType(8)
_I16: Final = ir.IntType(16)
_I32: Final = ir.IntType(32)
_I64: Final = ir.IntType(64)
_F32: Final = ir.FloatType()
_FLAGS: Final = ("reassoc", "contract", "nsz")


def wide_registers() -> bool:
    """Say whether the processor has 32 registers of 16 numbers, not 16 of 8."""
    return bool(binding.get_host_cpu_features().get("avx512f"))


def _width(dim: int) -> int:
    return math.gcd(16, dim)


def splat(builder: Any, value: Any, width: int) -> Any:
    vector = ir.VectorType(value.type, width)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, width), [0] * width)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


def pointer_to(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    return builder.inttoptr(builder.add(address, ir.Constant(_I64, offset)), kind.as_pointer())


def load(builder: Any, address: Any, at: int, width: int, kind: int) -> Any:
    """Return the numbers from the `at`-th on as a vector of fp32."""
    of = {FP32: _F32, BF16: _I16, INT8: _I8}[kind]
    place = pointer_to(builder, address, at * BYTES[kind], ir.VectorType(of, width))
    loaded = builder.load(place, align=BYTES[kind])
    wide, numbers = ir.VectorType(_I32, width), ir.VectorType(_F32, width)
    if kind == BF16:
        sixteen = ir.Constant(wide, [16] * width)
        return builder.bitcast(builder.shl(builder.zext(loaded, wide), sixteen), numbers)
    if kind == INT8:
        return builder.sitofp(builder.sext(loaded, wide), numbers)
    return loaded


def multiply_add(builder: Any, one: Any, other: Any, to: Any) -> Any:
    kind = one.type
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [kind] * 3), f"llvm.fmuladd.v{kind.count}f32"
    )
    return builder.call(function, [one, other, to])


def total_of(builder: Any, vector: Any) -> Any:
    name = f"llvm.vector.reduce.fadd.v{vector.type.count}f32"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_F32, [_F32, vector.type]), name)
    return builder.call(function, [ir.Constant(_F32, 0.0), vector], fastmath=_FLAGS)


def _scale(builder: Any, row: Any, offset: int) -> Any:
    """Return the bf16 number that lies so many bytes after a row's begin."""
    bits = builder.load(pointer_to(builder, row, offset, _I16), align=2)
    return builder.bitcast(builder.shl(builder.zext(bits, _I32), ir.Constant(_I32, 16)), _F32)


def exponential_of(builder: Any, x: Any) -> Any:
    """Return e^x of a vector of fp32 that is not above 88: `emitting.exponential` in vectors."""
    kind = x.type
    whole = ir.VectorType(_I32, kind.count)

    def number(value: float) -> Any:
        return ir.Constant(kind, [value] * kind.count)

    def call(name: str, *args: Any) -> Any:
        function = ir.FunctionType(kind, [kind] * len(args))
        return builder.call(
            cgutils.get_or_insert_function(builder.module, function, f"llvm.{name}.v{kind.count}f32"), list(args)
        )

    x = call("maxnum", x, number(-87.0))
    n = call("floor", multiply_add(builder, x, number(1.4426950408889634), number(0.5)))
    r = multiply_add(builder, n, number(-0.693359375), x)
    r = multiply_add(builder, n, number(2.12194440e-4), r)
    y = number(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = multiply_add(builder, y, r, number(coefficient))
    y = multiply_add(builder, y, builder.fmul(r, r), builder.fadd(r, number(1.0)))
    power = builder.add(builder.fptosi(n, whole), ir.Constant(whole, [127] * kind.count))
    return builder.fmul(y, builder.bitcast(builder.shl(power, ir.Constant(whole, [23] * kind.count)), kind))


def highest_of(builder: Any, one: Any, other: Any) -> Any:
    """Return the higher of each two elements of vectors of fp32."""
    kind = one.type
    function = ir.FunctionType(kind, [kind, kind])
    name = f"llvm.maxnum.v{kind.count}f32"
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), [one, other])


def _literals(*values: Any) -> list[int]:
    return [int(value.literal_value) for value in values]


@intrinsic(prefer_literal=True)
def query_products(
    _context: Any, key: Any, stride: Any, count: Any, query: Any, out: Any, out_stride: Any, ahead: Any,
    kind: Any, dim: Any, group: Any, scale: Any, lines: Any,
) -> Any:  # fmt: skip
    """Put query[g] . key[t] into out[g, t] for the group's queries and `count` keys that lie `stride` bytes apart.

    With each key the first `lines` lines of memory of another are asked for, which lies as far behind `ahead`.

    Addresses are of a row of the cache, and of fp32 [group, dim] and [group, out_stride]. `scale` is where a key's factor
    lies in its row, for integers.
    """
    numbers, width_of, groups, scale_at, asked = _literals(kind, dim, group, scale, lines)

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        key, stride, count, query, out, out_stride, ahead = args[:7]
        width = _width(width_of)
        with cgutils.for_range(builder, count, intp=_I64) as loop:
            distance = builder.mul(loop.index, stride)
            row = builder.add(key, distance)
            for line in range(asked):
                prefetch_line(builder, builder.add(builder.add(ahead, distance), ir.Constant(_I64, 64 * line)))
            sums: list[Any] = [None] * groups
            for at in range(0, width_of, width):
                part = load(builder, row, at, width, numbers)
                for g in range(groups):
                    other = load(builder, query, g * width_of + at, width, FP32)
                    sums[g] = (
                        builder.fmul(part, other, flags=_FLAGS)
                        if sums[g] is None
                        else multiply_add(builder, part, other, sums[g])
                    )
            factor = _scale(builder, row, scale_at) if numbers == INT8 else None
            for g in range(groups):
                total = total_of(builder, sums[g])
                if factor is not None:
                    total = builder.fmul(total, factor)
                index = builder.add(builder.mul(out_stride, ir.Constant(_I64, g)), loop.index)
                place = builder.add(out, builder.mul(index, ir.Constant(_I64, 4)))
                builder.store(total, pointer_to(builder, place, 0, _F32), align=4)
        return context.get_dummy_value()

    ints = [types.int64] * 7
    return types.void(*ints, kind, dim, group, scale, lines), emit


@intrinsic(prefer_literal=True)
def weighted_sums(
    _context: Any, value: Any, stride: Any, count: Any, weights: Any, weights_stride: Any, total: Any,
    kind: Any, dim: Any, group: Any, scale: Any,
) -> Any:  # fmt: skip
    """Add the sum over t of weights[g, t] value[t] to total[g], with rows and addresses as `query_products` has them."""
    numbers, width_of, groups, scale_at = _literals(kind, dim, group, scale)

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        value, stride, count, weights, weights_stride, total = args[:6]
        width = _width(width_of)
        most = 16 if wide_registers() else 4  # vectors of sums that registers have room for
        at_once = max(1, most // groups) * width
        vector = ir.VectorType(_F32, width)
        for first in range(0, width_of, at_once):
            parts = range(first, min(first + at_once, width_of), width)
            sums = [(g, at, cgutils.alloca_once(builder, vector)) for g in range(groups) for at in parts]
            for g, at, kept in sums:
                builder.store(load(builder, total, g * width_of + at, width, FP32), kept)
            with cgutils.for_range(builder, count, intp=_I64) as loop:
                row = builder.add(value, builder.mul(loop.index, stride))
                loaded = {at: load(builder, row, at, width, numbers) for at in parts}
                factor = _scale(builder, row, scale_at) if numbers == INT8 else None
                spread = []
                for g in range(groups):
                    index = builder.add(builder.mul(weights_stride, ir.Constant(_I64, g)), loop.index)
                    place = builder.add(weights, builder.mul(index, ir.Constant(_I64, 4)))
                    weight = builder.load(pointer_to(builder, place, 0, _F32), align=4)
                    if factor is not None:
                        weight = builder.fmul(weight, factor)
                    spread.append(splat(builder, weight, width))
                for g, at, kept in sums:
                    builder.store(multiply_add(builder, spread[g], loaded[at], builder.load(kept)), kept)
            for g, at, kept in sums:
                place = pointer_to(builder, total, (g * width_of + at) * 4, vector)
                builder.store(builder.load(kept), place, align=4)
        return context.get_dummy_value()

    ints = [types.int64] * 6
    return types.void(*ints, kind, dim, group, scale), emit
