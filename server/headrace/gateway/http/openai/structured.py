"""What a request says its text has to be: response_format, as OpenAI has it, or structured_outputs, as vLLM has it.

Sizes are bounded here; whether a schema, pattern or grammar can be kept to is the backend's to say.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from headrace.gateway.http.errors import HttpError
from headrace.gateway.http.openai.errors import missing, refusal
from headrace.gateway.http.openai.fields import Fields
from headrace_protocol.generation import StructuredOutput

_FORMATS: Final = ("text", "json_object", "json_schema", "structural_tag")
_KINDS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
MAX_SCHEMA: Final = 1 << 18
"""Characters of a schema, a grammar or a structural tag."""
MAX_PATTERN: Final = 1 << 14
MAX_CHOICES: Final = 1000
MAX_CHOICE: Final = 1 << 14


def read_structured(fields: Fields) -> StructuredOutput | None:
    """Return what the text has to be, None where it may be anything. Raises HttpError 400, also for two such wishes."""
    of_format = _read_format(fields)
    of_outputs = _read_outputs(fields)
    if of_format is not None and of_outputs is not None:
        raise refusal(
            "'response_format' and 'structured_outputs' both say what the text has to be; one of them may",
            "structured_outputs",
        )
    return of_format or of_outputs


def _read_format(fields: Fields) -> StructuredOutput | None:
    wanted = fields.object("response_format")
    if wanted is None:
        return None
    kind = wanted.choice("type", _FORMATS)
    match kind:
        case None:
            raise missing(wanted.at("type"))
        case "text":
            return None
        case "json_object":
            schema = wanted.any("schema")  # as llama.cpp's clients write it
            return StructuredOutput("json_object") if schema is None else _schema(wanted, "schema")
        case "structural_tag":
            return StructuredOutput("structural_tag", _bounded(wanted, "type", wanted.members))
    described = wanted.object("json_schema")
    if described is None:
        raise missing(wanted.at("json_schema"))
    name = described.needed_text("name")
    if not _NAME.fullmatch(name):
        expected = "1 to 64 letters, digits, '_' and '-'"
        raise described.wrong("name", expected, name)
    described.text("description")
    described.flag("strict")
    return _schema(described, "schema") if described.has("schema") else StructuredOutput("json_schema", "{}")


def _read_outputs(fields: Fields) -> StructuredOutput | None:
    wanted = fields.object("structured_outputs")
    if wanted is None:
        return None
    given = [kind for kind in _KINDS if wanted.has(kind) and wanted.any(kind) is not False]
    if len(given) > 1:
        raise refusal(f"'structured_outputs' has {' and '.join(given)}; it takes one", "structured_outputs")
    match given:
        case []:
            raise refusal(f"'structured_outputs' has none of {', '.join(_KINDS)}", "structured_outputs")
        case ["json"]:
            return _schema(wanted, "json", text=True)
        case ["regex"]:
            return StructuredOutput("regex", wanted.needed_text("regex", MAX_PATTERN))
        case ["grammar"]:
            return StructuredOutput("grammar", wanted.needed_text("grammar", MAX_SCHEMA))
        case ["choice"]:
            return StructuredOutput("choice", _choices(wanted))
        case ["json_object"]:
            wanted.flag("json_object")
            return StructuredOutput("json_object")
    return StructuredOutput("structural_tag", _text_or_object(wanted, "structural_tag"))


def _schema(fields: Fields, name: str, *, text: bool = False) -> StructuredOutput:
    """Return the wish for what fits a schema, which may come as JSON text where `text` says so."""
    value = fields.any(name)
    if isinstance(value, bool):  # true allows everything, false nothing
        return StructuredOutput("json_schema", msgspec.json.encode(value).decode())
    if not text and not isinstance(value, dict):
        raise fields.wrong(name, "an object", value)
    return StructuredOutput("json_schema", _text_or_object(fields, name))


def _text_or_object(fields: Fields, name: str) -> str:
    value = fields.any(name)
    if isinstance(value, str):
        return fields.needed_text(name, MAX_SCHEMA)
    if not isinstance(value, dict):
        raise fields.wrong(name, "an object", value)
    return _bounded(fields, name, value)


def _bounded(fields: Fields, name: str, value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    if len(text) > MAX_SCHEMA:
        raise _too_long(fields, name, len(text))
    return text


def _too_long(fields: Fields, name: str, length: int) -> HttpError:
    path = fields.at(name)
    return refusal(f"'{path}': {length} characters, at most {MAX_SCHEMA} are taken", path)


def _choices(fields: Fields) -> str:
    choices = fields.items("choice", MAX_CHOICES, "choices")
    if not choices:
        raise refusal("'structured_outputs.choice' has no choices", fields.at("choice"))
    for number, choice in enumerate(choices):
        if not isinstance(choice, str) or not 1 <= len(choice) <= MAX_CHOICE:
            raise fields.wrong(f"choice[{number}]", f"a string of 1 to {MAX_CHOICE} characters", choice)
    return msgspec.json.encode(choices).decode()
