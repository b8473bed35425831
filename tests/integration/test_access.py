"""Who may call what: every path of every door for every role, odd spellings of paths, and keys that change under load."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time

import grpc
import pytest
import tritonclient.grpc
import tritonclient.http
import yaml

from harness import running
from headrace.access.table import key_hash
from headrace.gateway.gatekeeper import INDEX, roles_of
from headrace.gateway.grpc.access import KIND
from headrace.gateway.http.routes import PATHS, Endpoint
from headrace_protocol._generated import grpc_service_pb2 as pb
from repositories import add_identity

KEYS = {role: f"key-of-{role}-0123456789" for role in ("infer", "observe", "admin", "nothing", "narrow", "slow")}
WRONG = "key-of-nobody-0123456789"
BODY = json.dumps({"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}]})


def document(keys=KEYS, **changes):
    callers = [
        {"name": role, "roles": [role], "keys": [{"sha256": key_hash(keys[role])}]}
        for role in ("infer", "observe", "admin")
    ]
    callers.append({"name": "nothing", "keys": [key_hash(keys["nothing"])]})
    callers.append({"name": "narrow", "roles": ["infer"], "models": ["other*"], "keys": [key_hash(keys["narrow"])]})
    limits = {"requests_per_second": 1, "burst": 2, "concurrent": 1}
    callers.append({"name": "slow", "roles": ["infer"], "limits": limits, "keys": [key_hash(keys["slow"])]})
    return {"callers": callers, **changes}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("access")
    add_identity(folder / "models", "calm")
    add_identity(folder / "models", "other1")
    (folder / "access.yaml").write_text(yaml.safe_dump(document()))
    return folder


@pytest.fixture(scope="module")
def server(folder):
    flags = (f"--access-file={folder / 'access.yaml'}", "--model-control-mode=explicit", "--load-model=*")
    with running(folder / "models", *flags) as server:
        yield server


def bearer(key):
    return {} if key is None else {"Authorization": f"Bearer {key}"}


@contextlib.contextmanager
def connected(server):
    host, port = server.http.split(":")
    with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=20)) as connection:
        yield connection


def ask(server, method, path, body=None, headers=None):
    with connected(server) as connection:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())


def passes(roles, who):
    """What comes of a call: let in, or refused with 401 (nobody known) or 403 (known)."""
    if roles is None:
        return True
    if who == "admin" or who in {role.value for role in roles}:
        return True
    return 401 if who in (None, "wrong") else 403


def paths():
    """Each path of the HTTP door with one of its methods, its names filled in; nothing that would change the server."""
    for path, endpoint in PATHS.items():
        roles = INDEX if endpoint is Endpoint.INDEX else roles_of(endpoint.kind)
        model = "ghost" if endpoint in (Endpoint.LOAD, Endpoint.UNLOAD) else "calm"
        filled = path.replace("{model}", model).replace("{version}", "1").replace("{region}", "none")
        for method in endpoint.methods:
            yield method, filled.replace("{repository}", "none"), roles


@pytest.mark.parametrize("who", [None, "wrong", "nothing", "infer", "observe", "admin"])
@pytest.mark.parametrize("door", ["http", "grpc", "metrics"])
def test_every_path_of_every_door_takes_its_role(server, door, who):
    key = WRONG if who == "wrong" else KEYS.get(who)
    checked = 0
    if door == "http":
        for method, path, roles in paths():
            status, body, headers = ask(server, method, path, "{}" if method == "POST" else None, bearer(key))
            wanted = passes(roles, who)
            if wanted is True:
                assert status not in (401, 403), (method, path, status, body)
            else:
                assert status == wanted, (method, path, status, body)
                assert ("WWW-Authenticate" in headers) == (wanted == 401)
                assert KEYS["admin"].encode() not in body
            checked += 1
    elif door == "grpc":
        with grpc.insecure_channel(server.grpc) as channel:
            for path, kind in KIND.items():
                if path.endswith(("Watch", "ModelStreamInfer")):
                    continue
                roles = INDEX if path.endswith("RepositoryIndex") else roles_of(kind)
                metadata = [(name.lower(), value) for name, value in bearer(key).items()]
                code = grpc.StatusCode.OK
                try:
                    channel.unary_unary(path)(b"", timeout=20, metadata=metadata)
                except grpc.RpcError as error:
                    code = error.code()
                refused = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
                wanted = passes(roles, who)
                if wanted is True:
                    assert code not in refused, (path, code)
                else:
                    assert code == (refused[0] if wanted == 401 else refused[1]), (path, code)
                checked += 1
    else:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.ports["Metrics"])) as connection:
            connection.request("GET", "/metrics", headers=bearer(key))
            status = connection.getresponse().status
            wanted = passes(INDEX, who)
            assert status == (200 if wanted is True else wanted)
            checked = 1
    assert checked >= {"http": 40, "grpc": 20, "metrics": 1}[door]


SPELLINGS = [
    "/v2/repository/index",
    "/v2//repository/index",
    "//v2/repository/index",
    "/v2/repository/index/",
    "/v2/repository/index/.",
    "/v2/./repository/index",
    "/v2/health/../repository/index",
    "/v2/health/live/../../repository/index",
    "/v2%2Frepository%2Findex",
    "/v2/repository%2Findex",
    "/v2/%72epository/index",
    "/V2/Repository/Index",
    "/v2/repository/index?x=/v2/health/live",
    "/v2/repository/index#/v2/health/live",
    "/v2/repository/index;a=b",
    "/v2/repository/index%00",
    "/v2/repository/index%20",
    "/v2/repository\\index",
    "http://other/v2/repository/index",
    "/v2/repository/models/calm/unload",
    "/v2/repository/models/calm/unload/",
    "/v2/repository/models/calm%2Funload",
    "/v2/repository/models/..%2fcalm/unload",
    "/v2/repository/models/calm/unload?role=admin",
    "/v2/repository//models/calm/unload",
    "/v2/health/live/../../repository/models/calm/unload",
    "/v2/models/calm/traffic",
    "/v2/models/calm/traffic/",
    "/v2/models/calm//traffic",
    "/v2/models/calm/Traffic",
    "/v2/models/calm/versions/../traffic",
    "/v2/models/calm/traffic?role=admin",
    "/v2/logging",
    "/v2/LOGGING",
    "/v2/logging/",
    "/v2/trace/setting%2e",
    "/v2/systemsharedmemory/region/x/register",
    "/v2/systemsharedmemory/region/x%2fregister",
]


def raw(server, request, *, half_closed=True):
    host, port = server.http.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(request)
        if half_closed:
            connection.shutdown(socket.SHUT_WR)
        received = b""
        while piece := connection.recv(65536):
            received += piece
        return received


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "PUT", "DELETE", "PATCH", "get", "OPTIONS"])
def test_no_spelling_of_a_path_leads_around_the_role(server, spelling, method):
    for version in (b"HTTP/1.1\r\nHost: x\r\nConnection: close", b"HTTP/1.0"):
        for extra in (b"", b"X-Original-URL: /v2/repository/index\r\nX-HTTP-Method-Override: GET\r\n"):
            head = f"{method} {spelling} ".encode() + version + b"\r\nContent-Length: 2\r\n" + extra
            received = raw(server, head + f"Authorization: Bearer {KEYS['infer']}\r\n\r\n{{}}".encode())
            status = int(received.split(b" ", 2)[1]) if received else 400
            assert status in (400, 401, 403, 404, 405, 501), received
            assert b"calm" not in received.split(b"\r\n\r\n", 1)[-1] or b"may not" in received or b"no such" in received


def test_pipelined_requests_are_each_checked(server):
    health = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
    last = health.replace(b"Host: x", b"Host: x\r\nConnection: close")
    index = b"POST /v2/repository/index HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n%b\r\n"
    known = f"Authorization: Bearer {KEYS['admin']}\r\n".encode()
    received = raw(server, health + index % known + index % b"" + index % known + last, half_closed=False)
    statuses = [int(part.split(b" ", 1)[0]) for part in received.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [200, 200, 401, 200, 200], received


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": f"Bearer {KEYS['admin']}"}, 200),
        ({"authorization": f"bearer   {KEYS['admin']} "}, 200),
        ({"X-API-Key": KEYS["admin"]}, 200),
        ({"Authorization": f"Basic {KEYS['admin']}"}, 401),
        ({"Authorization": KEYS["admin"]}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": f"Bearer {WRONG}", "X-API-Key": KEYS["admin"]}, 401),
        ({"X-API-Key": f"{KEYS['admin']}, {KEYS['admin']}"}, 401),
        ({"Cookie": f"key={KEYS['admin']}"}, 401),
        ({}, 401),
    ],
)
def test_how_a_key_is_shown(server, headers, status):
    assert ask(server, "POST", "/v2/repository/index", "", headers)[0] == status


def test_stock_clients_show_their_keys(server):
    over_http = tritonclient.http.InferenceServerClient(server.http)
    assert over_http.get_model_repository_index(headers=bearer(KEYS["observe"]))
    over_http.close()
    with tritonclient.grpc.InferenceServerClient(server.grpc) as over_grpc:
        shown = {"authorization": f"Bearer {KEYS['observe']}"}
        assert over_grpc.get_model_repository_index(headers=shown).models
        with pytest.raises(tritonclient.utils.InferenceServerException, match="lacks the role admin"):
            over_grpc.unload_model("calm", headers=shown)
        assert over_grpc.is_server_live()


def test_models_are_granted_by_name_at_both_doors(server):
    assert ask(server, "POST", "/v2/models/other1/infer", BODY, bearer(KEYS["narrow"]))[0] == 200
    status, body, _ = ask(server, "POST", "/v2/models/calm/infer", BODY, bearer(KEYS["narrow"]))
    assert (status, json.loads(body)["error"]) == (403, "caller 'narrow' may not ask model 'calm'")
    assert ask(server, "POST", "/v2/models/nosuch/infer", BODY, bearer(KEYS["narrow"]))[0] == 403
    metadata = (("x-api-key", KEYS["narrow"]),)
    with grpc.insecure_channel(server.grpc) as channel:
        infer = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer", pb.ModelInferRequest.SerializeToString
        )
        with pytest.raises(grpc.RpcError) as caught:
            infer(pb.ModelInferRequest(model_name="calm"), metadata=metadata)
        assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
        stream = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            pb.ModelInferRequest.SerializeToString,
            pb.ModelStreamInferResponse.FromString,
        )
        answers = stream(iter([pb.ModelInferRequest(model_name="calm", id="7")]), metadata=metadata, timeout=20)
        assert "may not ask model 'calm'" in next(answers).error_message


def test_limits_answer_429_with_the_time_to_wait_and_harm_nobody_else(server):
    statuses = [ask(server, "POST", "/v2/models/calm/infer", BODY, bearer(KEYS["slow"])) for _ in range(4)]
    assert [status for status, _, _ in statuses[:2]] == [200, 200]
    refused = [(status, headers.get("Retry-After")) for status, _, headers in statuses if status != 200]
    assert refused
    assert set(refused) == {(429, "1")}
    with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
        for _ in range(4):
            request = pb.ModelInferRequest(model_name="calm").SerializeToString()
            metadata = (("x-api-key", KEYS["slow"]),)
            with contextlib.suppress(grpc.RpcError) as _:
                channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(request, metadata=metadata)
        channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(request, metadata=metadata)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert ask(server, "POST", "/v2/models/calm/infer", BODY, bearer(KEYS["infer"]))[0] == 200


def test_requests_under_way_are_counted_and_given_back_when_clients_leave(folder):
    limited = {
        "callers": [{"name": "one", "roles": ["infer"], "limits": {"concurrent": 1}, "keys": [key_hash("k" * 20)]}]
    }
    (folder / "one.yaml").write_text(yaml.safe_dump(limited))
    with running(folder / "models", f"--access-file={folder / 'one.yaml'}") as server:
        held = json.loads(BODY) | {"parameters": {"delay_ms": 20000}}
        with connected(server) as connection:
            connection.request("POST", "/v2/models/calm/infer", json.dumps(held), bearer("k" * 20))
            deadline = time.monotonic() + 20
            while ask(server, "POST", "/v2/models/calm/infer", BODY, bearer("k" * 20))[0] != 429:
                assert time.monotonic() < deadline
        while ask(server, "POST", "/v2/models/calm/infer", BODY, bearer("k" * 20))[0] != 200:
            assert time.monotonic() < deadline


def test_keys_change_under_load_within_seconds_and_no_request_is_lost(folder):
    file = folder / "changing.yaml"
    old, new = KEYS["infer"], "another-key-0123456789"
    file.write_text(yaml.safe_dump(document()))
    stop, statuses = threading.Event(), []

    def load(server):
        with connected(server) as connection:
            while not stop.is_set():
                connection.request("POST", "/v2/models/calm/infer", BODY, bearer(KEYS["admin"]))
                answer = connection.getresponse()
                answer.read()
                statuses.append(answer.status)

    with running(folder / "models", f"--access-file={file}") as server:
        thread = threading.Thread(target=load, args=(server,))
        thread.start()
        try:
            for first, second in ((old, new), (new, old)):
                (folder / "next").write_text(yaml.safe_dump(document(KEYS | {"infer": second})))
                (folder / "next").replace(file)
                deadline = time.monotonic() + 5
                while True:
                    known = ask(server, "POST", "/v2/models/calm/infer", BODY, bearer(second))[0]
                    gone = ask(server, "POST", "/v2/models/calm/infer", BODY, bearer(first))[0]
                    if (known, gone) == (200, 401):
                        break
                    assert time.monotonic() < deadline, (known, gone)
            file.write_text("callers: nonsense")
            server.wait_for_log("the access file stays as it was")
            assert ask(server, "POST", "/v2/models/calm/infer", BODY, bearer(old))[0] == 200
        finally:
            stop.set()
            thread.join()
        assert set(statuses) == {200}
        assert len(statuses) > 100
        assert old not in server.log()
        assert new not in server.log()


def test_a_wrong_file_is_told_at_the_start(folder):
    import subprocess
    import sys

    (folder / "wrong.yaml").write_text("callers: [{name: a, roles: [root]}]")
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "serve", f"--model-repository={folder / 'models'}", "--http-port=0",
         "--grpc-port=0", "--metrics-port=0", f"--access-file={folder / 'wrong.yaml'}"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "callers[0].roles: expected some of infer, observe, admin, got 'root'" in done.stdout + done.stderr


def test_a_key_of_the_command_opens_the_door_that_its_entry_says(folder):
    import subprocess
    import sys

    made = subprocess.run(
        [sys.executable, "-m", "headrace", "key", "team", "--role", "observe"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    key = made.stdout.strip()
    assert key not in made.stderr
    (folder / "made.yaml").write_text(f"callers:\n{made.stderr}")
    with running(folder / "models", f"--access-file={folder / 'made.yaml'}") as server:
        assert ask(server, "POST", "/v2/repository/index", "", bearer(key))[0] == 200
        assert ask(server, "POST", "/v2/models/calm/infer", BODY, bearer(key))[0] == 403
    hashed = subprocess.run(
        [sys.executable, "-m", "headrace", "key", "--hash"],
        input=key, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert hashed.stdout.strip() == key_hash(key)
