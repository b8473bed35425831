"""Which rpc is of which kind, and the check of the metadata that a restricted kind asks for.

Reflection is of no kind: it tells what the protocol is, which is public, and nothing of this server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from headrace.gateway.grpc.paths import HEALTH, METHOD, Metadata
from headrace.gateway.restricted import Restriction, Restrictions
from headrace_protocol.errors import unavailable

PREFIX: Final = "triton-grpc-protocol-"
"""Stands before the header of a group in a client's metadata."""

_RPCS: Final = {
    "health": ("ServerLive", "ServerReady", "ModelReady"),
    "metadata": ("ServerMetadata", "ModelMetadata"),
    "inference": ("ModelInfer", "ModelStreamInfer"),
    "shared-memory": (
        "SystemSharedMemoryStatus",
        "SystemSharedMemoryRegister",
        "SystemSharedMemoryUnregister",
        "CudaSharedMemoryStatus",
        "CudaSharedMemoryRegister",
        "CudaSharedMemoryUnregister",
    ),
    "model-config": ("ModelConfig",),
    "model-repository": ("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"),
    "statistics": ("ModelStatistics",),
    "trace": ("TraceSetting",),
    "logging": ("LogSettings",),
}

KIND: Final = {METHOD + rpc: kind for kind, rpcs in _RPCS.items() for rpc in rpcs} | {
    f"{HEALTH}Check": "health",
    f"{HEALTH}Watch": "health",
}
"""By path."""

Guard = Callable[[Metadata], None]
"""Raises UNAVAILABLE where the metadata of a call do not show what they must."""


def guards(restrictions: Restrictions) -> dict[str, Guard]:
    """Return the guards of the restricted rpcs, by path."""
    return {path: _guard(restrictions[kind]) for path, kind in KIND.items() if kind in restrictions}


def _guard(restriction: Restriction) -> Guard:
    wanted = PREFIX + restriction.header

    def check(metadata: Metadata) -> None:
        if not any(restriction.admits(value) for key, value in metadata if key == wanted):
            raise unavailable(f"this call is restricted: it takes the right value of metadata '{wanted}'")

    return check
