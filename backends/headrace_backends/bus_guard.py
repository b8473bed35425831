"""Keeps the process alive where a client shortens shared memory that a backend is just using.

Whoever touches mapped memory beyond the end of its file gets SIGBUS, which would end the process and with it the
requests of others. Inside a guarded range the handler puts empty memory in its place, so that the code that was
interrupted goes on with zeros, and tells the range's owner, which lets the request fail. Anywhere else the signal does
what it always did.

The handler is Python, which is sound here though signal handlers may do little in general: the signal is synchronous,
so the interrupted instruction is an access to a client's memory, never one inside an allocator or under a lock of
libc's; and a thread that needs the interpreter waits for it as any thread does.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import threading
from collections.abc import Callable
from typing import Any, Final

_LIBC: Final = ctypes.PyDLL(None, use_errno=True)
"""Called with the interpreter's lock held: nobody else shall run between a fault and its repair."""
_SA_SIGINFO: Final = 4
_MAP_FIXED: Final = 0x10
_FAILED: Final = ctypes.c_void_p(-1).value
_CODE_OFFSET: Final = 8
"""Where siginfo_t has si_code."""
_ADDRESS_OFFSET: Final = 16 if ctypes.sizeof(ctypes.c_void_p) == 8 else 12
"""Where siginfo_t has si_addr."""

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, use_errno=True)


class _SigAction(ctypes.Structure):
    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * (1024 // (8 * ctypes.sizeof(ctypes.c_ulong)))),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_LIBC.sigaction.argtypes = [ctypes.c_int, ctypes.POINTER(_SigAction), ctypes.POINTER(_SigAction)]
_LIBC.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_long,
]
_LIBC.mmap.restype = ctypes.c_void_p

Guarded = tuple[int, int, Callable[[], None]]
"""First address, address after the last, whom to tell; all in whole pages."""


class BusGuard:
    """The process's handler of SIGBUS. There is one: `GUARD`."""

    def __init__(self) -> None:
        self._lock: Final = threading.Lock()
        self._ranges: tuple[Guarded, ...] = ()
        """Replaced as a whole: the handler takes no lock."""
        self._previous: Final = _SigAction()
        self._handler: Final[Any] = _Handler(self._on_signal)
        self._installed = False

    def watch(self, start: int, nbytes: int, on_fault: Callable[[], None]) -> None:
        """Guard whole pages from `start`. `on_fault` is called by whichever thread touched them, and must only note it."""
        with self._lock:
            self._ranges = (*self._ranges, (start, start + nbytes, on_fault))
            if not self._installed:
                self._install()

    def unwatch(self, start: int) -> None:
        """End the guard of the pages from `start`, before they are unmapped."""
        with self._lock:
            self._ranges = tuple(guarded for guarded in self._ranges if guarded[0] != start)

    def _install(self) -> None:
        action = _SigAction(ctypes.cast(self._handler, ctypes.c_void_p).value, flags=_SA_SIGINFO)
        if _LIBC.sigaction(signal.SIGBUS, ctypes.byref(action), ctypes.byref(self._previous)):
            raise OSError(ctypes.get_errno(), "sigaction")
        self._installed = True

    def _on_signal(self, number: int, info: int, context: int) -> None:  # noqa: ARG002 - the kernel's signature
        saved = ctypes.get_errno()
        with contextlib.suppress(BaseException):  # nothing can be raised out of here: what fails is not repaired
            address = ctypes.c_void_p.from_address(info + _ADDRESS_OFFSET).value or 0
            for start, end, on_fault in self._ranges:
                if start <= address < end and _fill(address, end):
                    on_fault()
                    ctypes.set_errno(saved)
                    return
        _LIBC.sigaction(signal.SIGBUS, ctypes.byref(self._previous), None)
        if ctypes.c_int.from_address(info + _CODE_OFFSET).value <= 0:
            os.kill(os.getpid(), signal.SIGBUS)  # sent by a process: unlike a fault it does not come again by itself


def _fill(address: int, end: int) -> bool:
    """Put empty memory from the page of `address` to `end`: what lies behind the end of a file is gone as well."""
    page = address & -mmap.PAGESIZE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    return bool(_LIBC.mmap(page, end - page, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) != _FAILED)


GUARD: Final = BusGuard()
