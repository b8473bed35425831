"""A real server where it was told to listen: on Unix domain sockets, on IPv6; and with calls that take a secret."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from figures import wait_until
from harness import RunningServer, running

REPOSITORY = Path(__file__).parents[2] / "model_repository"
INTERFACES = Path("/proc/net/if_inet6")
needs_ipv6 = pytest.mark.skipif(
    not (INTERFACES.exists() and " lo" in INTERFACES.read_text()), reason="this machine has no IPv6 loopback"
)


def ask(family: int, address: object, path: str, body: bytes | None = None, *headers: str) -> tuple[int, bytes]:
    """Return status and body of one request over a connection of its own."""
    method = "GET" if body is None else "POST"
    length = [] if body is None else [f"Content-Length: {len(body)}"]
    lines = [f"{method} {path} HTTP/1.0", *headers, *length]
    with socket.socket(family) as client:
        client.settimeout(20)
        client.connect(address)
        client.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + (body or b""))
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    head, _, rest = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), rest


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "http.sock")


@pytest.fixture
def on_sockets(path: str, tmp_path: Path) -> Iterator[RunningServer]:
    flags = (
        f"--http-address=unix:{path}",
        f"--grpc-address=unix:{tmp_path}/grpc.sock",
        "--http-restricted-api=statistics:key=s",
    )
    with running(REPOSITORY, *flags, ready=False) as server:
        wait_until("the server is ready", lambda: ask(socket.AF_UNIX, path, "/v2/health/ready")[0] == 200, 60)
        yield server


def test_both_doors_serve_on_unix_sockets_and_remove_them_at_the_stop(on_sockets, path, tmp_path):
    body = json.dumps({"IN": [4, 2]}).encode()
    status, events = ask(socket.AF_UNIX, path, "/v2/models/repeat/generate_stream", body)
    assert status == 200
    assert [json.loads(event[6:])["OUT"] for event in events.split(b"\n\n")[:-1]] == [4, 2]
    with grpc.insecure_channel(f"unix:{tmp_path}/grpc.sock") as channel:
        live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
        assert live(b"", timeout=20) == b"\x08\x01"
    assert (Path(path).stat().st_mode & 0o777) == 0o660
    on_sockets.stop()
    assert not Path(path).exists()
    assert not (tmp_path / "grpc.sock").exists()


def test_a_restricted_kind_takes_the_secret(on_sockets, path):
    assert ask(socket.AF_UNIX, path, "/v2/models/stats")[0] == 403
    assert ask(socket.AF_UNIX, path, "/v2/models/stats", None, "Key: s")[0] == 200
    assert ask(socket.AF_UNIX, path, "/v2/models/repeat")[0] == 200


def test_a_second_server_on_the_same_socket_ends_at_once_and_the_first_goes_on(on_sockets, path, tmp_path):
    flags = (f"--http-address=unix:{path}", f"--grpc-address=unix:{tmp_path}/other.sock", "--metrics-port=0")
    started = time.monotonic()
    second = subprocess.run(
        [sys.executable, "-m", "headrace", "serve", f"--model-repository={REPOSITORY}", *flags],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert second.returncode == 1
    assert f"cannot serve HTTP on unix:{path}: a server listens there already" in second.stdout + second.stderr
    assert time.monotonic() - started < 30
    assert ask(socket.AF_UNIX, path, "/v2/health/live")[0] == 200


def test_a_server_takes_the_socket_of_one_that_was_killed(path):
    first = RunningServer(REPOSITORY, f"--http-address=unix:{path}")
    children = first.descendants()
    first.kill()
    assert Path(path).exists()
    with running(REPOSITORY, f"--http-address=unix:{path}", ready=False):
        assert ask(socket.AF_UNIX, path, "/v2/health/live")[0] == 200
    wait_until("what the first had started has gone", lambda: not any(child.is_running() for child in children))


@needs_ipv6
def test_one_address_serves_ipv6_and_ipv4():
    with running(REPOSITORY, "--http-address=::", "--grpc-address=::1", ready=True) as server:
        port = server.ports["HTTPService"]
        assert ask(socket.AF_INET6, ("::1", port), "/v2/health/live")[0] == 200
        assert ask(socket.AF_INET, ("127.0.0.1", port), "/v2/health/live")[0] == 200
        assert f"Started HTTPService at [::]:{port}" in server.log()
