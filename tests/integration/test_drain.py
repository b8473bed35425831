"""A stop that nobody notices: readiness goes first, everything is served for the grace time, then doors close."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc

from harness import RunningServer, running
from repositories import add_decoupled, add_identity, add_sample

GRACE = "--drain-grace-secs=2"
BODY = json.dumps({"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}]})


@pytest.fixture
def repository(tmp_path):
    add_identity(tmp_path / "models", "calm")
    return tmp_path / "models"


@contextlib.contextmanager
def connected(server):
    host, port = server.http.split(":")
    with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=20)) as connection:
        yield connection


def infer(connection, model="calm", body=BODY):
    connection.request("POST", f"/v2/models/{model}/infer", body)
    answer = connection.getresponse()
    return answer, answer.read()


def test_everything_is_served_between_not_ready_and_the_end(repository):
    with running(repository, GRACE) as server, connected(server) as kept, connected(server) as new:
        assert infer(kept)[0].getheader("Connection") != "close"
        server.process.send_signal(signal.SIGTERM)
        server.wait_status("/v2/health/ready", 400)
        assert server.status("/v2/health/live") == 200
        assert server.status("/v2/models/calm/ready") == 503
        with tritonclient.grpc.InferenceServerClient(server.grpc) as over_grpc:
            assert over_grpc.is_server_live()
            assert not over_grpc.is_server_ready()
            given = tritonclient.grpc.InferInput("INPUT0", [1, 1], "FP32")
            given.set_data_from_numpy(np.ones((1, 1), np.float32))
            assert over_grpc.infer("calm", [given]).as_numpy("OUTPUT0").item() == 1
        answer, _ = infer(kept)
        assert (answer.status, answer.getheader("Connection")) == (200, "close")
        answer, _ = infer(new)
        assert (answer.status, answer.getheader("Connection")) == (200, "close")
        assert server.process.wait(20) == 0


def test_after_the_grace_time_new_connections_are_refused_while_requests_end(tmp_path):
    add_identity(tmp_path / "models", "slow", execute_delay_ms="4000")
    with running(tmp_path / "models", "--drain-grace-secs=1") as server, connected(server) as slow:
        slow.request("POST", "/v2/models/slow/infer", BODY)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_log("stopping: no new requests")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(tuple(server.http.split(":")), timeout=5)
        answer = slow.getresponse()
        assert (answer.status, answer.getheader("Connection")) == (200, "close")
        assert server.process.wait(20) == 0


def test_a_stream_goes_on_through_the_grace_time_and_the_drain(tmp_path):
    add_decoupled(tmp_path / "models", "stream", responses="30", response_delay_ms="100")
    with running(tmp_path / "models", "--drain-grace-secs=1") as server, connected(server) as connection:
        connection.request("POST", "/v2/models/stream/generate_stream", json.dumps({"INPUT0": [1.5]}))
        answer = connection.getresponse()
        assert answer.readline().startswith(b"data:")
        server.process.send_signal(signal.SIGTERM)
        assert answer.read().count(b"data:") == 29
        assert server.process.wait(20) == 0


def test_a_second_signal_ends_the_grace_time_at_once(repository):
    server = RunningServer(repository, "--drain-grace-secs=600")
    server.wait_ready()
    server.process.send_signal(signal.SIGTERM)
    server.wait_for_log("leaving: not ready any more")
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(10) == 1


def test_a_server_that_fails_to_start_has_nobody_to_wait_for(tmp_path):
    folder = add_identity(tmp_path / "models", "broken", fail_load="on purpose")
    assert folder.is_dir()
    server = RunningServer(tmp_path / "models", "--drain-grace-secs=600")
    assert server.process.wait(30) == 1


NGINX = """
daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log warn;
events {{ worker_connections 512; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream servers {{ server {first}; server {second}; keepalive 16; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://servers; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_connect_timeout 1s;
      # 503 says that nothing was done: a server that starts, or has been told to stop.
      proxy_next_upstream error timeout http_503 non_idempotent;
    }}
  }}
}}
"""


@contextlib.contextmanager
def nginx(folder: Path, first: str, second: str):
    """Run a real nginx before two servers; yield its port."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed (Debian: apt-get install nginx-light)")
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder, first=first, second=second, port=port))
    with subprocess.Popen([program, "-p", folder, "-c", folder / "nginx.conf"]) as process:
        try:
            deadline = time.monotonic() + 20
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                    break
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            yield port
        finally:
            process.terminate()


def test_a_rolling_restart_of_two_servers_behind_nginx_loses_no_request(tmp_path):
    repository = tmp_path / "models"
    repository.mkdir()
    add_sample(repository, "simple")
    add_identity(repository, "calm", execute_delay_ms="20")
    failures, answered, stop = [], [0], threading.Event()

    def ask(port):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        while not stop.is_set():
            try:
                answer, body = infer(connection)
                if answer.status != 200:
                    failures.append((answer.status, body[:200]))
                answered[0] += 1
            except (OSError, http.client.HTTPException) as error:
                failures.append(error)
                connection.close()
        connection.close()

    flags = ("--drain-grace-secs=1",)
    servers = [RunningServer(repository, *flags) for _ in range(2)]
    ports = [server.ports["HTTPService"] for server in servers]
    try:
        for server in servers:
            server.wait_ready()
        with nginx(tmp_path / "nginx", *[f"127.0.0.1:{port} fail_timeout=1s" for port in ports]) as port:
            clients = [threading.Thread(target=ask, args=(port,)) for _ in range(8)]
            for client in clients:
                client.start()
            try:
                for at in (0, 1):
                    before = answered[0]
                    assert servers[at].stop() == 0, servers[at].log()
                    assert answered[0] > before
                    servers[at] = RunningServer(repository, *flags, f"--http-port={ports[at]}")
                    servers[at].wait_ready()
                    seen = answered[0]
                    while answered[0] < seen + 100:
                        time.sleep(0.02)
            finally:
                stop.set()
                for client in clients:
                    client.join()
    finally:
        for server in servers:
            server.kill()
    assert failures == []
    assert answered[0] > 400
