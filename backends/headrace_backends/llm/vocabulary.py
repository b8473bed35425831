"""The exact bytes of each token, from the vocabulary: what decoding loses where a token is half a character."""

from __future__ import annotations

import json
import re
from typing import Any, Final

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK: Final = "\u2581"
"""SentencePiece's letter for a space."""


class Vocabulary:
    """Tokens as bytes. Immutable, so for any number of threads."""

    def __init__(self, tokenizer: Any, backend: Any) -> None:
        """`backend` is the tokenizer of the library tokenizers inside of transformers', or None."""
        self._tokenizer = tokenizer
        self._pieces = tokenizer.convert_ids_to_tokens if backend is None else backend.id_to_token
        added = tokenizer.added_tokens_decoder
        self._special: Final = frozenset(tokenizer.all_special_ids) | {
            number for number, token in added.items() if token.special
        }
        self._literal: Final[dict[int, bytes]] = {number: token.content.encode() for number, token in added.items()}
        steps = _steps(backend)
        self._by_alphabet: Final = "ByteLevel" in steps
        self._by_subwords: Final = "WordPiece" in steps
        self._size: Final = len(tokenizer)

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are no text."""
        return self._special

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return a token's bytes; None for a special token and one that is not there."""
        if token_id in self._special or not 0 <= token_id < self._size:
            return None
        if token_id in self._literal:
            return self._literal[token_id]
        piece: str | None = self._pieces(token_id)
        if piece is None:
            return None
        if self._by_alphabet:
            return _from_alphabet(piece)
        if (byte := _BYTE_TOKEN.fullmatch(piece)) is not None:
            return bytes([int(byte[1], 16)])
        if self._by_subwords:
            return piece[2:].encode() if piece.startswith("##") else f" {piece}".encode()
        return piece.replace(_SPACE_MARK, " ").encode()


def _steps(backend: Any) -> set[str]:
    """Return the kinds of the decoder's steps."""
    if backend is None or backend.decoder is None:
        return set()
    state = json.loads(backend.decoder.__getstate__())
    steps = state.get("decoders") or [state]
    return {step["type"] for step in steps}


def _alphabet() -> dict[str, int]:
    """Return the byte of each letter of byte-level BPE: bytes that print are themselves, others letters from U+0100 on.

    The alphabet of GPT-2.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printing)]
    return {chr(byte): byte for byte in printing} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTES: Final = _alphabet()


def _from_alphabet(piece: str) -> bytes:
    out = bytearray()
    for letter in piece:
        byte = _BYTES.get(letter)
        out += letter.encode() if byte is None else bytes([byte])
    return bytes(out)
