"""Addresses of repositories in object stores. Knows no store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

SCHEMES: Final = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "as": "azure", "az": "azure", "abfs": "azure", "memory": ""}
"""What an address may begin with, and the extra that brings its store."""


class Address(NamedTuple):
    """Where a repository is, as fsspec wants it."""

    url: str
    options: Mapping[str, Any]


def is_remote(address: str) -> bool:
    """Return whether an address is one of a store, not a folder's."""
    return "://" in address


def parse_address(address: str) -> Address:
    """Return what fsspec is asked for; raises ValueError where nothing is known of such stores.

    Triton's forms are taken: `s3://https://host:port/bucket/path`, `s3://host:port/bucket/path` (https),
    `as://account/container/path`.
    """
    scheme, _, rest = address.partition("://")
    if scheme not in SCHEMES:
        raise ValueError(f"expected a folder, or an address of {', '.join(sorted(SCHEMES))}, got {scheme!r}")
    if not rest.strip("/"):
        raise ValueError("names no bucket")
    if scheme == "s3":
        inner = rest if rest.startswith(("http://", "https://")) else f"https://{rest}"
        parts = urlsplit(inner)
        if inner == rest or parts.port is not None:
            if not parts.path.strip("/"):
                raise ValueError("names a host and no bucket")
            return Address(f"s3://{parts.path.lstrip('/')}", {"endpoint_url": f"{parts.scheme}://{parts.netloc}"})
    if scheme == "as":
        account, _, path = rest.partition("/")
        return Address(f"az://{path}", {"account_name": account})
    return Address(address, {})
