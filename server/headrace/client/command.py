"""`headrace infer`: words into a request, an answer into text."""

# ruff: noqa: T201 - printing is what a command does
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from headrace.client.transport import Answer, Call, connect
from headrace.client.values import WireTensor, make_input, show
from headrace.observability.logging import escape
from headrace.subcommand import WordParser
from headrace.types import Parameter, TensorMetadata
from headrace_protocol.errors import InferError, invalid

_EPILOG = """\
An input is written name=value, where value is @file.npy, @file.json, a JSON literal such as [[1, 2], [3, 4]], or, for
BYTES, plain text or @file for the bytes of a file. A missing batch dimension is added.

  headrace infer simple --input 'INPUT0=[1, 2, 3]' --input INPUT1=@b.npy
  headrace infer digits --url grpc://localhost:8001 --input image=@7.npy --output scores:classification=3
"""


def run(words: Sequence[str]) -> int:
    """Send the request that `words` describe; print the answer, or what is wrong; return the exit status."""
    parser = WordParser("headrace infer", "Send one inference request and print the answer.", _EPILOG)
    parser.add_argument("model")
    parser.add_argument(
        "--url", default="http://localhost:8000", help="http://host:port or grpc://host:port (%(default)s)"
    )
    parser.add_argument("--version", default="", help="model version; the server chooses where none is given")
    parser.add_argument("--input", action="append", default=[], metavar="NAME=VALUE", help="an input; repeat for each")
    parser.add_argument(
        "--output", action="append", default=[], metavar="NAME[:classification=K]", help="an output wanted"
    )
    parser.add_argument("--id", default="", help="request id")
    parser.add_argument("--parameter", action="append", default=[], metavar="KEY=VALUE", help="request parameter")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for an answer (%(default)s)")
    try:
        arguments = parser.parse_args(words)
    except SystemExit as stop:  # argparse exits by itself, for --help too; main returns a status instead.
        return int(stop.code or 0)
    try:
        answer = _infer(arguments)
        print(_render(answer))
    except InferError as error:
        print(escape(error.message), file=sys.stderr)
        return 1
    return 0


def _infer(arguments: argparse.Namespace) -> Answer:
    given = dict(_pair("--input", text) for text in arguments.input)
    outputs = dict(_output(text) for text in arguments.output)
    parameters = {key: _parameter(text) for key, text in (_pair("--parameter", text) for text in arguments.parameter)}
    transport = connect(arguments.url, arguments.timeout)
    try:
        declared = transport.inputs(arguments.model, arguments.version)
        inputs = _inputs(arguments.model, declared, given)
        for tensor in inputs:
            if tensor.note:
                print(f"input {tensor.name}: {tensor.note}", file=sys.stderr)
        call = Call(arguments.model, arguments.version, inputs, outputs, arguments.id, parameters)
        return transport.infer(call)
    finally:
        transport.close()


def _inputs(model: str, declared: Sequence[TensorMetadata], given: dict[str, str]) -> list[WireTensor]:
    names = {tensor.name for tensor in declared}
    unknown = sorted(given.keys() - names)
    if unknown:
        wanted = ", ".join(f"{tensor.name} ({tensor.datatype} {list(tensor.shape)})" for tensor in declared)
        raise invalid(f"model {model!r} has no input {unknown[0]!r}; its inputs are {wanted}")
    return [make_input(tensor, given[tensor.name]) for tensor in declared if tensor.name in given]


def _pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise invalid(f"{option}: expected name=value, got {text!r}")
    return name, value


def _output(text: str) -> tuple[str, int]:
    name, colon, rest = text.rpartition(":classification=")
    if not colon:
        return text, 0
    if not rest.isdecimal() or not int(rest):
        raise invalid(f"--output: expected {name}:classification=<number of classes>, got {text!r}")
    return name, int(rest)


def _parameter(text: str) -> Parameter:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, bool | int | float | str) else text


def _render(answer: Answer) -> str:
    head = escape(f"model {answer.model}, version {answer.version}" + (f", id {answer.id}" if answer.id else ""))
    lines = [head, *(f"parameter {escape(key)} = {value!r}" for key, value in answer.parameters.items())]
    return "\n".join([*lines, *(f"\n{show(tensor)}" for tensor in answer.outputs)])
