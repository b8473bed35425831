"""A JSON body read member by member: a null is a member that is not there, and what is wrong is told by its path.

Members that nobody asks for are not looked at. Knows no endpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import isfinite
from typing import Any, Final

import msgspec

from headrace.gateway.http.errors import HttpError
from headrace.gateway.http.json_text import check_depth, describe, malformed
from headrace.gateway.http.openai.errors import missing, refusal
from headrace.gateway.http.request import CONTENT_TYPE, HttpRequest

_decoder: Final = msgspec.json.Decoder(dict[str, Any])
_WHAT: Final = "the body"
_INT64: Final = 1 << 63


class Fields:
    """An object of a request. `path` is what the paths of its members begin with."""

    __slots__ = ("_members", "_path")

    def __init__(self, members: Mapping[str, Any], path: str = "") -> None:
        self._members = members
        self._path = path

    def at(self, name: str) -> str:
        """Return the path of a member, as errors name it."""
        return f"{self._path}.{name}" if self._path else name

    def wrong(self, name: str, expected: str, value: Any) -> HttpError:
        """Return the error of a member that is not what it has to be."""
        return refusal(f"'{self.at(name)}': expected {expected}, got {describe(value)}", self.at(name))

    def any(self, name: str) -> Any:
        """Return a member as JSON has it, None where there is none."""
        return self._members.get(name)

    def has(self, name: str) -> bool:
        """Return whether there is such a member."""
        return self._members.get(name) is not None

    def text(self, name: str, longest: int | None = None) -> str | None:
        """Return a string, of `longest` characters at most."""
        value = self._members.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.wrong(name, "a string", value)
        if longest is not None and len(value) > longest:
            raise refusal(f"'{self.at(name)}': {len(value)} characters, at most {longest} are taken", self.at(name))
        return value

    def needed_text(self, name: str, longest: int | None = None) -> str:
        """Return a string that has to be there and has to have characters."""
        value = self.text(name, longest)
        if value is None:
            raise missing(self.at(name))
        if not value:
            raise refusal(f"'{self.at(name)}' is empty", self.at(name))
        return value

    def choice(self, name: str, options: Collection[str]) -> str | None:
        """Return a string that is one of `options`."""
        value = self._members.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or value not in options:
            raise self.wrong(name, f"one of {', '.join(options)}", value)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a truth value."""
        value = self._members.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false", value)
        return value

    def integer(self, name: str, low: int, high: int | None = None) -> int | None:
        """Return an integer in a range, both ends included."""
        value = self._members.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # some clients know one kind of number alone
        most = _INT64 - 1 if high is None else high
        if type(value) is not int or not low <= value <= most:
            expected = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
            raise self.wrong(name, expected, value)
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        """Return a number in a range, both ends included."""
        value = self._members.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "a number", value)
        if not (isfinite(value) and low <= value <= high):
            raise self.wrong(name, f"a number from {low:g} to {high:g}", value)
        return value

    def object(self, name: str) -> Fields | None:
        """Return an object, to be read member by member."""
        value = self._members.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "an object", value)
        return Fields(value, self.at(name))

    def mapping(self, name: str) -> dict[str, Any] | None:
        """Return an object as it is."""
        value = self._members.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "an object", value)
        return value

    def items(self, name: str, most: int, what: str = "items") -> Sequence[Any] | None:
        """Return an array of `most` items at most, as JSON has them."""
        value = self._members.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.wrong(name, "an array", value)
        if len(value) > most:
            raise refusal(f"'{self.at(name)}': {len(value)} {what}, at most {most} are taken", self.at(name))
        return value

    def objects(self, name: str, most: int, what: str = "items") -> list[Fields] | None:
        """Return an array of objects, each to be read member by member."""
        values = self.items(name, most, what)
        if values is None:
            return None
        for number, value in enumerate(values):
            if not isinstance(value, dict):
                raise self.wrong(f"{name}[{number}]", "an object", value)
        return [Fields(value, self.at(f"{name}[{number}]")) for number, value in enumerate(values)]

    @property
    def members(self) -> Mapping[str, Any]:
        """The object as JSON has it."""
        return self._members


def read_body(http: HttpRequest) -> Fields:
    """Return the object that a request's body is. Raises HttpError 415 and 400, InferError for what is too deep."""
    kind = http.text(CONTENT_TYPE)
    if kind is not None and kind.partition(";")[0].strip().lower() != "application/json":
        raise refusal(f"Content-Type {kind[:80]!r} is not taken; application/json is", code=None, status=415)
    text = bytes(http.body)
    if not text:
        raise refusal(f"{_WHAT} is empty, and has to be a JSON object", code=None)
    check_depth(text, _WHAT)
    try:
        return Fields(_decoder.decode(text))
    except (msgspec.MsgspecError, ValueError) as error:
        raise malformed(error, _WHAT) from None
