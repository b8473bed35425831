"""What a backend process has of the server's: chosen variables, its own descriptors, as much memory as it was given."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import sys
from pathlib import Path

from clients import call, infer
from figures import wait_until
from harness import RunningServer, running
from headrace.instances.process import ExecLauncher
from headrace.instances.zygote import ZygoteLauncher
from repositories import add_identity

SECRETS = {
    "HF_TOKEN": "hf-very-secret",
    "AWS_ACCESS_KEY_ID": "aws-very-secret",
    "GOOGLE_APPLICATION_CREDENTIALS": "/very-secret.json",
    "OPENAI_API_KEY": "sk-very-secret",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=very-secret",
    "HEADRACE_LOG_ERROR": "true",
    "DATABASE_URL": "postgres://joe:very-secret@db/x",
}
OTHERS = {"SOME_SETTING": "some", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
CONFIG = """
backend: "python" max_batch_size: 0
input [ { name: "IN" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
TELLING = '''
"""Tells of its process: 0 = variables, 1 = descriptors, 2 = limits; more = takes so many bytes, and tells what it got."""
import ctypes, json, os, resource
import numpy as np
import triton_python_backend_utils as pb_utils

AT_LOAD = bytearray(int(os.environ.get("AT_LOAD", "0")))

def descriptors():
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            pass  # that of the listing
    return found

def limits():
    return {name: resource.getrlimit(getattr(resource, name)) for name in ("RLIMIT_DATA", "RLIMIT_CORE", "RLIMIT_AS")}

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            what = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])
            if what < 0:  # as native code that does not look whether it got the memory
                libc = ctypes.CDLL(None)
                libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
                ctypes.memset(libc.malloc(-what), 1, 4096)
                told = -what
            elif what < 3:
                told = [lambda: dict(os.environ), descriptors, limits][what]()
            else:
                told = len(bytearray(what))
            out = np.array([json.dumps(told).encode()], dtype=np.object_)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)]))
        return responses
'''


def add_telling(repository: Path, name: str = "telling", **parameters: str) -> None:
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    lines = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items()]
    (folder.parent / "config.pbtxt").write_text("\n".join([CONFIG, *lines]))
    (folder / "model.py").write_text(TELLING)


def ask(server: RunningServer, what: int, model: str = "telling") -> tuple[int, object]:
    status, body = infer(server, model, ("IN", "INT64", [1], [what]))
    return status, json.loads(body["outputs"][0]["data"][0]) if status == 200 else body["error"]


def variables(server: RunningServer, model: str = "telling") -> dict[str, str]:
    status, told = ask(server, 0, model)
    assert status == 200, told
    assert isinstance(told, dict)
    return told


def descriptors_of(pid: int) -> set[str]:
    found = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it reads the modules that it imports
            found.add(str(path.readlink()))
    return found


def sockets_of(pid: int) -> list[str]:
    return [target for target in descriptors_of(pid) if target.startswith("socket:")]


def environment_like_the_servers(folder: Path) -> Path:
    """Make an environment in which the server's Python runs, with the packages that it has."""
    (folder / "bin").mkdir(parents=True)
    script = folder / "bin" / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return folder


def test_models_do_not_see_what_is_secret_however_their_process_was_started(tmp_path):
    repository = tmp_path / "models"
    add_telling(repository)
    add_telling(repository, "apart", EXECUTION_ENV_PATH=str(environment_like_the_servers(tmp_path / "env")))
    with running(repository, env={**SECRETS, **OTHERS}) as server:
        for model in ("telling", "apart"):
            told = variables(server, model)
            assert not {name for name in told if name in SECRETS}
            assert "very-secret" not in json.dumps(told)
            assert told.items() >= OTHERS.items()
        # what is started before any model is: the zygote, whose memory its children share
        for process in server.descendants():
            with contextlib.suppress(FileNotFoundError):
                assert b"very-secret" not in Path(f"/proc/{process.pid}/environ").read_bytes(), process.cmdline()


def test_the_operator_says_how_much_of_the_environment_goes_on(tmp_path):
    add_telling(tmp_path)
    flags = ("--backend-environment=minimal", "--backend-env=HF_TOKEN", "--backend-env=AWS_*")
    with running(tmp_path, *flags, env={**SECRETS, **OTHERS}) as server:
        told = variables(server)
        assert {name for name in told if name in SECRETS} == {"HF_TOKEN", "AWS_ACCESS_KEY_ID"}
        assert {name for name in told if name in OTHERS} == {"OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM"}


def test_a_process_has_no_descriptor_of_the_servers_whatever_that_has_open(tmp_path):
    """With connections, a trace file and a log file open: also one that takes the place of a process that died."""
    repository = tmp_path / "models"
    add_telling(repository)
    add_identity(repository, "m")
    flags = (
        f"--trace-config=triton,file={tmp_path / 'trace.json'}", "--trace-config=level=TIMESTAMPS", "--trace-config=rate=1",
        "--model-control-mode=explicit", "--load-model=m",
    )  # fmt: skip
    with running(repository, *flags) as server, contextlib.ExitStack() as stack:
        host, port = server.http.split(":")
        for _ in range(50):
            stack.enter_context(socket.create_connection((host, int(port))))
        infer(server, "m", ("INPUT0", "FP32", [1, 1], [1]))
        assert call(server, "/v2/repository/models/telling/load", {})[0] == 200
        status, told = ask(server, 1)
        assert status == 200
        assert isinstance(told, dict)
        assert told.pop("0") == "/dev/null"
        assert told.pop("1") == told.pop("2"), "what it prints goes where the server's errors go"
        assert sorted(told.values()).count("anon_inode:[timerfd]") == 1
        told = {number: target for number, target in told.items() if target != "anon_inode:[timerfd]"}
        assert len([target for target in told.values() if target.startswith("socket:")]) == 1, "its channel"
        memories = {target for target in told.values() if not target.startswith("socket:")}
        assert memories == {"/memfd:headrace-arena (deleted)"}, told
        assert len(told) == 3, "the arena is known by two numbers: its own, and that of its mapping"
        _, limits = ask(server, 2)
        for name in ("RLIMIT_DATA", "RLIMIT_CORE", "RLIMIT_AS"):
            assert limits[name] == list(resource.getrlimit(getattr(resource, name))), f"{name} is the server's"


async def test_nothing_that_the_server_has_open_reaches_a_process_even_where_it_could_be_inherited(tmp_path):
    with contextlib.ExitStack() as stack:
        for name in ("key.pem", "server.log", "trace.json"):
            os.set_inheritable(stack.enter_context((tmp_path / name).open("w")).fileno(), True)
        for pair in [socket.socketpair() for _ in range(20)]:
            for end in pair:
                os.set_inheritable(stack.enter_context(end).fileno(), True)
        launcher = ZygoteLauncher("identity")
        children = [await ExecLauncher().launch(), await launcher.launch()]
        for child in children:
            assert not [target for target in descriptors_of(child.pid) if str(tmp_path) in target]
            # a fork lets go of its zygote's first
            wait_until("it has one socket", lambda pid=child.pid: len(sockets_of(pid)) == 1)
            child.socket.close()
            await child.wait()
        launcher.close()


def test_a_model_that_takes_more_than_its_share_fails_alone(tmp_path):
    mib = 1 << 20
    add_telling(tmp_path, "small", memory_limit_bytes=str(400 * mib))
    add_telling(tmp_path, "middle", memory_limit_bytes=str(4000 * mib))
    add_telling(tmp_path, "greedy", memory_limit_bytes=str(2 * mib))
    add_telling(tmp_path, "wrong", memory_limit_bytes="much")
    flags = (f"--backend-memory-limit={600 * mib}", "--exit-on-error=false", "--strict-readiness=false")
    with running(tmp_path, *flags) as server:
        pids = {process.pid for process in server.backends()}
        assert ask(server, 2, "small")[1]["RLIMIT_DATA"] == [400 * mib] * 2
        assert ask(server, 2, "middle")[1]["RLIMIT_DATA"] == [600 * mib] * 2, "the smaller of the two counts"
        for model, too_much in (("small", 500 * mib), ("middle", 700 * mib)):
            status, error = ask(server, too_much, model)
            assert status == 500
            assert "MemoryError" in str(error), error
            assert ask(server, 10 * mib, model) == (200, 10 * mib), "the next request finds room"
        assert {process.pid for process in server.backends()} == pids, "nobody else noticed"
        assert ask(server, -10 * mib, "small") == (200, 10 * mib)
        assert ask(server, -500 * mib, "small")[0] == 503, "it died of that"
        server.wait_status("/v2/models/small/ready", 200)
        assert ask(server, 10 * mib, "small") == (200, 10 * mib), "and was started again"
        assert len({process.pid for process in server.backends()} & pids) == 1, "the other one goes on"
        states = {entry["name"]: entry.get("reason", "") for entry in call(server, "/v2/repository/index", {})[1]}
        assert f"memory limit of {2 * mib} bytes is no more than what it takes before" in states["greedy"]
        assert "parameters.memory_limit_bytes: expected a number of bytes" in states["wrong"]


def test_a_model_that_takes_too_much_at_its_load_is_refused_and_the_others_serve(tmp_path):
    mib = 1 << 20
    add_telling(tmp_path, "telling", memory_limit_bytes=str(400 * mib))
    add_identity(tmp_path, "m")
    flags = ("--exit-on-error=false", "--strict-readiness=false")
    with running(tmp_path, *flags, env={"AT_LOAD": str(500 * mib)}) as server:
        assert infer(server, "m", ("INPUT0", "FP32", [1, 1], [1]))[0] == 200
        reasons = [entry.get("reason", "") for entry in call(server, "/v2/repository/index", {})[1]]
        assert any("MemoryError" in reason for reason in reasons), reasons


def test_processes_started_in_place_of_dead_ones_have_the_same_limit(tmp_path):
    add_identity(tmp_path, "m", memory_limit_bytes=str(1 << 30))
    with running(tmp_path) as server:
        for _ in range(2):
            (process,) = server.backends()
            assert process.rlimit(2) == (1 << 30, 1 << 30)
            assert infer(server, "m", ("INPUT0", "FP32", [1, 1], [1]), parameters={"crash": True})[0] == 503
            server.wait_status("/v2/models/m/ready", 200)
