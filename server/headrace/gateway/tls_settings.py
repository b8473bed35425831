"""What an operator says of a door's TLS, as one frozen value. Reads no file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """Where a door's certificate is, in PEM files. Paths may be links, as mounted secrets are."""

    certificate: str
    """The door's own, followed by those that lead to its authority."""
    key: str
    client_authority: str = ""
    """Certificates of the authorities whose clients are let in; "" = every client."""

    @property
    def files(self) -> tuple[str, ...]:
        named = (self.certificate, self.key, self.client_authority)
        return tuple(name for name in named if name)
