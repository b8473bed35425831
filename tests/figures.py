"""What a running server tells of its models: statistics, metrics, the repository index."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from harness import RunningServer


@dataclass(frozen=True)
class Figures:
    """Requests, rows and executions of a model so far."""

    requests: int
    rows: int
    executions: int

    def since(self, before: Figures) -> Figures:
        """Return what was added to `before`."""
        return Figures(self.requests - before.requests, self.rows - before.rows, self.executions - before.executions)


def figures(server: RunningServer, model: str) -> Figures:
    """Return the statistics of a model with one version."""
    with urllib.request.urlopen(f"http://{server.http}/v2/models/{model}/stats", timeout=10) as answer:
        (told,) = json.load(answer)["model_stats"]
    return Figures(told["inference_stats"]["success"]["count"], told["inference_count"], told["execution_count"])


def metric(server: RunningServer, name: str, model: str, **labels: str) -> int:
    """Return the sum over a model's versions of the samples of a metric that bear these labels."""
    wanted = {"model": model, **labels}
    return sum(
        int(sample.value)
        for family in text_string_to_metric_families(server.metrics())
        for sample in family.samples
        if sample.name.removesuffix("_total") == name.removesuffix("_total") and wanted.items() <= sample.labels.items()
    )


def failures(server: RunningServer, model: str, reason: str) -> int:
    """Return how many requests to a model failed for this reason, from the metrics."""
    return metric(server, "nv_inference_request_failure", model, reason=reason)


def index(server: RunningServer, model: str) -> dict[str, tuple[str, str]]:
    """Return state and reason of each version of a model, from the repository index."""
    request = urllib.request.Request(f"http://{server.http}/v2/repository/index", b"{}")
    with urllib.request.urlopen(request, timeout=10) as answer:
        entries = json.load(answer)
    return {
        entry.get("version", ""): (entry.get("state", ""), entry.get("reason", ""))
        for entry in entries
        if entry["name"] == model
    }


def backend_pid(server: RunningServer, model: str) -> int:
    """Return the number of the process that serves a model with one instance, version 1, as the log tells it."""
    said = re.compile(rf"(?:loaded model {model} version 1 in .*|model {model}:1 serves again), process (\d+)")
    pids = [int(match[1]) for line in server.lines if (match := said.search(line))]
    return pids[-1]


def wait_until(what: str, true: Callable[[], object], timeout: float = 10.0) -> float:
    """Poll until `true()` is; return the seconds it took. For what nobody announces."""
    started = time.monotonic()
    while not true():
        assert time.monotonic() - started < timeout, f"not within {timeout} s: {what}"
        time.sleep(0.01)
    return time.monotonic() - started
