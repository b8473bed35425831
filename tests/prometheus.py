"""A real Prometheus in a child process, which scrapes what a test starts and is asked by its own API."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

_TRIES_S = 0.2


class Prometheus:
    """Asked by `query`; every wait polls, for Prometheus tells nobody when it has scraped."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"{self._url}/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.loads(answer.read())["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an instant query."""
        return self._get("query", query=expression)["result"]

    def firing(self) -> set[str]:
        """Return the names of the alerts that fire now."""
        return {alert["labels"]["alertname"] for alert in self._get("alerts")["alerts"] if alert["state"] == "firing"}

    def wait_for_values(self, expressions: Sequence[str], timeout: float) -> None:
        """Wait until each of the expressions has had a value; fail with those that had none."""
        left, deadline = list(dict.fromkeys(expressions)), time.monotonic() + timeout
        while left:
            left = [expression for expression in left if not self.query(expression)]
            assert not left or time.monotonic() < deadline, "no value of:\n" + "\n".join(left)
            time.sleep(_TRIES_S if left else 0)

    def wait_for_alerts(self, names: set[str], timeout: float) -> None:
        """Wait until each of the alerts has fired."""
        left, deadline = set(names), time.monotonic() + timeout
        while left := left - self.firing():
            assert time.monotonic() < deadline, f"alerts that did not fire: {sorted(left)}"
            time.sleep(_TRIES_S)


@contextlib.contextmanager
def scraping(folder: Path, targets: Sequence[str], rules: Mapping[str, Any] | None = None) -> Iterator[Prometheus]:
    """Run Prometheus over `targets` (host:port of metrics doors), once a second; skip where it is not installed."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    (folder / "rules.yml").write_text(yaml.safe_dump(rules or {"groups": []}))
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(folder / "rules.yml")],
        "scrape_configs": [{"job_name": "headrace", "static_configs": [{"targets": list(targets)}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    argv = [
        *(program, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"),
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("w") as log, subprocess.Popen(argv, stdout=log, stderr=log) as process:
        try:
            _wait_until_it_answers(port, process, folder / "log")
            yield Prometheus(port)
        finally:
            process.terminate()


def _wait_until_it_answers(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 30
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=5):
            return
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(_TRIES_S)


_WINDOW = re.compile(r"\[\d+m\]")


def hastened(rules: Mapping[str, Any]) -> dict[str, Any]:
    """Return alert rules that look at seconds where they look at minutes, and wait for nothing."""
    groups = []
    for group in rules["groups"]:
        changed = [{**rule, "expr": _WINDOW.sub("[10s]", rule["expr"]), "for": "0s"} for rule in group["rules"]]
        groups.append({**group, "rules": changed})
    return {"groups": groups}
