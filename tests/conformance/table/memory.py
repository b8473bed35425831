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

from conformance.table.cases import Case, each, gives
from conformance.table.tensors import Infer, Region, Tensor

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


def _registrations() -> Iterator[Case]:
    told = {"name": "r", "key": KEY, "offset": 100, "byte_size": 8}
    yield Case("register and see", within(status, 8, 100), check=gives({"r": told}))
    yield Case("register and see by name", within(lambda ask: status(ask, "r"), 8, 100), check=gives({"r": told}))
    yield Case("status where nothing is registered", status, check=gives({}))
    yield Case("CUDA status where nothing is registered", lambda ask: status(ask, kind="cuda"), check=gives({}))
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
        check=gives({}),
    )
    yield Case(
        "unregister all of the other kind",
        within(lambda ask: (ask.stock(lambda client: client.unregister_cuda_shared_memory()), list(status(ask)))[-1]),
        check=gives(["r"]),
    )
    yield Case("a key with a slash in front", within(status, key="/" + KEY))
    yield Case("a whole page in the middle", within(status, 4096, 4096))
    yield Case("the last byte", within(status, 1, SIZE - 1))
    yield Case(
        "a region with an odd name",
        lambda ask: (register("é 🙂%2f")(ask), list(status(ask)), unregister()(ask))[1],
        check=gives(["é 🙂%2f"]),
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


CASES = [*_registrations(), *_keys(), *_cuda()]
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
    Case("status where shared memory is off", status, check=gives({})),
    Case(
        "an input in a region where shared memory is off",
        Infer("identity", [Tensor("INPUT_INT32", "INT32", (2,), region=Region("r", 8))]),
        "NOT_FOUND",
        "region 'r' --allow-client-shm",
    ),
]
"""For a server with nothing but the defaults."""
