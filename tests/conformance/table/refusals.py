"""Rows of the table: inferences that have to be refused, each with the code and the name of what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from conformance.table.arrays import PAIR, filled
from conformance.table.cases import Case, equal
from conformance.table.models import DATATYPES
from conformance.table.tensors import LENGTH, Infer, Output, Tensor, grpc_message

JSON_ONLY = "typed contents have no place for such an element"
LARGEST = 2**63 - 1


def _plane(shape: tuple[int, ...], data: bytes = bytes(16), kind: str = "FP32") -> Infer:
    return Infer("plane", [Tensor(f"INPUT_{kind}", kind, shape, data)], wire=True)


def _shapes() -> Iterator[Case]:
    for shape in [(-1, 4), (-1, -4), (2, -2), (0, -1), (-1, 0), (-(2**63), 1)]:
        yield Case(f"negative dimension {list(shape)}", _plane(shape), "INVALID_ARG", "INPUT_FP32 negative|dimension -")
    for shape in [(4,), (1, 2, 2), (), (1,) * 60]:
        yield Case(
            f"rank {len(shape)} for rank 2", _plane(shape, bytes(16)), "INVALID_ARG", "INPUT_FP32 shape|size|bytes"
        )
    yield Case("a shape of 10000 dimensions", _plane((1,) * 10000), "INVALID_ARG", "INPUT_FP32 dimensions|shape")
    for shape in [(2**31, 2**31), (LARGEST, LARGEST), (2**62, 2)]:
        yield Case(f"a size beyond 64 bits {list(shape)}", _plane(shape), "INVALID_ARG", "INPUT_FP32 bytes")
    yield Case(
        "a size beyond the machine",
        _plane((2**31, 2**20)),
        "INVALID_ARG",
        "INPUT_FP32 bytes",
    )
    yield Case("a huge dimension beside a zero", _plane((0, LARGEST), b""), "INVALID_ARG", "INPUT_FP32")
    yield Case(
        "a huge dimension beside a zero of strings", _plane((0, 2**41), b"", "BYTES"), "INVALID_ARG", "INPUT_BYTES"
    )
    yield Case(
        "a large dimension beside a zero holds no element",
        _plane((0, 2**40), b""),
        check=lambda answer: equal(answer.shapes["OUTPUT_FP32"], (0, 2**40)),
    )
    yield Case("a fixed dimension that differs", _row(1, 15), "INVALID_ARG", "INPUT0 15 16")
    yield Case("no batch dimension", _row(16), "INVALID_ARG", "batch 16 8")
    yield Case("no batch dimension, few enough", _row(8), "INVALID_ARG", "INPUT0 8 16")
    yield Case("no dimension at all where there are batches", _row(), "INVALID_ARG", "INPUT0 batch")
    yield Case("a batch of nothing", _row(0, 16), "INVALID_ARG", "batch 0 8")
    yield Case("a batch that is too large", _row(9, 16), "INVALID_ARG", "batch 9 8")
    yield Case(
        "batches that do not agree",
        Infer("simple", [PAIR[0], Tensor("INPUT1", "INT32", (1, 16), filled("INT32", (1, 16)))]),
        "INVALID_ARG",
        "INPUT0 INPUT1 2 1",
    )
    yield Case(
        "a scalar of two elements",
        Infer("scalar", [Tensor("INPUT_FP32", "FP32", (2,), filled("FP32", (2,)))]),
        "INVALID_ARG",
        "INPUT_FP32 2",
    )


def _row(*shape: int) -> Infer:
    data = bytes(4 * int(np.prod(shape)))
    return Infer("simple", [Tensor(f"INPUT{i}", "INT32", shape, data) for i in (0, 1)], wire=True)


def _sizes() -> Iterator[Case]:
    for kind in DATATYPES:
        if kind == "BYTES":
            continue
        right = filled(kind, (3,)).nbytes
        for size in {0, right - 1, right + 1, right * 2}:
            tensor = Tensor(f"INPUT_{kind}", kind, (3,), bytes(size))
            yield Case(
                f"{kind} of 3 elements in {size} bytes",
                Infer("identity", [tensor], wire=True),
                "INVALID_ARG",
                f"INPUT_{kind} {size}|bytes {right}",
            )


def _strings() -> Iterator[Case]:
    def of(data: bytes, count: int = 2) -> Infer:
        return Infer("identity", [Tensor("INPUT_BYTES", "BYTES", (count,), data)], wire=True)

    good = LENGTH.pack(1) + b"a"
    yield Case("no string at all", of(b""), "INVALID_ARG", "INPUT_BYTES 2")
    yield Case("one string too few", of(good), "INVALID_ARG", "INPUT_BYTES 2 1")
    yield Case("one string too many", of(good * 3), "INVALID_ARG", "INPUT_BYTES 2")
    yield Case("half a length", of(good + b"\1\0"), "INVALID_ARG", "INPUT_BYTES length")
    yield Case("a length beyond the end", of(good + LENGTH.pack(2) + b"a"), "INVALID_ARG", "INPUT_BYTES 2")
    yield Case("the largest length", of(good + LENGTH.pack(2**32 - 1) + b"a"), "INVALID_ARG", "INPUT_BYTES")
    yield Case("bytes behind the last string", of(good * 2 + b"a"), "INVALID_ARG", "INPUT_BYTES")
    yield Case("a string where there is no element", of(good, 0), "INVALID_ARG", "INPUT_BYTES 0")
    yield Case("strings that are no UTF-8", of((LENGTH.pack(2) + b"\xff\xfe") * 2))
    yield Case(
        "strings that are no UTF-8 asked for as text",
        Infer(
            "identity",
            [Tensor("INPUT_BYTES", "BYTES", (1,), LENGTH.pack(1) + b"\xff")],
            [Output("OUTPUT_BYTES", binary=False)],
            wire=True,
        ),
        "INVALID_ARG",
        "OUTPUT_BYTES UTF-8",
        only="http",
        because="over gRPC outputs are always binary",
    )


def _datatypes() -> Iterator[Case]:
    for kind, other in [
        ("FP32", "INT32"),
        ("INT64", "FP64"),
        ("UINT8", "BOOL"),
        ("BF16", "FP16"),
        ("INT32", "UINT32"),
        ("BYTES", "UINT8"),
    ]:
        tensor = Tensor(f"INPUT_{kind}", other, (2,), filled(other, (2,)))
        yield Case(f"{other} for {kind}", Infer("identity", [tensor]), "INVALID_ARG", f"INPUT_{kind} {other} {kind}")
    for unknown in ("", "FP33", "fp32", "STRING", "TYPE_FP32", "INT32 ", "FLOAT\n"):
        tensor = Tensor("INPUT_FP32", unknown, (2,), bytes(8))
        yield Case(
            f"datatype {unknown!r}", Infer("identity", [tensor], wire=True), "INVALID_ARG", "INPUT_FP32 datatype FP32"
        )


def _names() -> Iterator[Case]:
    yield Case("a missing input", Infer("simple", PAIR[:1]), "INVALID_ARG", "simple INPUT1")
    yield Case("no input", Infer("simple", [], wire=True), "INVALID_ARG", "simple INPUT0 INPUT1")
    yield Case("none of the optional inputs", Infer("identity", [], wire=True), "INVALID_ARG", "identity optional")
    wrong = Tensor("NOPE", "INT32", (2, 16), PAIR[0].data)
    yield Case("an unknown input", Infer("simple", [PAIR[0], wrong]), "INVALID_ARG", "simple NOPE INPUT1")
    yield Case("one input too many", Infer("simple", [*PAIR, wrong]), "INVALID_ARG", "simple NOPE")
    yield Case("an input twice", Infer("simple", [*PAIR, PAIR[0]]), "INVALID_ARG", "INPUT0 twice|once")
    yield Case("an output twice", Infer("simple", PAIR, [Output("OUTPUT0")] * 2), "INVALID_ARG", "OUTPUT0 twice|once")
    yield Case("an unknown output", Infer("simple", PAIR, [Output("NOPE")]), "INVALID_ARG", "simple NOPE OUTPUT0")
    yield Case(
        "an input asked for as output", Infer("simple", PAIR, [Output("INPUT0")]), "INVALID_ARG", "INPUT0 OUTPUT0"
    )
    yield Case("an output without a name", Infer("simple", PAIR, [Output("")]), "INVALID_ARG", "output ''")
    unnamed = Tensor("", "INT32", (2, 16), PAIR[0].data)
    yield Case("an input without a name", Infer("simple", [unnamed, PAIR[1]]), "INVALID_ARG", "input ''")
    for name in ("a\nb", "\x1b[31m", "\0"):
        odd = Tensor(name, "INT32", (2, 16), PAIR[0].data)
        yield Case(f"an input called {name!r}", Infer("simple", [odd, PAIR[1]]), "INVALID_ARG", "simple INPUT0")
    yield Case("an id in front of the reason", Infer("simple", PAIR[:1], id="the-id"), "INVALID_ARG", "the-id INPUT1")


def _values() -> Iterator[Case]:
    """Elements outside their datatype, in text form."""
    outside: list[tuple[str, Any]] = [
        *(("UINT8", 257), ("UINT8", 256), ("UINT16", 65536), ("INT8", -129), ("INT8", 128), ("INT16", 40000)),
    ]
    for kind, value in outside:
        yield Case(f"{value} for {kind}", _text(kind, [value]), "INVALID_ARG", f"INPUT_{kind} {value}")
    only_json: list[tuple[str, Any]] = [
        *(("UINT8", -1), ("UINT32", 2**32), ("INT32", 2**31), ("UINT64", -1), ("UINT64", 2**64), ("INT64", 2**63)),
        *(("INT32", 1.5), ("BOOL", 2), ("BOOL", "true"), ("BOOL", 1), ("INT32", True), ("INT32", "1"), ("INT32", None)),
        *(("FP32", "1.5"), ("FP32", None), ("FP64", True), ("FP32", {}), ("BYTES", 1), ("BYTES", None), ("BYTES", [])),
        *(("INT8", 2**70), ("FP32", 10**400), ("INT32", 1e10)),
    ]
    for kind, value in only_json:
        yield Case(
            f"{str(value)[:30]!r} of {type(value).__name__} for {kind}",
            _text(kind, [value]),
            "INVALID_ARG",
            f"INPUT_{kind}",
            only="http",
            because=JSON_ONLY,
        )
    for kind in ("FP16", "BF16"):
        yield Case(f"{kind} as text", _text(kind, [0.5]), "INVALID_ARG", f"INPUT_{kind} {kind}")
        yield Case(
            f"{kind} asked for as text",
            Infer(
                "identity",
                [Tensor(f"INPUT_{kind}", kind, (2,), bytes(4))],
                [Output(f"OUTPUT_{kind}", binary=False)],
                wire=True,
            ),
            "INVALID_ARG",
            f"OUTPUT_{kind} binary",
            only="http",
            because="over gRPC outputs are always binary",
        )
    for count in (0, 1, 3):
        yield Case(
            f"2 elements announced, {count} as text",
            _text("FP32", [0.5] * count, 2),
            "INVALID_ARG",
            f"INPUT_FP32 2 {count or '0|none'}",
        )
    yield Case("strings announced, one too few as text", _text("BYTES", ["a"], 2), "INVALID_ARG", "INPUT_BYTES 2 1")


def _text(kind: str, data: list[Any], count: int = 1) -> Infer:
    return Infer("identity", [Tensor(f"INPUT_{kind}", kind, (count,), data, text=True)], wire=True)


def _contents() -> Iterator[Case]:
    """Raw and typed contents of gRPC, mixed up."""

    def sends(change: Callable[[Any], None], *, text: bool = False) -> Callable[[Any], Any]:
        def send(ask: Any) -> Any:
            inputs = [Tensor(one.name, "INT32", (2, 16), one.data, text) for one in PAIR]
            message = grpc_message(Infer("simple", inputs, wire=True))
            change(message)
            return ask.infer_message(message)

        return send

    def type_one(message: Any, index: int) -> None:
        message.inputs[index].contents.int_contents.extend([1] * 32)

    def drop_raw(message: Any, count: int) -> None:
        del message.raw_input_contents[count:]

    why = {"only": "grpc", "because": "HTTP has no two places for the elements of an input"}
    yield Case(
        "raw and typed on the same input", sends(lambda m: type_one(m, 0)), "INVALID_ARG", "INPUT0 contents", **why
    )

    def one_of_each(message: Any) -> None:
        drop_raw(message, 1)
        type_one(message, 1)

    yield Case("raw for one input, typed for the other", sends(one_of_each), "INVALID_ARG", "INPUT1 contents", **why)
    yield Case(
        "one raw entry for two inputs",
        sends(lambda m: drop_raw(m, 1)),
        "INVALID_ARG",
        "INPUT1 raw_input_contents",
        **why,
    )
    yield Case(
        "three raw entries for two inputs",
        sends(lambda m: m.raw_input_contents.append(b"x")),
        "INVALID_ARG",
        "raw_input_contents 3 2 INPUT0",
        **why,
    )
    yield Case("no contents for two inputs", sends(lambda m: drop_raw(m, 0)), "INVALID_ARG", "INPUT0 data", **why)
    yield Case(
        "typed contents of another datatype",
        sends(
            lambda m: (
                m.inputs[0].contents.ClearField("int_contents"),
                m.inputs[0].contents.fp32_contents.extend([1.0] * 32),
            ),
            text=True,
        ),
        "INVALID_ARG",
        "INPUT0 INT32 fp32_contents|int_contents",
        **why,
    )
    yield Case(
        "two typed fields of one input",
        sends(lambda m: m.inputs[1].contents.fp32_contents.append(1.0), text=True),
        "INVALID_ARG",
        "INPUT1 contents",
        **why,
    )
    yield Case(
        "typed contents that are empty",
        sends(lambda m: m.inputs[1].contents.ClearField("int_contents"), text=True),
        "INVALID_ARG",
        "INPUT1 32",
        **why,
    )
    yield Case(
        "typed contents without elements for no elements",
        lambda ask: ask.infer(Infer("identity", [Tensor("INPUT_INT64", "INT64", (0,), [], text=True)], wire=True)),
        check=lambda answer: equal(answer.shapes, {"OUTPUT_INT64": (0,)}),
    )
    yield Case(
        "fp32_contents for INT64",
        Infer(
            "identity", [Tensor("INPUT_INT64", "INT64", (1,), [1.0], text=True, contents="fp32_contents")], wire=True
        ),
        "INVALID_ARG",
        "INPUT_INT64 INT64",
        **why,
    )


CASES = [
    *_shapes(),
    *_sizes(),
    *_strings(),
    *_datatypes(),
    *_names(),
    *_values(),
    *_contents(),
    Case(
        "a text that is no UTF-8 as id",
        lambda ask: ask.infer_bytes("simple", b'{"id":"\xff","inputs":[]}'),
        "INVALID_ARG",
        "JSON|UTF",
        only="http",
        because="a gRPC library refuses to build it",
    ),
]
