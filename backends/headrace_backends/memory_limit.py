"""The memory that a model's process may take, where the server says how much: RLIMIT_DATA, set before the model is loaded.

RLIMIT_DATA counts what is private and writable (heap, anonymous mappings, stacks of threads), so neither the arena, nor
files mapped to be read, nor the address space that CUDA reserves, for which RLIMIT_AS could not be used.
"""

from __future__ import annotations

import resource
from pathlib import Path

from headrace_protocol.errors import invalid

_STATUS = Path("/proc/self/status")


def limit_memory(limit_bytes: int) -> None:
    """Hold this process, and those that it starts, to so many bytes of private memory from now on; 0 = no limit.

    Raises INVALID_ARG where it has as much already.
    """
    if not limit_bytes:
        return
    taken = private_bytes()
    if taken >= limit_bytes:
        raise invalid(
            f"the process's memory limit of {limit_bytes} bytes is no more than what it takes before the model is loaded, "
            f"{taken} bytes: raise parameters.memory_limit_bytes or --backend-memory-limit"
        )
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        limit_bytes = min(limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))


def private_bytes() -> int:
    """Return what RLIMIT_DATA counts of this process now, in bytes."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) << 10
    return 0
