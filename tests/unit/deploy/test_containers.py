"""Dockerfiles and compose: what can be said of them without a container engine."""

import re
import runpy
import subprocess
import sys
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
import yaml

ROOT = Path(__file__).parents[3]
DOCKERFILES = sorted((ROOT / "deploy/docker").glob("Dockerfile.*"))


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_images_have_stages_a_user_a_check_and_pinned_bases(file):
    text = file.read_text()
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert len(bases) == 2
    assert all(":" in base and not base.endswith(":latest") for base in bases)
    final = text[text.rindex("FROM ") :]
    assert re.search(r"^USER 10001:10001$", final, re.MULTILINE)
    assert "HEALTHCHECK" in final
    assert 'ENTRYPOINT ["headrace"]' in final
    assert "STOPSIGNAL SIGTERM" in final


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_everything_that_is_copied_exists_and_is_not_ignored(file):
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ignored[0] == "*"
    for line in re.findall(r"^COPY (?!--from)(.+)$", file.read_text(), re.MULTILINE):
        *sources, _ = line.split()
        for source in sources:
            assert (ROOT / source).exists(), source
            assert any(source == entry[1:] for entry in ignored if entry.startswith("!")), source


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_extras_are_those_of_the_project(file):
    extras = re.search(r"^ARG EXTRAS=(\S+)$", file.read_text(), re.MULTILINE)[1].split(",")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras) <= set(project["optional-dependencies"])


def test_compose_mounts_what_exists_and_serves_the_ports_of_the_server():
    file = ROOT / "deploy/compose/compose.yaml"
    compose = yaml.safe_load(file.read_text())
    for name, service in compose["services"].items():
        for volume in service.get("volumes", ()):
            source = re.sub(r"^\$\{\w+:-([^}]*)\}", r"\1", volume).split(":")[0]
            if source.startswith("."):
                assert (file.parent / source).exists(), (name, source)
        if "build" not in service:
            assert re.search(r":v?\d+\.\d+", service["image"]), f"{name}: no pinned version"
    assert compose["services"]["headrace"]["ports"] == ["8000:8000", "8001:8001", "8002:8002"]
    scraped = yaml.safe_load((ROOT / "deploy/prometheus/compose.yml").read_text())
    assert scraped["scrape_configs"][0]["static_configs"] == [{"targets": ["headrace:8002"]}]


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_the_health_check_tells_by_its_exit_status(status, healthy):
    asked = []

    class Live(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Live) as server:
        thread = Thread(target=server.handle_request)
        thread.start()
        done = subprocess.run(
            [sys.executable, ROOT / "deploy/docker/healthcheck.py"],
            env={"HEADRACE_HTTP_PORT": str(server.server_address[1])}, check=False,
        )  # fmt: skip
        thread.join()
    assert (done.returncode == 0) is healthy
    assert asked == ["/v2/health/live"]


def test_the_health_check_says_that_nobody_answers(monkeypatch, unused_tcp_port):
    monkeypatch.setenv("HEADRACE_HTTP_PORT", str(unused_tcp_port))
    with pytest.raises(SystemExit, match="not live"):
        runpy.run_path(str(ROOT / "deploy/docker/healthcheck.py"))
