"""Ends a group of processes without leaving behind what they share. Knows Linux's /proc, and no engine.

Python's tracker of shared resources is spared: it ends by itself when the others have, after it has removed the shared
memory and the semaphores that they could not remove any more.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Final

_TRACKER: Final = b"multiprocessing.resource_tracker"
_LOOK_S: Final = 0.01


def kill_members(group: int, *, spare: int = 0) -> int:
    """Kill the group's processes but for `spare` and trackers, again until there are none; return how many trackers live."""
    while True:
        members = [pid for pid in _members(group) if pid != spare]
        trackers = [pid for pid in members if _TRACKER in _command(pid)]
        others = set(members) - set(trackers)
        if not others:
            return len(trackers)
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_S)


def end_group(group: int, seconds: float) -> None:
    """Kill a group's processes, and wait so long for trackers, which end a little later, to have removed what is left."""
    deadline = time.monotonic() + seconds
    while kill_members(group) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


def _members(group: int) -> list[int]:
    """Return the group's processes that have not ended; zombies have."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                state, _, its_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(its_group) == group and state != "Z":
                    found.append(int(entry.name))
    return found


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
