"""What a client may ask its text to be: checked for size and form before any library sees it. Pure; knows no library.

Bounds keep what a grammar can cost to what its use is worth: a schema of a megabyte is a mistake or an attack.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from headrace_protocol.errors import invalid
from headrace_protocol.generation import StructuredOutput

_MOST_BYTES: Final = {
    "json_object": 1 << 10,
    "json_schema": 256 << 10,
    "regex": 16 << 10,
    "choice": 256 << 10,
    "grammar": 64 << 10,
    "structural_tag": 256 << 10,
}
_MOST_NESTING: Final = 64
_MOST_PROPERTIES: Final = 5000
_MOST_CHOICES: Final = 10000
_MOST_TAGS: Final = 256
_MOST_RULES: Final = 1000
_BRACKETS: Final = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
"""Of JSON: strings, ended or not, so that none is looked at twice; and brackets."""
_NAMES: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose objects have names of the client's choice for keys."""
_VALUES: Final = frozenset({"const", "enum", "default", "examples"})


class Tag(msgspec.Struct, frozen=True):
    """A part of a text that begins with `begin`: from there to `end` it is held to `schema`."""

    begin: str
    schema: dict[str, Any] | bool
    end: str


class StructuralTag(msgspec.Struct, frozen=True, tag="structural_tag", tag_field="type"):
    """Free text; whatever follows a trigger has to be one of the structures that begin with it."""

    structures: list[Tag]
    triggers: list[str]


def check_size(structured: StructuredOutput) -> None:
    """Raise INVALID_ARG where the description is larger than is taken."""
    size, most = len(structured.spec.encode(errors="surrogatepass")), _MOST_BYTES[structured.kind]
    if size > most:
        raise invalid(f"{structured.kind}: {size} bytes are more than are taken, {most}")
    if not structured.spec and structured.kind != "json_object":
        raise invalid(f"{structured.kind}: expected a description of the text, got nothing")


def read_json(kind: str, text: str) -> Any:
    """Return what JSON says. Raises INVALID_ARG where it is not JSON, or nested too deep."""
    depth = 0
    for match in _BRACKETS.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match[0], 0)
        if depth > _MOST_NESTING:
            raise invalid(f"{kind}: nested deeper than {_MOST_NESTING} levels")
    try:
        return msgspec.json.decode(text.encode())
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise invalid(f"{kind}: not JSON: {error}") from error


def check_schema(kind: str, schema: Any) -> None:
    """Raise INVALID_ARG where a JSON schema is none, has too much in it, or refers to something outside of it."""
    properties = choices = 0
    for path, part in schemas_of(schema):
        where = f"{kind}{path}"
        if not isinstance(part, dict | bool):
            raise invalid(f"{where}: expected a schema (an object, true or false), got {_shown(part)}")
        if isinstance(part, bool):
            continue
        names, values, reference = part.get("properties", {}), part.get("enum", []), part.get("$ref", "#")
        if not isinstance(names, dict):
            raise invalid(f"{where}.properties: expected an object, got {_shown(names)}")
        if not isinstance(values, list):
            raise invalid(f"{where}.enum: expected a list, got {_shown(values)}")
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise invalid(f"{where}.$ref: expected a reference within the schema (#...), got {_shown(reference)}")
        properties += len(names)
        choices += len(values)
    if properties > _MOST_PROPERTIES:
        raise invalid(f"{kind}: {properties} properties are more than are taken, {_MOST_PROPERTIES}")
    if choices > _MOST_CHOICES:
        raise invalid(f"{kind}: {choices} values of enum are more than are taken, {_MOST_CHOICES}")


def check_regex(pattern: str) -> None:
    """Raise INVALID_ARG where a pattern repeats a repetition: `a**` is read otherwise than its writer meant."""
    escaped = in_class = repeated = False
    for at, letter in enumerate(pattern):
        if escaped:
            escaped = repeated = False
        elif letter == "\\":
            escaped = True
        elif in_class:
            in_class = letter != "]" or pattern[at - 1] == "[" or pattern[at - 2 : at] == "[^"
            repeated = False
        elif letter == "*" and repeated:
            raise invalid("regex: it repeats a repetition (such as a**); put what is meant in parentheses")
        else:
            in_class, repeated = letter == "[", letter in "*+?}"


def check_grammar(text: str) -> None:
    """Raise INVALID_ARG where a grammar has more rules than are taken."""
    rules = text.count("::=")
    if rules > _MOST_RULES:
        raise invalid(f"grammar: {rules} rules are more than are taken, {_MOST_RULES}")


def schemas_of(schema: Any) -> Iterator[tuple[str, Any]]:
    """Go through a schema and all that are in it, each with its path. The nesting was checked."""
    left: list[tuple[str, Any]] = [("", schema)]
    while left:
        path, part = left.pop()
        yield path, part
        if not isinstance(part, dict):
            continue
        for key, value in part.items():
            if key in _NAMES and isinstance(value, dict):
                left.extend((f"{path}.{key}.{name}", inner) for name, inner in value.items())
            elif key in _VALUES:
                continue
            elif isinstance(value, dict):
                left.append((f"{path}.{key}", value))
            elif isinstance(value, list):
                left.extend((f"{path}.{key}[{at}]", inner) for at, inner in enumerate(value) if isinstance(inner, dict))


def read_choices(text: str) -> list[str]:
    """Return the texts of a choice, each once. Raises INVALID_ARG where they are none."""
    choices = read_json("choice", text)
    if not isinstance(choices, list) or not choices:
        raise invalid(f"choice: expected a list of texts, got {_shown(choices)}")
    if len(choices) > _MOST_CHOICES:
        raise invalid(f"choice: {len(choices)} texts are more than are taken, {_MOST_CHOICES}")
    for at, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice:
            raise invalid(f"choice[{at}]: expected a text that is not empty, got {_shown(choice)}")
    return list(dict.fromkeys(choices))


def read_structural_tag(text: str) -> StructuralTag:
    """Return a structural tag. Raises INVALID_ARG where it is none, or a structure has no trigger."""
    try:
        tag = msgspec.convert(read_json("structural_tag", text), StructuralTag)
    except msgspec.ValidationError as error:
        raise invalid(f"structural_tag: {error}") from error
    if not tag.structures or not tag.triggers:
        raise invalid("structural_tag: expected one structure and one trigger at least")
    if len(tag.structures) > _MOST_TAGS:
        raise invalid(f"structural_tag: {len(tag.structures)} structures are more than are taken, {_MOST_TAGS}")
    for at, each in enumerate(tag.structures):
        if not any(trigger and each.begin.startswith(trigger) for trigger in tag.triggers):
            raise invalid(f"structural_tag: structures[{at}].begin does not begin with a trigger: {_shown(each.begin)}")
        if each.schema is False:
            raise invalid(f"structural_tag: structures[{at}].schema: no text fits it")
        check_schema(f"structural_tag: structures[{at}].schema", each.schema)
    return tag


def _shown(value: Any) -> str:
    text = msgspec.json.encode(value).decode(errors="replace")
    return text if len(text) <= 80 else f"{text[:77]}..."
