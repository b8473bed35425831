"""Runs compiled functions on the threads that PyTorch computes with: one pool, so none fights the other for the cores.

PyTorch for Linux brings GNU's OpenMP library and parts its loops by it; `GOMP_parallel` is what compilers call for that
(https://gcc.gnu.org/onlinedocs/libgomp/Implementing-PARALLEL-construct.html). Where there is no such library everything
runs in the thread that asks.
"""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path
from typing import Any, Final

import torch


def _entry() -> Any:
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        entry = ctypes.CDLL(str(path)).GOMP_parallel
        entry.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        entry.restype = None
        return entry
    return None


_ENTRY: Final = _entry()


class Kernel:
    """A compiled function of the address of its arguments, the first of which counts the tasks that threads took."""

    __slots__ = ("_alone", "_apart", "address")

    def __init__(self, compiled: Any) -> None:
        """Take numba's cfunc of `emitting.SIGNATURE`."""
        self.address: Final[int] = compiled.address
        # Holds the GIL: what takes microseconds is done before another thread could have been given it.
        self._alone: Final = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(compiled.address)
        self._apart: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address)

    def __call__(self, arguments: Arguments, threads: int = 1, *, long: bool = False) -> None:
        """Run in so many threads at once, or in this one. `long`: others may hold the GIL meanwhile."""
        arguments.values[0] = 0
        if threads > 1 and _ENTRY is not None:
            _ENTRY(self.address, arguments.address, threads, 0)
        elif long:
            self._apart(arguments.address)
        else:
            self._alone(arguments.address)


class Arguments:
    """What a kernel is called with: integers, addresses among them. `values[0]` is the kernel's own."""

    __slots__ = ("address", "values")

    def __init__(self, *values: int) -> None:
        """Take all but the first."""
        self.values = (ctypes.c_int64 * (len(values) + 1))(0, *values)
        self.address = ctypes.addressof(self.values)


def bits(number: float) -> int:
    """Return an fp32 number as kernels take it among integers."""
    return int.from_bytes(struct.pack("<f", number), "little")
