"""The settings of the HTTP door."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.gateway.header_forward import STICKY_HEADER
from headrace.gateway.restricted import Restrictions
from headrace.gateway.tls_settings import TlsSettings

if TYPE_CHECKING:  # it brings what reads files, which a mistake in an option should not wait for
    from headrace.gateway.gatekeeper import Gatekeeper


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """What the HTTP gateway may be told. Sizes in bytes, times in seconds."""

    address: str = "0.0.0.0"
    """A host name, an IPv4 or IPv6 address, or `unix:<path>`; "::" takes IPv4 connections too."""
    port: int = 8000
    """0 = any free port; `HttpGateway.start` returns it."""
    reuse_port: bool = False
    """Whether several servers may share the port on purpose (SO_REUSEPORT)."""
    max_input_size: int = 67108864
    """Limit of everything that is parsed or inflated: the JSON part of a request, the tensor that a JSON `data` makes,
    and a body after decompression. The binary section of an uncompressed request is not bound by it."""
    max_body_size: int = 2**31
    """Limit of a whole body on the wire, its binary section included. Refused before it is read where the client
    declares its length."""
    body_idle_timeout: float = 60.0
    """How long a client may pause in the middle of a body, and how long it has for a whole head."""
    min_body_rate: int = 256
    """Bytes a second of a body that a client has to send on average, once `body_idle_timeout` is over; 0 = any."""
    write_idle_timeout: float = 60.0
    """How long a client may take nothing of an answer that is there."""
    keepalive_timeout: float = 3630.0
    """How long an idle connection is kept; longer than what usual proxies keep theirs."""
    max_header_line: int = 16384
    """Limit of the request line and of each header."""
    max_headers: int = 128
    """Limit of the number of headers."""
    max_connections: int = 0
    """Connections open at once; one more is answered 503 and closed. 0 = as many as descriptors allow."""
    backlog: int = 1024
    """Connections that may wait to be accepted."""
    min_compress_size: int = 1024
    """Answers below this size are sent as they are, whatever the client accepts."""
    header_forward_pattern: str = ""
    """Regular expression (searched for, case ignored): headers whose name matches become request parameters."""
    sticky_header: str = STICKY_HEADER
    """In lower case: the header by whose value callers stay with a version of a model."""
    restricted: Restrictions = field(default_factory=dict)
    """Headers that a caller has to show, by kind of endpoint."""
    tls: TlsSettings | None = None
    """None = plain text."""
    gatekeeper: Gatekeeper | None = None
    """Who knows callers by their keys; None = everybody may call."""
