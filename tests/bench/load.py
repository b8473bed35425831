"""One measurement: a client puts load on one door of one server, and the server's CPU time is read meanwhile."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from servers import Server

_WINDOWS = 3
"""perf_analyzer measures so many windows and reports them together."""
_ANY_SPREAD = 999
"""Percent. It would repeat windows that differ by more; here whole rounds are repeated, and medians taken."""
_CPU_FROM, _CPU_UNTIL = 0.25, 0.85
"""The part of a measurement in which the server's CPU time is read: no start, no end."""
_CLIENT_START_S = 120.0


@dataclass(frozen=True)
class Target:
    """What a measurement is of."""

    door: str
    model: str
    concurrency: int
    is_float: bool


@dataclass(frozen=True)
class Sample:
    """What one measurement found. Latencies and CPU in microseconds."""

    throughput: float
    p50_us: float
    p99_us: float
    cpu_us: float
    """Server CPU, all its processes, per request."""

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


class PerfAnalyzer:
    """Triton's C++ load client."""

    name = "perf_analyzer"

    def __init__(self, program: Path) -> None:
        self._program = program

    def command(self, server: Server, target: Target, seconds: float, output: Path) -> list[str]:
        argv = [
            *(str(self._program), "-m", target.model, "-i", target.door),
            *("-u", f"127.0.0.1:{server.ports[target.door]}"),
            *("--concurrency-range", str(target.concurrency)),
            *("-p", str(round(seconds * 1000 / _WINDOWS)), "-r", str(_WINDOWS), "-s", str(_ANY_SPREAD)),
            *("-f", str(output)),
        ]
        if target.is_float:
            argv.append("-z")  # its random bytes would hold NaNs
        if server.json_over_http and target.door == "http":
            argv += ["--input-tensor-format", "json", "--output-tensor-format", "json"]
        return argv

    def read(self, output: Path, _said: str) -> tuple[float, float, float]:
        with output.open(newline="") as file:
            row = next(csv.DictReader(file))
        return float(row["Inferences/Second"]), float(row["p50 latency"]), float(row["p99 latency"])


class PythonClient:
    """The client of this folder."""

    name = "python"

    def command(self, server: Server, target: Target, seconds: float, _output: Path) -> list[str]:
        argv = [
            *(sys.executable, str(Path(__file__).with_name("client.py")), "--door", target.door),
            *("--port", str(server.ports[target.door]), "--model", target.model),
            *("--concurrency", str(target.concurrency), "--seconds", str(seconds)),
        ]
        return [*argv, "--json"] if server.json_over_http and target.door == "http" else argv

    def read(self, _output: Path, said: str) -> tuple[float, float, float]:
        result = json.loads(said.splitlines()[-1])
        return result["throughput"], result["p50_us"], result["p99_us"]


Client = PerfAnalyzer | PythonClient


def measure(client: Client, server: Server, target: Target, seconds: float) -> Sample:
    """Load the server for `seconds`. Raises RuntimeError with what the client said where it failed."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.csv"
        command = client.command(server, target, seconds, output)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            _wait_for_load(server, process)
            time.sleep(seconds * _CPU_FROM)
            began, cpu_began = time.monotonic(), server.cpu_seconds()
            time.sleep(seconds * (_CPU_UNTIL - _CPU_FROM))
            cpu_rate = (server.cpu_seconds() - cpu_began) / (time.monotonic() - began)
            said, _ = process.communicate(timeout=_CLIENT_START_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{' '.join(command)} does not end") from None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{said[-2000:]}")
        throughput, p50_us, p99_us = client.read(output, said)
    return Sample(throughput, p50_us, p99_us, cpu_rate / throughput * 1e6)


def _wait_for_load(server: Server, client: subprocess.Popen[str]) -> None:
    """Wait until the client has started and the server works, which its CPU time tells."""
    deadline = time.monotonic() + _CLIENT_START_S
    idle = server.cpu_seconds()
    while server.cpu_seconds() < idle + 0.05 and client.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
