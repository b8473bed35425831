"""TLS and mutual TLS on every door of a real server, and certificates that change under load."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
import trustme

from harness import running
from headrace.gateway.tls import POLL_S
from headrace_protocol._generated import grpc_service_pb2 as pb
from repositories import add_identity

DOORS = ("http", "grpc", "metrics")
READY = "/inference.GRPCInferenceService/ServerReady"


class Authority:
    """An authority, and the files of a server and of a client that it vouches for."""

    def __init__(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.ca = trustme.CA()
        self.ca.cert_pem.write_to_path(self.root)
        self.issue()
        client = self.ca.issue_cert("client@example.org")
        client.private_key_and_cert_chain_pem.write_to_path(self.client)

    root = property(lambda self: str(self.folder / "root.pem"))
    cert = property(lambda self: str(self.folder / "cert.pem"))
    key = property(lambda self: str(self.folder / "key.pem"))
    client = property(lambda self: str(self.folder / "client.pem"))

    def issue(self, ca=None):
        """Write a new certificate of the server, of this authority or another."""
        server = (ca or self.ca).issue_cert("localhost", "127.0.0.1")
        for name, blobs in (("cert", server.cert_chain_pems), ("key", [server.private_key_pem])):
            new = self.folder / f"{name}.new"
            new.write_bytes(b"".join(blob.bytes() for blob in blobs))
            new.replace(self.folder / f"{name}.pem")  # whole at any moment, as secrets are mounted

    def flags(self, *, mutual=False, doors=DOORS):
        for door in doors:
            yield f"--{door}-use-ssl=true"
            yield f"--{door}-server-cert={self.cert}"
            yield f"--{door}-server-key={self.key}"
            if mutual:
                yield f"--{door}-use-ssl-mutual=true"
                yield f"--{door}-root-cert={self.root}"

    def context(self, *, client=False):
        context = ssl.create_default_context(cafile=self.root)
        if client:
            context.load_cert_chain(self.client)
        return context


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path / "tls")


@pytest.fixture
def repository(tmp_path):
    add_identity(tmp_path / "models", "calm")
    return tmp_path / "models"


def status(port, context, path="/v2/health/live"):
    connection = http.client.HTTPSConnection("localhost", port, context=context, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return connection.getresponse().status


def wait_ready(server, context):
    deadline = time.monotonic() + 60
    while status(server.ports["HTTPService"], context, "/v2/health/ready") != 200:
        assert time.monotonic() < deadline, server.log()
        time.sleep(0.02)


def grpc_ready(port, root, client=None):
    pem = None if client is None else Path(client).read_bytes()
    credentials = grpc.ssl_channel_credentials(Path(root).read_bytes(), pem, pem)
    with grpc.secure_channel(f"localhost:{port}", credentials) as channel:
        call = channel.unary_unary(READY, pb.ServerReadyRequest.SerializeToString, pb.ServerReadyResponse.FromString)
        return call(pb.ServerReadyRequest(), timeout=10).ready


def row():
    return np.arange(4, dtype=np.float32).reshape(1, 4)


def test_stock_clients_reach_every_door_over_tls(repository, authority):
    with running(repository, *authority.flags(), ready=False) as server:
        wait_ready(server, authority.context())
        over_http = tritonclient.http.InferenceServerClient(
            f"localhost:{server.ports['HTTPService']}", ssl=True, ssl_context_factory=authority.context
        )
        given = tritonclient.http.InferInput("INPUT0", [1, 4], "FP32")
        given.set_data_from_numpy(row())
        assert np.array_equal(over_http.infer("calm", [given]).as_numpy("OUTPUT0"), row())
        over_http.close()
        with tritonclient.grpc.InferenceServerClient(
            f"localhost:{server.ports['GRPCInferenceService']}", ssl=True, root_certificates=authority.root
        ) as over_grpc:
            given = tritonclient.grpc.InferInput("INPUT0", [1, 4], "FP32")
            given.set_data_from_numpy(row())
            assert np.array_equal(over_grpc.infer("calm", [given]).as_numpy("OUTPUT0"), row())
        assert status(server.ports["Metrics"], authority.context(), "/metrics") == 200


def test_doors_over_tls_answer_nothing_in_plain_text(repository, authority):
    with running(repository, *authority.flags(), ready=False) as server:
        wait_ready(server, authority.context())
        for door in ("HTTPService", "Metrics"):
            with socket.create_connection(("localhost", server.ports[door]), timeout=10) as plain:
                plain.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
                with contextlib.suppress(ConnectionResetError):
                    assert b"HTTP/1.1 200" not in plain.recv(1000)
        channel = grpc.insecure_channel(f"localhost:{server.ports['GRPCInferenceService']}")
        with channel, pytest.raises(grpc.RpcError):
            channel.unary_unary(READY)(b"", timeout=5)
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.load_verify_locations(authority.root)
        old.set_ciphers("DEFAULT:@SECLEVEL=0")
        with pytest.warns(DeprecationWarning):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionResetError)):
            status(server.ports["HTTPService"], old)


def test_mutual_tls_lets_in_whom_the_authority_vouches_for(repository, authority, tmp_path):
    stranger = Authority(tmp_path / "stranger")
    with running(repository, *authority.flags(mutual=True), ready=False) as server:
        known = authority.context(client=True)
        wait_ready(server, known)
        assert status(server.ports["Metrics"], known, "/metrics") == 200
        assert grpc_ready(server.ports["GRPCInferenceService"], authority.root, authority.client)
        forged = authority.context()
        forged.load_cert_chain(stranger.client)
        for context in (authority.context(), forged):
            for door in ("HTTPService", "Metrics"):
                with pytest.raises((ssl.SSLError, ConnectionResetError, http.client.RemoteDisconnected)):
                    status(server.ports[door], context)
        for client in (None, stranger.client):
            with pytest.raises(grpc.RpcError):
                grpc_ready(server.ports["GRPCInferenceService"], authority.root, client)
        assert status(server.ports["HTTPService"], known) == 200


def serial(port):
    """The number of the certificate that a new connection is shown."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("localhost", port), timeout=10) as plain, context.wrap_socket(plain) as wrapped:
        return hash(wrapped.getpeercert(binary_form=True))


def wait_for_another(port, known, timeout=5 * POLL_S):
    deadline = time.monotonic() + timeout
    while serial(port) in known:
        assert time.monotonic() < deadline, "the old certificate is still shown"
        time.sleep(0.05)


def test_certificates_change_under_load_and_no_request_is_lost(repository, authority):
    failures, answered, stop = [], [0, 0], threading.Event()
    with running(repository, *authority.flags(), ready=False) as server:
        wait_ready(server, authority.context())
        ports = [server.ports[door] for door in ("HTTPService", "GRPCInferenceService", "Metrics")]
        body = json.dumps({"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}]})

        def ask(kept):
            connection = http.client.HTTPSConnection("localhost", ports[0], context=authority.context(), timeout=10)
            while not stop.is_set():
                try:
                    connection.request("POST", "/v2/models/calm/infer", body)
                    answer = connection.getresponse()
                    answer.read()
                    assert answer.status == 200, answer.status
                    answered[kept] += 1
                except Exception as error:
                    failures.append(error)
                    connection.close()
                if not kept:
                    connection.close()
            connection.close()

        threads = [threading.Thread(target=ask, args=(kept,)) for kept in (0, 1)]
        for thread in threads:
            thread.start()
        try:
            known = {serial(port) for port in ports}
            for _ in range(2):
                before = list(answered)
                authority.issue()
                for port in ports:
                    wait_for_another(port, known)
                known |= {serial(port) for port in ports}
                assert answered[0] > before[0]
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not failures
        assert min(answered) > 20
        assert status(ports[0], authority.context()) == 200
        assert grpc_ready(ports[1], authority.root)


def test_files_that_cannot_be_used_leave_the_certificate_in_force(repository, authority):
    with running(repository, *authority.flags(doors=("http",)), ready=False) as server:
        wait_ready(server, authority.context())
        port = server.ports["HTTPService"]
        known = serial(port)
        whole = (authority.folder / "cert.pem").read_bytes()
        (authority.folder / "cert.pem").write_bytes(whole[:200])
        server.wait_for_log("the TLS certificate in force stays")
        assert serial(port) == known
        authority.issue()
        wait_for_another(port, {known})
        assert "certificate" in server.log()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--http-use-ssl=true"], "--http-server-cert: --http-use-ssl needs it"),
        (["--grpc-server-cert=x"], "--grpc-server-cert: has no effect without --grpc-use-ssl"),
        (["--http-use-ssl=true", "--http-server-cert=/none", "--http-server-key=/none"], "/none: No such file"),
    ],
)
def test_what_is_wrong_is_said_at_the_start(repository, flags, sentence):
    addresses = [f"--{door}-address=127.0.0.1" for door in DOORS] + [f"--{door}-port=0" for door in DOORS]
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "serve", f"--model-repository={repository}", *addresses, *flags],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert sentence in done.stdout + done.stderr


def test_an_encrypted_key_and_a_wrong_key_are_named(repository, authority, tmp_path):
    other = Authority(tmp_path / "other")
    addresses = [f"--{door}-address=127.0.0.1" for door in DOORS] + [f"--{door}-port=0" for door in DOORS]
    flags = ["--http-use-ssl=true", f"--http-server-cert={authority.cert}", f"--http-server-key={other.key}"]
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "serve", f"--model-repository={repository}", *addresses, *flags],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"{authority.cert} and {other.key} are no certificate and its key" in done.stdout + done.stderr


def test_a_client_that_never_agrees_on_keys_is_let_go(repository, authority):
    with running(repository, *authority.flags(doors=("http",)), ready=False) as server:
        wait_ready(server, authority.context())
        with socket.create_connection(("localhost", server.ports["HTTPService"]), timeout=20) as silent:
            assert status(server.ports["HTTPService"], authority.context()) == 200
            assert silent.recv(1) == b""
