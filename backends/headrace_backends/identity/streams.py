"""What the identity backend answers where its model is decoupled: how many responses, when, and how they end. Pure.

A model with an input IN and outputs OUT and IDX *repeats*: each element of IN (INT32) becomes a response, with OUT =
the element and IDX = its place; DELAY (UINT32) holds the milliseconds after each response, its last element going for
those beyond; WAIT (UINT32) the milliseconds before the end, which comes without a response.

Any other model gives its inputs back `responses` times (a parameter, 1 where it is absent), with `response_delay_ms`
between them. The last of them is final; with the parameter `empty_final` the end comes without a response, as it does
with none. A misbehaviour that stops a request, its batch or the process waits until these responses are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

import numpy as np

from headrace_backends.api import BatchRequest
from headrace_backends.identity.misbehaviour import fail, misbehave
from headrace_backends.identity.parameters import FOREVER_S, asked, number
from headrace_protocol.datatype import Array
from headrace_protocol.errors import invalid
from headrace_protocol.messages import Parameter

_STOPS: Final = ("fail", "fail_all", "hang", "crash", "signal", "nonsense_frame")


class Part(NamedTuple):
    """One response of a stream, or its end, and the seconds to wait before it is sent."""

    after_s: float
    outputs: Mapping[str, Array] | None
    """None = the end, without a response."""
    final: bool


def repeats(inputs: list[str], outputs: list[str]) -> bool:
    """Return whether a decoupled model with these tensors repeats the elements of IN."""
    return "IN" in inputs and {"OUT", "IDX"} == set(outputs)


def repeated(request: BatchRequest, given: Mapping[str, Array]) -> Iterator[Part]:
    """Return what a request to a model that repeats gets. Raises INVALID_ARG where its tensors do not fit."""
    if "IN" not in given:
        raise invalid("input 'IN' is missing")
    elements, delays, waits = (
        request.input(name).reshape(-1) if name in given else np.zeros(0, np.uint32) for name in ("IN", "DELAY", "WAIT")
    )
    if delays.size > elements.size:
        raise invalid(f"input 'DELAY' has {delays.size} elements, more than the {elements.size} of 'IN'")
    return _repeated(elements, [float(delay) for delay in delays], float(waits[0]) if waits.size else 0.0)


def _repeated(elements: Array, delays_ms: list[float], wait_ms: float) -> Iterator[Part]:
    after_ms = 0.0
    for index in range(elements.size):
        outputs = {"OUT": elements[index : index + 1], "IDX": np.array([index], np.uint32)}
        yield Part(after_ms / 1000, outputs, final=False)
        after_ms = delays_ms[min(index, len(delays_ms) - 1)] if delays_ms else 0.0
    yield Part((after_ms + wait_ms) / 1000, None, final=True)


def copied(parameters: Mapping[str, Parameter], outputs: Callable[[], Mapping[str, Array]]) -> Iterator[Part]:
    """Return what a request to any other decoupled model gets. Raises INVALID_ARG for parameters that do not fit."""
    count = int(number(parameters, "responses", 1))
    first_s, between_s = number(parameters, "delay_ms") / 1000, number(parameters, "response_delay_ms") / 1000
    return _copied(parameters, count, first_s, between_s, outputs)


def _copied(
    parameters: Mapping[str, Parameter],
    count: int,
    first_s: float,
    between_s: float,
    outputs: Callable[[], Mapping[str, Array]],
) -> Iterator[Part]:
    stops = any(asked(parameters, name) for name in _STOPS)
    apart = stops or not count or asked(parameters, "empty_final")
    for index in range(count):
        yield Part(between_s if index else first_s, outputs(), final=index == count - 1 and not apart)
    if not apart:
        return
    if asked(parameters, "hang"):
        yield Part(FOREVER_S, None, final=True)
    misbehave(parameters)
    fail(parameters)
    yield Part(0.0 if count else first_s, None, final=True)
