"""Configuration text (protobuf text format, or JSON) into a message, with a place for every mistake; and back to text.

Proto3 cannot tell `max_batch_size: 0` from silence. Text is therefore read into a proto2 twin of the schema, where every
scalar knows whether it was written, and then turned into the real message, which has the same wire format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import Message

from headrace.repository.model_config import ConfigError, Problem
from headrace.repository.proto_json import from_dict
from headrace_protocol._generated import model_config_pb2 as pb

MAX_CONFIG_BYTES: Final = 4 << 20
"""Longest configuration that is read."""
MODEL_DIRECTORY: Final = "$$TRITON_MODEL_DIRECTORY"
"""What stands for the model's directory in values of `parameters`."""
_LONGEST_MESSAGE: Final = 300
_COMMENT_OR_STRING: Final = re.compile(r"""#[^\n]*|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'""")
_ESCAPE: Final = re.compile(
    r"\\(?:[abfnrtv\\'\"]|x[0-9a-fA-F]{1,2}|[0-3][0-7]{2}|[0-7]{1,2}(?![0-7])|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})|(\\)"
)
_TEXT_ERROR: Final = re.compile(r"(\d+:\d+) : (.*)", re.DOTALL)


def _twin_class() -> type[Message]:
    file = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    file.syntax = "proto2"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    twin = message_factory.GetMessageClass(pool.FindMessageTypeByName(pb.ModelConfig.DESCRIPTOR.full_name))
    assert issubclass(twin, Message)
    return twin


_Twin: Final = _twin_class()


@dataclass(frozen=True, slots=True)
class ParsedConfig:
    """A configuration as its author wrote it: nothing completed, nothing defaulted."""

    proto: pb.ModelConfig = field(default_factory=pb.ModelConfig)
    """Read-only by agreement."""
    written: frozenset[str] = frozenset()
    """Top-level fields that were given, a scalar with its default value too."""
    source: str = ""
    """Where it came from, for people: a file name; "" = there was no configuration."""


def parse_text(text: str, source: str = "config.pbtxt") -> ParsedConfig:
    """Parse protobuf text format. Raises ConfigError whose problem's path is `line:column`."""
    _check_size(text)
    _check_escapes(text)
    twin = _Twin()
    try:
        text_format.Parse(text, twin)
    except text_format.ParseError as error:
        raise ConfigError([_text_problem(text, str(error))]) from None
    return _parsed(twin, source)


def parse_json(text: str, source: str = "the configuration given as JSON") -> ParsedConfig:
    """Parse a configuration written as proto JSON. Raises ConfigError with every problem's field path."""
    _check_size(text)
    repeated: list[Problem] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs) and not repeated:
            repeated.append(Problem("", "a key occurs twice in one object: which of the two is meant?"))
        return values

    try:
        values = json.loads(text, object_pairs_hook=unique, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ConfigError([Problem(f"{error.lineno}:{error.colno}", f"this is not JSON: {error.msg}")]) from None
    except ValueError as error:
        raise ConfigError([Problem("", f"this is not JSON: {str(error)[:_LONGEST_MESSAGE]}")]) from None
    except RecursionError:
        raise ConfigError([Problem("", "the JSON is nested too deeply")]) from None
    twin = _Twin()
    problems = repeated + from_dict(values, twin)
    if problems:
        raise ConfigError(problems)
    return _parsed(twin, source)


def to_text(proto: pb.ModelConfig) -> str:
    """Return `proto` in the text format of config.pbtxt."""
    return text_format.MessageToString(proto, as_utf8=True, use_short_repeated_primitives=True)


def expanded_parameters(proto: pb.ModelConfig, model_directory: str) -> Mapping[str, str]:
    """Return the model's `parameters` with MODEL_DIRECTORY replaced by the directory."""
    return {
        key: proto.parameters[key].string_value.replace(MODEL_DIRECTORY, model_directory)
        for key in sorted(proto.parameters)
    }


def _parsed(twin: Message, source: str) -> ParsedConfig:
    written = frozenset(field.name for field, _ in twin.ListFields())
    return ParsedConfig(pb.ModelConfig.FromString(twin.SerializeToString()), written, source)


def _check_size(text: str) -> None:
    if len(text) > MAX_CONFIG_BYTES:
        raise ConfigError([Problem("", f"the configuration has {len(text)} characters, at most {MAX_CONFIG_BYTES} go")])


def _check_escapes(text: str) -> None:
    """Refuse what protobuf's C++ parser refuses in strings, and its Python parser lets through with a warning."""
    for token in _COMMENT_OR_STRING.finditer(text):
        if "\\" not in token[0] or token[0].startswith("#"):
            continue
        for escape in _ESCAPE.finditer(token[0]):
            if escape[1]:
                place = token.start() + escape.start()
                line, column = text.count("\n", 0, place) + 1, place - text.rfind("\n", 0, place)
                wrong = ascii(text[place : place + 2])[1:-1].replace("\\\\", "\\")
                raise ConfigError([Problem(f"{line}:{column}", f"there is no escape sequence {wrong} in strings")])


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _text_problem(text: str, error: str) -> Problem:
    """Take protobuf's `line:column : 'the whole line': message` apart."""
    match = _TEXT_ERROR.fullmatch(error)
    if match is None:
        return Problem("", error[:_LONGEST_MESSAGE])
    position, message = match.groups()
    lines = text.split("\n")
    number = int(position.partition(":")[0])
    for line in lines[max(0, number - 2) : number]:
        message = message.removeprefix(f"'{line}': ")
    if len(message) > _LONGEST_MESSAGE:
        message = f"{message[: _LONGEST_MESSAGE // 2]} ... {message[-_LONGEST_MESSAGE // 2 :]}"
    return Problem(position, message if message.isprintable() else ascii(message)[1:-1])
