"""Finds a backend's class by its name, among the entry points of the group `headrace.backends`."""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from headrace_backends.api import Backend
from headrace_protocol.errors import InferError, internal, not_found, unavailable

GROUP: Final = "headrace.backends"
_OWN: Final = {
    "python": EntryPoint("python", "headrace_backends.python.backend:PythonBackend", GROUP),
}
"""What runs in models' own environments, where this package is not installed and has no entry points."""


@functools.cache  # a forked process finds what its zygote found; looking through all distributions takes milliseconds
def load_backend(name: str) -> type[Backend]:
    """Import and return the class of backend `name`. Raises InferError with what has to be installed."""
    found = list(entry_points(group=GROUP, name=name)) or ([_OWN[name]] if name in _OWN else [])
    if not found:
        known = ", ".join(sorted({point.name for point in entry_points(group=GROUP)})) or "none"
        raise not_found(f"there is no backend '{name}' in this environment; installed are: {known}")
    try:
        loaded: type[Backend] = found[0].load()
    except ModuleNotFoundError as error:
        raise _not_installed(name, error) from error
    except Exception as error:
        raise internal(f"backend '{name}' cannot be imported: {type(error).__name__}: {error}") from error
    return loaded


def _not_installed(backend: str, error: ModuleNotFoundError) -> InferError:
    package = (error.name or "").partition(".")[0]
    if package in {"", "headrace_backends", "headrace_protocol"}:
        return internal(f"backend '{backend}' cannot be imported: {error}")
    return unavailable(f"{package} is not installed: pip install headrace[{backend}]")
