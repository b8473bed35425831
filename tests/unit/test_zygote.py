"""The zygote, as a real process that forks real model processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import onnx_models
from backend_process import Conversation, ZygoteProcess, identity_config, wait_gone
from headrace_backends.runner import EXIT_PROTOCOL_ERROR
from headrace_protocol.messages import Finalize, RequestHeader
from headrace_protocol.zygote import Exited

ROW = np.ones((1, 2), np.float32)
MEGABYTE = 1 << 20


@pytest.fixture
def zygote() -> Iterator[ZygoteProcess]:
    zygote = ZygoteProcess("identity")
    yield zygote
    zygote.close()


def serve_one(child: Conversation, **parameters: bool) -> None:
    assert child.initialize(identity_config()).error is None
    child.send(child.execute(1, ROW, [RequestHeader(1, parameters=dict(parameters) or None)]))


def test_it_says_hello_once_it_can_fork(zygote: ZygoteProcess) -> None:
    assert zygote.hello.refusal == ""


def test_children_serve_models_and_their_ends_are_told(zygote: ZygoteProcess) -> None:
    pid, child = zygote.fork()
    serve_one(child)
    assert child.results()[0].batched is not None
    child.send(Finalize())
    assert zygote.exited() == Exited(pid, 0)
    child.close()


def test_the_status_of_a_killed_child_is_its_signal(zygote: ZygoteProcess) -> None:
    pid, child = zygote.fork()
    child.initialize(identity_config())
    os.kill(pid, signal.SIGKILL)
    assert zygote.exited() == Exited(pid, -signal.SIGKILL)
    child.close()


def test_a_crash_of_one_child_does_not_touch_another(zygote: ZygoteProcess) -> None:
    pid, crashing = zygote.fork()
    _, other = zygote.fork()
    serve_one(crashing, crash=True)
    assert zygote.exited() == Exited(pid, 42)
    serve_one(other)
    assert other.results()[0].batched is not None
    crashing.close()
    other.close()


def test_a_child_ends_when_its_own_channel_does_although_others_were_forked_later(zygote: ZygoteProcess) -> None:
    pid, first = zygote.fork()
    _, second = zygote.fork()
    first.close()
    assert zygote.exited() == Exited(pid, 0)
    second.close()


def test_a_child_holds_no_descriptor_but_its_own(zygote: ZygoteProcess) -> None:
    _, first = zygote.fork()
    pid, second = zygote.fork()
    second.initialize(identity_config())
    targets = [link.readlink().as_posix() for link in Path(f"/proc/{pid}/fd").iterdir() if int(link.name) > 2]
    assert len([target for target in targets if target.startswith("socket:")]) == 1
    own = ("socket:", "/memfd:headrace-arena", "anon_inode:[timerfd]")
    assert all(target.startswith(own) for target in targets), targets
    first.close()
    second.close()


def test_children_outlive_the_zygote(zygote: ZygoteProcess) -> None:
    pid, child = zygote.fork()
    child.initialize(identity_config())
    zygote.close()
    child.send(child.execute(1, ROW))
    assert child.results()[0].batched is not None
    child.close()
    wait_gone(pid)


def test_the_zygote_ends_with_its_control_channel(zygote: ZygoteProcess) -> None:
    zygote.socket.close()
    assert zygote.process.wait(30) == 0


def test_an_order_without_a_descriptor_or_meaning_ends_the_zygote(zygote: ZygoteProcess) -> None:
    zygote.socket.send(b"\xc1")
    assert zygote.process.wait(30) == EXIT_PROTOCOL_ERROR


def test_a_backend_that_cannot_be_imported_is_refused_with_the_reason() -> None:
    zygote = ZygoteProcess("nonsuch")
    assert "there is no backend 'nonsuch'" in zygote.hello.refusal
    zygote.close()


@pytest.mark.parametrize(
    ("before", "refusal"),
    [
        ("", ""),
        (
            "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
            "importing backend 'identity' started 1 threads",
        ),
    ],
)
def test_a_process_with_threads_is_not_forked(before: str, refusal: str) -> None:
    script = "import threading, time\nfrom headrace_backends.zygote import why_not_fork\n"
    script += f"{before}\nprint(why_not_fork('identity'))"
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert result.stdout == f"{refusal}\n"


def test_importing_onnxruntime_starts_no_thread_and_a_small_model_costs_less_than_15_megabytes(tmp_path: Path) -> None:
    onnx_models.mlp(tmp_path / "1" / "model.onnx")
    config = {
        **identity_config(),
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [8]}],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [4]}],
    }
    zygote = ZygoteProcess("onnxruntime")
    assert zygote.hello.refusal == ""
    children = [zygote.fork() for _ in range(4)]
    for _, child in children:
        assert child.initialize(config, tmp_path, "onnxruntime").error is None
        child.send(child.execute(1, np.ones((1, 8), np.float32), name="x"))
        responses, _, _ = child.results()
        assert responses.batched is not None
        assert child.array(responses.batched[0]).sum() == pytest.approx(1)
    for pid, _ in children:
        found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
        assert found is not None
        assert int(found[1]) * 1024 < 15 * MEGABYTE
    for _, child in children:
        child.close()
    zygote.close()


def test_a_channel_handed_over_is_closed_in_the_zygote(zygote: ZygoteProcess) -> None:
    def sockets() -> int:
        links = Path(f"/proc/{zygote.process.pid}/fd").iterdir()
        return sum(link.readlink().as_posix().startswith("socket:") for link in links)

    before = sockets()
    _, child = zygote.fork()
    child.initialize(identity_config())
    assert sockets() == before
    child.close()
