"""The standard gRPC health service: two messages of one field each, written by hand.

The `service` a client names is ignored: there is one answer, that of ServerReady.
"""

from __future__ import annotations

from typing import Final

CHECK: Final = "/grpc.health.v1.Health/Check"

_SERVING: Final = b"\x08\x01"
_NOT_SERVING: Final = b"\x08\x02"


def encode_status(serving: bool) -> bytes:
    """Return an encoded HealthCheckResponse."""
    return _SERVING if serving else _NOT_SERVING
