"""A tensor in shared memory, as the parameters of an input or a requested output name it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from headrace.gateway.http.json_text import describe
from headrace.types import RegionRef
from headrace_protocol.errors import invalid

REGION: Final = "shared_memory_region"
REGION_OFFSET: Final = "shared_memory_offset"
REGION_SIZE: Final = "shared_memory_byte_size"
REGION_KEYS: Final = (REGION, REGION_OFFSET, REGION_SIZE)

_MAX_SIZE: Final = 2**63 - 1


def names_region(parameters: Mapping[str, Any]) -> bool:
    """Return whether a tensor's parameters speak of shared memory."""
    return any(key in parameters for key in REGION_KEYS)


def take_region(where: str, parameters: Mapping[str, Any]) -> RegionRef:
    """Return the range that a tensor's parameters name. Raises INVALID_ARG, naming the parameter; `where` the tensor."""
    name = parameters.get(REGION)
    if type(name) is not str or not name:
        if REGION in parameters:
            raise invalid(f"{where}: '{REGION}': expected the name of a region, got {describe(name)}")
        raise invalid(f"{where}: '{REGION_OFFSET}' and '{REGION_SIZE}' say nothing without '{REGION}'")
    if REGION_SIZE not in parameters:
        raise invalid(f"{where}: '{REGION_SIZE}' is missing beside '{REGION}'")
    size, offset = parameters[REGION_SIZE], parameters.get(REGION_OFFSET, 0)
    for key, value in ((REGION_SIZE, size), (REGION_OFFSET, offset)):
        if type(value) is not int or not 0 <= value <= _MAX_SIZE:
            raise invalid(
                f"{where}: '{key}': expected a number of bytes between 0 and {_MAX_SIZE}, got {describe(value)}"
            )
    if offset + size > _MAX_SIZE:
        raise invalid(
            f"{where}: '{REGION_OFFSET}' {offset} and '{REGION_SIZE}' {size} add up to more than {_MAX_SIZE} bytes"
        )
    return RegionRef(name, offset, size)
