"""Texts of models read by a parser of ours, and what a client would have heard."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from headrace.gateway.http.openai.message import CallArguments, CallBegun, Content, Part, Reasoning
from headrace.gateway.http.openai.tools.formats import parser_of


class Heard(NamedTuple):
    content: str
    calls: list[tuple[str, str]]
    """Names, with the text of the arguments."""
    reasoning: str = ""
    ids: tuple[str, ...] = ()


def added(parts: Iterable[Part]) -> Heard:
    """Add parts up, and check that they come as a client has to be told them."""
    content, reasoning = "", ""
    calls: list[tuple[CallBegun, list[str]]] = []
    for part in parts:
        match part:
            case Content(text):
                assert text
                content += text
            case Reasoning(text):
                assert text
                reasoning += text
            case CallBegun(index):
                assert index == len(calls)
                calls.append((part, []))
            case CallArguments(index, text):
                assert text and index == len(calls) - 1
                calls[index][1].append(text)
    told = [(call.name, "".join(pieces)) for call, pieces in calls]
    return Heard(content, told, reasoning, tuple(call.id for call, _ in calls))


def parser(tool_format: str, names: Iterable[str] = ("f", "g"), *, parallel: bool = True):
    count = itertools.count(1)
    return parser_of(tool_format, frozenset(names), lambda: f"c{next(count)}", parallel=parallel)


def heard(reader, pieces: Iterable[str]) -> Heard:
    """Return what a parser makes of pieces of text."""
    parts = [part for piece in pieces for part in reader.feed(piece)]
    return added(parts + reader.finish())
