"""Where spans go, as an operator says it. Knows no span."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class OtelSettings:
    """Where spans go, and how; the names are Triton's."""

    url: str = "http://localhost:4318/v1/traces"
    resource: Mapping[str, str] = field(default_factory=dict)
    """Attributes of the server, beside those of OTEL_RESOURCE_ATTRIBUTES; `service.name` among them."""
    max_queue_size: int | None = None
    """Spans that wait for the next batch; None here and below is the SDK's default, or OTEL_BSP_*."""
    schedule_delay_ms: int | None = None
    max_export_batch_size: int | None = None
