"""Large tensors without copies: cut raw contents out of an encoded request, append them to an encoded response.

The message library copies every bytes field twice on the way in and twice on the way out. For tensors of megabytes
that is most of the work, so the top level of the two inference messages is read and written here. All else, and all
judgement of what is well formed, stays with the library.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace_protocol.datatype import Buffer

_RAW_INPUT_KEY = 7 << 3 | 2
_RAW_OUTPUT_KEY = b"\x32"
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_MAX_FIELDS = 4096
"""Top-level fields worth reading in Python; a message of very many tiny ones must not hold up the event loop."""


def split_raw(data: bytes) -> tuple[bytes, list[memoryview]] | None:
    """Return an encoded ModelInferRequest without its raw_input_contents, and views of those.

    None where the top level is not plain and whole (cut short, groups, overlong varints, very many fields): then
    the message library takes it as it is, or says that it is no message.
    """
    view = memoryview(data)
    total = len(data)
    rest: list[memoryview] = []
    raw: list[memoryview] = []
    kept = offset = 0
    for _ in range(_MAX_FIELDS):
        if offset == total:
            break
        start = offset
        key, offset = _varint(data, offset, total)
        wire_type = key & 7
        if wire_type == _LENGTH and key >> 3:
            length, offset = _varint(data, offset, total)
            if offset < 0 or length > total - offset:
                return None
            if key == _RAW_INPUT_KEY:
                rest.append(view[kept:start])
                raw.append(view[offset : offset + length])
                kept = offset + length
            offset += length
        elif wire_type == _VARINT and key >> 3:
            _, offset = _varint(data, offset, total)
        elif wire_type in (_FIXED64, _FIXED32) and key >> 3:
            offset += 8 if wire_type == _FIXED64 else 4
        else:
            return None
        if offset < 0 or offset > total:
            return None
    if offset != total:
        return None
    if not raw:
        return data, raw
    rest.append(view[kept:])
    return b"".join(rest), raw


def _varint(data: bytes, offset: int, total: int) -> tuple[int, int]:
    """Return the varint at `offset` and where it ends; an end of -1 where it is cut short or above 64 bits."""
    if 0 <= offset < total and (byte := data[offset]) < 0x80:
        return byte, offset + 1
    value = shift = 0
    while 0 <= offset < total and shift < 70:
        byte = data[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (value, offset) if value < 1 << 64 else (0, -1)
        shift += 7
    return 0, -1


def encode_varint(value: int) -> bytes:
    """Return `value` (>= 0) as a varint."""
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def frame_outputs(header: bytes, outputs: Sequence[Buffer]) -> list[Buffer]:
    """Return the pieces of a ModelInferResponse: its encoded `header`, then each of `outputs` as raw contents."""
    pieces: list[Buffer] = [header]
    for data in outputs:
        nbytes = data.nbytes if isinstance(data, memoryview) else len(data)
        pieces.append(_RAW_OUTPUT_KEY + encode_varint(nbytes))
        pieces.append(data)
    return pieces


def byte_count(pieces: Sequence[Buffer]) -> int:
    """Return how long the joined `pieces` will be."""
    return sum(piece.nbytes if isinstance(piece, memoryview) else len(piece) for piece in pieces)
