"""Every fault of pitfalls.py has tests that exist; and those tests that have no other place."""

from __future__ import annotations

import ast
import contextlib
import functools
import gzip
import importlib
import pkgutil
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance import table
from conformance.pitfall import Pitfall
from conformance.pitfalls import PITFALLS
from conformance.table import health
from conformance.table.asking import GOOD, asking
from conformance.table.cases import HTTP_STATUS, Refused, kind
from conformance.table.tensors import Infer, Tensor, grpc_message
from harness import RunningServer, running
from repositories import add_identity, add_sample

TESTS = Path(__file__).resolve().parent.parent
DOORS = ("http", "grpc")


@functools.cache
def rows() -> list[str]:
    """Names of the table's cases: of every list of them in every module of the package."""
    modules = [
        importlib.import_module(f"{table.__name__}.{found.name}") for found in pkgutil.iter_modules(table.__path__)
    ]
    return [
        case.name
        for module in modules
        for name in vars(module)
        if name.endswith("CASES")
        for case in vars(module)[name]
    ]


@functools.cache
def functions(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.mark.parametrize("fault", PITFALLS, ids=[fault.told for fault in PITFALLS])
def test_every_test_that_a_pitfall_names_is_there(fault: Pitfall) -> None:
    for point, tests in fault.points.items():
        for test in tests:
            assert exists(test), f"{point}: there is no {test}"


def exists(test: str) -> bool:
    if test.startswith("table:"):
        return any(name.startswith(test.removeprefix("table:")) for name in rows())
    path, _, name = test.partition("::")
    return (TESTS / path).is_file() and (not name or name in functions(TESTS / path))


def test_no_point_is_without_a_test() -> None:
    assert all(tests for fault in PITFALLS for tests in fault.points.values())
    assert len({fault.told for fault in PITFALLS}) == len(PITFALLS)


# --- a load that is held ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def half_loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server one of whose models loads for ever."""
    folder = tmp_path_factory.mktemp("models")
    add_sample(folder, "simple")
    add_identity(folder, "held", hang_load="true")
    with running(folder, ready=False) as started:
        started.wait_status("/v2/models/simple/ready", 200)
        yield started


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("reader", [*health.READERS, "stream"])
def test_a_model_that_loads_is_unavailable_whether_asked_for_readiness_or_not(
    half_loaded: RunningServer, door: str, reader: str
) -> None:
    request = Infer("held", GOOD.inputs)
    with asking(half_loaded, door) as ask:
        if reader == "stream":
            with pytest.raises(Refused) as refused:
                ask.post("/v2/models/held/generate_stream", b"{}") if door == "http" else ask.stream_messages(
                    [grpc_message(request)], [("triton_grpc_error", "true")]
                )
        elif (reader, door) == ("ready", "grpc"):
            assert ask.model_ready("held") is False
            return
        elif reader == "statistics":
            with contextlib.suppress(Refused):  # there may be none yet; what is told is never that it is unknown
                health.READERS[reader]("held", "")(ask)
            return
        else:
            with pytest.raises(Refused) as refused:
                health.READERS[reader]("held", "")(ask)
        assert refused.value.status == (HTTP_STATUS["UNAVAILABLE"] if kind(door) == "http" else "UNAVAILABLE")
        assert "held" in refused.value.text
        np.testing.assert_array_equal(ask.infer(GOOD).arrays["OUTPUT0"], GOOD.inputs[0].data * 2)


# --- names of memory --------------------------------------------------------------------------------------------------


def test_failures_tell_no_name_of_memory_and_the_server_has_none(tmp_path: Path) -> None:
    """Whatever goes wrong inside, no sentence names a segment, a file of the system or an address; there are none."""
    add_identity(tmp_path, "m", dims="-1", max_batch_size=0)
    add_sample(tmp_path, "simple")
    before = {path.name for path in Path("/dev/shm").iterdir()}
    with running(tmp_path, "--arena-byte-size=4194304") as server:
        large = Tensor("INPUT0", "FP32", (4 << 20,), np.zeros(4 << 20, np.float32))
        small = Tensor("INPUT0", "FP32", (1,), np.zeros(1, np.float32))
        faults = ("wrong_dtype", "wrong_shape", "missing_output", "extra_output", "nonsense_frame", "crash")
        requests = [Infer("m", [large]), *[Infer("m", [small], parameters={fault: True}) for fault in faults]]
        for door in DOORS:
            with asking(server, door) as ask:
                for request in requests:
                    text = refusal(ask, request)
                    for word in ("/dev/shm", "memfd", "/proc", "/tmp", "shm_", "0x", ".py", str(tmp_path)):
                        assert word not in text, text
        ours = {path.name for path in Path("/dev/shm").iterdir()} - before
        assert not {name for name in ours if "headrace" in name}, ours
        with asking(server, "http") as ask:
            np.testing.assert_array_equal(ask.infer(GOOD).arrays["OUTPUT0"], GOOD.inputs[0].data * 2)


def refusal(ask: Any, request: Infer) -> str:
    with pytest.raises(Refused) as refused:
        ask.infer(request)
    return refused.value.text


# --- messages by hand -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["pygrpc-native", "grpcio"])
def plain(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    add_sample(folder, "simple")
    with running(folder, f"--grpc-transport={request.param}") as started:
        yield started


GOOD_MESSAGE = grpc_message(GOOD).SerializeToString()
BROKEN = {
    "cut short": gzip.compress(GOOD_MESSAGE)[:-9],
    "with more behind": gzip.compress(GOOD_MESSAGE) + b"more",
    "with a wrong sum": gzip.compress(GOOD_MESSAGE)[:-8] + bytes(8),
    "that is none": GOOD_MESSAGE,
    "of nothing": b"",
    "in two members": gzip.compress(GOOD_MESSAGE[:20]) + gzip.compress(GOOD_MESSAGE[20:]),
}


@pytest.mark.parametrize("rpc", ["ModelInfer", "ModelStreamInfer"])
@pytest.mark.parametrize("what", BROKEN)
def test_a_compressed_message_that_is_broken_hurts_nobody(plain: RunningServer, rpc: str, what: str) -> None:
    answered = is_answered(plain, rpc, BROKEN[what])
    assert not answered or what == "with more behind", "what lies behind the end of its gzip a transport may overlook"
    with asking(plain, "grpc") as ask:
        ask.still_well()


@pytest.mark.parametrize("rpc", ["ModelInfer", "ModelStreamInfer"])
def test_a_compressed_message_that_is_well_is_answered(plain: RunningServer, rpc: str) -> None:
    assert is_answered(plain, rpc, gzip.compress(GOOD_MESSAGE))


def is_answered(server: RunningServer, rpc: str, data: bytes) -> bool:
    """Send one message that says it is compressed with gzip; return whether a message with outputs came back."""
    came = b""
    host, port = server.grpc.rsplit(":", 1)
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/inference.GRPCInferenceService/{rpc}",
        ":authority": "x",
        "content-type": "application/grpc",
        "te": "trailers",
        "grpc-encoding": "gzip",
    }
    block = b"".join(b"\x10" + _text(name) + _text(value) for name, value in headers.items())
    body = b"\x01" + struct.pack(">I", len(data)) + data
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b""))
        connection.sendall(_frame(1, 4, 1, block) + _frame(0, 1, 1, body))
        stream = connection.makefile("rb")
        while head := stream.read(9):
            size, type_, flags = int.from_bytes(head[:3]), head[3], head[4]
            payload = stream.read(size)
            came += payload if type_ == 0 else b""
            if type_ in (3, 7) or (type_ == 1 and flags & 1):
                break
    return b"OUTPUT0" in came


def _frame(type_: int, flags: int, number: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes([type_, flags]) + number.to_bytes(4) + payload


def _text(text: str) -> bytes:
    assert len(text) < 127
    return bytes([len(text)]) + text.encode()
