"""A real server in a child process, on loopback and free ports, for the tests that go through its doors.

`running(repository, *flags)` is the one way to start it; when the block ends the server is stopped and it is checked
that nothing of it is left: no process, and nothing in /dev/shm since nothing of it was ever mapped.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil

START_S = 60.0
_SERVICE = re.compile(r"Started (\w+) at (?:unix:[^\s\"]+|\S+:(\d+))")


class RunningServer:
    """A started server. Ports are known once `__init__` returns; models may still be loading."""

    def __init__(self, repository: Path | str, *flags: str, env: dict[str, str] | None = None) -> None:
        argv = [
            *(sys.executable, "-m", "headrace", "serve", f"--model-repository={repository}"),
            *("--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--metrics-address=127.0.0.1"),
            *("--http-port=0", "--grpc-port=0", "--metrics-port=0"),
            *flags,
        ]
        self.process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **(env or {})}
        )
        self.lines: list[str] = []
        self.ports: dict[str, int] = {}
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        with self._changed:
            self._changed.wait_for(lambda: len(self.ports) == 3 or self.process.poll() is not None, START_S)
        if len(self.ports) != 3:
            self.kill()
            raise AssertionError(f"the server did not open its ports:\n{self.log()}")

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with self._changed:
                    self.lines.append(line.rstrip("\n"))
                    if match := _SERVICE.search(line):
                        self.ports[match[1]] = int(match[2] or 0)
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    @property
    def http(self) -> str:
        """The HTTP door as host:port, the way tritonclient wants it."""
        return f"127.0.0.1:{self.ports['HTTPService']}"

    @property
    def grpc(self) -> str:
        """The gRPC door as host:port."""
        return f"127.0.0.1:{self.ports['GRPCInferenceService']}"

    @property
    def metrics_url(self) -> str:
        """The URL that Prometheus would scrape."""
        return f"http://127.0.0.1:{self.ports['Metrics']}/metrics"

    def log(self) -> str:
        """Everything the server wrote so far."""
        return "\n".join(self.lines)

    def wait_for_log(self, text: str, timeout: float = 30.0, *, since: int = 0) -> None:
        """Wait until some line of the log, from line `since` on, contains `text`."""
        with self._changed:
            found = self._changed.wait_for(lambda: any(text in line for line in self.lines[since:]), timeout)
        assert found, f"no line with {text!r} within {timeout} s:\n{self.log()}"

    def status(self, path: str) -> int:
        """Return the status code of a GET."""
        try:
            with urllib.request.urlopen(f"http://{self.http}{path}", timeout=10) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except urllib.error.URLError:
            self.process.wait(10)  # a closed door is the end of the process; whoever polls says so with the log
            return 0

    def wait_status(self, path: str, wanted: int, timeout: float = 60.0) -> float:
        """Poll `path` until it answers `wanted`; return the seconds it took."""
        start = time.monotonic()
        while True:
            assert self.process.poll() is None, f"the server ended:\n{self.log()}"
            got = self.status(path)
            if got == wanted:
                return time.monotonic() - start
            assert time.monotonic() - start < timeout, f"{path} still answers {got}, not {wanted}:\n{self.log()}"
            time.sleep(0.02)

    def wait_ready(self, timeout: float = 60.0) -> float:
        """Wait until the server is ready; return the seconds it took."""
        return self.wait_status("/v2/health/ready", 200, timeout)

    def metrics(self) -> str:
        """Return one scrape as text."""
        with urllib.request.urlopen(self.metrics_url, timeout=10) as answer:
            return answer.read().decode()

    def descendants(self) -> list[psutil.Process]:
        """Return every process below the server."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def backends(self) -> list[psutil.Process]:
        """Return the processes that serve a model, forked by a zygote or started anew."""
        found = []
        for process in self.descendants():
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended while we looked
                if "run" in process.cmdline() or process.ppid() != self.process.pid:
                    found.append(process)
        return found

    def stop(self, timeout: float = 60.0) -> int:
        """Send SIGTERM and return the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the server did not stop within {timeout} s:\n{self.log()}") from None
        self._reader.join(5)
        return status

    def kill(self) -> None:
        """Send SIGKILL and reap."""
        self.process.kill()
        self.process.wait(10)
        self._reader.join(5)


def named_shared_memory(process: psutil.Process) -> list[str]:
    """Return the files of /dev/shm that a process maps; what else is there may be anybody's."""
    try:
        return [area.path for area in process.memory_maps() if area.path.startswith("/dev/shm")]
    except psutil.NoSuchProcess:
        return []


@contextlib.contextmanager
def running(
    repository: Path | str, *flags: str, ready: bool = True, env: dict[str, str] | None = None
) -> Iterator[RunningServer]:
    """Run a server for the length of a block, then check that it ended well and left nothing behind."""
    server = RunningServer(repository, *flags, env=env)
    try:
        if ready:
            server.wait_ready()
        yield server
        children = server.descendants() if server.process.poll() is None else []
        named = [path for process in children for path in named_shared_memory(process)]
    except BaseException:
        server.kill()
        print(server.log())
        raise
    status = server.stop()
    assert status == 0, f"exit status {status}:\n{server.log()}"
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive, f"processes left behind: {alive}"
    assert not named, f"memory with a name, which a crash would leave behind: {named}"
    ours = [line for line in server.lines if "Traceback" in line and "headrace.instances] model " not in line]
    assert not ours, "\n".join(ours)
