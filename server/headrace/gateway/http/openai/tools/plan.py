"""What a request says of tools, read and checked: which there are, whether one has to be called, what the text has to be.

The old fields `functions` and `function_call` are read as the tools that they became; the answer is then shaped as theirs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple

import msgspec

from headrace.gateway.http.openai.errors import missing, refusal
from headrace.gateway.http.openai.fields import Fields
from headrace.gateway.http.openai.tools.constraint import any_call, arguments_of, strict_calls
from headrace.gateway.http.openai.tools.formats import FORMATS, parser_of, parser_of_choice
from headrace.gateway.http.openai.tools.parts import ToolParser
from headrace_protocol.generation import StructuredOutput

MAX_TOOLS: Final = 128
_NAME: Final = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may call."""

    name: str
    told: dict[str, Any]
    """As the client wrote it, for the chat template."""
    schema: dict[str, Any]
    """JSON schema of its arguments, an object."""
    strict: bool = False


class ToolChoice(NamedTuple):
    """Which tools may or have to be called."""

    kind: Literal["none", "auto", "required", "named"] = "none"
    names: frozenset[str] = frozenset()
    """Those that may be called; the one that has to be, where the kind is named."""


class ToolPlan(msgspec.Struct, frozen=True):
    """What a request wants of tools."""

    tools: tuple[Tool, ...] = ()
    """Those that the template shows."""
    choice: ToolChoice = ToolChoice()
    parallel: bool = True
    """Whether one message may have several calls."""
    legacy: bool = False
    """Whether the request has `functions`: the answer has `function_call`."""
    tool_format: str | None = None
    free_text: bool = True
    """Whether nothing but the tools says what the text has to be."""

    @property
    def told(self) -> list[dict[str, Any]] | None:
        """What ChatPrompt.tools is."""
        return [tool.told for tool in self.tools] or None

    @property
    def structured(self) -> StructuredOutput | None:
        """What the text has to be so that the choice is kept; it goes before the request's own response format.

        None: whatever the response format says. Under "auto" there is one only where a function is `strict`, and where
        the request says nothing else of the text.
        """
        tools = [tool for tool in self.tools if tool.name in self.choice.names]
        if self.choice.kind == "named":
            return arguments_of(tools[0].schema)
        if self.choice.kind == "required":
            return any_call([(tool.name, tool.schema) for tool in tools], parallel=self.parallel)
        if self.choice.kind == "auto" and self.free_text and any(tool.strict for tool in tools):
            schemas = [(tool.name, tool.schema if tool.strict else {}) for tool in tools]
            return strict_calls(schemas, self.tool_format or "")
        return None

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether special tokens have to stay in the text, since calls are marked by them."""
        return self.choice.kind == "auto" and FORMATS[self.tool_format or ""].special

    def parser(self, make_id: Callable[[], str]) -> ToolParser | None:
        """Return what reads the text of one choice, None where it is content alone. `make_id` names each call."""
        kind, names = self.choice
        if kind == "none":
            return None
        if kind == "auto":
            return parser_of(self.tool_format or "", names, make_id, parallel=self.parallel)
        return parser_of_choice(next(iter(names)) if kind == "named" else None, names, make_id, parallel=self.parallel)

    def finish_reason(self, reason: str, calls: int) -> str:
        """Return how a choice ended that has so many calls, where the engine says `reason`."""
        if reason != "stop" or not calls or self.choice.kind == "named":
            return reason
        return "function_call" if self.legacy else "tool_calls"


def plan_tools(body: Fields, model: str, tool_format: str | None) -> ToolPlan:
    """Return what the request in `body` wants of tools; `tool_format` is ModelCard.tool_format of `model`.

    Raises HttpError 400, naming the member at fault.
    """
    legacy = body.has("functions") or body.has("function_call")
    if legacy and (body.has("tools") or body.has("tool_choice")):
        raise refusal(
            "'functions' and 'tools' cannot both be there; the latter took the place of the former", "functions"
        )
    tools = _functions(body) if legacy else _tools(body)
    choice = _choice(body, "function_call" if legacy else "tool_choice", tools, legacy=legacy)
    if choice.kind == "auto" and tool_format not in FORMATS:
        known = f"in the form {tool_format!r}, which is not known" if tool_format else "in no form that is known"
        raise refusal(
            f"the model {model!r} calls tools {known} here; ask with tool_choice 'required' or one function, "
            "or say the form by tool_call_parser in its model.json",
            "tools",
            "unsupported_parameter",
        )
    parallel = body.flag("parallel_tool_calls", True) and not legacy
    wanted = body.any("response_format")
    plain = wanted is None or (isinstance(wanted, dict) and wanted.get("type") == "text")
    return ToolPlan(tools, choice, parallel, legacy, tool_format, plain and not body.has("structured_outputs"))


def _tools(body: Fields) -> tuple[Tool, ...]:
    items = body.objects("tools", MAX_TOOLS, "tools")
    if items is None:
        return ()
    if not items:
        raise refusal("'tools' is empty; leave it out where there are none", "tools")
    tools = []
    for item in items:
        if item.needed_text("type") != "function":
            raise item.wrong("type", "'function'", item.any("type"))
        function = item.object("function")
        if function is None:
            raise missing(item.at("function"))
        tools.append(_tool(function, dict(item.members)))
    return _distinct(tools, "tools", ".function.name")


def _functions(body: Fields) -> tuple[Tool, ...]:
    items = body.objects("functions", MAX_TOOLS, "functions")
    if not items:
        raise refusal("'functions' is empty, and 'function_call' needs some", "functions")
    tools = [_tool(item, {"type": "function", "function": dict(item.members)}) for item in items]
    return _distinct(tools, "functions", ".name")


def _tool(function: Fields, told: dict[str, Any]) -> Tool:
    name = function.needed_text("name")
    if not _NAME.fullmatch(name):
        raise refusal(
            f"'{function.at('name')}': {name[:80]!r} is no name; it has 1 to 64 letters, digits, '_', '-' and '.'",
            function.at("name"),
        )
    function.text("description")
    schema = function.mapping("parameters")
    if schema is None:
        schema = {"type": "object", "properties": {}, "additionalProperties": False}
    elif schema.get("type", "object") != "object":
        raise function.wrong("parameters.type", "'object'", schema["type"])
    elif not isinstance(schema.get("properties", {}), Mapping):
        raise function.wrong("parameters.properties", "an object", schema["properties"])
    return Tool(name, told, schema, function.flag("strict"))


def _distinct(tools: list[Tool], path: str, tail: str) -> tuple[Tool, ...]:
    seen: set[str] = set()
    for number, tool in enumerate(tools):
        if tool.name in seen:
            where = f"{path}[{number}]{tail}"
            raise refusal(f"'{where}': there is another {tool.name!r} before it", where)
        seen.add(tool.name)
    return tuple(tools)


def _choice(body: Fields, member: str, tools: tuple[Tool, ...], *, legacy: bool) -> ToolChoice:
    value = body.any(member)
    everyone = frozenset(tool.name for tool in tools)
    if value is None:
        return ToolChoice("auto", everyone) if tools else ToolChoice()
    if not tools and value != "none":
        raise refusal(f"'{member}' needs 'tools'", member)
    match value:
        case "none":
            return ToolChoice()
        case "auto":
            return ToolChoice("auto", everyone)
        case "required" if not legacy:
            return ToolChoice("required", everyone)
        case dict() if legacy:
            return ToolChoice("named", frozenset((_known(Fields(value, member), everyone),)))
        case dict():
            return _chosen(Fields(value, member), everyone)
    options = "none, auto or" if legacy else "none, auto, required or"
    raise body.wrong(member, f"{options} an object that names a function", value)


def _chosen(choice: Fields, names: frozenset[str]) -> ToolChoice:
    """Return the choice that an object makes: one function, or some of which one may or has to be called."""
    kind = choice.needed_text("type")
    if kind == "function":
        return ToolChoice("named", frozenset((_function(choice, names),)))
    if kind != "allowed_tools":
        raise choice.wrong("type", "function or allowed_tools", kind)
    allowed = choice.object("allowed_tools")
    if allowed is None:
        raise missing(choice.at("allowed_tools"))
    mode = allowed.choice("mode", ("auto", "required")) or "auto"
    items = allowed.objects("tools", MAX_TOOLS, "tools")
    if not items:
        raise missing(allowed.at("tools"))
    chosen = frozenset(_function(item, names) for item in items)
    return ToolChoice("required" if mode == "required" else "auto", chosen)


def _function(item: Fields, names: frozenset[str]) -> str:
    function = item.object("function")
    if function is None:
        raise missing(item.at("function"))
    return _known(function, names)


def _known(function: Fields, names: frozenset[str]) -> str:
    name = function.needed_text("name")
    if name not in names:
        raise refusal(f"'{function.at('name')}': there is no tool {name[:80]!r}", function.at("name"))
    return name
