"""Rewrite docs/protocol.md from the OpenAPI document, the .proto files and the table of options: `make docs`.

With --check nothing is written: the exit status is 1 where the page is not what the code says.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from headrace.flags import FLAGS, Flag, Status
from headrace.gateway.grpc.errors import STATUS as GRPC_STATUS
from headrace.gateway.http.answer import JSON
from headrace.gateway.http.errors import STATUS as HTTP_STATUS
from headrace.gateway.http.openapi.document import document
from headrace.gateway.http.openapi.parts import ANYWHERE
from headrace_protocol.datatype import ALL
from headrace_protocol.errors import ErrorCode
from proto_source import Block, Line, read

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "protocol.md"
PROTOS = ("health", "reflection", "grpc_service", "model_config")

_HEAD = """\
# Protocol

Written by `make docs` out of the code: the [OpenAPI document](#http) that the server gives at `/openapi.json`, the files
of `protos/`, and the table of options. What of it is as in Triton, and what is not, is in
[compatibility.md](compatibility.md).

Sections: [codes](#codes), [datatypes](#datatypes), [HTTP](#http), [JSON bodies](#json-bodies), [gRPC](#grpc),
[messages](#messages), [options](#options).
"""


def page() -> str:
    """Return the page's text."""
    described = document()
    messages = [block for name in PROTOS for block in read(ROOT / "protos" / f"{name}.proto")]
    parts = (_codes(), _datatypes(), _http(described), _bodies(described, messages), _services(messages))
    return "\n".join([_HEAD, *parts, _messages(messages), _options()])


# --- codes and datatypes ----------------------------------------------------------------------------------------------


def _codes() -> str:
    rows = ((code.value, HTTP_STATUS[code], GRPC_STATUS[code].name) for code in ErrorCode)
    return "## Codes\n\n" + _table(("what", "HTTP", "gRPC"), rows)


def _datatypes() -> str:
    rows = ((f"`{t.name}`", t.itemsize or "4 and its length", f"`{t.config_name}`", str(t.numpy)) for t in ALL)
    return (
        "## Datatypes\n\nOn the wire: little-endian, row-major, unpadded; an element of `BYTES` has its length in front.\n\n"
        + _table(("name", "bytes an element", "in a configuration", "numpy"), rows)
    )


# --- HTTP -------------------------------------------------------------------------------------------------------------


def _http(described: dict[str, Any]) -> str:
    parts = ["## HTTP\n", described["info"]["description"]]
    common = ", ".join(map(str, ANYWHERE))
    parts.append(f"Any operation may fail with {common}:\n")
    responses = described["components"]["responses"]
    parts.append(_table(("status", "when"), ((status, answer["description"]) for status, answer in responses.items())))
    for tag in described["tags"]:
        parts.append(f"### {tag['name']}\n\n{tag['description']}\n")
        parts.extend(_operations(described, tag["name"]))
    return "\n".join(parts)


def _operations(described: dict[str, Any], tag: str) -> Iterator[str]:
    gathered: dict[tuple[str, str], list[tuple[str, dict[str, Any]]]] = {}
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            if operation["tags"] == [tag]:
                gathered.setdefault((operation["summary"], method.upper()), []).append((path, operation))
    for (summary, method), found in gathered.items():
        paths = "".join(f"    {method} {path}\n" for path, _ in found)
        yield f"{paths}\n{_operation(summary, found[-1][1])}"


def _operation(summary: str, operation: dict[str, Any]) -> str:
    text = [f"{summary}. {operation.get('description', '')}".strip(), ""]
    headers = [name for ref in operation["parameters"] if (name := _name(ref)) != name.lower() or name == "traceparent"]
    text.append(f"- headers: {', '.join(f'`{name}`' for name in headers)}")
    if "requestBody" in operation:
        body = operation["requestBody"]
        absent = "" if body["required"] else ", or none"
        text.append(f"- takes {_content(body['content'])}{absent}")
    for status, answer in operation["responses"].items():
        if "$ref" not in answer:
            content = _content(answer["content"]) if "content" in answer else "no body"
            text.append(f"- {status}: {content}. {answer['description']}")
    own = [status for status, to in operation["responses"].items() if "$ref" in to and int(status) not in ANYWHERE]
    if own:
        text.append(f"- fails with {', '.join(own)}")
    return "\n".join([*text, ""])


def _content(content: dict[str, Any]) -> str:
    return " or ".join(
        f"`{kind}`" + (f" {_type(media['schema'])}" if kind == JSON else "") for kind, media in content.items()
    )


def _bodies(described: dict[str, Any], messages: Iterable[Block]) -> str:
    printed = {block.name for block in messages}
    parts = ["## JSON bodies\n"]
    for name, schema in described["components"]["schemas"].items():
        if name not in printed:
            parts.append(f"### {name}\n\n{_members(schema)}")
    return "\n".join(parts)


def _members(schema: dict[str, Any]) -> str:
    text = f"{schema['description']}\n\n" if "description" in schema else ""
    if schema.get("type") != "object":
        return f"{text}{_type(schema)}\n"
    required = schema.get("required", ())
    named = {f"{start.removeprefix('^')}...": member for start, member in schema.get("patternProperties", {}).items()}
    members = {**schema["properties"], **named}
    rows = [
        (f"`{name}`", "yes" if name in required else "", _type(member), _describe(member))
        for name, member in members.items()
    ]
    if isinstance(more := schema.get("additionalProperties"), dict):
        rows.append(("any other", "", _type(more), _describe(more)))
    return text + _table(("member", "required", "type", ""), rows)


def _describe(schema: dict[str, Any]) -> str:
    inner = [f"`{name}`: {_type(member)}. {_describe(member)}" for name, member in schema.get("properties", {}).items()]
    return "<br>".join(filter(None, (schema.get("description", ""), *inner))).strip()


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = _name(schema)
        return f"[{name}](#{_anchor(name)})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_type, schema["anyOf"])))
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kinds = schema.get("type", "anything")
    named = " or ".join([kinds] if isinstance(kinds, str) else kinds)
    if kinds == "array":
        most = f", at most {schema['maxItems']}" if "maxItems" in schema else ""
        return f"array of {_type(schema['items'])}{most}"
    if "minimum" in schema:
        low, high = _number(schema["minimum"]), _number(schema.get("maximum"))
        return f"{named} {low} to {high}" if high else f"{named} ≥ {low}"
    return f"{named} (base64)" if "contentEncoding" in schema else named


def _number(value: int | None) -> str:
    names = {2**63 - 1: "2^63 - 1", 2**64 - 1: "2^64 - 1", -(2**63): "-2^63"}
    return "" if value is None else names.get(value, str(value))


def _name(reference: dict[str, str]) -> str:
    return reference["$ref"].rpartition("/")[2]


# --- gRPC -------------------------------------------------------------------------------------------------------------


def _services(blocks: Collection[Block]) -> str:
    names = {block.name for block in blocks}
    parts = ["## gRPC\n"]
    for block in blocks:
        if block.keyword == "service":
            calls = ((f"`{call.name}`", _linked(call.kind, names), call.comment) for call in block.lines)
            parts.append(f"### {block.name}\n\n" + _table(("rpc", "request and answer", ""), calls))
    return "\n".join(parts)


def _messages(blocks: Collection[Block]) -> str:
    names = {block.name for block in blocks}
    parts = ["## Messages\n"]
    for block in blocks:
        if block.keyword == "service":
            continue
        text = f"{block.comment}\n\n" if block.comment else ""
        if block.keyword == "enum":
            table = _table(("value", "number", ""), ((f"`{v.name}`", v.number, v.comment) for v in block.lines))
        elif block.lines:
            table = _table(
                ("field", "number", "type", ""), (_field_row(line, names, block.name) for line in block.lines)
            )
        else:
            table = "Empty.\n"
        parts.append(f"### {block.name}\n\n{text}{table}")
    return "\n".join(parts)


def _field_row(line: Line, names: Collection[str], around: str) -> tuple[object, ...]:
    one_of = f"One of `{line.oneof}`. " if line.oneof else ""
    return f"`{line.name}`", line.number, _linked(line.kind, names, around), f"{one_of}{line.comment}"


def _linked(kind: str, names: Collection[str], around: str = "") -> str:
    """Return a type with links to the messages and enums in it; `around` is the message in which it is named."""

    def link(name: re.Match[str]) -> str:
        inner = f"{around}.{name[0]}"
        return f"[{name[0]}](#{_anchor(inner if inner in names else name[0])})"

    return re.sub(r"\b[A-Z][\w.]+", link, kind.replace("<", "&lt;"))


# --- options ----------------------------------------------------------------------------------------------------------


def _options() -> str:
    also = "Each is also an environment variable and a key of the file that `--config` names"
    parts = [f"## Options\n\n{also}; [compatibility.md](compatibility.md#options) says more.\n"]
    for status, title in (
        (Status.SERVED, "Served"),
        (Status.IGNORED, "Accepted and ignored"),
        (Status.REFUSED, "Refused"),
    ):
        flags = [flag for flag in FLAGS.values() if flag.status is status]
        parts.append(f"### {title}\n\n" + _table(("option", "default", "environment", ""), map(_flag_row, flags)))
    return "\n".join(parts)


def _flag_row(flag: Flag) -> tuple[object, ...]:
    default = "" if flag.default is None else f"`{flag.default}`" if flag.default else "empty"
    return f"`--{flag.name}`" + (", repeatable" if flag.repeatable else ""), default, f"`{flag.variable}`", flag.help


# --- markdown ---------------------------------------------------------------------------------------------------------


def _table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def main() -> None:
    """Write the page, or compare it."""
    text = page()
    if "--check" not in sys.argv:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        raise SystemExit(f"{PAGE.relative_to(ROOT)} is not what the code says: run `make docs`")


if __name__ == "__main__":
    main()
