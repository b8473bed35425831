"""Stands where a part of the control plane is still to come: every call is refused as not served."""
# ruff: noqa: ARG002 - the names are those of the protocols

from __future__ import annotations

from collections.abc import Mapping
from typing import Never

from headrace.planes import LogValue, Setting
from headrace.types import CudaRegion, SystemRegion
from headrace_protocol.errors import unsupported


def _refuse(what: str) -> Never:
    raise unsupported(f"{what} not served by this server")


class UnservedMemory:
    """Implements planes.SharedMemory."""

    def register_system(self, name: str, key: str, offset: int, nbytes: int) -> None:
        _refuse("shared memory of clients is")

    def register_cuda(self, name: str, handle: bytes, device: int, nbytes: int) -> None:
        _refuse("shared memory of clients is")

    def unregister_system(self, name: str) -> None:
        _refuse("shared memory of clients is")

    def unregister_cuda(self, name: str) -> None:
        _refuse("shared memory of clients is")

    def system_status(self, name: str) -> list[SystemRegion]:
        _refuse("shared memory of clients is")

    def cuda_status(self, name: str) -> list[CudaRegion]:
        _refuse("shared memory of clients is")


class UnservedTrace:
    """Implements planes.TraceSettings."""

    def get(self, model: str) -> dict[str, Setting]:
        _refuse("trace settings are")

    def update(self, model: str, changes: Mapping[str, list[str] | None]) -> dict[str, Setting]:
        _refuse("trace settings are")


class UnservedLog:
    """Implements planes.LogSettings."""

    def get(self) -> dict[str, LogValue]:
        _refuse("log settings are")

    def update(self, changes: Mapping[str, LogValue]) -> dict[str, LogValue]:
        _refuse("log settings are")
