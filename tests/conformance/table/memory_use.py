"""Rows of the table: tensors that lie in a client's shared memory, or are to be written there, and every misuse."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from conformance.table.cases import Case, Differs, Refused, gives
from conformance.table.memory import CONTENT, FOLDER, PREFIX, SIZE, register, status, unregister, within
from conformance.table.tensors import Answer, Infer, Output, Region, Tensor, Typed, grpc_message


def ints(nbytes: Any = 8, offset: Any = 0, region: Any = "r", shape: tuple[int, ...] = (2,)) -> Tensor:
    """Return INT32 in a region, sent to the sample model `identity`."""
    return Tensor("INPUT_INT32", "INT32", shape, region=Region(region, nbytes, offset))


def ask_ints(one: Tensor, outputs: list[Output] | None = None, *, wire: bool = False) -> Infer:
    return Infer("identity", [one], outputs, wire=wire)


def _gives(*wanted: int) -> Callable[[Answer], None]:
    def check(answer: Answer) -> None:
        assert answer.arrays["OUTPUT_INT32"].tolist() == list(wanted)

    return check


def _inputs() -> Iterator[Case]:
    yield Case("an input in a region", within(ask_ints(ints())), check=_gives(0, 1))
    yield Case("an input in the middle of a region", within(ask_ints(ints(offset=400))), check=_gives(100, 101))
    yield Case("a region's own offset counts once", within(ask_ints(ints()), 4096, 4096), check=_gives(1024, 1025))
    yield Case("both offsets count once each", within(ask_ints(ints(offset=400)), 4096, 4096), check=_gives(1124, 1125))
    yield Case("the end of a region", within(ask_ints(ints(offset=4088)), 4096, 4096), check=_gives(2046, 2047))
    yield Case("a region at an odd offset", within(ask_ints(ints()), 8, 101), check=lambda answer: _odd(answer, 101))
    yield Case("an odd offset in a region", within(ask_ints(ints(offset=3))), check=lambda answer: _odd(answer, 3))
    yield Case(
        "no bytes of a region",
        within(Infer("identity", [Tensor("INPUT_INT32", "INT32", (0,), region=Region("r", 0))], wire=True)),
        check=lambda answer: gives({"OUTPUT_INT32": (0,)})(answer.shapes),
    )
    outside = [
        (8, SIZE),
        (8, SIZE - 4),
        (SIZE + 4, 0),
        (8, 2**63),
        (8, 2**64 - 4),
        (2**63, 0),
        (2**64 - 8, 8),
        (2**63, 2**63),
    ]
    for nbytes, offset in outside:
        message_ok = nbytes < 2**63 and offset < 2**63
        over = {} if message_ok else {"only": "http", "because": "int64_param has no place for it"}
        yield Case(
            f"{nbytes} bytes at {offset} of a region",
            within(ask_ints(ints(nbytes, offset), wire=True)),
            "INVALID_ARG",
            "",
            **over,
        )
    yield Case("4092 + 8 of a region of 4096", within(ask_ints(ints(8, 4092)), 4096, 4096), "INVALID_ARG", "4092 8 r")
    yield Case("a region that is not registered", ask_ints(ints()), "NOT_FOUND", "region 'r'")
    yield Case(
        "a region that was unregistered",
        lambda ask: (within(status)(ask), ask.infer(ask_ints(ints())))[-1],
        "NOT_FOUND",
        "region 'r'",
    )
    for size in (4, 12, 0):
        yield Case(f"{size} bytes for 2 elements", within(ask_ints(ints(size))), "INVALID_ARG", f"INPUT_INT32 8 {size}")
    wrong: list[tuple[str, Any]] = [
        ("shared_memory_region", 5),
        ("shared_memory_region", True),
        ("shared_memory_byte_size", "8"),
        ("shared_memory_byte_size", True),
        ("shared_memory_byte_size", -8),
        ("shared_memory_offset", "0"),
        ("shared_memory_offset", -1),
        ("shared_memory_offset", 1.5),
    ]
    good = {"shared_memory_region": "r", "shared_memory_byte_size": 8}
    for key, value in wrong:
        one = Tensor("INPUT_INT32", "INT32", (2,), parameters=good | {key: value})
        yield Case(f"{key} {value!r}", within(ask_ints(one, wire=True)), "INVALID_ARG", f"INPUT_INT32 {key}")
    for missing in good:
        one = Tensor(
            "INPUT_INT32",
            "INT32",
            (2,),
            parameters={key: value for key, value in (good | {"shared_memory_offset": 4}).items() if key != missing},
        )
        yield Case(
            f"a tensor in shared memory without {missing}",
            within(ask_ints(one, wire=True)),
            "INVALID_ARG",
            "INPUT_INT32",
        )
    yield Case(
        "an empty name of a region",
        within(ask_ints(ints(region=""), wire=True)),
        "INVALID_ARG",
        "INPUT_INT32 region",
    )
    both = Tensor("INPUT_INT32", "INT32", (2,), [1, 2], text=True, parameters=good)
    yield Case("a region and elements", within(ask_ints(both, wire=True)), "INVALID_ARG", "INPUT_INT32")
    yield Case(
        "a region and a raw entry",
        within(lambda ask: ask.infer_message(_and_raw(b"12345678"))),
        "INVALID_ARG",
        "raw_input_contents",
        only="grpc",
        because="HTTP has binary_data_size for it",
    )
    yield Case(
        "a region and a binary size",
        within(ask_ints(Tensor("INPUT_INT32", "INT32", (2,), parameters=good | {"binary_data_size": 8}), wire=True)),
        "INVALID_ARG",
        "INPUT_INT32 binary_data_size",
        only="http",
        because="gRPC has raw entries for it",
    )


def _odd(answer: Answer, start: int) -> None:
    wanted = np.frombuffer(CONTENT.tobytes()[start : start + 8], np.int32)
    np.testing.assert_array_equal(answer.arrays["OUTPUT_INT32"], wanted)


def _and_raw(data: bytes) -> Any:
    message = grpc_message(ask_ints(ints()))
    message.raw_input_contents.append(data)
    return message


def _mixed() -> Iterator[Case]:
    first = np.arange(16, dtype=np.int32).reshape(1, 16)
    row = {name: Tensor(name, "INT32", (1, 16), first) for name in ("INPUT0", "INPUT1")}
    held = {name: Tensor(name, "INT32", (1, 16), region=Region("r", 64, 64)) for name in ("INPUT0", "INPUT1")}
    wanted = {"INPUT0": first + 16 + first, "INPUT1": first + first + 16}
    for name in row:
        inputs = [(held if other == name else row)[other] for other in row]
        yield Case(
            f"{name} in a region, the other sent",
            within(Infer("simple", inputs)),
            check=lambda answer, name=name: np.testing.assert_array_equal(answer.arrays["OUTPUT0"], wanted[name]),
        )
    yield Case(
        "both inputs in one region",
        within(Infer("simple", list(held.values()))),
        check=lambda answer: np.testing.assert_array_equal(answer.arrays["OUTPUT0"], 2 * (first + 16)),
    )
    text = b"\x02\0\0\0ab\0\0\0\0"
    yield Case(
        "strings in a region",
        _on_own(text, Infer("identity", [Tensor("INPUT_BYTES", "BYTES", (2,), region=Region("own", len(text)))])),
        check=lambda answer: gives([b"ab", b""])(answer.arrays["OUTPUT_BYTES"].tolist()),
    )
    yield Case(
        "strings in a region, one length beyond it",
        _on_own(b"\x09\0\0\0ab", Infer("identity", [Tensor("INPUT_BYTES", "BYTES", (1,), region=Region("own", 6))])),
        "INVALID_ARG",
        "INPUT_BYTES",
    )
    yield Case(
        "a region whose object became smaller",
        _on_own(
            bytes(SIZE),
            Infer("identity", [Tensor("INPUT_INT32", "INT32", (2048,), region=Region("own", SIZE))]),
            cut=100,
        ),
        "INVALID_ARG",
        "own",
    )
    yield Case(
        "a region whose object was removed is still there",
        _on_own(
            bytes(8), Infer("identity", [Tensor("INPUT_INT32", "INT32", (2,), region=Region("own", 8))]), remove=True
        ),
        check=_gives(0, 0),
    )


def _on_own(
    content: bytes, send: Callable[[Any], Any], *, cut: int | None = None, remove: bool = False
) -> Callable[[Any], Any]:
    """Return the sending of something while an object of this content is registered as `own`, whole."""

    def sent(ask: Any) -> Any:
        path = FOLDER / f"{PREFIX}own"
        path.write_bytes(content)
        try:
            register("own", path.name, len(content))(ask)
            if cut is not None:
                os.truncate(path, cut)
            if remove:
                path.unlink()
            return send(ask)
        finally:
            with contextlib.suppress(Refused):
                unregister("own")(ask)
            path.unlink(missing_ok=True)

    return sent


def _outputs() -> Iterator[Case]:
    def into(nbytes: Any, offset: Any = 0, count: int = 2, **more: Any) -> Infer:
        sent = Tensor("INPUT_INT32", "INT32", (count,), np.arange(5, 5 + count, dtype=np.int32))
        return Infer(
            "identity", [sent], [Output("OUTPUT_INT32", region=Region("own", nbytes, offset), **more)], wire=bool(more)
        )

    def written(send: Infer, start: int, wanted: list[int]) -> Case:
        def sent(ask: Any) -> Any:
            path = FOLDER / f"{PREFIX}own"
            seen: list[bytes] = []
            answer = _on_own(bytes(64), lambda ask: (ask.infer(send), seen.append(path.read_bytes()))[0])(ask)
            assert answer.arrays == {}, "no bytes in the answer"
            assert answer.shapes == {"OUTPUT_INT32": (len(wanted),)}
            data = np.array(wanted, np.int32).tobytes()
            assert seen[0] == bytes(start) + data + bytes(64 - start - len(data)), "nothing else is written"
            return answer

        return Case(f"an output of {len(wanted)} in {send.outputs[0].region.nbytes} bytes at {start} of a region", sent)

    yield written(into(8), 0, [5, 6])
    yield written(into(8, 16), 16, [5, 6])
    yield written(into(64), 0, [5, 6])
    yield written(into(12, 1, 3), 1, [5, 6, 7])
    for nbytes in (0, 4, 7):
        yield Case(
            f"{nbytes} bytes for an output of 8",
            _on_own(bytes(64), into(nbytes)),
            "INVALID_ARG",
            f"OUTPUT_INT32 8 {nbytes}",
        )
    for nbytes, offset in [(8, 64), (8, 60), (65, 0), (8, 2**62)]:
        yield Case(
            f"an output of {nbytes} bytes at {offset} of a region of 64",
            _on_own(bytes(64), into(nbytes, offset)),
            "INVALID_ARG",
            "OUTPUT_INT32 64",
        )
    yield Case("an output in a region that is not registered", into(8), "NOT_FOUND", "own")
    yield Case(
        "classes in a region", _on_own(bytes(64), into(64, classes=1)), "INVALID_ARG", "OUTPUT_INT32 classification"
    )
    yield Case(
        "a binary output in a region",
        _on_own(bytes(64), into(64, parameters={"binary_data": True})),
        "INVALID_ARG",
        "OUTPUT_INT32 binary_data",
        only="http",
        because="gRPC has no such parameter",
    )
    wrong: list[tuple[str, Any]] = [
        ("shared_memory_region", 5),
        ("shared_memory_byte_size", "8"),
        ("shared_memory_byte_size", -8),
        ("shared_memory_offset", -1),
        ("shared_memory_offset", True),
    ]
    for key, value in wrong:
        parameters = {"shared_memory_region": "own", "shared_memory_byte_size": 8, key: value}
        sent = Tensor("INPUT_INT32", "INT32", (2,), np.zeros(2, np.int32))
        request = Infer("identity", [sent], [Output("OUTPUT_INT32", binary=False, parameters=parameters)], wire=True)
        yield Case(f"an output with {key} {value!r}", _on_own(bytes(64), request), "INVALID_ARG", f"OUTPUT_INT32 {key}")
    yield Case(
        "a size as uint64",
        _on_own(
            bytes(64),
            Infer(
                "identity",
                [
                    Tensor(
                        "INPUT_INT32",
                        "INT32",
                        (2,),
                        parameters={"shared_memory_region": "own", "shared_memory_byte_size": Typed("uint64_param", 8)},
                    )
                ],
                wire=True,
            ),
        ),
        differs={
            "grpc": Differs(
                "the protocol has int64_param for it", code="INVALID_ARG", says="shared_memory_byte_size int64_param"
            )
        },
    )


CASES = [*_inputs(), *_mixed(), *_outputs()]
