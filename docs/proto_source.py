"""Reads what a .proto file of this project says, comments included: a descriptor has none. No full parser.

It takes one declaration a line, as our files have it, and refuses a line that it does not know.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_RPC = re.compile(r"rpc (\w+)\((stream )?([\w.]+)\) returns \((stream )?([\w.]+)\);")
_BLOCK = re.compile(r"(service|message|enum|oneof) (\w+) \{(\})?")
_FIELD = re.compile(r"((?:repeated |optional )?[\w.]+(?:<\w+, [\w.]+>)?) (\w+) = (\d+)(?: \[[^\]]*\])?;")
_VALUE = re.compile(r"(\w+) = (-?\d+);")
_IGNORED = re.compile(r"syntax = .*|package .*|import .*")


@dataclass
class Line:
    """A field, a value or an rpc."""

    name: str
    kind: str
    number: int
    comment: str
    oneof: str = ""


@dataclass
class Block:
    """A service, a message or an enum."""

    keyword: str
    name: str
    """With the names of those around it."""
    comment: str
    lines: list[Line] = field(default_factory=list)


def read(path: Path) -> Iterator[Block]:
    """Yield the blocks of a file in the order in which they begin. Raises ValueError for a line it cannot read."""
    return iter(_Reader(path).blocks)


class _Reader:
    def __init__(self, path: Path) -> None:
        self.blocks: list[Block] = []
        self._open: list[Block] = []
        self._oneof = ""
        self._comment: list[str] = []
        self._group = ""
        for number, text in enumerate(path.read_text().splitlines(), 1):
            if not self._take(text.strip()):
                raise ValueError(f"{path.name}:{number}: unknown declaration: {text.strip()}")

    def _take(self, text: str) -> bool:
        if text.startswith("//"):
            self._comment.append(text.removeprefix("//").strip())
            return True
        comment = " ".join(filter(None, self._comment))
        self._comment = []
        if not text or _IGNORED.fullmatch(text):
            self._group = ""
            return True
        if text == "}":
            self._end()
            return True
        if begun := _BLOCK.fullmatch(text):
            self._begin(begun[1], begun[2], comment)
            if begun[3]:
                self._end()
            return True
        return self._declare(text, comment)

    def _begin(self, keyword: str, name: str, comment: str) -> None:
        if keyword == "oneof":
            self._oneof = name
            return
        block = Block(keyword, ".".join((*(around.name for around in self._open[-1:]), name)), comment)
        self._open.append(block)
        self.blocks.append(block)

    def _end(self) -> None:
        if self._oneof:
            self._oneof = ""
        else:
            self._open.pop()

    def _declare(self, text: str, comment: str) -> bool:
        lines = self._open[-1].lines if self._open else []
        if call := _RPC.fullmatch(text):
            self._group = comment or self._group
            kind = f"{call[2] or ''}{call[3]} → {call[4] or ''}{call[5]}"
            lines.append(Line(call[1], kind, 0, self._group))
        elif declared := _FIELD.fullmatch(text):
            lines.append(Line(declared[2], declared[1], int(declared[3]), comment, self._oneof))
        elif value := _VALUE.fullmatch(text):
            lines.append(Line(value[1], "", int(value[2]), comment))
        else:
            return False
        return bool(self._open)
