"""Every query of the dashboards has a value, and every alert fires, in a real Prometheus over a real server under load."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml

import scripted_engine
from harness import RunningServer, running
from prometheus import hastened, scraping
from repositories import add_identity, add_sample
from traffic_models import add_versions, traffic

ROOT = Path(__file__).parents[2]
DASHBOARDS = sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
ALERTS = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())
UNPROVOKED = {"HeadraceMemory", "HeadraceDescriptors", "HeadraceSlowFirstTokens", "HeadracePreemptions"}
"""Alerts of what a test should not take from its machine, or has no time for; promtool is shown them instead."""


def queries() -> dict[str, list[str]]:
    """The queries of each dashboard as Grafana would send them."""
    found = {}
    for file in DASHBOARDS:
        dashboard = json.loads(file.read_text())
        texts = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
        found[file.stem] = [text.replace("$model", ".*").replace("$__rate_interval", "10s") for text in texts]
    return found


class Load:
    """Sends one request after another to a model until it is stopped, in threads."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    def on(self, model: str, inputs: list[dict], clients: int = 1, **parameters: object) -> None:
        for _ in range(clients):
            self.ask(f"/v2/models/{model}/infer", {"inputs": inputs, "parameters": parameters})

    def ask(self, path: str, body: object) -> None:
        thread = threading.Thread(target=self._send, args=(path, json.dumps(body).encode()))
        thread.start()
        self._threads.append(thread)

    def _send(self, path: str, body: bytes) -> None:
        asked = urllib.request.Request(f"http://{self._server.http}{path}", body, {"Content-Type": "application/json"})
        while not self._stopped.is_set():
            with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(asked, timeout=30) as answer:
                answer.read()
            self._stopped.wait(0.01)

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()


@contextlib.contextmanager
def load_on(server):
    load = Load(server)
    try:
        yield load
    finally:
        load.stop()


ROW = [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1.5]}]
SIMPLE = [
    {"name": f"INPUT{at}", "datatype": "INT32", "shape": [1, 16], "data": list(range(16))} for at in range(2)
]  # fmt: skip


def test_each_query_of_each_dashboard_has_a_value(tmp_path):
    repository = tmp_path / "models"
    repository.mkdir()
    add_sample(repository, "simple")
    queue = "dynamic_batching { default_queue_policy { max_queue_size: 1 } }"
    add_identity(repository, "crowded", extra=queue, execute_delay_ms="50")
    scripted_engine.add_model(repository, "writer")
    (tmp_path / "prometheus").mkdir()
    with running(repository, env=scripted_engine.installed(tmp_path / "site")) as server, load_on(server) as load:
        load.on("simple", SIMPLE, 2)
        load.ask("/v1/completions", {"model": "writer", "prompt": "Write!"})
        load.on("crowded", ROW, 6)
        load.on("crowded", ROW, 1, fail="on purpose")
        with scraping(tmp_path / "prometheus", [server.metrics_url.split("/")[2]]) as prometheus:
            found = queries()
            prometheus.wait_for_values(sum(found.values(), []), 45)


def roll_back_soon(server):
    """Have a version that fails get half of the requests of a model, under a guard."""
    server.wait_status("/v2/models/trial/ready", 200)
    guard = {"max_error_rate": 0.1, "min_requests": 5}
    traffic(server, "trial", {"default": 1, "weights": {"2": 50}, "guard": guard})


def test_each_alert_fires_on_what_it_is_for(tmp_path):
    repository = tmp_path / "models"
    repository.mkdir()
    add_identity(repository, "fragile")
    add_identity(repository, "slow", execute_delay_ms="1200")
    queue = "dynamic_batching { default_queue_policy { max_queue_size: 1 } }"
    add_identity(repository, "crowded", extra=queue, execute_delay_ms="400")
    add_versions(repository, "trial", "good", "failing")
    add_identity(repository, "broken", extra="instance_group [ { count: 1 kind: KIND_GPU gpus: [ 7 ] } ]")
    (tmp_path / "prometheus").mkdir()
    flags = ("--exit-on-error=false", "--backend-restart-limit=100")
    provoked = {rule["alert"] for group in ALERTS["groups"] for rule in group["rules"]} - UNPROVOKED
    with running(repository, *flags, ready=False) as server, load_on(server) as load:
        roll_back_soon(server)
        for model in ("fragile", "slow", "crowded"):
            server.wait_status(f"/v2/models/{model}/ready", 200)
        load.on("fragile", ROW, 1, crash=True)
        load.on("slow", ROW, 1)
        load.on("trial", [{**ROW[0], "shape": [1, 3], "data": [1, 2, 3]}])
        load.on("crowded", ROW, 6)
        targets = [server.metrics_url.split("/")[2], "127.0.0.1:9"]
        with scraping(tmp_path / "prometheus", targets, hastened(ALERTS)) as prometheus:
            prometheus.wait_for_alerts(provoked, 60)


def test_no_alert_fires_on_a_server_that_does_its_work(tmp_path):
    repository = tmp_path / "models"
    repository.mkdir()
    add_sample(repository, "simple")
    (tmp_path / "prometheus").mkdir()
    with running(repository) as server, load_on(server) as load:
        load.on("simple", SIMPLE, 2)
        rules = hastened(ALERTS)
        with scraping(tmp_path / "prometheus", [server.metrics_url.split("/")[2]], rules) as prometheus:
            answered = "rate(headrace_request_duration_seconds_count[5s]) > 0"
            prometheus.wait_for_values([answered, "nv_cpu_memory_used_bytes"], 30)
            assert prometheus.firing() == set()


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    written = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return {"series": f"{name}{{{written}}}", "values": values}


@pytest.mark.parametrize(
    ("alert", "given", "minute", "fires"),
    [
        ("HeadraceMemory", [series("nv_cpu_memory_used_bytes", "95x20"), series("nv_cpu_memory_total_bytes", "100x20")], 10, True),
        ("HeadraceMemory", [series("nv_cpu_memory_used_bytes", "90x20"), series("nv_cpu_memory_total_bytes", "100x20")], 10, False),
        ("HeadraceMemory", [series("nv_cpu_memory_used_bytes", "95x20"), series("nv_cpu_memory_total_bytes", "100x20")], 2, False),
        ("HeadraceDescriptors", [series("process_open_fds", "90x20", job="headrace"), series("process_max_fds", "100x20", job="headrace")], 10, True),
        ("HeadraceDescriptors", [series("process_open_fds", "90x20", job="other"), series("process_max_fds", "100x20", job="other")], 10, False),
        ("HeadraceSlowFirstTokens", [
            series("headrace_llm_time_to_first_token_seconds_bucket", "0+1x20", instance="i", model="m", le="5"),
            series("headrace_llm_time_to_first_token_seconds_bucket", "0+9x20", instance="i", model="m", le="10"),
            series("headrace_llm_time_to_first_token_seconds_bucket", "0+9x20", instance="i", model="m", le="+Inf"),
        ], 12, True),
        ("HeadraceSlowFirstTokens", [
            series("headrace_llm_time_to_first_token_seconds_bucket", "0+9x20", instance="i", model="m", le="5"),
            series("headrace_llm_time_to_first_token_seconds_bucket", "0+9x20", instance="i", model="m", le="+Inf"),
        ], 12, False),
        ("HeadracePreemptions", [series("headrace_llm_num_preemptions_total", "0+60x20", instance="i", model="m")], 12, True),
        ("HeadracePreemptions", [series("headrace_llm_num_preemptions_total", "0+1x20", instance="i", model="m")], 12, False),
        ("HeadraceRolledBack", [series("headrace_rollbacks_total", "0x4 1x40", model="m", reason="p99")], 6, True),
        ("HeadraceRolledBack", [series("headrace_rollbacks_total", "0x4 1x40", model="m", reason="p99")], 30, False),
        ("HeadraceRolledBack", [series("headrace_rollbacks_total", "_x4 1x40", model="m", reason="p99")], 6, True),
        ("HeadraceRolledBack", [series("headrace_rollbacks_total", "_x4 1x40", model="m", reason="p99")], 30, False),
        ("HeadraceRolledBack", [series("headrace_rollbacks_total", "0x4 1x40", model="m", reason="manual")], 6, False),
        ("HeadraceModelNotReady", [series("headrace_model_ready", "1x4 0x20", model="m")], 5, False),
        ("HeadraceModelNotReady", [series("headrace_model_ready", "1x4 0x20", model="m")], 7, True),
        ("HeadraceErrors", [
            series("nv_inference_request_success", "0+99x20", instance="i", model="m", version="1"),
            series("nv_inference_request_failure", "0+2x20", instance="i", model="m", version="1", reason="BACKEND"),
        ], 12, True),
        ("HeadraceErrors", [
            series("nv_inference_request_success", "0+300x20", instance="i", model="m", version="1"),
            series("nv_inference_request_failure", "0+2x20", instance="i", model="m", version="1", reason="BACKEND"),
            series("nv_inference_request_failure", "0+90x20", instance="i", model="m", version="1", reason="CANCELED"),
        ], 12, False),
    ],
)  # fmt: skip
def test_alerts_wait_and_compare_as_they_say(tmp_path, alert, given, minute, fires):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    check = (
        f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})',
        [{"value": 1, "labels": "{}"}] if fires else [],
    )
    test = {
        "rule_files": [str(ROOT / "deploy/prometheus/alerts.yml")],
        "evaluation_interval": "30s",
        "tests": [
            {
                "interval": "1m",
                "input_series": given,
                "promql_expr_test": [{"expr": check[0], "eval_time": f"{minute}m", "exp_samples": check[1]}],
            }
        ],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test))
    done = subprocess.run(
        [promtool, "test", "rules", tmp_path / "test.yml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_its_chapter_in_the_runbook():
    chapters = re.findall(r"^#+ (\w+)$", (ROOT / "docs/runbook.md").read_text(), re.MULTILINE)
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            assert rule["alert"] in chapters
            assert rule["annotations"]["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"


def test_the_dashboards_are_what_their_script_writes(tmp_path, monkeypatch):
    import runpy

    script = runpy.run_path(str(ROOT / "deploy/grafana/dashboards.py"))
    for name, panels in script["DASHBOARDS"].items():
        written = json.loads((ROOT / "deploy/grafana/dashboards" / f"{name}.json").read_text())
        assert written == script["dashboard"](name, panels)
    assert {file.stem for file in DASHBOARDS} == set(script["DASHBOARDS"])
