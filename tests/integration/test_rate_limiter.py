"""Where executions are limited by resources, no more run than there are, through a real server, whatever dies meanwhile."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from clients import call, infer
from harness import RunningServer, running
from repositories import add_decoupled, add_identity, add_onnx
from sequence_models import DIRECT, accumulator, accumulator_config, add, oldest

ON = "--rate-limit=execution_count"
TENSOR = ("INPUT0", "FP32", [1, 1], [1])


def group(
    count: int = 1, needs: int = 1, resource: str = "r", *, everywhere: bool = True, priority: int = 0, **more
) -> str:
    scope = "global: true" if everywhere else ""
    limiter = f'resources [ {{ name: "{resource}" {scope} count: {needs} }} ] priority: {priority}'
    fields = " ".join(f"{key}: {value}" for key, value in more.items())
    return f"instance_group [ {{ count: {count} kind: KIND_CPU rate_limiter {{ {limiter} }} {fields} }} ]"


def used(server: RunningServer, resource: str = "r") -> float:
    lines = [line for line in server.metrics().splitlines() if line.startswith("headrace_resource_used{")]
    (line,) = [line for line in lines if f'resource="{resource}"' in line]
    return float(line.rsplit(" ", 1)[1])


@contextlib.contextmanager
def load_on(server: RunningServer, seconds: float, *models: str, callers: int = 4):
    """Keep models busy for a while; yields a function that tells the answers of each so far."""
    until = time.monotonic() + seconds
    answers = dict.fromkeys(models, 0)
    lock = threading.Lock()

    def ask(model: str) -> None:
        while time.monotonic() < until:
            status, _ = infer(server, model, TENSOR)
            assert status == 200
            with lock:
                answers[model] += 1

    with ThreadPoolExecutor(callers * len(models)) as pool:
        tasks = [pool.submit(ask, model) for model in models for _ in range(callers)]
        yield answers
        for task in tasks:
            task.result()


def test_models_that_share_a_resource_run_one_after_the_other(tmp_path):
    for name in ("a", "b"):
        add_identity(tmp_path, name, extra=group(count=2), execute_delay_ms="300")
    add_identity(tmp_path, "free", execute_delay_ms="0")
    with running(tmp_path, ON) as server:
        started = time.monotonic()
        with ThreadPoolExecutor(4) as pool:
            tasks = [pool.submit(infer, server, name, TENSOR) for name in "abab"]
            time.sleep(0.1)
            assert used(server) == 1
            assert infer(server, "free", TENSOR)[0] == 200
            assert time.monotonic() - started < 1
            assert [task.result()[0] for task in tasks] == [200] * 4
        assert time.monotonic() - started >= 1.2
        assert used(server) == 0


def test_a_limit_lets_as_many_run_as_it_says_and_capitals_make_no_difference(tmp_path):
    add_identity(tmp_path, "a", extra=group(count=4, needs=2, resource="Memory"), execute_delay_ms="300")
    with running(tmp_path, ON, "--rate-limit-resource=MEMORY:4") as server:
        started = time.monotonic()
        with ThreadPoolExecutor(4) as pool:
            assert [status for status, _ in pool.map(lambda _: infer(server, "a", TENSOR), range(4))] == [200] * 4
        assert 0.6 <= time.monotonic() - started < 1.1


def test_turns_go_by_priority(tmp_path):
    add_identity(tmp_path, "first", extra=group(), execute_delay_ms="5")
    add_identity(tmp_path, "second", extra=group(priority=3), execute_delay_ms="5")
    with running(tmp_path, ON) as server, load_on(server, 2, "first", "second") as answers:
        pass
    assert answers["second"] > 10
    assert 2 < answers["first"] / answers["second"] < 4


def test_without_the_option_resources_are_not_looked_at(tmp_path):
    add_identity(tmp_path, "a", extra=group(count=2, needs=5), execute_delay_ms="300")
    with running(tmp_path) as server:
        started = time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda _: infer(server, "a", TENSOR), range(2)))
        assert time.monotonic() - started < 0.6
        assert "headrace_resource_used" not in server.metrics()


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_process_that_dies_gives_its_resources_back(tmp_path, decoupled):
    """Another model takes its turn when the process of the first crashes in the middle of a batch."""
    if decoupled:
        folder = add_decoupled(tmp_path, "dies", hold_instance="true", execute_delay_ms="300")
        with (folder / "config.pbtxt").open("a") as config:
            config.write("\n" + group())
    else:
        add_identity(tmp_path, "dies", extra=group())
    add_identity(tmp_path, "lives", extra=group())
    with running(tmp_path, ON) as server:
        if decoupled:
            with ThreadPoolExecutor(1) as pool:
                body = {"INPUT0": [1.0]}
                task = pool.submit(call, server, "/v2/models/dies/generate", body)
                time.sleep(0.15)
                assert used(server) == 1
                for process in server.backends():
                    if process.pid in pids(server, "dies"):
                        process.kill()
                assert task.result()[0] == 503
        else:
            assert infer(server, "dies", TENSOR, parameters={"crash": True})[0] == 503
        assert infer(server, "lives", TENSOR)[0] == 200
        assert used(server) == 0
        server.wait_status("/v2/models/dies/ready", 200)


def pids(server: RunningServer, model: str) -> list[int]:
    """Return the processes of a model, by the log."""
    lines = [line for line in server.lines if f"loaded model {model} " in line]
    return [int(text) for text in lines[-1].split("process ")[1].rstrip('"').split(", ")]


def test_a_model_that_waits_and_is_unloaded_holds_nobody_up(tmp_path):
    for name in ("a", "b", "c"):
        add_identity(tmp_path, name, extra=group(), execute_delay_ms="200")
    with running(tmp_path, ON, "--model-control-mode=explicit", "--load-model=*") as server:
        with load_on(server, 1.5, "a", "b", callers=2) as answers:
            time.sleep(0.3)
            task = threading.Thread(target=infer, args=(server, "c", TENSOR))
            task.start()
            assert call(server, "/v2/repository/models/c/unload", {})[0] == 200
            task.join()
        assert min(answers.values()) >= 2
        assert infer(server, "a", TENSOR)[0] == 200


def test_an_instance_that_could_never_run_is_refused_at_load(tmp_path):
    add_identity(tmp_path, "large", extra=group(needs=3))
    add_identity(tmp_path, "local", extra=group(everywhere=False))
    flags = (ON, "--rate-limit-resource=r:2", "--model-control-mode=explicit")
    with running(tmp_path, *flags) as server:
        status, body = call(server, "/v2/repository/models/large/load", {})
        assert status == 400
        assert "resource 'r' is limited to 2, and an instance that needs 3 could never run" in body["error"]
        assert call(server, "/v2/repository/models/local/load", {})[0] == 200
        add_identity(tmp_path, "global", extra=group())
        status, body = call(server, "/v2/repository/models/global/load", {})
        assert status == 400
        assert "resource 'r' is global in one model configuration and of each device in another" in body["error"]
        assert call(server, "/v2/models/local/ready")[0] == 200


def test_a_reload_keeps_to_the_resources(tmp_path):
    """While the new copy loads and the old one drains they share what there is."""
    folder = add_identity(tmp_path, "a", extra=group(), execute_delay_ms="20")
    with running(tmp_path, ON, "--model-control-mode=explicit", "--load-model=a") as server:
        with load_on(server, 2, "a") as answers:
            for _ in range(3):
                with (folder / "config.pbtxt").open("a") as config:
                    config.write("\n")
                assert call(server, "/v2/repository/models/a/load", {})[0] == 200
        assert answers["a"] > 20
        assert used(server) == 0


def test_a_batch_that_waits_for_its_delay_and_then_for_resources_runs(tmp_path):
    """The delay is over while the other model has the resource; nothing else happens that could wake the batcher."""
    batching = "dynamic_batching { max_queue_delay_microseconds: 200000 }"
    add_identity(tmp_path, "late", extra=f"{batching} {group()}")
    add_identity(tmp_path, "busy", extra=group(), execute_delay_ms="400")
    with running(tmp_path, ON) as server, ThreadPoolExecutor(2) as pool:
        first = pool.submit(infer, server, "busy", TENSOR)
        time.sleep(0.1)
        second = pool.submit(infer, server, "late", TENSOR)
        assert first.result()[0] == second.result(timeout=5)[0] == 200
        third = pool.submit(infer, server, "busy", TENSOR)
        time.sleep(0.3)
        fourth = pool.submit(infer, server, "late", TENSOR)
        assert third.result()[0] == fourth.result(timeout=5)[0] == 200


def test_passive_instances_are_loaded_and_take_no_request(tmp_path):
    extra = (
        "instance_group [ { name: 'x' count: 1 kind: KIND_CPU }, { name: 'y' count: 2 kind: KIND_CPU passive: true } ]"
    )
    add_identity(tmp_path, "a", extra=extra, execute_delay_ms="200")
    with running(tmp_path) as server:
        assert len(server.backends()) == 2
        started = time.monotonic()
        with ThreadPoolExecutor(3) as pool:
            assert [status for status, _ in pool.map(lambda _: infer(server, "a", TENSOR), range(3))] == [200] * 3
        assert time.monotonic() - started >= 0.6


@pytest.mark.parametrize("strategy", [DIRECT, oldest(4)], ids=["direct", "oldest"])
def test_sequences_take_turns_with_other_models(tmp_path, strategy):
    """Two instances of sequences and another model share one of a resource; every sum is right, and nobody waits for ever."""
    limiter = 'rate_limiter { resources [ { name: "r" global: true count: 1 } ] }'
    config = accumulator_config(strategy, instances=2).replace("kind: KIND_CPU", f"kind: KIND_CPU {limiter}")
    add_onnx(tmp_path, "sums", accumulator, config=config)
    add_identity(tmp_path, "other", extra=group(), execute_delay_ms="5")

    def sum_up(sequence: int) -> list[tuple[int, object]]:
        return [add(server, "sums", sequence, sequence, start=number == 0, end=number == 9) for number in range(10)]

    with running(tmp_path, ON) as server, load_on(server, 2, "other", callers=2) as answers:
        with ThreadPoolExecutor(6) as pool:
            for sequence, sums in enumerate(pool.map(sum_up, range(1, 7)), 1):
                assert sums == [(200, sequence * number) for number in range(1, 11)]
        assert used(server) <= 1
    assert answers["other"] > 10
