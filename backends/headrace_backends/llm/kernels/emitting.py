"""What compiled loops are written with: memory by address, bf16 as its bits, an exponential that the compiler makes wide.

Imports numba: only modules of kernels import this one, and `loading_of_kernels` decides whether they are there.
"""

from __future__ import annotations

import logging
import zlib
from pathlib import Path
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from headrace_backends.llm.kernels.pool import Kernel

_LOG: Final = logging.getLogger(__name__)
LOOSE: Final = {"reassoc", "contract", "nsz", "arcp"}
"""Sums may be taken in any order; what is not a number stays so."""
SIGNATURE: Final = types.void(types.CPointer(types.int64))
"""Every kernel takes the address of its arguments: integers, addresses among them. So threads of a pool can call it."""
SOURCES: Final = zlib.crc32(
    b"".join((Path(__file__).parent / f"{name}.py").read_bytes() for name in ("emitting", "products"))
)
"""What kernels have in common: numba looks only at a kernel's own file to see whether its copy on the disk is old."""

_I16: Final = ir.IntType(16)
_I32: Final = ir.IntType(32)
_F32: Final = ir.FloatType()


@intrinsic
def pointer(_context: Any, address: Any) -> Any:
    """Return an address as a pointer."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(address), emit


@intrinsic
def float_of_bits(_context: Any, bits: Any) -> Any:
    """Return the fp32 number of these 32 bits."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.trunc(args[0], _I32) if bits.bitwidth > 32 else args[0], _F32)

    return types.float32(bits), emit


@intrinsic
def widen(_context: Any, value: Any) -> Any:
    """Return a number of the model's or the cache's in fp32: fp32 itself, bf16 as its 16 bits, or an 8-bit integer."""

    def of_bf16(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.shl(builder.zext(args[0], _I32), ir.Constant(_I32, 16)), _F32)

    def of_int8(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.sitofp(args[0], _F32)

    def of_fp32(_context: Any, _builder: Any, _signature: Any, args: Any) -> Any:
        return args[0]

    emit = {types.uint16: of_bf16, types.int8: of_int8, types.float32: of_fp32}[value]
    return types.float32(value), emit


@intrinsic
def narrow(_context: Any, value: Any, like: Any) -> Any:
    """Return an fp32 number as `like`'s elements are: fp32, or the bits of the nearest bf16, of two the even one."""

    def to_bf16(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], _I32)
        odd = builder.and_(builder.lshr(bits, ir.Constant(_I32, 16)), ir.Constant(_I32, 1))
        rounded = builder.add(builder.add(bits, ir.Constant(_I32, 0x7FFF)), odd)
        return builder.trunc(builder.lshr(rounded, ir.Constant(_I32, 16)), _I16)

    def to_fp32(_context: Any, _builder: Any, _signature: Any, args: Any) -> Any:
        return args[0]

    emit = {types.uint16: to_bf16, types.float32: to_fp32}[like.dtype]
    return like.dtype(types.float32, like), emit


@intrinsic
def take(_context: Any, address: Any) -> Any:
    """Return the 64-bit counter at an address and count it up, as one: threads share out tasks by it."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        counter = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "acq_rel")

    return types.int64(address), emit


def prefetch_line(builder: Any, address: Any) -> None:
    """Emit what begins to read the line of memory at an address, which may be any, into the second cache."""
    kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    hints = [ir.Constant(_I32, number) for number in (0, 2, 1)]
    builder.call(function, [builder.inttoptr(address, cgutils.voidptr_t), *hints])


@intrinsic
def prefetch(_context: Any, address: Any) -> Any:
    """See `prefetch_line`."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        prefetch_line(builder, args[0])
        return context.get_dummy_value()

    return types.void(address), emit


@njit(fastmath=LOOSE, error_model="numpy", inline="always")
def exponential(x: Any) -> Any:
    """Return e^x in fp32, within 2 units of the last place; written without branches, so that loops of it become wide.

    x = n ln 2 + r with |r| <= ln 2 / 2, e^r by its series to r^6 (coefficients of Cephes' expf).
    """
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    y = np.float32(1.9875691500e-4)
    y = y * r + np.float32(1.3981999507e-3)
    y = y * r + np.float32(8.3334519073e-3)
    y = y * r + np.float32(4.1665795894e-2)
    y = y * r + np.float32(1.6666665459e-1)
    y = y * r + np.float32(5.0000001201e-1)
    y = y * (r * r) + r + np.float32(1.0)
    return y * float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))


@njit(fastmath=LOOSE, error_model="numpy", inline="always")
def tangent(x: Any) -> Any:
    """Return tanh x in fp32."""
    return np.float32(1.0) - np.float32(2.0) / (exponential(np.float32(2.0) * x) + np.float32(1.0))


@njit(fastmath=True, error_model="numpy")
def highest(values: Any, count: Any) -> Any:
    """Return the highest of the first `count` numbers."""
    most = values[0]
    for at in range(1, count):
        most = max(most, values[at])
    return most


def compiled(function: Any) -> Kernel:
    """Compile a function of its arguments' address, or find it compiled on the disk."""
    options = {"fastmath": LOOSE, "error_model": "numpy"}
    try:
        return Kernel(cfunc(SIGNATURE, cache=True, **options)(function))
    except RuntimeError as error:  # there is no folder to write to: neither beside this file nor the user's own
        _LOG.info("compiled loops are not kept for the next start: %s", error)
        return Kernel(cfunc(SIGNATURE, **options)(function))


@njit(inline="always")
def at(address: Any, shape: Any, dtype: Any) -> Any:
    """Return what lies at an address as an array."""
    return carray(pointer(address), shape, dtype)
