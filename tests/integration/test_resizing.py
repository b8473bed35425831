"""A change of instance groups or of the version policy changes what serves in place: nothing else of it begins anew."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from clients import call, infer
from harness import RunningServer, running
from repositories import add_identity, add_onnx, identity_config
from sequence_models import accumulator, accumulator_config

EXPLICIT = ("--model-control-mode=explicit", "--load-model=*")
TENSOR = ("INPUT0", "FP32", [1, 1], [1])


def groups(*counts: int, **more: str) -> str:
    """Return instance groups g0, g1, ... of so many instances each; keywords say more of one by its name."""
    said = [
        f"{{ name: 'g{index}' count: {count} kind: KIND_CPU {more.get(f'g{index}', '')} }}"
        for index, count in enumerate(counts)
    ]
    return f"instance_group [ {', '.join(said)} ]"


def write(folder: Path, *counts: int, **more: str) -> None:
    config = identity_config("m", extra=groups(*counts, **more), execute_delay_ms="50")
    (folder / "config.pbtxt").write_text(config)


def load(server: RunningServer, name: str = "m") -> tuple[int, str]:
    status, body = call(server, f"/v2/repository/models/{name}/load", {})
    return status, (body or {}).get("error", "")


def pids(server: RunningServer) -> set[int]:
    return {process.pid for process in server.backends()}


def successes(server: RunningServer, name: str = "m") -> int:
    return call(server, f"/v2/models/{name}/stats")[1]["model_stats"][0]["inference_stats"]["success"]["count"]


def wait_for_end(pid: int) -> None:
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=10)
    assert not psutil.pid_exists(pid)


@pytest.fixture
def folder(tmp_path):
    folder = add_identity(tmp_path, "m")
    write(folder, 1)
    return folder


def test_instances_come_and_go_without_a_failure_and_statistics_go_on(tmp_path, folder):
    """Under load; passive groups, and host policies that do not exist, make groups with processes of their own."""
    apart = {"g1": "host_policy: 'x'", "g2": "host_policy: 'y'"}
    with running(tmp_path, *EXPLICIT) as server:
        (first,) = pids(server)
        failed: list = []
        answered = 0
        over = threading.Event()

        def ask() -> None:
            nonlocal answered
            while not over.is_set():
                status, body = infer(server, "m", TENSOR)
                answered += status == 200
                if status != 200:
                    failed.append(body)

        with ThreadPoolExecutor(6) as pool:
            tasks = [pool.submit(ask) for _ in range(6)]
            write(folder, 1, 2, **apart)
            assert load(server) == (200, "")
            both = pids(server)
            assert len(both) == 2
            assert first in both, "the group that is the same goes on"
            write(folder, 1, 2, 1, **apart)
            assert load(server) == (200, "")
            assert both < pids(server)
            (folder / "config.pbtxt").write_text(
                identity_config("m", extra=groups(1, g0="host_policy: 'z'"), execute_delay_ms="50")
            )
            assert load(server) == (200, "")
            over.set()
            for task in tasks:
                task.result()
        assert failed == []
        wait_for_end(first)
        assert len(pids(server)) == 1
        assert answered >= 6
        assert successes(server) == answered
        (group,) = call(server, "/v2/models/m/config")[1]["instance_group"]
        assert (group["count"], group["host_policy"]) == (1, "z")
        server.wait_for_log("0 processes go on, 1 are new")


def test_more_instances_take_what_waits_at_once(tmp_path, folder):
    (folder / "config.pbtxt").write_text(identity_config("m", extra=groups(1), execute_delay_ms="1000"))
    with running(tmp_path, *EXPLICIT) as server, ThreadPoolExecutor(4) as pool:
        started = time.monotonic()
        tasks = [pool.submit(infer, server, "m", TENSOR) for _ in range(4)]
        time.sleep(0.2)
        extra = groups(1, 3, g1="host_policy: 'x'")
        (folder / "config.pbtxt").write_text(identity_config("m", extra=extra, execute_delay_ms="1000"))
        assert load(server) == (200, "")
        assert [task.result()[0] for task in tasks] == [200] * 4
        assert time.monotonic() - started < 3


def test_what_cannot_be_had_leaves_everything_as_it_is_and_is_tried_again(tmp_path, folder):
    """The second try fails too, though nothing has changed; the third, of a good configuration, does not."""
    limits = ("--rate-limit=execution_count", "--rate-limit-resource=r:1")
    with running(tmp_path, *EXPLICIT, *limits) as server:
        before = pids(server)
        infer(server, "m", TENSOR)
        write(folder, 1, 1, g1="rate_limiter { resources { name: 'r' count: 2 } }")
        for _ in range(2):
            status, error = load(server)
            assert status == 400
            assert "resource 'r' is limited to 1" in error
            assert infer(server, "m", TENSOR)[0] == 200
        assert pids(server) == before
        assert len(call(server, "/v2/models/m/config")[1]["instance_group"]) == 1
        write(folder, 1, 1, g1="rate_limiter { resources { name: 'r' count: 1 } }")
        assert load(server) == (200, "")
        assert before < pids(server)
        assert successes(server) == 3


def test_a_warm_up_that_fails_in_a_new_instance_leaves_everything_as_it_is(tmp_path):
    """The model works in its first instance alone."""
    sample = (
        "model_warmup { name: 's' batch_size: 1 inputs { key: 'INPUT0' value { data_type: TYPE_FP32 dims: [ 1 ] "
        "zero_data: true } } }"
    )
    slow = {"execute_delay_ms": "10", "instance_wise_delay_multiplier": "1000"}
    folder = add_identity(tmp_path, "m", extra=f"{sample} {groups(1)}", **slow)
    with running(tmp_path, *EXPLICIT, "--model-load-timeout-secs=3") as server:
        before = pids(server)
        (folder / "config.pbtxt").write_text(identity_config("m", extra=f"{sample} {groups(2)}", **slow))
        status, error = load(server)
        assert status == 400
        assert "warm-up sample 's' was not over in instance 'g0_1'" in error
        assert pids(server) == before
        assert infer(server, "m", TENSOR)[0] == 200


def test_a_change_of_the_version_policy_leaves_versions_alone_that_stay(tmp_path, folder):
    with running(tmp_path, *EXPLICIT) as server:
        before = pids(server)
        infer(server, "m", TENSOR)
        (folder / "2").mkdir()
        config = identity_config("m", extra=f"{groups(1)} version_policy {{ all {{ }} }}", execute_delay_ms="50")
        (folder / "config.pbtxt").write_text(config)
        assert load(server) == (200, "")
        assert before < pids(server)
        assert "all" in call(server, "/v2/models/m/versions/1/config")[1]["version_policy"]
        assert call(server, "/v2/models/m/versions/1/stats")[1]["model_stats"][0]["inference_count"] == 1


def test_any_other_change_loads_anew(tmp_path, folder):
    with running(tmp_path, *EXPLICIT) as server:
        (before,) = pids(server)
        infer(server, "m", TENSOR)
        (folder / "config.pbtxt").write_text(identity_config("m", extra=groups(2), execute_delay_ms="51"))
        assert load(server) == (200, "")
        wait_for_end(before)
        assert successes(server) == 0


def test_a_model_that_takes_sequences_is_loaded_anew(tmp_path):
    folder = add_onnx(tmp_path, "sums", accumulator, config=accumulator_config(instances=1))
    with running(tmp_path, *EXPLICIT) as server:
        (before,) = pids(server)
        (folder / "config.pbtxt").write_text(accumulator_config(instances=2))
        assert load(server, "sums") == (200, "")
        wait_for_end(before)
        assert pids(server)


def test_the_server_stops_while_an_instance_that_nobody_needs_still_runs(tmp_path, folder):
    slow = {"execute_delay_ms": "1500"}
    (folder / "config.pbtxt").write_text(identity_config("m", extra=groups(1), **slow))
    with running(tmp_path, *EXPLICIT) as server, ThreadPoolExecutor(1) as pool:
        task = pool.submit(infer, server, "m", TENSOR)
        time.sleep(0.3)
        (folder / "config.pbtxt").write_text(identity_config("m", extra=groups(1, g0="host_policy: 'x'"), **slow))
        assert load(server) == (200, "")
        assert len(pids(server)) == 2
        assert server.stop() == 0
        assert task.result()[0] == 200


def test_a_process_that_dies_while_it_is_retired_is_not_started_again(tmp_path, folder):
    slow = {"execute_delay_ms": "3000"}
    (folder / "config.pbtxt").write_text(identity_config("m", extra=groups(1), **slow))
    with running(tmp_path, *EXPLICIT) as server, ThreadPoolExecutor(1) as pool:
        (old,) = pids(server)
        task = pool.submit(infer, server, "m", TENSOR)
        time.sleep(0.3)
        extra = groups(1, g0="host_policy: 'x'")
        (folder / "config.pbtxt").write_text(identity_config("m", extra=extra, **slow))
        assert load(server) == (200, "")
        psutil.Process(old).kill()
        assert task.result()[0] == 503
        assert len(pids(server)) == 1
        assert call(server, "/v2/models/m/ready")[0] == 200


def test_polling_sees_the_change(tmp_path, folder):
    with running(tmp_path, "--model-control-mode=poll", "--repository-poll-secs=1") as server:
        before = pids(server)
        write(folder, 1, 1, g1="host_policy: 'x'")
        server.wait_for_log("1 processes go on, 1 are new")
        assert before < pids(server)
