"""Where a door listens, as its setting says: a host name, an IPv4 or IPv6 address, or `unix:<path>`."""

from __future__ import annotations

from typing import Final

UNIX: Final = "unix:"


def unix_path(address: str) -> str | None:
    """Return the path of an address `unix:<path>` or `unix://<absolute path>`; None where the address is a host."""
    return address.removeprefix(UNIX).removeprefix("//") if address.startswith(UNIX) else None


def host(address: str) -> str:
    """Return an address as the system takes it: an IPv6 address may stand in brackets."""
    return address[1:-1] if address.startswith("[") and address.endswith("]") else address


def where(address: str, port: int) -> str:
    """Return address and port as they are written together, for logs and errors."""
    if address.startswith(UNIX):
        return address
    name = host(address)
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
