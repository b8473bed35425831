"""A timer that wakes a thread only when something takes long: setting and stopping it wakes nobody."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Final


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSetting(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


_LIBC: Final = ctypes.PyDLL(None)  # keeps the interpreter's lock: these calls never block
_CLOEXEC: Final = os.O_CLOEXEC


class ReliefTimer:
    """One timerfd. `set` and `stop` are for the thread that works, `wait` for the one that would relieve it.

    `wake` is for any thread.
    """

    def __init__(self, after_s: float) -> None:
        self._fd: Final[int] = _LIBC.timerfd_create(time.CLOCK_MONOTONIC, _CLOEXEC)
        if self._fd < 0:
            raise OSError("no timer could be made")
        never = _Timespec(0, 0)
        self._set: Final = ctypes.byref(_TimerSetting(never, _Timespec(int(after_s), int(after_s % 1 * 1e9))))
        self._at_once: Final = ctypes.byref(_TimerSetting(never, _Timespec(0, 1)))
        self._stop: Final = ctypes.byref(_TimerSetting(never, never))

    def set(self) -> None:
        """Let `wait` return once the time is over, unless `stop` comes first."""
        _LIBC.timerfd_settime(self._fd, 0, self._set, None)

    def wake(self) -> None:
        """Let `wait` return now."""
        _LIBC.timerfd_settime(self._fd, 0, self._at_once, None)

    def stop(self) -> None:
        """Let `wait` go on waiting."""
        _LIBC.timerfd_settime(self._fd, 0, self._stop, None)

    def wait(self) -> None:
        """Block until the time is over."""
        os.read(self._fd, 8)
