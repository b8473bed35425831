"""How models write calls of tools, by the names of ModelCard.tool_format, and what reads each."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Collection
from typing import Final, NamedTuple, Protocol

from headrace.gateway.http.openai.tools.call_list import CallList
from headrace.gateway.http.openai.tools.call_reader import CallReader
from headrace.gateway.http.openai.tools.chosen import NamedChoice
from headrace.gateway.http.openai.tools.marked import MarkedCalls
from headrace.gateway.http.openai.tools.mistral import MARKER as MISTRAL_MARKER
from headrace.gateway.http.openai.tools.mistral import MistralCalls
from headrace.gateway.http.openai.tools.parts import PartSink, ToolParser
from headrace.gateway.http.openai.tools.pythonic import PythonCalls
from headrace.gateway.http.openai.tools.whole import WholeCalls

_OTHER_MEMBERS: Final = ("type", "id")
"""What Llama writes beside name and parameters; an object with anything else is an answer in JSON."""
_ALPHABET: Final = string.ascii_letters + string.digits
MISTRAL: Final = "mistral"


class MakeParser(Protocol):
    """Makes what reads one choice. `names` are those of the tools."""

    def __call__(self, sink: PartSink, names: Collection[str]) -> ToolParser: ...


class ToolFormat(NamedTuple):
    """How a model writes calls."""

    make: MakeParser
    special: bool = False
    """Whether calls are marked by special tokens, which have to stay in the text."""


def _hermes(sink: PartSink, names: Collection[str]) -> ToolParser:
    del names  # a marker says that it is a call; clients tell a model that there is no such tool
    return MarkedCalls(sink, "<tool_call>", "</tool_call>", lambda sink: CallReader(sink, bool))


def _mistral(sink: PartSink, names: Collection[str]) -> ToolParser:
    del names
    return MarkedCalls(sink, MISTRAL_MARKER, None, lambda sink: MistralCalls(sink, bool))


def _llama3_json(sink: PartSink, names: Collection[str]) -> ToolParser:
    return WholeCalls(
        sink, "{[", lambda sink: CallList(sink, names.__contains__, _OTHER_MEMBERS), begin="<|python_tag|>"
    )


def _pythonic(sink: PartSink, names: Collection[str]) -> ToolParser:
    return WholeCalls(
        sink,
        "[",
        lambda sink: PythonCalls(sink, names.__contains__),
        begin="<|python_start|>",
        end="<|python_end|>",
    )


FORMATS: Final = {
    "hermes": ToolFormat(_hermes),
    "llama3_json": ToolFormat(_llama3_json),
    MISTRAL: ToolFormat(_mistral, special=True),
    "pythonic": ToolFormat(_pythonic),
}


def parser_of(tool_format: str, names: Collection[str], make_id: Callable[[], str], *, parallel: bool) -> ToolParser:
    """Return what reads calls where the model is free to make some. Raises KeyError for an unknown format."""
    return FORMATS[tool_format].make(PartSink(make_id, parallel=parallel), names)


def parser_of_choice(
    name: str | None, names: Collection[str], make_id: Callable[[], str], *, parallel: bool
) -> ToolParser:
    """Return what reads calls that the request demands: of the function `name`, or of any."""
    sink = PartSink(make_id, parallel=parallel)
    if name is not None:
        return NamedChoice(sink, name)
    return WholeCalls(sink, "[{", lambda sink: CallList(sink, names.__contains__))


def call_ids(tool_format: str | None, source: random.Random) -> Callable[[], str]:
    """Return what makes ids of calls, random ones: nine characters where Mistral's template demands that."""
    if tool_format == MISTRAL:
        return lambda: "".join(source.choices(_ALPHABET, k=9))
    return lambda: "call_" + "".join(source.choices(_ALPHABET, k=24))
