"""The servers that are measured: headrace, started here, and peers, started by scripts of the user.

A peer NAME is a script NAME.sh in the folder of --peers: `NAME.sh start` returns once it serves the models add_sub,
mlp_onnx and identity_img on the ports below, having printed "pid" and its process number; `NAME.sh stop` ends it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import psutil

START_S = 120.0
_STARTED = re.compile(r"Started (\w+) at \S+:(\d+)")


@dataclass(frozen=True)
class Peer:
    """What the scripts of a peer promise, and what a client must mind."""

    name: str
    http_port: int
    grpc_port: int
    json_over_http: bool = False
    """It does not take binary tensors over HTTP."""


PEERS = (Peer("triton", 18000, 18001), Peer("mlserver", 18100, 18101, json_over_http=True))


class Server(ABC):
    """A server that can be started, stopped, and asked for the CPU time of its processes."""

    def __init__(self, name: str, *, json_over_http: bool = False) -> None:
        self.name = name
        self.json_over_http = json_over_http
        self.ports: dict[str, int] = {}
        self.pid = 0
        self.resident = True
        """False: it uses CPU while idle, and so runs only while it is measured itself."""

    @abstractmethod
    def start(self) -> None:
        """Start it; return once it serves."""

    @abstractmethod
    def stop(self) -> None:
        """End it and what it started."""

    @property
    def running(self) -> bool:
        return self.pid != 0

    def cpu_seconds(self) -> float:
        """User and system time of the process and all below it."""
        root = psutil.Process(self.pid)
        total = 0.0
        for process in [root, *root.children(recursive=True)]:
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
        return total

    def version(self) -> str:
        """What the server says of itself."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports['http']}/v2", timeout=10) as answer:
            metadata = json.load(answer)
        return f"{metadata['name']} {metadata['version']}"


class Headrace(Server):
    """The headrace of this interpreter, on free ports of loopback."""

    def __init__(self, repository: Path, *flags: str) -> None:
        super().__init__("headrace")
        self._argv = [
            *(sys.executable, "-m", "headrace", "serve", f"--model-repository={repository}"),
            *("--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--allow-metrics=false"),
            *("--http-port=0", "--grpc-port=0", *flags),
        ]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            self._argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C is for us: we stop it
        )
        self._process = process
        self.pid = process.pid
        self.ports = {}
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if match := _STARTED.search(line):
                self.ports["grpc" if match[1].startswith("GRPC") else "http"] = int(match[2])
            if len(self.ports) == 2:
                break
        else:
            raise RuntimeError(f"headrace did not start:\n{''.join(lines)}")
        threading.Thread(target=_drain, args=(process,), daemon=True).start()
        deadline = time.monotonic() + START_S
        while not _is_ready(self.ports["http"]):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("headrace does not become ready; start it by hand to see why")
            time.sleep(0.1)

    def stop(self) -> None:
        process, self._process, self.pid = self._process, None, 0
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class PeerServer(Server):
    """A peer behind its script."""

    def __init__(self, peer: Peer, folder: Path) -> None:
        super().__init__(peer.name, json_over_http=peer.json_over_http)
        self._script = folder / f"{peer.name}.sh"
        self.ports = {"http": peer.http_port, "grpc": peer.grpc_port}

    @property
    def installed(self) -> bool:
        return self._script.is_file()

    def start(self) -> None:
        if _is_ready(self.ports["http"]):
            raise RuntimeError(f"something serves port {self.ports['http']} already; stop it first")
        # Into a file, not a pipe: the server inherits it, and a pipe would never end.
        with tempfile.TemporaryFile("w+") as log:
            result = subprocess.run(
                [self._script, "start"],
                stdout=log,
                stderr=log,
                timeout=START_S,
                check=False,
                start_new_session=True,
            )
            log.seek(0)
            said = log.read()
        found = re.search(r"\bpid (\d+)", said)
        if result.returncode or found is None:
            raise RuntimeError(f"{self._script} start failed:\n{said}")
        self.pid = int(found[1])

    def stop(self) -> None:
        if not self.pid:
            return
        processes: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.pid)
            processes = [root, *root.children(recursive=True)]
        self.pid = 0
        subprocess.run([self._script, "stop"], timeout=START_S, check=True)
        _, alive = psutil.wait_procs(processes, timeout=30)
        for process in alive:
            process.kill()


def _drain(process: subprocess.Popen[str]) -> None:
    """Read what the server logs until it ends, so that it never waits for a reader."""
    assert process.stdout is not None
    with process.stdout as lines:
        for _ in lines:
            pass


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False
