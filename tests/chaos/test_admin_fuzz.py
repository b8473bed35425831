"""Thousands of odd calls of the admin surface, with and without its role: the server lives, and the disk is as it was."""

from __future__ import annotations

import base64
import http.client
import json
import os
import random
from pathlib import Path

import grpc
import pytest
import yaml

from harness import RunningServer, running
from headrace.access.table import key_hash
from headrace_protocol._generated import grpc_service_pb2 as pb
from repositories import add_identity

ADMIN = "key-of-the-admin-0123456789"
CALLS = int(os.environ.get("HEADRACE_FUZZ_CALLS", "1500"))
NAMES = [
    "calm", "other", "ghost", "", ".", "..", "../calm", "a/b", "/etc", "%2e%2e", "x" * 300, "ü", "a\nb", "a\x1b[2Jb", "calm\x00",
    "..%2f..%2ftmp%2fpwn", "*", "CALM", "calm ", "-1", "\u202e",
]  # fmt: skip
TEXTS = [
    *NAMES,
    "1",
    "0",
    "-1",
    "OFF",
    "TIMESTAMPS",
    "opentelemetry",
    "/tmp/pwn",
    "/dev/null",
    "9" * 400,
    "1e400",
    "NaN",
    "true",
]
KEYS = [
    "config", "file:1/model.py", "file:../../../../tmp/pwn", "file:/tmp/pwn", "file:1/../../x", "file:", "trace_file", "trace_level",
    "trace_rate", "trace_count", "log_frequency", "trace_mode", "log_file", "log_info", "log_verbose_level", "log_format", "key",
    "offset", "byte_size", "raw_handle", "device_id", "unload_dependents", "parameters", "", "ü",
]  # fmt: skip
PATHS = [
    "/v2/repository/index", "/v2/repository/models/{}/load", "/v2/repository/models/{}/unload", "/v2/repository/{}/index",
    "/v2/trace/setting", "/v2/models/{}/trace/setting", "/v2/logging", "/v2/systemsharedmemory/region/{}/register",
    "/v2/systemsharedmemory/region/{}/unregister", "/v2/systemsharedmemory/status", "/v2/cudasharedmemory/region/{}/register",
    "/v2/cudasharedmemory/unregister", "/v2/models/{}/config", "/v2/models/{}/stats", "/v2/models/{}/versions/{}/config",
]  # fmt: skip


def value(draw: random.Random, depth: int = 0):
    kinds = ["text", "number", "none", "bool", "base64"] + (["list", "object"] if depth < 3 else [])
    match draw.choice(kinds):
        case "text":
            return draw.choice(TEXTS)
        case "number":
            return draw.choice([0, 1, -1, 2**31, 2**63, 2**64, -(2**63), 1.5, 1e308, 10**30])
        case "bool":
            return draw.random() < 0.5
        case "base64":
            return base64.b64encode(draw.randbytes(draw.randrange(40))).decode()
        case "list":
            return [value(draw, depth + 1) for _ in range(draw.randrange(4))]
        case "object":
            return {draw.choice(KEYS): value(draw, depth + 1) for _ in range(draw.randrange(4))}
    return None


def body(draw: random.Random) -> bytes:
    match draw.randrange(6):
        case 0:
            return draw.choice([b"", b"[", b"{}", b"null", b"\xff\xfe", b"{" * 5000, b"[" * 5000, b'{"a":' * 2000])
        case 1:
            return json.dumps({"parameters": {draw.choice(KEYS): value(draw) for _ in range(3)}}).encode()
        case 2:
            config = json.dumps(
                {"backend": draw.choice(["identity", "python", "ghost", "../x"]), "name": draw.choice(TEXTS)}
            )
            files = {draw.choice(KEYS[1:6]): base64.b64encode(b"import os").decode()}
            return json.dumps({"parameters": {"config": config, **files}}).encode()
    return json.dumps({draw.choice(KEYS): value(draw) for _ in range(draw.randrange(5))}).encode()


def quoted(text: str) -> str:
    return "".join(
        c if c.isascii() and c.isprintable() and c not in " \x00" else "%" + c.encode().hex()[:2] for c in text
    )


def message(draw: random.Random):
    name = draw.choice(NAMES).replace("\ud800", "")
    trace = pb.TraceSettingRequest(model_name=name)
    for _ in range(2):
        trace.settings[draw.choice(KEYS)].value.extend(draw.choices(TEXTS, k=draw.randrange(3)))
    log = pb.LogSettingsRequest()
    log.settings[draw.choice(KEYS)].string_param = draw.choice(TEXTS)
    load = pb.RepositoryModelLoadRequest(repository_name=draw.choice(["", name]), model_name=name)
    load.parameters[draw.choice(KEYS)].bytes_param = draw.randbytes(20)
    load.parameters[draw.choice(KEYS)].string_param = draw.choice(TEXTS)
    region = pb.SystemSharedMemoryRegisterRequest(name=name, key=draw.choice(TEXTS), offset=draw.choice([0, 2**63]), byte_size=draw.choice([0, 8, 2**63]))  # fmt: skip
    choices = [
        ("TraceSetting", trace), ("LogSettings", log), ("RepositoryModelLoad", load), ("SystemSharedMemoryRegister", region),
        ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name=name)),
        ("RepositoryIndex", pb.RepositoryIndexRequest(repository_name=name)),
        ("ModelStatistics", pb.ModelStatisticsRequest(name=name, version=draw.choice(TEXTS))),
        ("CudaSharedMemoryUnregister", pb.CudaSharedMemoryUnregisterRequest(name=name)),
    ]  # fmt: skip
    method, request = draw.choice(choices)
    return method, request.SerializeToString() if draw.random() < 0.9 else draw.randbytes(30)


def tree(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def infer(server: RunningServer, connection: http.client.HTTPConnection) -> int:
    row = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
    connection.request("POST", "/v2/models/kept/infer", json.dumps(row), {"X-API-Key": ADMIN})
    answer = connection.getresponse()
    answer.read()
    return answer.status


@pytest.mark.parametrize("key", [ADMIN, None], ids=["admin", "nobody"])
def test_no_call_of_the_admin_surface_hurts_the_server_or_the_disk(tmp_path, key):
    models = tmp_path / "models"
    for name in ("calm", "other", "kept"):
        add_identity(models, name)
    (tmp_path / "access.yaml").write_text(
        yaml.safe_dump({"callers": [{"name": "admin", "roles": ["admin"], "keys": [key_hash(ADMIN)]}]})
    )
    (tmp_path / "scratch").mkdir()
    flags = (
        "--model-control-mode=explicit", "--load-model=kept", "--load-model=calm", "--allow-client-shm=true",
        f"--trace-config=triton,file={tmp_path / 'trace.json'}", f"--access-file={tmp_path / 'access.yaml'}",
    )  # fmt: skip
    draw = random.Random(7)
    before = tree(models)
    headers = {} if key is None else {"X-API-Key": key}
    with running(models, *flags, env={"TMPDIR": str(tmp_path / "scratch")}) as server:
        host, port = server.http.split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        with grpc.insecure_channel(server.grpc) as channel:
            for number in range(CALLS):
                if number % 3:
                    path = draw.choice(PATHS)
                    path = path.format(*(quoted(draw.choice(NAMES)) for _ in range(path.count("{}"))))
                    method = draw.choice(["POST", "POST", "POST", "GET", "DELETE"])
                    connection.request(method, path, body(draw), headers)
                    answer = connection.getresponse()
                    told = answer.read()
                    assert answer.status not in (500, 502), (method, path, told[:300])
                    if key is None:
                        assert answer.status in (400, 401, 404, 405, 413), (method, path, answer.status)
                else:
                    method, data = message(draw)
                    metadata = () if key is None else (("x-api-key", key),)
                    try:
                        channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(
                            data, metadata=metadata, timeout=60
                        )
                    except grpc.RpcError as error:
                        refused = error.code()
                        assert refused not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN), (
                            method,
                            error.details(),
                        )
                        if key is None:
                            assert refused is grpc.StatusCode.UNAUTHENTICATED
                    else:
                        assert key is not None, method
                if number % 100 == 99 and key is None:
                    assert infer(server, connection) == 200
        connection.close()
        assert server.status("/v2/health/live") == 200
    assert tree(models) == before
    assert not Path("/tmp/pwn").exists()
    assert tree(tmp_path / "scratch") == {}
