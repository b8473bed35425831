"""Rows of the table: tensors of every datatype and shape, in each form that the protocol has, come back as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from conformance.table.cases import Case
from conformance.table.models import DATATYPES
from conformance.table.tensors import Answer, Infer, Output, Tensor

VALUES: dict[str, np.ndarray] = {
    "BOOL": np.array([True, False]),
    **{f"UINT{bits}": np.array([0, 2**bits - 1, 1], f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": np.array([-(2 ** (bits - 1)), 2 ** (bits - 1) - 1, 0], f"int{bits}") for bits in (8, 16, 32)},
    "INT64": np.array([-(2**63), 2**63 - 1, 2**53 + 1], np.int64),
    "FP16": np.array([0.5, -65504.0, np.inf], np.float16),
    "FP32": np.array([1.5, -0.0, np.inf, -np.inf, np.nan, 1e-45], np.float32),
    "FP64": np.array([1e300, -5e-324, np.nan, 0.1], np.float64),
    "BYTES": np.array(["안녕 🙂".encode(), b"", b'"\\\x00\n', b"x" * 300], object),
    "BF16": np.array([0.5, -2.0, np.inf], ml_dtypes.bfloat16),
}
NO_TEXT = ("FP16", "BF16")
SHAPES: dict[str, Sequence[tuple[int, ...]]] = {
    "identity": [(0,), (1,), (7,)],
    "plane": [(1, 1), (2, 3), (2, 0), (0, 3), (0, 0)],
    "rows": [(1, 1), (1, 5), (8, 2), (2, 0)],
    "scalar": [(), (1,)],
}
"""By model: without batches rank 1 and rank 2, with batches rank 1, and rank 0."""


def filled(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array of this datatype whose elements are its odd ones, over and over."""
    count = int(np.prod(shape))
    return np.resize(VALUES[kind], count).reshape(shape) if count else np.empty(shape, VALUES[kind].dtype)


def same(kind: str, sent: np.ndarray) -> Callable[[Answer], None]:
    """Return the check that the one output holds what was sent."""

    def check(answer: Answer) -> None:
        name = f"OUTPUT_{kind}"
        assert answer.order == [name]
        assert answer.datatypes[name] == kind
        assert answer.shapes[name] == (sent.shape or (1,))  # configured as dims: [ 1 ]
        if name in answer.arrays:
            np.testing.assert_array_equal(answer.arrays[name].reshape(sent.shape), sent)
        else:
            assert not sent.size

    return check


def _round_trips() -> Iterator[Case]:
    for kind in DATATYPES:
        for model, shapes in SHAPES.items():
            for shape in shapes:
                sent = filled(kind, shape)
                for text in (False, True):
                    if text and kind in NO_TEXT:
                        continue
                    tensor = Tensor(f"INPUT_{kind}", kind, shape, sent, text)
                    outputs = [Output(f"OUTPUT_{kind}", binary=not text)]
                    form = "text" if text else "binary"
                    name = f"{kind} {form} {model} {list(shape)}"
                    # The stock client makes its arrays itself, and has no scalars.
                    if text and not shape:
                        tensor = Tensor(f"INPUT_{kind}", kind, (), sent.reshape(1), text)
                    yield Case(name, Infer(model, [tensor], outputs, wire=not shape), check=same(kind, sent))


def _mixed_forms() -> Iterator[Case]:
    """JSON in and binary out, and the other way round; what is not listed comes as the request says."""
    sent = filled("INT32", (4,))
    for text in (False, True):
        tensor = Tensor("INPUT_INT32", "INT32", (4,), sent, text)
        for binary in (False, True):
            for listed in (False, True):
                name = f"INT32 {'text' if text else 'binary'} in, {'binary' if binary else 'text'} out"
                yield Case(
                    f"{name}{', listed' if listed else ''}",
                    Infer(
                        "identity",
                        [tensor],
                        [Output("OUTPUT_INT32", binary)] if listed else None,
                        parameters={} if listed else {"binary_data_output": binary},
                        wire=True,
                    )
                    if listed
                    else _by_default(tensor, binary),
                    check=same("INT32", sent),
                )


def _by_default(tensor: Tensor, binary: bool) -> Callable[[Any], Any]:
    """Return the sending of a request that lists no output, with the form where HTTP has one."""

    def send(ask: Any) -> Any:
        parameters = {"binary_data_output": binary} if ask.door == "http" else {}
        return ask.infer(Infer("identity", [tensor], parameters=parameters, wire=True))

    return send


PAIR = [Tensor(f"INPUT{i}", "INT32", (2, 16), np.arange(32, dtype=np.int32).reshape(2, 16) * (i + 1)) for i in (0, 1)]


def _gives(**wanted: int) -> Callable[[Answer], None]:
    """Return the check that these outputs come, each the multiple of what was sent."""

    def check(answer: Answer) -> None:
        assert sorted(answer.arrays) == sorted(wanted)
        for name, factor in wanted.items():
            np.testing.assert_array_equal(answer.arrays[name], PAIR[0].data * factor)
        assert (answer.model, answer.version) == ("simple", "1")

    return check


def _is(attribute: str, wanted: object) -> Callable[[Answer], None]:
    def check(answer: Answer) -> None:
        assert getattr(answer, attribute) == wanted

    return check


CHOICES = [
    Case("all outputs where none is asked for", Infer("simple", PAIR), check=_gives(OUTPUT0=3, OUTPUT1=-1)),
    Case(
        "an empty list of outputs means all", Infer("simple", PAIR, [], wire=True), check=_gives(OUTPUT0=3, OUTPUT1=-1)
    ),
    Case("one of two outputs", Infer("simple", PAIR, [Output("OUTPUT1")]), check=_gives(OUTPUT1=-1)),
    Case("inputs in another order", Infer("simple", PAIR[::-1]), check=_gives(OUTPUT0=3, OUTPUT1=-1)),
    Case(
        "outputs in the model's order",
        Infer("simple", PAIR, [Output("OUTPUT1"), Output("OUTPUT0")]),
        check=_is("order", ["OUTPUT0", "OUTPUT1"]),
    ),
    Case(
        "one output binary, the other text",
        Infer("simple", PAIR, [Output("OUTPUT0"), Output("OUTPUT1", binary=False)]),
        check=_gives(OUTPUT0=3, OUTPUT1=-1),
    ),
    Case(
        "one input binary, the other text",
        lambda ask: ask.infer(
            Infer("simple", [PAIR[0], Tensor("INPUT1", "INT32", (2, 16), PAIR[1].data, text=ask.door == "http")])
        ),
        check=_gives(OUTPUT0=3, OUTPUT1=-1),
    ),
    Case("the largest batch", Infer("rows", [Tensor("INPUT_FP32", "FP32", (8, 1), filled("FP32", (8, 1)))])),
    Case("no id, none in the answer", Infer("simple", PAIR), check=_is("id", None)),
    Case("an id comes back", Infer("simple", PAIR, id="é-1 🙂"), check=_is("id", "é-1 🙂")),
    Case("an id of 10000 characters comes back", Infer("simple", PAIR, id="i" * 10000), check=_is("id", "i" * 10000)),
    Case("no parameters, none in the answer", Infer("simple", PAIR), check=_is("parameters", {})),
    Case(
        "the highest version serves",
        Infer("versions", _four := [Tensor("INPUT0", "FP32", (4,), filled("FP32", (4,)))]),
        check=_is("version", "3"),
    ),
    Case("the version that is named serves", Infer("versions", _four, version="1"), check=_is("version", "1")),
    Case(
        "every datatype in one request",
        Infer("identity", [Tensor(f"INPUT_{kind}", kind, (2,), filled(kind, (2,))) for kind in DATATYPES]),
        check=_is("order", [f"OUTPUT_{kind}" for kind in DATATYPES]),
    ),
    Case(
        "a megabyte",
        Infer("identity", [big := Tensor("INPUT_INT64", "INT64", (131072,), np.arange(131072))]),
        check=same("INT64", big.data),
    ),
]

CASES = [*_round_trips(), *_mixed_forms(), *CHOICES]
