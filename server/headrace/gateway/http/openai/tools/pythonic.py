"""Calls that a model writes as a list of Python calls: `[f(a=1), g(b="x")]`. Pure: the text is parsed, never run.

A call is told when its closing bracket is there, for its arguments have to become JSON.
"""

from __future__ import annotations

import ast
import enum
import json
import re
import warnings
from typing import Any, Final

from headrace.gateway.http.openai.tools.body import Accepts
from headrace.gateway.http.openai.tools.call_reader import MAX_HELD
from headrace.gateway.http.openai.tools.json_scanner import skip_space
from headrace.gateway.http.openai.tools.parts import PartSink

_MAX_NAME: Final = 256
_MAX_NESTING: Final = 50
_NAME: Final = re.compile(r"[\w.]*")
_FULL_NAME: Final = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")
_OUTSIDE: Final = re.compile(r"""[^"'()\[\]{}]*""")
_IN_STRING: Final = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_CLOSERS: Final = {"(": ")", "[": "]", "{": "}"}
_CONSTANTS: Final = {"true": True, "false": False, "null": None}


class _Place(enum.Enum):
    OPENING = 1
    BEFORE_NAME = 2
    IN_NAME = 3
    IN_ARGUMENTS = 4
    BEHIND_CALL = 5


class PythonCalls:
    """Implements CallsBody."""

    in_arguments = False
    """Arguments are told as a whole."""

    def __init__(self, sink: PartSink, accepts: Accepts) -> None:
        self._sink = sink
        self._accepts = accepts
        self._place = _Place.OPENING
        self._name = ""
        self._call = PythonScanner()
        self._raw: list[str] = []
        self._arguments: list[str] = []
        self._held = 0
        self._told = 0
        """Calls so far."""
        self.done = False
        self.broken = False

    @property
    def begun(self) -> bool:
        return self._told > 0

    @property
    def raw(self) -> str:
        return "".join(self._raw)

    def feed(self, text: str, at: int) -> int:
        while at < len(text) and not (self.done or self.broken):
            start, end, told = at, min(len(text), at + MAX_HELD - self._held), self._told
            at = self._step(text, at, end)
            if self._told == told:
                self._raw.append(text[start:at])
                self._held += at - start
                self.broken = self.broken or self._held >= MAX_HELD
        return at

    def _step(self, text: str, at: int, end: int) -> int:
        if self._place is _Place.IN_ARGUMENTS:
            return self._read_arguments(text, at, end)
        if self._place is _Place.IN_NAME:
            return self._read_name(text, at, end)
        at = skip_space(text, at, end)
        if at == end:
            return at
        character = text[at]
        if self._place is _Place.OPENING and character == "[":
            self._place = _Place.BEFORE_NAME
        elif self._place is _Place.BEFORE_NAME and character.isidentifier():
            self._place = _Place.IN_NAME
            self._name = ""
            return at
        elif self._place is _Place.BEHIND_CALL and character == ",":
            self._place = _Place.BEFORE_NAME
        elif character == "]" and self.begun and self._place in (_Place.BEHIND_CALL, _Place.BEFORE_NAME):
            self.done = True
        else:
            self.broken = True
            return at
        return at + 1

    def _read_name(self, text: str, at: int, end: int) -> int:
        start, at = at, _NAME.match(text, at, end).end()  # type: ignore[union-attr]  # it matches nothing too
        self._name += text[start:at]
        if len(self._name) > _MAX_NAME:
            self.broken = True
        elif at < end:
            if text[at] == "(" and _FULL_NAME.fullmatch(self._name) and self._accepts(self._name):
                self._call = PythonScanner()
                self._place = _Place.IN_ARGUMENTS
            else:
                self.broken = True
        return at

    def _read_arguments(self, text: str, at: int, end: int) -> int:
        start, at = at, self._call.feed(text, at, end)
        self._arguments.append(text[start:at])
        self.broken = self._call.broken
        if self._call.done:
            arguments = arguments_of_call("".join(self._arguments))
            self._arguments.clear()
            if arguments is None:
                self.broken = True
            else:
                self._sink.begin(self._name)
                self._sink.arguments(arguments)
                self._raw.clear()
                self._held = 0
                self._told += 1
                self._place = _Place.BEHIND_CALL
        return at


class PythonScanner:
    """Looks for the bracket that closes the one it begins with, in Python that comes in pieces."""

    def __init__(self) -> None:
        self._closers: list[str] = []
        self._quote = ""
        """What ends the string that is being read, "" outside of strings."""
        self._row = ""
        """Quotes in a row, which open a string or may end one of three."""
        self._escaped = False
        self.done = False
        self.broken = False

    def feed(self, text: str, at: int, end: int) -> int:
        """Read on from `at`; return where the bracket's contents end, or `end` where they have not ended before."""
        while at < end and not (self.done or self.broken):
            if self._quote:
                at = self._string(text, at, end)
            elif self._row:
                at = self._opening(text, at)
            else:
                at = self._outside(text, at, end)
        return at

    def _opening(self, text: str, at: int) -> int:
        """Decide after one or two quotes whether they open a string, are an empty one, or go on to be three."""
        if text[at] == self._row[0]:
            self._row += text[at]
            if len(self._row) == 3:
                self._quote, self._row = self._row, ""
            return at + 1
        self._quote, self._row = self._row if len(self._row) == 1 else "", ""
        return at

    def _string(self, text: str, at: int, end: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        if text[at] == self._quote[0]:
            self._row += text[at]
            if self._row == self._quote:
                self._quote = self._row = ""
            return at + 1
        self._row = ""
        if text[at] == "\\":
            self._escaped = True
            return at + 1
        return _IN_STRING[self._quote[0]].match(text, at, end).end()  # type: ignore[union-attr]

    def _outside(self, text: str, at: int, end: int) -> int:
        at = _OUTSIDE.match(text, at, end).end()  # type: ignore[union-attr]
        if at == end:
            return at
        character = text[at]
        if character in "\"'":
            self._row = character
        elif character in _CLOSERS:
            self._closers.append(_CLOSERS[character])
            self.broken = len(self._closers) > _MAX_NESTING
        elif self._closers[-1] != character:
            self.broken = True
            return at
        else:
            self._closers.pop()
            self.done = not self._closers
        return at + 1


def arguments_of_call(brackets: str) -> str | None:
    """Return the keyword arguments that stand in `(...)` as JSON; None where they are not plain values."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # a backslash that escapes nothing stays what it is
            call = ast.parse(f"f{brackets}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        values = {keyword.arg: _value(keyword.value) for keyword in call.keywords}
        if None in values or len(values) < len(call.keywords):
            return None
        arguments = json.dumps(values, ensure_ascii=False, allow_nan=False)
        arguments.encode()  # half of a surrogate pair is no text
        return arguments
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Any:
    """Return the value of a literal, in which JSON's names of constants may stand. Raises ValueError for all else."""
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _value(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("keys of JSON objects are texts")
        return dict(zip(keys, map(_value, node.values), strict=True))
    value = ast.literal_eval(node)
    if value is not None and not isinstance(value, str | int | float):
        raise ValueError("JSON has no such value")
    return value
