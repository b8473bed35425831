"""Reads the numbers of a GGUF file's header, without its arrays and tensors. Layout: GGUF 2 and 3, little-endian."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO, Final

from headrace_protocol.errors import invalid

_FORMATS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""struct's letter for each type of one number."""
_STRING: Final = 8
_ARRAY: Final = 9


def read_numbers(path: Path) -> dict[str, int | float]:
    """Return the header's keys whose value is a number. Raises INVALID_ARG where the file is no GGUF file, or cut off."""
    try:
        with path.open("rb") as file:
            magic, version, _, count = struct.unpack("<4sIQQ", file.read(24))
            if magic != b"GGUF" or version not in {2, 3}:
                raise invalid(f"{path}: not a GGUF file of version 2 or 3")
            found = {}
            for _ in range(count):
                key = file.read(_number(file, "Q")).decode()
                value = _value(file, _number(file, "I"))
                if value is not None:
                    found[key] = value
            return found
    except (struct.error, KeyError, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise invalid(f"{path}: the header of this GGUF file is damaged: {error!r}") from error


def _number(file: BinaryIO, letter: str) -> int:
    size = struct.calcsize(letter)
    value: int = struct.unpack("<" + letter, file.read(size))[0]
    return value


def _value(file: BinaryIO, kind: int) -> int | float | None:
    """Read one value and return it if it is a number."""
    if kind == _STRING:
        file.seek(_number(file, "Q"), 1)
    elif kind == _ARRAY:
        of, count = _number(file, "I"), _number(file, "Q")
        if of in _FORMATS:
            file.seek(count * struct.calcsize(_FORMATS[of]), 1)
        else:
            for _ in range(count):
                _value(file, of)
    else:
        return _number(file, _FORMATS[kind])
    return None
