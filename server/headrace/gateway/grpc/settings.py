"""What an operator may choose about the gRPC door, as one frozen value."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from headrace.gateway.address import UNIX, unix_path, where
from headrace.gateway.header_forward import STICKY_HEADER
from headrace.gateway.restricted import Restrictions
from headrace.gateway.tls_settings import TlsSettings

if TYPE_CHECKING:  # it brings what reads files, which a mistake in an option should not wait for
    from headrace.gateway.gatekeeper import Gatekeeper

INT32_MAX = 2**31 - 1

Transport = Literal["auto", "grpcio", "pygrpc-native"]
Compression = Literal["none", "low", "medium", "high"]


@dataclasses.dataclass(frozen=True)
class GrpcSettings:
    """Address, transport and limits of the gRPC gateway."""

    address: str = "0.0.0.0"
    """A host name, an IPv4 or IPv6 address, or `unix:<path>`."""
    port: int = 8001
    """0 = any free port; `GrpcGateway.start` returns the real one."""
    transport: Transport = "auto"
    """pygrpc-native costs a fraction of grpcio's CPU time, but decompresses a request of any size: where clients are not
    trusted, set a `max_message_size` ("auto" then takes grpcio, which holds it) or choose grpcio."""
    reuse_port: bool = False
    """Share the port with another process that asks for the same; otherwise a taken port is an error."""
    max_message_size: int = INT32_MAX
    """Bytes of one message, either way, after decompression."""
    max_concurrent_streams: int = 1024
    """Calls that one connection may have in flight."""
    compression: Compression = "none"
    """How hard inference responses are compressed for clients that accept gzip."""
    keepalive_time_ms: int = 7_200_000
    keepalive_timeout_ms: int = 20_000
    keepalive_permit_without_calls: bool = False
    max_pings_without_data: int = 2
    min_ping_interval_without_data_ms: int = 300_000
    max_ping_strikes: int = 2
    max_connection_age_ms: int = 0
    """0 = a connection may live for ever."""
    max_connection_age_grace_ms: int = 0
    header_forward_pattern: str = ""
    """Regular expression (searched for, case ignored): metadata whose key matches becomes request parameters."""
    sticky_header: str = STICKY_HEADER
    """In lower case: the metadata by whose value callers stay with a version of a model."""
    restricted: Restrictions = dataclasses.field(default_factory=dict)
    """Metadata that a caller has to show, by kind of rpc, without the prefix."""

    reflection: bool = True
    """Whether tools may ask what the services look like."""
    tls: TlsSettings | None = None
    """None = plain text."""
    gatekeeper: Gatekeeper | None = None
    """Who knows callers by their keys; None = everybody may call."""

    @property
    def limits_pings(self) -> bool:
        """Whether the limits of clients' pings are other than the usual ones."""
        usual = GrpcSettings()
        return (
            self.max_pings_without_data != usual.max_pings_without_data
            or self.min_ping_interval_without_data_ms != usual.min_ping_interval_without_data_ms
            or self.max_ping_strikes != usual.max_ping_strikes
        )

    @property
    def target(self) -> str:
        """The address and port as gRPC writes them."""
        path = unix_path(self.address)
        return where(self.address, self.port) if path is None else f"{UNIX}{path}"
