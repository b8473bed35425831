"""Runs kernels one after another in all threads at once, without the interpreter between them.

Threads take the tasks of a kernel from its counter, and go on to the next when none is left and nobody is at one: so a thread
that the system has put aside holds the others up only where it is at a task. Kernels are as `emitting.SIGNATURE` has them.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from headrace_backends.llm.kernels.emitting import SOURCES, at, compiled
from headrace_backends.llm.kernels.pool import Kernel

_SPINS: Final = 2000
"""Looks at what others do before the processor is offered to them."""
_I64: Final = ir.IntType(64)
_WORD: Final = _I64.as_pointer()


@intrinsic
def _call(_context: Any, function: Any, argument: Any) -> Any:
    """Call the function at an address with an address."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_WORD]).as_pointer()
        builder.call(builder.inttoptr(args[0], kind), [builder.inttoptr(args[1], _WORD)])
        return context.get_dummy_value()

    return types.void(function, argument), emit


@intrinsic
def _add(_context: Any, address: Any, number: Any) -> Any:
    """Add to the 64-bit integer at an address, as one."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        builder.atomic_rmw("add", builder.inttoptr(args[0], _WORD), args[1], "seq_cst")
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def _now(_context: Any, address: Any) -> Any:
    """Return the 64-bit integer at an address as it is now."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], _WORD), "seq_cst", 8)

    return types.int64(address), emit


@intrinsic
def _yield(_context: Any, function: Any) -> Any:
    """Call sched_yield, which lies at an address."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), []).as_pointer()
        return builder.call(builder.inttoptr(args[0], kind), [])

    return types.int32(function), emit


@cache
def sequence() -> Kernel:
    """Return what runs kernels in their order.

    Arguments: 0 unused, 1 pairs of a kernel's address and its arguments', 2 how many, 3 for each kernel how many threads are
    at it, all 0 before and after, 4 the address of sched_yield.
    """
    source = SOURCES
    most = _SPINS

    def kernel(args: Any) -> None:
        of = carray(args, (5 + source * 0,))
        pairs = at(of[1], (of[2], 2), np.int64)
        for number in range(of[2]):
            threads = of[3] + number * 8
            _add(threads, 1)
            _call(pairs[number, 0], pairs[number, 1])
            _add(threads, -1)
            spins = 0
            while _now(threads) != 0:
                spins += 1
                if spins == most:
                    _yield(of[4])
                    spins = 0

    return compiled(kernel)


def sched_yield() -> int:
    """Return the address of the system's function of that name."""
    address = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value
    assert address is not None
    return address
