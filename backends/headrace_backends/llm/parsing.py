"""Sampling parameters out of what a client sent: all that is wrong at once, each with its name. Pure.

Knows no door: each tells by `ParamLimits` what holds behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, NamedTuple

import msgspec

from headrace_backends.llm.sampling_params import GREEDY_BELOW, LOWEST_TEMPERATURE, RepetitionDetection, SamplingParams

_INT64: Final = 1 << 63
_LONGEST_PATTERN: Final = 256


class _WrongError(Exception):
    """What is wrong with a value."""


class Problem(NamedTuple):
    """Something wrong with one parameter."""

    field: str
    text: str

    def __str__(self) -> str:
        return f"{self.field}: {self.text}"


@dataclass(frozen=True, slots=True)
class ParamLimits:
    """What depends on the model and on the door."""

    vocab_size: int | None = None
    """None: token ids are not checked against a vocabulary."""
    max_logprobs: int = 20
    """-1 is the whole vocabulary."""
    max_n: int = 128
    max_stop_strings: int = 4
    max_stop_length: int = 1024
    """Characters of a stop string or bad word."""
    max_token_ids: int = 1024
    """Entries of a list of tokens; `allowed_token_ids` may have the whole vocabulary."""
    max_bad_words: int = 128
    allow_no_tokens: bool = False
    """Whether `max_tokens` may be 0."""
    texts: bool = False
    """Whether numbers and truth values may come as strings, as Triton's vLLM backend takes them."""
    unsupported: frozenset[str] = frozenset()
    """Parameters that this model cannot honour: refused unless they have their default."""


Reader = Callable[[Any, ParamLimits], Any]


def parse(given: Mapping[str, Any], limits: ParamLimits) -> SamplingParams | list[Problem]:
    """Return the parameters, or everything that is wrong. A null is a parameter that was not given."""
    problems: list[Problem] = []
    read: dict[str, Any] = {}
    for name, sent in given.items():
        if name not in _READERS:
            problems.append(Problem(name, _unknown(name)))
        elif sent is not None:
            value = _out_of_text(sent) if limits.texts and name not in _TEXTS else sent
            try:
                read[name] = _READERS[name](value, limits)
            except _WrongError as error:
                problems.append(Problem(name, str(error)))
    if not problems:
        params = SamplingParams(**read)
        problems = _contradictions(params, limits)
        if not problems:
            return params
    return problems


def _contradictions(params: SamplingParams, limits: ParamLimits) -> list[Problem]:
    problems = []
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        problems.append(Problem("min_tokens", f"{params.min_tokens} is more than max_tokens, {params.max_tokens}"))
    if params.stop and not params.detokenize:
        problems.append(Problem("stop", "needs detokenize: stop strings are looked for in the text"))
    default = SamplingParams()
    problems.extend(
        Problem(name, "this model does not support it")
        for name in sorted(limits.unsupported)
        if getattr(params, name) != getattr(default, name)
    )
    return problems


def _unknown(name: str) -> str:
    near = get_close_matches(name, _READERS, 1)
    return f"no such parameter; is {near[0]} meant?" if near else "no such parameter"


def _out_of_text(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value.lower() if value in {"True", "False"} else value)
    except (msgspec.DecodeError, RecursionError):
        return value


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _whole(value: Any, expected: str) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise _WrongError(f"expected {expected}, got {_shown(value)}")
    return value


def _integer(low: int, high: int | None = None) -> Reader:
    expected = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"

    def read(value: Any, _limits: ParamLimits) -> int:
        number = _whole(value, expected)
        if number < low or number > (_INT64 - 1 if high is None else high):
            raise _WrongError(f"expected {expected}, got {_shown(value)}")
        return number

    return read


def _number(expected: str, right: Callable[[float], bool]) -> Reader:
    def read(value: Any, _limits: ParamLimits) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not (abs(value) < 1e300 and right(value)):
            raise _WrongError(f"expected {expected}, got {_shown(value)}")
        return float(value)

    return read


def _boolean(value: Any, _limits: ParamLimits) -> bool:
    if not isinstance(value, bool):
        raise _WrongError(f"expected true or false, got {_shown(value)}")
    return value


def _temperature(value: Any, limits: ParamLimits) -> float:
    number: float = _number("a number from 0 to 2", lambda number: 0 <= number <= 2)(value, limits)
    return 0.0 if number < GREEDY_BELOW else max(number, LOWEST_TEMPERATURE)


def _minus_one_is_off(off: int | None, low: int, high: int = _INT64 - 1) -> Reader:
    def read(value: Any, _limits: ParamLimits) -> int | None:
        number = _whole(value, f"an integer >= {low}, or -1")
        if number == -1:
            return off
        if not low <= number <= high:
            raise _WrongError(f"expected an integer from {low} to {high}, or -1, got {_shown(value)}")
        return number

    return read


def _count_of_choices(value: Any, limits: ParamLimits) -> Any:
    return _integer(1, limits.max_n)(value, limits)


def _max_tokens(value: Any, limits: ParamLimits) -> Any:
    return _integer(0 if limits.allow_no_tokens else 1)(value, limits)


def _logprobs(value: Any, limits: ParamLimits) -> int:
    number = _whole(value, "an integer")
    if limits.max_logprobs >= 0 and not 0 <= number <= limits.max_logprobs:
        raise _WrongError(f"expected an integer from 0 to {limits.max_logprobs}, got {_shown(value)}")
    if number < -1:
        raise _WrongError(f"expected an integer >= 0, or -1 for the whole vocabulary, got {_shown(value)}")
    return number


def _truncation(value: Any, _limits: ParamLimits) -> int:
    number = _whole(value, "an integer >= 1, or -1")
    if number != -1 and number < 1:
        raise _WrongError(f"expected an integer >= 1, or -1 for the model's length, got {_shown(value)}")
    return number


def _side(value: Any, _limits: ParamLimits) -> str:
    if value not in ("left", "right"):
        raise _WrongError(f"expected left or right, got {_shown(value)}")
    return str(value)


def _stop(value: Any, limits: ParamLimits) -> tuple[str, ...]:
    return _strings([value] if isinstance(value, str) else value, limits.max_stop_strings, limits.max_stop_length)


def _bad_words(value: Any, limits: ParamLimits) -> tuple[str, ...]:
    return _strings(value, limits.max_bad_words, limits.max_stop_length)


def _strings(value: Any, most: int, longest: int) -> tuple[str, ...]:
    items = _list(value, "strings", most)
    for item in items:
        if not isinstance(item, str) or not 1 <= len(item) <= longest:
            raise _WrongError(f"expected strings of 1 to {longest} characters, got {_shown(item)}")
    return tuple(items)


def _list(value: Any, what: str, most: int | None) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise _WrongError(f"expected a list of {what}, got {_shown(value)}")
    if most is not None and len(value) > most:
        raise _WrongError(f"expected {most} {what} at most, got {len(value)}")
    return list(value)


def _token(value: Any, limits: ParamLimits) -> int:
    number = _whole(value, "a token id")
    if number < 0 or number >= (limits.vocab_size or 1 << 31):
        of = "" if limits.vocab_size is None else f" below {limits.vocab_size}"
        raise _WrongError(f"expected a token id{of}, got {_shown(value)}")
    return number


def _token_ids(value: Any, limits: ParamLimits) -> tuple[int, ...]:
    return tuple(_token(item, limits) for item in _list(value, "token ids", limits.max_token_ids))


def _allowed(value: Any, limits: ParamLimits) -> tuple[int, ...]:
    most = limits.max_token_ids if limits.vocab_size is None else limits.vocab_size
    items = _list(value, "token ids", most)
    if not items:
        raise _WrongError("expected one token id at least, got none")
    return tuple(dict.fromkeys(_token(item, limits) for item in items))


def _logit_bias(value: Any, limits: ParamLimits) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise _WrongError(f"expected an object of token ids and numbers, got {_shown(value)}")
    if len(value) > limits.max_token_ids:
        raise _WrongError(f"expected {limits.max_token_ids} tokens at most, got {len(value)}")
    number = _number("a number from -100 to 100", lambda number: -100 <= number <= 100)
    bias: dict[int, float] = {}
    for key, amount in value.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 12 else key
        bias[_token(token, limits)] = number(amount, limits)
    return bias


def _repetition(value: Any, limits: ParamLimits) -> RepetitionDetection:
    names = RepetitionDetection.__struct_fields__
    if not isinstance(value, Mapping) or not set(value) <= set(names) or "max_pattern_size" not in value:
        raise _WrongError(f"expected an object of {', '.join(names)}, got {_shown(value)}")
    size, count = _integer(1, _LONGEST_PATTERN), _integer(2, _LONGEST_PATTERN)
    rule = RepetitionDetection(
        max_pattern_size=size(value["max_pattern_size"], limits),
        min_pattern_size=size(value.get("min_pattern_size", 1), limits),
        min_count=count(value.get("min_count", 2), limits),
    )
    if rule.min_pattern_size > rule.max_pattern_size:
        message = f"min_pattern_size, {rule.min_pattern_size}, is more than max_pattern_size, {rule.max_pattern_size}"
        raise _WrongError(message)
    return rule


_PENALTY: Final = _number("a number from -2 to 2", lambda number: -2 <= number <= 2)
_READERS: Final[Mapping[str, Reader]] = {
    "n": _count_of_choices,
    "temperature": _temperature,
    "top_p": _number("a number above 0, 1 at most", lambda number: 0 < number <= 1),
    "top_k": _minus_one_is_off(0, 0),
    "min_p": _number("a number from 0 to 1", lambda number: 0 <= number <= 1),
    "repetition_penalty": _number("a number above 0", lambda number: number > 0 and math.isfinite(number)),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "logit_bias": _logit_bias,
    "seed": _minus_one_is_off(None, -_INT64),
    "stop": _stop,
    "stop_token_ids": _token_ids,
    "include_stop_str_in_output": _boolean,
    "ignore_eos": _boolean,
    "min_tokens": _integer(0),
    "max_tokens": _max_tokens,
    "bad_words": _bad_words,
    "allowed_token_ids": _allowed,
    "logprobs": _logprobs,
    "prompt_logprobs": _logprobs,
    "truncate_prompt_tokens": _truncation,
    "truncation_side": _side,
    "skip_special_tokens": _boolean,
    "spaces_between_special_tokens": _boolean,
    "detokenize": _boolean,
    "skip_reading_prefix_cache": _boolean,
    "thinking_token_budget": _minus_one_is_off(None, 0),
    "repetition_detection": _repetition,
}
_TEXTS: Final = frozenset({"stop", "bad_words", "truncation_side"})
