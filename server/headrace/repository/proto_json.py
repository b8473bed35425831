"""Protobuf messages as JSON-ready values and back, with a precise path for everything that does not fit.

`to_dict` prints what Triton's configuration endpoint prints: field names as in the .proto, enums by name, unset scalars,
lists and maps with their defaults, unset messages and oneof members left out, 64-bit integers as numbers. `from_dict`
is its strict inverse; it knows the schema only through descriptors.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import json
import math
import re
import struct
from typing import Any, Final, cast

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from headrace.repository.model_config import Problem

MAX_DEPTH: Final = 100
"""Levels of nested messages that from_dict follows."""
MAX_PROBLEMS: Final = 50
"""After so many problems from_dict stops looking for more."""
_SHOWN_CHARACTERS: Final = 40
_INTEGERS: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_SIXTY_FOUR: Final = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)
_FLOATS: Final = (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE)
_DECIMAL: Final = re.compile(r"-?[0-9]{1,20}", re.ASCII)
_NOT_FINITE: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_dict(message: Message) -> dict[str, Any]:
    """Return `message` as values that a JSON encoder takes."""
    values: dict[str, Any] = {}
    for field in _descriptor(message).fields:
        name = field.name
        if field.has_presence and not message.HasField(name):
            continue
        value = getattr(message, name)
        entry = _map_entry(field)
        if entry is not None:
            value_field = entry.fields_by_name["value"]
            values[name] = {_key_text(key): _to_json(value_field, value[key]) for key in sorted(value)}
        elif _is_repeated(field):
            values[name] = [_to_json(field, item) for item in value]
        else:
            values[name] = _to_json(field, value)
    return values


def from_dict(values: object, message: Message) -> list[Problem]:
    """Fill `message` from JSON-ready `values`; return everything that does not fit, in order (empty = all is well).

    Strict: a field that the schema lacks or a value of another kind is a problem. As in proto JSON, names may be
    lowerCamelCase, 64-bit integers may be decimal strings, null means unset. With problems `message` is half filled.
    """
    reader = _Reader()
    try:
        reader.read_message(values, message, "", 1)
    except _TooManyProblemsError:
        reader.problems.append(Problem("", f"more problems than {MAX_PROBLEMS}: the rest is not listed"))
    return reader.problems


def _descriptor(message: Message) -> Descriptor:
    return cast("Descriptor", message.DESCRIPTOR)  # its stub is a union with the same class's C twin


def _map_entry(field: FieldDescriptor) -> Descriptor | None:
    """Return the type of the entries where `field` is a map, else None."""
    entry = field.message_type
    return entry if entry is not None and entry.GetOptions().map_entry else None


def _is_repeated(field: FieldDescriptor) -> bool:
    return isinstance(field.default_value, list)


def _key_text(key: object) -> str:
    return ("true" if key else "false") if isinstance(key, bool) else str(key)


def _to_json(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None:
        return to_dict(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else known.name
    if field.cpp_type in _FLOATS:
        return _float_to_json(value, single=field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT)
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def _float_to_json(value: float, *, single: bool) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    if not single:
        return value
    for digits in range(6, 9):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value


class _TooManyProblemsError(Exception):
    """Enough is known to say that this is not what was expected."""


class _UnfitError(Exception):
    """A value does not fit its field; the text says what was expected."""


class _Reader:
    """One walk over values and descriptors."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def report(self, path: str, text: str) -> None:
        self.problems.append(Problem(path, text))
        if len(self.problems) == MAX_PROBLEMS:
            raise _TooManyProblemsError

    def read_message(self, values: object, message: Message, path: str, depth: int) -> None:
        descriptor = _descriptor(message)
        if not isinstance(values, dict):
            self.report(path, f"expected {_object_of(descriptor)}, got {_shown(values)}")
            return
        if depth > MAX_DEPTH:
            self.report(path, f"nested deeper than {MAX_DEPTH} levels")
            return
        seen: dict[str, str] = {}
        for key, value in values.items():
            field = descriptor.fields_by_name.get(key) or descriptor.fields_by_camelcase_name.get(key)
            where = _join(path, key)
            if field is None:
                self.report(where, f"unknown field{_suggestion(key, [known.name for known in descriptor.fields])}")
            elif value is not None:
                taken = field.name if field.containing_oneof is None else field.containing_oneof.name
                if taken in seen:
                    self.report(where, f"{key} and {seen[taken]} exclude each other: give one of them")
                else:
                    seen[taken] = key
                    self.read_field(field, value, message, _join(path, field.name), depth)

    def read_field(self, field: FieldDescriptor, value: object, message: Message, path: str, depth: int) -> None:
        entry = _map_entry(field)
        if entry is not None:
            self.read_map(field, entry, value, message, path, depth)
        elif _is_repeated(field):
            self.read_list(field, value, message, path, depth)
        elif field.message_type is not None:
            member = getattr(message, field.name)
            member.SetInParent()
            self.read_message(value, member, path, depth + 1)
        else:
            try:
                setattr(message, field.name, _scalar(field, value))
            except _UnfitError as error:
                self.report(path, str(error))

    def read_list(self, field: FieldDescriptor, value: object, message: Message, path: str, depth: int) -> None:
        if not isinstance(value, (list, tuple)):
            self.report(path, f"expected a list, each {_kind(field)}, got {_shown(value)}")
            return
        items = getattr(message, field.name)
        for index, item in enumerate(value):
            where = f"{path}[{index}]"
            if field.message_type is not None:
                self.read_message(item, items.add(), where, depth + 1)
                continue
            try:
                items.append(_scalar(field, item))
            except _UnfitError as error:
                self.report(where, str(error))

    def read_map(
        self, field: FieldDescriptor, entry: Descriptor, value: object, message: Message, path: str, depth: int
    ) -> None:
        key_field, value_field = entry.fields_by_name["key"], entry.fields_by_name["value"]
        if not isinstance(value, dict) or _is_written_entry(value, value_field):
            self.report(path, _map_hint(value, value_field, path))
            return
        items = getattr(message, field.name)
        for key, item in value.items():
            where = f"{path}.{_clip(str(key))}"
            try:
                parsed = _map_key(key_field, key)
                if value_field.message_type is None:
                    items[parsed] = _scalar(value_field, item)
                else:
                    self.read_message(item, items[parsed], where, depth + 1)
            except _UnfitError as error:
                self.report(where, str(error))


def _scalar(field: FieldDescriptor, value: object) -> object:
    """Return `value` as what `field` holds. Raises _UnfitError."""
    if field.enum_type is not None:
        return _enum(field.enum_type, value)
    if field.cpp_type in _INTEGERS:
        return _integer(field, value)
    if field.cpp_type in _FLOATS:
        return _float(field, value)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        if isinstance(value, bool):
            return value
        raise _unfit(field, value)
    if not isinstance(value, str):
        raise _unfit(field, value)
    if field.type == FieldDescriptor.TYPE_BYTES:
        try:
            return base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            raise _unfit(field, value) from None
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _UnfitError("expected text, got half of a surrogate pair") from None
    return value


def _enum(enum: EnumDescriptor, value: object) -> int:
    if isinstance(value, str):
        known = enum.values_by_name.get(value)
        if known is not None:
            return known.number
    elif isinstance(value, int) and not isinstance(value, bool) and value in enum.values_by_number:
        return value
    names = [known.name for known in enum.values]
    hint = _suggestion(value, names) if isinstance(value, str) else ""
    raise _UnfitError(f"expected one of {', '.join(names)}, got {_shown(value)}{hint}")


def _integer(field: FieldDescriptor, value: object) -> int:
    if isinstance(value, str) and field.cpp_type in _SIXTY_FOUR and _DECIMAL.fullmatch(value):
        value = int(value)
    low, high = _INTEGERS[field.cpp_type]
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _unfit(field, value)
    return value


def _float(field: FieldDescriptor, value: object) -> float:
    if isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _unfit(field, value)
    try:
        number = float(value)
    except OverflowError:
        raise _unfit(field, value) from None
    if field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT and math.isfinite(number) and not _fits_single(number):
        raise _unfit(field, value)
    return number


def _fits_single(number: float) -> bool:
    try:
        struct.pack("<f", number)
    except OverflowError:
        return False
    return True


def _map_key(field: FieldDescriptor, key: object) -> object:
    if field.cpp_type in _INTEGERS and isinstance(key, str) and _DECIMAL.fullmatch(key):
        key = int(key)
    elif field.cpp_type == FieldDescriptor.CPPTYPE_BOOL and key in ("true", "false"):
        key = key == "true"
    try:
        return _scalar(field, key)
    except _UnfitError as error:
        raise _UnfitError(f"key of a map: {error}") from None


def _is_written_entry(value: dict[Any, Any], value_field: FieldDescriptor) -> bool:
    """Whether a map of messages was written as one {"key": .., "value": ..} entry, as in the text format."""
    return value_field.message_type is not None and set(value) == {"key", "value"} and isinstance(value["key"], str)


def _map_hint(value: object, value_field: FieldDescriptor, path: str) -> str:
    written = value[0] if isinstance(value, (list, tuple)) and value else value
    is_entry = isinstance(written, dict) and isinstance(written.get("key"), str)
    key = _clip(written["key"]) if is_entry and isinstance(written, dict) else "NAME"
    shape, leaf = "...", f"{path}.{key}"
    if value_field.message_type is not None and value_field.message_type.fields:
        first = value_field.message_type.fields[0].name
        shape, leaf = f'{{"{first}": ...}}', f"{leaf}.{first}"
    got = '{"key": ..., "value": ...}' if is_entry else _shown(value)
    return f'expected a map written {{"{key}": {shape}}} (which sets {leaf}), got {got}'


def _unfit(field: FieldDescriptor, value: object) -> _UnfitError:
    return _UnfitError(f"expected {_kind(field)}, got {_shown(value)}")


def _kind(field: FieldDescriptor) -> str:
    if field.message_type is not None:
        return _object_of(field.message_type)
    if field.enum_type is not None:
        return f"a name of {field.enum_type.name} such as {field.enum_type.values[-1].name}"
    if field.cpp_type in _INTEGERS:
        low, high = _INTEGERS[field.cpp_type]
        return f"an integer from {low} to {high}"
    if field.cpp_type in _FLOATS:
        return f"a number of {32 if field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT else 64} bits"
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return "true or false"
    return "text in base64" if field.type == FieldDescriptor.TYPE_BYTES else "text"


def _object_of(descriptor: Descriptor) -> str:
    names = [field.name for field in descriptor.fields]
    return f"an object ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''})"


def _suggestion(given: object, names: list[str]) -> str:
    if not isinstance(given, str) or len(given) > _SHOWN_CHARACTERS:
        return ""
    close = [name for name in names if name.endswith(f"_{given.upper()}")]
    close = close or difflib.get_close_matches(given, names, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _join(path: str, key: object) -> str:
    name = _clip(str(key))
    return f"{path}.{name}" if path else name


def _clip(text: str) -> str:
    short = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
    return short if short.isprintable() else ascii(short)[1:-1]


def _shown(value: object) -> str:
    """Return a short picture of `value` for a message; never walks into it."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return "a huge integer"
    if isinstance(value, str):
        return f'"{_clip(value)}"'
    return "null" if value is None else json.dumps(value, default=lambda odd: type(odd).__name__)
