"""Metrics that models make, as a scrape shows them; through a real server."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from asking import ask
from asking_backend import add_asker, installed
from clients import call
from figures import wait_until
from harness import RunningServer, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    add_asker(repository, "asker")
    add_asker(repository, "other")
    add_asker(repository, "gone")
    add_asker(repository, "apart", "instance_group [ { count: 2 kind: KIND_CPU } ]", backend="apart")
    flags = ["--model-control-mode=explicit", "--load-model=*"]
    with running(repository, *flags, env=installed(tmp_path_factory.mktemp("site"))) as started:
        yield started


def shown(server: RunningServer, name: str) -> dict[tuple[str, ...], float]:
    """Return the samples of a family: their names and labels, sorted, and values."""
    return {
        (sample.name.removeprefix(name), *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(server.metrics())
        for sample in family.samples
        if re.fullmatch(name + "(_bucket|_sum|_count|_total)?", sample.name)
    }


def test_a_counter_is_shown_under_its_own_name_as_soon_as_the_request_was_answered(server: RunningServer) -> None:
    for number in range(1, 6):
        ask(server, do="count", name="my_requests", by=[1], labels={"kind": "a"})
        assert shown(server, "my_requests") == {("", "a"): number}
    ask(server, do="count", name="my_requests", by=[0.5], labels={"kind": 'b"\n\\'})
    assert shown(server, "my_requests") == {("", "a"): 5, ("", 'b"\n\\'): 0.5}
    assert "# HELP my_requests what my_requests counts" in server.metrics()


def test_a_counter_that_was_never_incremented_is_shown_as_nought(server: RunningServer) -> None:
    ask(server, do="count", name="my_zero:total")
    assert shown(server, "my_zero:total") == {("",): 0}


def test_a_histogram_counts_values_by_bucket(server: RunningServer) -> None:
    ask(server, do="count", name="my_times", kind="histogram", by=[0.5, 1, 5, 100])
    assert shown(server, "my_times") == {
        ("_bucket", "1"): 2,
        ("_bucket", "10"): 3,
        ("_bucket", "+Inf"): 4,
        ("_count",): 4,
        ("_sum",): 106.5,
    }


def test_processes_of_a_model_add_up_to_one_counter(server: RunningServer) -> None:
    ask(server, of="apart", do="count", name="my_sum", by=[1])
    total = 1
    with ThreadPoolExecutor(1) as pool:
        while True:  # until one process counted while the other slept
            asleep = pool.submit(ask, server, of="apart", do="sleep", seconds=0.5)
            awake = ask(server, of="apart", do="pid")
            total += 10
            assert ask(server, of="apart", do="count", name="my_sum", by=[10]) == total
            if asleep.result() != awake:
                break
    assert shown(server, "my_sum") == {("",): total}
    assert ask(server, of="apart", do="count", name="my_sum") == total


def test_models_share_a_metric_of_one_name_and_a_gauge_is_what_it_was_set_to_last(server: RunningServer) -> None:
    assert ask(server, do="set", name="my_level", value=3) == 3
    assert ask(server, of="other", do="set", name="my_level", value=7) == 7
    assert ask(server, do="count", kind="gauge", name="my_level", by=[-2]) == 5
    assert shown(server, "my_level") == {("",): 5}


@pytest.mark.parametrize(
    "name", ["nv_inference_count", "headrace_batch_size", "process_cpu_seconds_total", "nv_gpu_mine"]
)
def test_a_name_of_the_servers_own_is_refused(server: RunningServer, name: str) -> None:
    assert ask(server, do="count", name=name, by=[1])["error"] == "INVALID_ARG"


@pytest.mark.parametrize("name", ["", "1st", "with space", "dash-ed"])
def test_a_name_that_is_none_is_refused(server: RunningServer, name: str) -> None:
    assert ask(server, do="count", name=name, by=[1])["error"] == "INVALID_ARG"


def test_a_family_of_another_kind_under_the_same_name_is_refused_wherever_it_was_made(server: RunningServer) -> None:
    ask(server, do="count", name="my_kind")
    for model in ("asker", "other"):
        told = ask(server, of=model, do="set", name="my_kind", value=1)
        assert told["error"] == "ALREADY_EXISTS"
        assert "counter" in told["message"]


def test_a_family_whose_lines_would_mix_with_anothers_is_refused(server: RunningServer) -> None:
    ask(server, do="count", name="my_mix", kind="histogram", by=[1])
    assert ask(server, do="count", name="my_mix_sum")["error"] == "ALREADY_EXISTS"


def test_a_counter_only_grows(server: RunningServer) -> None:
    assert ask(server, do="count", name="my_growth", by=[-1])["error"] == "INVALID_ARG"


def test_counts_outlive_the_process_that_made_them(server: RunningServer) -> None:
    ask(server, of="other", do="count", name="my_lives", by=[2])
    assert shown(server, "my_lives") == {("",): 2}
    psutil.Process(ask(server, of="other", do="pid")).send_signal(signal.SIGKILL)
    server.wait_for_log("model other:1 serves again")
    assert ask(server, of="other", do="count", name="my_lives", by=[1]) == 3


def test_metrics_go_with_the_last_model_that_made_them(server: RunningServer) -> None:
    ask(server, do="count", name="my_shared", by=[1])
    ask(server, of="gone", do="count", name="my_shared", by=[1])
    ask(server, of="gone", do="count", name="my_own", by=[1], labels={"x": "y"})
    ask(server, of="gone", do="count", name="my_shared", by=[1], labels={"x": "y"})
    assert call(server, "/v2/repository/models/gone/unload", {})[0] == 200
    wait_until("the metrics are gone", lambda: not shown(server, "my_own"))
    assert shown(server, "my_shared") == {("",): 2}
    ask(server, of="other", do="set", name="my_own", value=1)
    assert shown(server, "my_own") == {("",): 1}
