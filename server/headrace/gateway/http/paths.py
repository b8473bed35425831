"""The path in a request target. Pure."""

from __future__ import annotations


def path_of(url: bytes) -> str:
    """Return the path, still percent-encoded, of a request target in origin or absolute form."""
    text = url.decode("latin-1")
    if not text.startswith("/"):
        _, found, rest = text.partition("://")
        text = "/" + rest.partition("/")[2] if found else text
    return text.partition("?")[0].partition("#")[0]
