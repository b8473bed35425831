"""The bodies of the shared-memory API: what registers a region. Pure: bytes to arguments of the control plane."""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple

import msgspec

from headrace.gateway.http.bodies import decode_body, from_base64
from headrace.gateway.http.request import Body
from headrace_protocol.errors import invalid

_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Device = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_HANDLE_SIZE: Final = 64


class _System(msgspec.Struct, forbid_unknown_fields=True):
    key: str
    byte_size: _Size
    offset: _Size = 0


class _Handle(msgspec.Struct, forbid_unknown_fields=True):
    b64: str


class _Cuda(msgspec.Struct, forbid_unknown_fields=True):
    raw_handle: _Handle
    byte_size: _Size
    device_id: _Device


_system_decoder: Final = msgspec.json.Decoder(_System)
_cuda_decoder: Final = msgspec.json.Decoder(_Cuda)
_WHAT: Final = "the register request"


class SystemRegistration(NamedTuple):
    """A range of a POSIX shared memory object."""

    key: str
    offset: int
    nbytes: int


class CudaRegistration(NamedTuple):
    """GPU memory of another process."""

    handle: bytes
    device: int
    nbytes: int


def decode_system(body: Body) -> SystemRegistration:
    """Return what registers a region of system memory. Raises INVALID_ARG, naming the field."""
    parsed = decode_body(_system_decoder, body, _WHAT)
    return SystemRegistration(parsed.key, parsed.offset, parsed.byte_size)


def decode_cuda(body: Body) -> CudaRegistration:
    """Return what registers a region of GPU memory. Raises INVALID_ARG, naming the field."""
    parsed = decode_body(_cuda_decoder, body, _WHAT)
    try:
        handle = from_base64(parsed.raw_handle.b64)
    except ValueError:
        handle = b""
    if len(handle) != _HANDLE_SIZE:
        raise invalid(
            f"{_WHAT}: raw_handle.b64: expected the base64 form of a cudaIpcMemHandle_t of {_HANDLE_SIZE} bytes"
        )
    return CudaRegistration(handle, parsed.device_id, parsed.byte_size)


def named(region: str) -> str:
    """Return the region of a register request; raises INVALID_ARG where the path has none."""
    if not region:
        raise invalid("the name of the region is missing: register is at /region/{name}/register")
    return region
