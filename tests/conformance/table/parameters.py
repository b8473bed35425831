"""Rows of the table: parameters of requests, free and reserved; priority, timeout and sequence fields; classification."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from conformance.table.arrays import PAIR, filled
from conformance.table.cases import Case, Differs, equal
from conformance.table.tensors import Answer, Infer, Output, Tensor, Typed

ONE = Tensor("INPUT0", "FP32", (1,), np.ones(1, np.float32))
ROW = Tensor("INPUT0", "FP32", (1, 1), np.ones((1, 1), np.float32))


def _echo(parameters: dict[str, Any], *, wire: bool = False) -> Infer:
    return Infer("echo", [ONE], parameters=parameters, wire=wire)


def _urgent(parameters: dict[str, Any]) -> Infer:
    return Infer("urgent", [ROW], parameters=parameters, wire=True)


def _comes_back(wanted: dict[str, Any]) -> Callable[[Answer], None]:
    def check(answer: Answer) -> None:
        assert dict(answer.parameters) == wanted
        assert {key: type(value) for key, value in answer.parameters.items()} == {
            key: type(value) for key, value in wanted.items()
        }

    return check


def _free() -> Iterator[Case]:
    values: dict[str, Any] = {
        "a text": "é 🙂 \0 \n",
        "an empty text": "",
        "a text of 10000 characters": "x" * 10000,
        "true": True,
        "false": False,
        "zero": 0,
        "the largest int64": 2**63 - 1,
        "the smallest int64": -(2**63),
        "a number": 0.1,
        "a tiny number": 5e-324,
        "a large number": -1.7976931348623157e308,
    }
    for name, value in values.items():
        yield Case(f"a parameter that is {name}", _echo({"custom": value}), check=_comes_back({"custom": value}))
    everything = {f"key {index}": value for index, value in enumerate(values.values())}
    yield Case("eleven parameters at once", _echo(everything), check=_comes_back(everything))
    yield Case("a parameter with an empty name", _echo({"": 1}), check=_comes_back({"": 1}))
    yield Case("a parameter with an odd name", _echo({"é\n\x1b[0m": 1}), check=_comes_back({"é\n\x1b[0m": 1}))
    yield Case(
        "a parameter of an input",
        Infer("echo", [Tensor("INPUT0", "FP32", (1,), ONE.data, parameters={"custom": 1})], wire=True),
    )
    yield Case(
        "a parameter of an output", Infer("echo", [ONE], [Output("OUTPUT0", parameters={"custom": 1})], wire=True)
    )
    for name, value in {
        "null": None,
        "a list": [1],
        "an object": {"a": 1},
        "beyond 64 bits": 2**64,
        "far below": -(2**63) - 1,
    }.items():
        yield Case(
            f"a parameter that is {name}",
            _echo({"custom": value}, wire=True),
            "INVALID_ARG",
            "custom",
            only="http",
            because="the message of gRPC has no place for it",
        )
    yield Case(
        "a parameter without a value",
        _echo({"custom": None}, wire=True),
        "INVALID_ARG",
        "custom",
        only="grpc",
        because="JSON has null, which has a row of its own",
    )
    yield Case(
        "a free parameter of uint64",
        _echo({"custom": Typed("uint64_param", 2**64 - 1)}, wire=True),
        "INVALID_ARG",
        "custom uint64_param",
        differs={"http": Differs("JSON has one kind of number; 64 bits, signed or not, are taken", code="OK")},
    )


def _reserved() -> Iterator[Case]:
    for key in ("triton_", "triton_x", "triton_final_response"):
        yield Case(f"{key} is reserved", _echo({key: True}, wire=True), "INVALID_ARG", f"{key} reserved")
    yield Case(
        "triton_enable_empty_final_response in a unary request",
        _echo({"triton_enable_empty_final_response": True}, wire=True),
        differs={"http": Differs("it belongs to streams, which only gRPC has", code="INVALID_ARG", says="reserved")},
    )
    yield Case(
        "triton_enable_empty_final_response that is a number",
        _echo({"triton_enable_empty_final_response": 1}, wire=True),
        "INVALID_ARG",
        "triton_enable_empty_final_response",
    )
    yield Case("TRITON_ in capitals is free", _echo({"TRITON_x": 1}), check=_comes_back({"TRITON_x": 1}))
    yield Case(
        "headers is reserved",
        _echo({"headers": "x"}, wire=True),
        check=_comes_back({}),
        differs={"grpc": Differs("it is a matter of HTTP clients", code="INVALID_ARG", says="headers")},
    )
    yield Case(
        "binary_data_output is reserved",
        _echo({"binary_data_output": True}, wire=True),
        check=_comes_back({}),
        differs={"grpc": Differs("it is a matter of HTTP", code="INVALID_ARG", says="binary_data_output")},
    )
    for value in (1, "true", 0.0):
        yield Case(
            f"binary_data_output that is {value!r}",
            _echo({"binary_data_output": value}, wire=True),
            "INVALID_ARG",
            "binary_data_output",
        )


def _schedule() -> Iterator[Case]:
    for priority in (0, 1, 2, 3, 2**32):
        yield Case(f"priority {priority}", Infer("urgent", [ROW], more={"priority": priority}))
        yield Case(f"priority {priority} where there are none", Infer("simple", PAIR, more={"priority": priority}))
    yield Case("the largest priority", _urgent({"priority": Typed("uint64_param", 2**64 - 1)}))
    yield Case("priority as int64", _urgent({"priority": 1}))
    for key in ("priority", "timeout"):
        for value in (-1, -(2**63), "1", True, 1.0):
            yield Case(f"{key} {value!r}", _urgent({key: value}), "INVALID_ARG", key)
        for value in (2**64, None, [1], 1.5):
            yield Case(
                f"{key} {value!r} in JSON",
                _urgent({key: value}),
                "INVALID_ARG",
                key,
                only="http",
                because="the message of gRPC has no place for it",
            )
    for timeout in (0, 1_000_000, 2**62):
        yield Case(f"timeout {timeout}", Infer("urgent", [ROW], more={"timeout": timeout}))
    yield Case(
        "timeout as uint64",
        _urgent({"timeout": Typed("uint64_param", 5_000_000)}),
        "INVALID_ARG",
        "timeout",
        differs={"http": Differs("JSON has one kind of number", code="OK")},
    )


def _sequence() -> Iterator[Case]:
    for value in (1, 2**63 - 1, "a", "x" * 128):
        name = value if isinstance(value, int) else f"text of {len(value)}"
        yield Case(
            f"sequence id {name}",
            Infer("simple", PAIR, more={"sequence_id": value, "sequence_start": True, "sequence_end": True}),
        )
    yield Case("an empty sequence id", Infer("simple", PAIR, parameters={"sequence_id": ""}, wire=True))
    yield Case("sequence id 0", Infer("simple", PAIR, parameters={"sequence_id": 0}, wire=True))
    bad: list[tuple[str, Any]] = [("sequence_id", "x" * 129), ("sequence_id", True), ("sequence_id", 1.0)]
    bad += [(key, value) for key in ("sequence_start", "sequence_end") for value in (1, "true", 0.0)]
    for key, value in bad:
        yield Case(
            f"{key} {str(value)[:8]!r} of {type(value).__name__}",
            Infer("simple", PAIR, parameters={"sequence_id": 7, key: value}, wire=True),
            "INVALID_ARG",
            key,
        )
    yield Case(
        "sequence id beyond 64 bits",
        Infer("simple", PAIR, parameters={"sequence_id": 2**64}, wire=True),
        "INVALID_ARG",
        "sequence_id",
        only="http",
        because="the message of gRPC has no place for it",
    )
    yield Case(
        "a negative sequence id",
        Infer("simple", PAIR, parameters={"sequence_id": -1}, wire=True),
        "INVALID_ARG",
        "sequence_id",
        differs={"grpc": Differs("ids are unsigned and travel in int64, so this one is 2^64 - 1", code="OK")},
    )


SCORES = Tensor("INPUT0", "FP32", (2, 4), np.array([[0.1, 0.9, 0.2, 0.9], [3, 2, 1, 0]], np.float32))
FIRST = [b"0.900000:1:b b", b"0.900000:3", b"0.200000:2", b"0.100000:0:a"]
SECOND = [b"3.000000:0:a", b"2.000000:1:b b", b"1.000000:2", b"0.000000:3"]


def _top(k: int, count: int) -> Case:
    def check(answer: Answer) -> None:
        assert answer.datatypes == {"OUTPUT0": "BYTES"}
        assert answer.shapes == {"OUTPUT0": (2, count)}
        assert answer.arrays["OUTPUT0"].tolist() == [FIRST[:count], SECOND[:count]]

    return Case(f"the top {k} of 4 classes", Infer("labelled", [SCORES], [Output("OUTPUT0", classes=k)]), check=check)


def _classes() -> Iterator[Case]:
    for k, count in [(1, 1), (2, 2), (4, 4), (5, 4), (100, 4), (2**31, 4)]:
        yield _top(k, count)
    for k in (0, -1, -(2**63)):
        yield Case(
            f"the top {k} classes",
            Infer("labelled", [SCORES], [Output("OUTPUT0", parameters={"classification": k})], wire=True),
            "INVALID_ARG",
            f"OUTPUT0 classification {k}",
        )
    for k in ("1", True, 1.0):
        yield Case(
            f"classification {k!r}",
            Infer("labelled", [SCORES], [Output("OUTPUT0", parameters={"classification": k})], wire=True),
            "INVALID_ARG",
            "OUTPUT0 classification",
        )
    for kind in ("BYTES", "BOOL", "FP16", "BF16"):
        tensor = Tensor(f"INPUT_{kind}", kind, (2,), filled(kind, (2,)))
        yield Case(
            f"classes of {kind}",
            Infer("identity", [tensor], [Output(f"OUTPUT_{kind}", classes=1)]),
            "INVALID_ARG",
            f"OUTPUT_{kind} {kind}",
        )
    for kind in ("UINT8", "INT16", "INT64", "UINT64", "FP64"):
        sent = filled(kind, (3,))
        if kind == "FP64":
            sent = np.array([0.5, -1.0, 2.0])
        yield Case(
            f"classes of {kind}",
            Infer("identity", [Tensor(f"INPUT_{kind}", kind, (3,), sent)], [Output(f"OUTPUT_{kind}", classes=3)]),
            check=_sorted(kind, sent),
        )
    yield Case(
        "classes of an output, another as it is",
        Infer("simple", PAIR, [Output("OUTPUT0", classes=1), Output("OUTPUT1")]),
        check=lambda answer: equal(answer.datatypes, {"OUTPUT0": "BYTES", "OUTPUT1": "INT32"}),
    )
    yield Case(
        "classes as text",
        Infer("labelled", [SCORES], [Output("OUTPUT0", binary=False, classes=2)]),
        check=lambda answer: equal(answer.arrays["OUTPUT0"].tolist(), [FIRST[:2], SECOND[:2]]),
    )
    yield Case(
        "classes of no elements",
        Infer(
            "identity", [Tensor("INPUT_FP32", "FP32", (0,), filled("FP32", (0,)))], [Output("OUTPUT_FP32", classes=3)]
        ),
        check=lambda answer: equal(answer.shapes, {"OUTPUT_FP32": (0,)}),
    )


def _sorted(kind: str, sent: np.ndarray) -> Callable[[Answer], None]:
    order = sorted(range(sent.size), key=lambda index: (-sent[index].item(), index))
    text = "{:.6f}:{}" if sent.dtype.kind == "f" else "{}:{}"
    wanted = [text.format(sent[index].item(), index).encode() for index in order]
    return lambda answer: equal(answer.arrays[f"OUTPUT_{kind}"].tolist(), wanted)


CASES = [*_free(), *_reserved(), *_schedule(), *_sequence(), *_classes()]
