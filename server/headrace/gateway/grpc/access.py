"""Which rpc is of which kind, and the check of the metadata by which a caller shows that the call is allowed.

Reflection is of no kind: it tells what the protocol is, which is public, and nothing of this server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from headrace.access.caller import Caller, Role
from headrace.gateway.gatekeeper import INDEX, Gatekeeper, roles_of
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

_INDEX: Final = f"{METHOD}RepositoryIndex"
_KEYS: Final = ("authorization", "x-api-key")

Guard = Callable[[Metadata], None]
"""Raises UNAVAILABLE where the metadata of a call do not show what they must."""


def guards(restrictions: Restrictions, gatekeeper: Gatekeeper | None = None) -> dict[str, Guard]:
    """Return the guards of the rpcs that not everybody may call, by path."""
    found: dict[str, Guard] = {}
    for path, kind in KIND.items():
        checks = [_guard(restrictions[kind])] if kind in restrictions else []
        roles = INDEX if path == _INDEX else roles_of(kind)
        if gatekeeper is not None and roles is not None:
            checks.append(_role_guard(gatekeeper, roles))
        if checks:
            found[path] = checks[0] if len(checks) == 1 else _both(*checks)
    return found


def caller_of(gatekeeper: Gatekeeper, metadata: Metadata) -> Caller:
    """Return who calls. Raises as Gatekeeper.caller does."""
    shown = {key: value for key, value in metadata if key in _KEYS}
    texts = [value if isinstance(value := shown.get(key), str) else None for key in _KEYS]
    return gatekeeper.caller(*texts)


def _role_guard(gatekeeper: Gatekeeper, roles: frozenset[Role]) -> Guard:
    def check(metadata: Metadata) -> None:
        gatekeeper.check(caller_of(gatekeeper, metadata), roles)

    return check


def _both(first: Guard, second: Guard) -> Guard:
    def check(metadata: Metadata) -> None:
        first(metadata)
        second(metadata)

    return check


def _guard(restriction: Restriction) -> Guard:
    wanted = PREFIX + restriction.header

    def check(metadata: Metadata) -> None:
        if not any(restriction.admits(value) for key, value in metadata if key == wanted):
            raise unavailable(f"this call is restricted: it takes the right value of metadata '{wanted}'")

    return check
