"""How this process keeps its heap: large request bodies reuse memory instead of mapping and faulting it anew.

glibc gives every allocation above 128 KiB (at first) a mapping of its own and takes it down at free: an image in and
out then costs some 200 page faults. Kept in the heap it costs none; what was used at a peak is given back when idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
from collections.abc import AsyncIterator, Callable
from typing import Final, NoReturn

_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_MMAP_THRESHOLD_BYTES: Final = 32 << 20
"""The largest that glibc takes."""
_TRIM_THRESHOLD_BYTES: Final = 256 << 20
_TOP_PAD_BYTES: Final = 1 << 20
_ARENAS: Final = 1
"""Heaps. The threads of this process allocate little; and what any other heap keeps at its end, nothing gives back."""
_IDLE_S: Final = 5.0
_GC_THRESHOLDS: Final = (20_000, 20, 50)


def keep_large_buffers() -> None:
    """Set glibc's allocator up; does nothing under another C library. Call it before memory is used much."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)
        mallopt(_M_TOP_PAD, _TOP_PAD_BYTES)
        mallopt(_M_ARENA_MAX, _ARENAS)


def give_back() -> None:
    """Collect garbage, of which an unloaded model leaves some, and return free heap pages to the system."""
    gc.collect()
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


@contextlib.asynccontextmanager
async def giving_back_when_idle(requests: Callable[[], int], idle_s: float = _IDLE_S) -> AsyncIterator[None]:
    """Until the block ends, give free pages back after `idle_s` seconds in which `requests`, a count, did not grow."""
    task = asyncio.create_task(_give_back_when_idle(requests, idle_s), name="give idle memory back")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _give_back_when_idle(requests: Callable[[], int], idle_s: float) -> NoReturn:
    while True:
        before = requests()
        await asyncio.sleep(idle_s)
        if requests() == before:
            give_back()  # some milliseconds, of which nobody waits for one


def settle() -> None:
    """Make what is loaded now permanent for the collector: requests leave no cycles, so it has little to look for."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
