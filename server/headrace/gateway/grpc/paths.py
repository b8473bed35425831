"""The names of services and rpcs as they stand in the paths of calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

SERVICE: Final = "inference.GRPCInferenceService"
HEALTH_SERVICE: Final = "grpc.health.v1.Health"
REFLECTION_SERVICE: Final = "grpc.reflection.v1.ServerReflection"
REFLECTION_SERVICE_BEFORE: Final = "grpc.reflection.v1alpha.ServerReflection"

METHOD: Final = f"/{SERVICE}/"
HEALTH: Final = f"/{HEALTH_SERVICE}/"
MODEL_INFER: Final = f"{METHOD}ModelInfer"
MODEL_STREAM_INFER: Final = f"{METHOD}ModelStreamInfer"
CHECK: Final = f"{HEALTH}Check"
WATCH: Final = f"{HEALTH}Watch"
REFLECTION: Final = tuple(
    f"/{service}/ServerReflectionInfo" for service in (REFLECTION_SERVICE, REFLECTION_SERVICE_BEFORE)
)

Metadata = Iterable[tuple[str, str | bytes]]
"""What a client sends beside a call; values are bytes where the key ends in -bin."""
