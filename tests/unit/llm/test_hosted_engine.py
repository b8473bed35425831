"""An engine with a process of its own: whichever of the two dies, nothing is left behind and everybody is told."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine_contract import GREEDY, Heard, text_of
from headrace_backends.llm.adapters.hosted import HostedEngine
from headrace_backends.llm.adapters.hosted_wire import Opening
from headrace_backends.llm.adapters.process_group import kill_members
from headrace_backends.llm.adapters.vllm import ENVIRONMENT, VllmEngine, command, variables
from headrace_backends.llm.engine import EngineCall
from headrace_protocol.errors import ErrorCode, InferError
from hosted_engines import hosted_script
from scripted_engine import ByteText, script


def call(number: int, **said) -> EngineCall:
    return EngineCall(number, (list(script(**said).encode()),), GREEDY, 0)


@pytest.fixture
def opened():
    engine, heard = hosted_script(), Heard()
    engine.open(heard)
    yield engine, heard
    engine.close()


def gone(group: int) -> bool:
    """Whether the whole group has ended, within some time."""
    for _ in range(500):
        members = subprocess.run(["pgrep", "-g", str(group), "-r", "R,S,D,T"], capture_output=True, check=False)
        if not members.stdout:
            return True
        time.sleep(0.01)
    return False


def test_a_process_that_dies_is_told_to_every_call_and_then_to_the_backend(opened):
    engine, heard = opened
    engine.submit(call(1, say="x" * 50, hold="for ever", at=2))
    heard.until(lambda: bool(heard._by_call.get(1)))
    engine.submit(call(2, say="abc", die_after=1))
    for number in (1, 2):
        error = heard.end(number)[-1].error
        assert error.code is ErrorCode.UNAVAILABLE
        assert "ended with status 9" in error.message
    heard.until(lambda: heard.broken is not None)
    assert not engine.healthy()
    engine.close()


def test_a_process_that_is_killed_is_told_as_that(opened):
    engine, heard = opened
    group = engine._process.pid
    os.kill(group, signal.SIGKILL)
    heard.until(lambda: heard.broken is not None)
    assert "was killed by signal 9" in heard.broken.message
    engine.submit(call(3, say="late"))
    assert heard.end(3)[-1].error is heard.broken
    assert gone(group)


def test_an_engine_that_breaks_is_told_with_its_own_reason(opened):
    engine, heard = opened
    engine.submit(call(1, say="abcdef", break_after=2))
    heard.until(lambda: heard.broken is not None)
    assert "the script says so" in heard.broken.message
    assert heard.end(1)[-1].error.code is ErrorCode.UNAVAILABLE


def test_a_fault_in_taking_what_it_tells_ends_the_calls_and_the_engine(opened, monkeypatch):
    engine, heard = opened
    monkeypatch.setattr(engine, "_wanted", lambda told: 1 // 0)
    engine.submit(call(1, say="abc"))
    heard.until(lambda: heard.broken is not None)
    assert "ZeroDivisionError" in heard.broken.message
    assert heard.end(1)[-1].error is heard.broken
    assert not engine.healthy()


def test_what_fails_to_load_says_why():
    with pytest.raises(InferError, match="cannot be loaded") as raised:
        hosted_script(explode=True).open(Heard())
    assert raised.value.code is ErrorCode.INTERNAL
    with pytest.raises(InferError, match="No module named 'nowhere'"):
        hosted_script(module="nowhere").open(Heard())


def test_what_ends_before_it_answers_says_with_what_status():
    def silent(code: str) -> HostedEngine:
        return HostedEngine(
            "the process", lambda _: [sys.executable, "-c", code], os.environ, Opening({}, {}), lambda told: (told.card, ByteText())
        )  # fmt: skip

    with pytest.raises(InferError, match="the process ended with status 4 while it loaded"):
        silent("raise SystemExit(4)").open(Heard())
    missing = HostedEngine("the process", lambda _: ["/nowhere/python"], {}, Opening({}, {}), lambda _: None)
    with pytest.raises(InferError, match="cannot be started"):
        missing.open(Heard())


def test_closing_ends_the_process_and_its_calls(opened):
    engine, heard = opened
    group = engine._process.pid
    engine.submit(call(1, say="hello"))
    assert text_of(heard.answer(1)) == "hello"
    engine.submit(call(2, say="hello", hold="for ever"))
    engine.close()
    assert "unloaded" in heard.end(2)[-1].error.message
    assert gone(group)
    assert heard.broken is None


def test_a_backend_that_is_killed_takes_the_engine_with_it():
    code = (
        "import os, subprocess, sys\n"
        "from engine_contract import Heard\n"
        "from hosted_engines import hosted_script\n"
        "engine = hosted_script()\n"
        "engine.open(Heard())\n"
        "print(engine._process.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    backend = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )  # fmt: skip
    with backend:
        group = int(backend.stdout.readline())
        backend.kill()
    assert gone(group)


def test_a_group_is_killed_but_for_who_is_spared():
    shell = subprocess.Popen(["sh", "-c", "sleep 100 & exec sleep 100"], start_new_session=True)
    for _ in range(500):
        if len(subprocess.run(["pgrep", "-g", str(shell.pid)], capture_output=True, check=False).stdout.split()) == 2:
            break
        time.sleep(0.01)
    assert kill_members(shell.pid, spare=shell.pid) == 0
    assert shell.poll() is None
    kill_members(shell.pid)
    assert shell.wait(5) == -signal.SIGKILL


def test_a_python_without_vllm_is_named_with_what_is_to_be_done():
    with pytest.raises(InferError, match=f"has no vllm: install vLLM in an environment of its own.*{ENVIRONMENT}"):
        command(Path(sys.executable), 3)
    with pytest.raises(InferError, match="cannot be asked"):
        command(Path("/nowhere/bin/python"), 3)


def test_settings_that_are_not_vllms_are_read_before_it_is_started(tmp_path):
    with pytest.raises(InferError) as raised:
        VllmEngine(
            tmp_path,
            {ENVIRONMENT: "venv", "tool_call_parser": "morse", "lora_modules": {"a": "x"}},
            threads=1,
            device="cpu",
        )
    message = raised.value.message
    for part in (
        "model: not given",
        f"{ENVIRONMENT}: expected the absolute path",
        "tool_call_parser: expected one of",
        "lora_modules.a",
    ):
        assert part in message


def test_the_engine_sees_no_variables_of_our_python(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/x")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    on_cpu = variables(Path("/opt/v/bin/python"), "cpu", 2)
    assert "PYTHONPATH" not in on_cpu
    assert on_cpu["PATH"].startswith("/opt/v/bin:")
    assert on_cpu["OMP_NUM_THREADS"] == "3"
    assert on_cpu["VLLM_NO_USAGE_STATS"] == "1"
    assert variables(Path("/opt/v/bin/python"), "cuda:1", 2)["CUDA_VISIBLE_DEVICES"] == "6"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert variables(Path("/opt/v/bin/python"), "cuda:1", 2)["CUDA_VISIBLE_DEVICES"] == "1"
