"""Rows of the table: clients' shared memory, registered and used, and every misuse of names, keys, offsets and sizes."""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc.service_pb2 as pb

from conformance.table.cases import Case, Differs, Refused, each
from conformance.table.tensors import Answer, Infer, Output, Region, Tensor, Typed, grpc_message

FOLDER = Path("/dev/shm")
SIZE = 8192
PREFIX = f"conformance-{os.getpid()}-"
KEY = PREFIX + "object"
CONTENT = np.arange(SIZE // 4, dtype=np.int32)
UNSIGNED = {"only": "http", "because": "the message of gRPC has an unsigned field for it"}
JSON_ONLY = {"only": "http", "because": "the message of gRPC has a type for it"}


@contextlib.contextmanager
def planted() -> Iterator[None]:
    """For the length of a block there are the objects that the rows name, good and bad."""
    (FOLDER / KEY).write_bytes(CONTENT.tobytes())
    (FOLDER / f"{PREFIX}link").symlink_to(FOLDER / KEY)
    (FOLDER / f"{PREFIX}passwd").symlink_to("/etc/passwd")
    (FOLDER / f"{PREFIX}folder").mkdir()
    os.mkfifo(FOLDER / f"{PREFIX}fifo")
    (FOLDER / f"headrace-{PREFIX}").write_bytes(bytes(SIZE))
    try:
        yield
    finally:
        (FOLDER / f"headrace-{PREFIX}").unlink()
        (FOLDER / f"{PREFIX}folder").rmdir()
        for left in FOLDER.glob(f"{PREFIX}*"):
            left.unlink()


def register(name: str, key: str = KEY, nbytes: int = SIZE, offset: int = 0) -> Callable[[Any], Any]:
    """Return the sending of a registration by the stock client."""
    return lambda ask: ask.stock(lambda client: client.register_system_shared_memory(name, key, nbytes, offset=offset))


def unregister(name: str = "") -> Callable[[Any], Any]:
    return lambda ask: ask.stock(lambda client: client.unregister_system_shared_memory(name))


def status(ask: Any, name: str = "", kind: str = "system") -> dict[str, Any]:
    """Return the status as it is told, by name of region."""
    if ask.door == "http":
        told = ask.stock(lambda client: getattr(client, f"get_{kind}_shared_memory_status")(name))
        return {one["name"]: one for one in told}
    told = ask.stock(lambda client: getattr(client, f"get_{kind}_shared_memory_status")(name))
    return {
        key: {field.name: getattr(one, field.name) for field in one.DESCRIPTOR.fields}
        for key, one in told.regions.items()
    }


def within(send: Callable[[Any], Any], nbytes: int = SIZE, offset: int = 0, key: str = KEY) -> Callable[[Any], Any]:
    """Return the sending of something while the region `r` is registered."""

    def sent(ask: Any) -> Any:
        register("r", key, nbytes, offset)(ask)
        try:
            return send(ask)
        finally:
            unregister("r")(ask)

    return sent


def wire_register(**fields: Any) -> Callable[[Any], Any]:
    """Return the sending of a registration whose fields are as given; `name` is the path's."""

    def over_http(ask: Any) -> Any:
        body = {key: value for key, value in fields.items() if key != "name"}
        return ask.post(f"/v2/systemsharedmemory/region/{fields.get('name', 'r')}/register", body)

    return each(
        over_http,
        lambda ask: ask.call(
            "SystemSharedMemoryRegister", pb.SystemSharedMemoryRegisterRequest(**({"name": "r"} | fields))
        ),
    )


def _is(wanted: Any) -> Callable[[Any], None]:
    def check(answer: Any) -> None:
        assert answer == wanted

    return check


def _registrations() -> Iterator[Case]:
    told = {"name": "r", "key": KEY, "offset": 100, "byte_size": 8}
    yield Case("register and see", within(status, 8, 100), check=_is({"r": told}))
    yield Case("register and see by name", within(lambda ask: status(ask, "r"), 8, 100), check=_is({"r": told}))
    yield Case("status where nothing is registered", status, check=_is({}))
    yield Case("CUDA status where nothing is registered", lambda ask: status(ask, kind="cuda"), check=_is({}))
    yield Case("status of an unknown region", lambda ask: status(ask, "nobody"), "NOT_FOUND", "nobody")
    yield Case("CUDA status of an unknown region", lambda ask: status(ask, "nobody", "cuda"), "NOT_FOUND", "nobody")
    yield Case(
        "CUDA status of a system region", within(lambda ask: status(ask, "r", "cuda")), "NOT_FOUND", "r system CUDA"
    )
    yield Case("register twice", within(register("r")), "ALREADY_EXISTS", "r registered")
    yield Case("unregister an unknown region", unregister("nobody"))
    yield Case(
        "unregister all",
        lambda ask: (register("a")(ask), register("b")(ask), unregister()(ask), status(ask))[-1],
        check=_is({}),
    )
    yield Case(
        "unregister all of the other kind",
        within(lambda ask: (ask.stock(lambda client: client.unregister_cuda_shared_memory()), list(status(ask)))[-1]),
        check=_is(["r"]),
    )
    yield Case("a key with a slash in front", within(status, key="/" + KEY))
    yield Case("a whole page in the middle", within(status, 4096, 4096))
    yield Case("the last byte", within(status, 1, SIZE - 1))
    yield Case(
        "a region with an odd name",
        lambda ask: (register("é 🙂%2f")(ask), list(status(ask)), unregister()(ask))[1],
        check=_is(["é 🙂%2f"]),
    )
    for nbytes, offset in [
        (SIZE + 1, 0),
        (SIZE, 4096),
        (1, SIZE),
        (1, 2**64 - 1),
        (1, 2**63),
        (2**64 - 1, 0),
        (2**63, 2**63),
        (2**64 - 4096, 4096),
        (0, 0),
        (0, 4096),
    ]:
        yield Case(f"register {nbytes} bytes at {offset}", register("r", KEY, nbytes, offset), "INVALID_ARG", "r")
    for field, value in [
        ("byte_size", -1),
        ("byte_size", 2**64),
        ("byte_size", 1.5),
        ("byte_size", "8"),
        ("byte_size", None),
        ("byte_size", True),
        ("offset", -1),
        ("offset", 2**64),
        ("offset", "0"),
        ("offset", 0.5),
        ("key", 5),
        ("key", None),
        ("key", []),
    ]:
        fields = {"key": KEY, "byte_size": 8, "offset": 0} | {field: value}
        yield Case(f"register with {field} {value!r}", wire_register(**fields), "INVALID_ARG", field, **UNSIGNED)
    yield Case("register without a key", wire_register(byte_size=8), "INVALID_ARG", "key")
    yield Case("register without a size", wire_register(key=KEY), "INVALID_ARG", "size")
    yield Case(
        "register without anything",
        lambda ask: ask.post("/v2/systemsharedmemory/region/r/register"),
        "INVALID_ARG",
        **JSON_ONLY,
    )
    for body in (b"x", [], b"null", {"key": KEY, "byte_size": 8, "nope": 1}):
        if isinstance(body, dict):
            continue
        yield Case(
            f"register with the body {body!r}",
            lambda ask, body=body: ask.post("/v2/systemsharedmemory/region/r/register", body),
            "INVALID_ARG",
            **JSON_ONLY,
        )
    yield Case(
        "register without a name",
        each(
            lambda ask: ask.post("/v2/systemsharedmemory/register", {"key": KEY, "byte_size": 8}),
            register(""),
        ),
        "INVALID_ARG",
        "name",
    )
    yield Case("a name of 300 characters", register("n" * 300), "INVALID_ARG", "name")


def _keys() -> Iterator[Case]:
    """Keys that name no memory of a client's."""
    keys = {
        "that is empty": "",
        "of one slash": "/",
        "of slashes": "////",
        "of a dot": ".",
        "of two dots": "..",
        "that leads out": "/../../etc/passwd",
        "that leads out without a slash": "../../etc/passwd",
        "with a path": "a/b",
        "of 300 characters": "k" * 300,
        "with a NUL": f"{KEY}\0x",
        "with a line end": f"{KEY}\n",
        "of a semaphore": "sem.x",
        "of Triton's Python backend": "triton_python_backend_shm_region_1",
        "of our own prefix": f"headrace-{PREFIX}",
        "of a link to memory": f"{PREFIX}link",
        "of a link to a file": f"{PREFIX}passwd",
        "of a folder": f"{PREFIX}folder",
        "of a pipe": f"{PREFIX}fifo",
        "that is not there": f"{PREFIX}nobody",
    }
    for name, key in keys.items():
        yield Case(f"a key {name}", register("r", key, 8), "INVALID_ARG", "r")


def _cuda() -> Iterator[Case]:
    handle = bytes(64)

    def cuda(handle: bytes, device: int = 0, nbytes: int = 8, name: str = "c") -> Callable[[Any], Any]:
        return each(
            lambda ask: ask.stock(
                lambda client: client.register_cuda_shared_memory(name, _base64(handle), device, nbytes)
            ),
            lambda ask: ask.stock(
                lambda client: client.register_cuda_shared_memory(name, _base64(handle), device, nbytes)
            ),
        )

    for size in (0, 63, 65, 100_000):
        yield Case(f"a CUDA handle of {size} bytes", cuda(bytes(size)), "INVALID_ARG", "64")
    yield Case("a CUDA region of no bytes", cuda(handle, nbytes=0), "INVALID_ARG", "c")
    yield Case("a CUDA region on a device that is not there", cuda(handle, device=99), "INVALID_ARG", "c")
    path = "/v2/cudasharedmemory/region/c/register"
    good = {"raw_handle": {"b64": _base64(handle).decode()}, "device_id": 0, "byte_size": 8}
    changes: list[tuple[str, Any]] = [
        *[("raw_handle", value) for value in ("x", None, {}, {"b64": 5}, {"b64": "!"}, [])],
        *[("device_id", value) for value in (-1, "0", 1.5, 2**63)],
        *[("byte_size", value) for value in (-1, "8", 2**64)],
    ]
    for field, value in changes:
        yield Case(
            f"register CUDA with {field} {value!r}",
            lambda ask, body=good | {field: value}: ask.post(path, body),
            "INVALID_ARG",
            "" if field == "device_id" else field,
            **JSON_ONLY,
        )
    for field in ("raw_handle", "byte_size"):
        body = {key: value for key, value in good.items() if key != field}
        yield Case(
            f"register CUDA without {field}",
            lambda ask, body=body: ask.post(path, body),
            "INVALID_ARG",
            field,
            **JSON_ONLY,
        )
    yield Case(
        "register CUDA without a name",
        each(lambda ask: ask.post("/v2/cudasharedmemory/register", good), cuda(handle, name="")),
        "INVALID_ARG",
        "name",
    )
    yield Case(
        "unregister an unknown CUDA region",
        lambda ask: ask.stock(lambda client: client.unregister_cuda_shared_memory("nobody")),
    )


def _base64(data: bytes) -> bytes:
    return base64.b64encode(data)


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
        check=lambda answer: _is({"OUTPUT_INT32": (0,)})(answer.shapes),
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
        check=lambda answer: _is([b"ab", b""])(answer.arrays["OUTPUT_BYTES"].tolist()),
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


CASES = [*_registrations(), *_keys(), *_cuda(), *_inputs(), *_mixed(), *_outputs()]
CLOSED_CASES = [
    Case("register where shared memory is off", register("r"), "UNSUPPORTED", "--allow-client-shm"),
    Case("unregister where shared memory is off", unregister("r"), "UNSUPPORTED", "--allow-client-shm"),
    Case("unregister all where shared memory is off", unregister(), "UNSUPPORTED", "--allow-client-shm"),
    Case(
        "register CUDA where shared memory is off",
        lambda ask: ask.stock(lambda client: client.register_cuda_shared_memory("c", _base64(bytes(64)), 0, 8)),
        "UNSUPPORTED",
        "--allow-client-shm",
    ),
    Case("status where shared memory is off", status, check=_is({})),
    Case(
        "an input in a region where shared memory is off",
        ask_ints(ints()),
        "NOT_FOUND",
        "region 'r' --allow-client-shm",
    ),
]
"""For a server with nothing but the defaults."""
