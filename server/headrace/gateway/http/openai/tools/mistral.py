"""The calls behind Mistral's marker: an array of objects, or since its tokenizer 11 a name with its arguments. Pure.

`[TOOL_CALLS][{"name": "f", "arguments": {...}}]` or `[TOOL_CALLS]f{...}`, where `[CALL_ID]...` and `[ARGS]` may stand
between name and arguments.
"""

from __future__ import annotations

import re
from typing import Final

from headrace.gateway.http.openai.tools.body import Accepts, CallsBody
from headrace.gateway.http.openai.tools.call_list import CallList
from headrace.gateway.http.openai.tools.json_scanner import ValueScanner, skip_space
from headrace.gateway.http.openai.tools.parts import PartSink

MARKER: Final = "[TOOL_CALLS]"
_MAX_HEAD: Final = 512
_HEAD: Final = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]*\s*)?(?:\[ARGS\]\s*)?")


class MistralCalls:
    """Implements CallsBody for either form; the first character tells which."""

    def __init__(self, sink: PartSink, accepts: Accepts) -> None:
        self._sink = sink
        self._accepts = accepts
        self._space = ""
        self._body: CallsBody | None = None

    @property
    def begun(self) -> bool:
        return self._body is not None and self._body.begun

    @property
    def in_arguments(self) -> bool:
        return self._body is not None and self._body.in_arguments

    @property
    def raw(self) -> str:
        if self._body is None:
            return self._space
        return self._body.raw if self._body.begun else self._space + self._body.raw

    @property
    def done(self) -> bool:
        return self._body is not None and self._body.done

    @property
    def broken(self) -> bool:
        return self._body is not None and self._body.broken

    def feed(self, text: str, at: int) -> int:
        if self._body is None:
            first = skip_space(text, at, len(text))
            self._space += text[at:first]
            at = first
            if at == len(text):
                return at
            plain = CallList if text[at] in "[{" else NamedCall
            self._body = plain(self._sink, self._accepts)
        return self._body.feed(text, at)


class NamedCall:
    """Implements CallsBody for one call whose name stands before its arguments."""

    def __init__(self, sink: PartSink, accepts: Accepts) -> None:
        self._sink = sink
        self._accepts = accepts
        self._head = ""
        self._scanner = ValueScanner()
        self.begun = False
        self.done = False
        self.broken = False

    @property
    def in_arguments(self) -> bool:
        return self.begun and not self.done

    @property
    def raw(self) -> str:
        return "" if self.begun else self._head

    def feed(self, text: str, at: int) -> int:
        if not self.begun:
            at = self._read_head(text, at)
        if self.begun and at < len(text):
            start, at = at, self._scanner.feed(text, at, len(text))
            self._sink.arguments(text[start:at])
            self.done, self.broken = self._scanner.done, self._scanner.broken
        return at

    def _read_head(self, text: str, at: int) -> int:
        most = min(len(text), at + _MAX_HEAD - len(self._head))
        brace = text.find("{", at, most)
        end = most if brace < 0 else brace
        self._head += text[at:end]
        if brace >= 0:
            head = _HEAD.fullmatch(self._head)
            if head is not None and self._accepts(head[1]):
                self.begun = True
                self._sink.begin(head[1])
                return end
        self.broken = brace >= 0 or len(self._head) == _MAX_HEAD
        return end
