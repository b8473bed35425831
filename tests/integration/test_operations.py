"""What an operator meets: ports, probes, start-up, the check and infer commands, a restart."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import onnx_models
from figures import index
from harness import RunningServer, running
from repositories import add_identity, add_onnx, add_sample

DOORS = ("http", "grpc", "metrics")


def headrace(*words: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; return its status and what it wrote."""
    return subprocess.run(
        [sys.executable, "-m", "headrace", *words], capture_output=True, text=True, timeout=timeout, check=False
    )


def serve(repository: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run a server that is to end by itself."""
    addresses = [f"--{door}-address=127.0.0.1" for door in DOORS]
    ports = {f"--{door}-port": "0" for door in DOORS} | dict(flag.split("=") for flag in flags if "-port=" in flag)
    others = [flag for flag in flags if "-port=" not in flag]
    options = [*addresses, *(f"{name}={port}" for name, port in ports.items()), *others]
    return headrace("serve", f"--model-repository={repository}", *options)


@contextlib.contextmanager
def taken() -> Iterator[int]:
    """A port of loopback on which somebody listens already."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


# --- ports ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("door", "transport"), [("http", "auto"), ("metrics", "auto"), ("grpc", "grpcio"), ("grpc", "pygrpc-native")]
)
def test_a_taken_port_is_told_and_ends_the_start(tmp_path: Path, door: str, transport: str) -> None:
    add_identity(tmp_path, "m")
    with taken() as port:
        ended = serve(tmp_path, f"--{door}-port={port}", f"--grpc-transport={transport}")
    assert ended.returncode == 1
    (line,) = [line for line in ended.stderr.splitlines() if line]
    assert f"127.0.0.1:{port}" in line
    assert door in line.lower()
    assert "in use" in line


@pytest.mark.parametrize(("one", "other"), [("http", "grpc"), ("http", "metrics"), ("grpc", "metrics")])
def test_one_port_for_two_doors_is_refused_before_anything_starts(tmp_path: Path, one: str, other: str) -> None:
    ended = serve(tmp_path, f"--{one}-port=18700", f"--{other}-port=18700")
    assert ended.returncode == 1
    for word in (one, other, "18700"):
        assert word in ended.stderr


def test_a_killed_server_can_be_started_again_on_its_ports_at_once(tmp_path: Path) -> None:
    add_identity(tmp_path, "m")
    first = RunningServer(tmp_path)
    try:
        first.wait_ready()
        ports = {"http": first.ports["HTTPService"], "grpc": first.ports["GRPCInferenceService"]}
        with (
            socket.create_connection(("127.0.0.1", ports["http"])),
            socket.create_connection(("127.0.0.1", ports["grpc"])),
        ):
            first.process.send_signal(signal.SIGKILL)
            first.process.wait(10)
            flags = [f"--{door}-port={port}" for door, port in ports.items()]
            with running(tmp_path, *flags) as second:
                assert second.ports["HTTPService"] == ports["http"]
                assert "OUTPUT0" in headrace("infer", "m", f"--url=http://{second.http}", "--input=INPUT0=[1]").stdout
    finally:
        first.kill()


# --- start-up and probes ----------------------------------------------------------------------------------------------


def test_probes_are_answered_while_models_load(tmp_path: Path) -> None:
    add_identity(tmp_path, "quick")
    add_identity(tmp_path, "slow", creation_delay_sec="2")
    with running(tmp_path, ready=False) as server:
        assert server.status("/v2/health/live") == 200
        assert server.status("/v2/health/ready") == 400
        server.wait_status("/v2/models/quick/ready", 200)
        assert index(server, "slow") == {"1": ("LOADING", "")}
        assert server.status("/v2/models/slow/ready") == 503
        assert server.status("/v2/health/ready") == 400, "not before all of them are there"
        server.wait_ready()
        assert server.status("/v2/models/slow/ready") == 200


def test_a_failed_model_stops_readiness_only_where_it_is_strict(tmp_path: Path) -> None:
    add_identity(tmp_path, "good")
    add_identity(tmp_path, "bad", fail_load="the weights are stale")
    for strict, status in (("true", 400), ("false", 200)):
        with running(tmp_path, "--exit-on-error=false", f"--strict-readiness={strict}", ready=False) as server:
            server.wait_for_log("| good")
            assert server.status("/v2/health/ready") == status
            assert server.status("/v2/models/good/ready") == 200
            assert server.status("/v2/models/bad/ready") == 503


def test_a_failed_model_ends_the_start_and_is_named(tmp_path: Path) -> None:
    add_identity(tmp_path, "good")
    add_identity(tmp_path, "bad", fail_load="the weights are stale")
    ended = serve(tmp_path)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    for words in ("bad", "the weights are stale", "exit-on-error"):
        assert words in last
    assert "good" not in last


def test_the_log_lists_the_models_with_reasons(tmp_path: Path) -> None:
    add_identity(tmp_path, "good")
    add_identity(tmp_path, "bad", fail_load="the weights are stale")
    with running(tmp_path, "--exit-on-error=false", "--strict-readiness=false") as server:
        server.wait_for_log("| good")
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in server.lines if "|" in line]
    assert rows == [
        ["Model", "Version", "State", "Reason"],
        ["bad", "1", "UNAVAILABLE", "the weights are stale"],
        ["good", "1", "READY", "-"],
    ]


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--http-prot=1", "--http-port"),
        ("--http-port=many", "--http-port"),
        ("--exit-on-error=perhaps", "--exit-on-error"),
    ],
)
def test_a_wrong_option_is_told_at_once(tmp_path: Path, flag: str, said: str) -> None:
    ended = headrace("serve", f"--model-repository={tmp_path}", flag, timeout=10)
    assert ended.returncode == 1
    assert said in ended.stderr
    assert ended.stdout == ""


def test_a_repository_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    ended = headrace("serve", f"--model-repository={tmp_path / 'nowhere'}", timeout=10)
    assert ended.returncode == 1
    assert "nowhere" in ended.stderr


# --- headrace check ---------------------------------------------------------------------------------------------------


def test_check_says_what_is_wrong_and_what_was_completed(tmp_path: Path) -> None:
    add_identity(tmp_path, "good")
    add_identity(tmp_path, "stale", fail_load="the weights are stale")
    add_onnx(tmp_path, "bare", onnx_models.add_sub)
    add_onnx(tmp_path, "garbage", lambda path: path.write_bytes(b"garbage" * 9))
    add_onnx(tmp_path, "typo", onnx_models.add_sub, config="max_bach_size: 4")
    (tmp_path / "empty").mkdir()
    ended = headrace("check", str(tmp_path))
    assert ended.returncode == 1
    parts: dict[str, list[str]] = {}
    for line in ended.stdout.splitlines()[:-1]:
        if not line.startswith(" "):
            parts[line] = []
        else:
            parts[next(reversed(parts))].append(line.strip())
    assert list(parts) == ["OK   bare", "BAD  empty", "BAD  garbage", "OK   good", "BAD  stale", "BAD  typo"]
    assert "input was completed from the model: INPUT0 TYPE_FP32 [16], INPUT1 TYPE_FP32 [16]" in parts["OK   bare"]
    assert parts["BAD  empty"] == ["it has no version folder"]
    assert "model.onnx" in " ".join(parts["BAD  garbage"])
    assert parts["OK   good"][0].startswith("version 1 loads in")
    assert "version 1: the weights are stale" in parts["BAD  stale"]
    assert "max_bach_size" in " ".join(parts["BAD  typo"])
    assert ended.stdout.splitlines()[-1] == "2 of 6 models can serve"


def test_check_of_good_models_succeeds_and_prints_their_configuration(tmp_path: Path) -> None:
    add_onnx(tmp_path, "bare", onnx_models.add_sub)
    ended = headrace("check", str(tmp_path), "--print-config")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "max_batch_size: 4" in ended.stdout
    assert ended.stderr == ""


def test_check_does_not_hang_with_a_model_that_does(tmp_path: Path) -> None:
    add_identity(tmp_path, "hangs", hang_load="true")
    ended = headrace("check", str(tmp_path), "--model-load-timeout-secs=1", timeout=30)
    assert ended.returncode == 1
    assert "was not loaded within 1 s" in ended.stdout


# --- headrace infer ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    add_sample(repository, "simple")
    add_identity(repository, "strings", datatype="STRING")
    with running(repository) as server:
        yield server


@pytest.mark.parametrize("door", ["http", "grpc"])
def test_infer_asks_the_running_server(server: RunningServer, tmp_path: Path, door: str) -> None:
    url = f"--url={door}://{server.http if door == 'http' else server.grpc}"
    np.save(tmp_path / "a.npy", np.arange(16, dtype=np.int32))
    literal = f"--input=INPUT1={json.dumps([5] * 16)}"
    ended = headrace("infer", "simple", url, f"--input=INPUT0=@{tmp_path / 'a.npy'}", literal, "--id=seven")
    assert ended.returncode == 0, ended.stderr
    assert "model simple, version 1, id seven" in ended.stdout
    assert "20" in ended.stdout
    assert "-5" in ended.stdout
    ended = headrace("infer", "strings", url, "--input=INPUT0=안녕 🙂")
    assert "안녕 🙂" in ended.stdout


@pytest.mark.parametrize("door", ["http", "grpc"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nobody", "--input=A=[1]"], "nobody"),
        (["simple", "--input=WRONG=[1]"], "INPUT0"),
        (["simple", "--version=9", "--input=INPUT0=[1]"], "version 9"),
        (["strings", "--input=INPUT0=x", "--parameter=fail=broken today"], "broken today"),
    ],
)
def test_infer_tells_what_went_wrong(server: RunningServer, door: str, words: list[str], said: str) -> None:
    ended = headrace("infer", *words, f"--url={door}://{server.http if door == 'http' else server.grpc}")
    assert ended.returncode == 1
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""


@pytest.mark.parametrize("door", ["http", "grpc"])
def test_infer_without_a_server_says_so(door: str) -> None:
    with taken() as port:
        pass
    started = time.monotonic()
    ended = headrace("infer", "m", f"--url={door}://127.0.0.1:{port}", "--input=A=[1]", "--timeout=5", timeout=30)
    assert time.monotonic() - started < 15
    assert ended.returncode == 1
    assert str(port) in ended.stderr
    assert "Traceback" not in ended.stderr


def test_connections_beyond_the_limit_are_refused_and_counted(tmp_path):
    add_identity(tmp_path, "m")
    with running(tmp_path, "--http-max-connections=2") as server, contextlib.ExitStack() as stack:
        while "headrace_http_connections 0.0" not in server.metrics():
            time.sleep(0.02)  # that of the probe is still being closed
        host, port = server.http.split(":")
        held = [stack.enter_context(contextlib.closing(http.client.HTTPConnection(host, int(port)))) for _ in range(3)]
        statuses = []
        for connection in held:
            connection.request("GET", "/v2/health/ready")
            answer = connection.getresponse()
            answer.read()
            statuses.append(answer.status)
        assert statuses == [200, 200, 503]
        told = server.metrics()
        assert "headrace_http_connections_limit 2.0" in told
        assert "headrace_http_connections_refused_total 1.0" in told
        server.wait_for_log("HTTP connections are refused: 2 are open")
