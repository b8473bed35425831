"""What is changed in a repository is served, however it was changed, and no request notices the change."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import onnx_models
from clients import call, infer
from harness import RunningServer, running
from repositories import add_identity, add_onnx

YEAR_AGO = time.time() - 365 * 24 * 3600
PATIENCE_S = 30.0
START_S = 2.5
"""How long a version of the models that are rolled out takes to start."""
VERSION = "1/model.onnx"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("polled")


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[RunningServer]:
    for name in ("replaced", "rewritten", "touched"):
        add_onnx(repository, name, lambda path: mlp(path, 1))
    linked = repository / "linked"
    linked.mkdir()
    for seed in (1, 2):
        mlp(repository.parent / "store" / str(seed) / "model.onnx", seed)
    (linked / "1").symlink_to(repository.parent / "store" / "1")
    slow = add_identity(
        repository, "rolled", 1, extra="version_policy { latest { num_versions: 2 } }", creation_delay_sec=str(START_S)
    )
    (slow / "2").mkdir()
    with running(repository, "--model-control-mode=poll", "--repository-poll-secs=1") as started:
        yield started


def mlp(path: Path, seed: int) -> Path:
    """Write one of several models of the same size that answer differently."""
    return onnx_models.mlp(path, 4, 8, 3, seed=seed)


def scores(server: RunningServer, model: str) -> list[float]:
    status, answer = infer(server, model, ("x", "FP32", [1, 4], [1, 2, 3, 4]))
    assert status == 200, answer
    return answer["outputs"][0]["data"]


def until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_a_file_that_is_replaced_by_one_of_an_older_date_is_served(
    server: RunningServer, repository: Path, tmp_path: Path
) -> None:
    before = scores(server, "replaced")
    new = mlp(tmp_path / "model.onnx", 2)
    os.utime(new, (YEAR_AGO, YEAR_AGO))
    new.replace(repository / "replaced" / VERSION)
    until(lambda: scores(server, "replaced") != before, "the older file is not served")


def test_bytes_that_change_under_the_same_size_and_date_are_served(server: RunningServer, repository: Path) -> None:
    before = scores(server, "rewritten")
    file = repository / "rewritten" / VERSION
    was = file.stat()
    mlp(file, 2)
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    now = file.stat()
    assert (now.st_size, now.st_mtime_ns) == (was.st_size, was.st_mtime_ns)
    until(lambda: scores(server, "rewritten") != before, "the rewritten file is not served")


def test_a_link_that_is_switched_is_followed(server: RunningServer, repository: Path) -> None:
    before = scores(server, "linked")
    new = repository / "linked" / "next"
    new.symlink_to(repository.parent / "store" / "2")
    new.replace(repository / "linked" / "1")
    until(lambda: scores(server, "linked") != before, "what the link now leads to is not served")


def test_a_touched_file_goes_on_answering(server: RunningServer, repository: Path) -> None:
    before = scores(server, "touched")
    loaded = server.log().count("loaded model touched version 1")
    (repository / "touched" / VERSION).touch()
    until(lambda: server.log().count("loaded model touched version 1") > loaded, "the touched file was not looked at")
    assert scores(server, "touched") == before
    assert server.status("/v2/models/touched/ready") == 200


class Asker:
    """Asks without pause from a thread, and keeps every answer that was not right."""

    def __init__(self, server: RunningServer, path: str) -> None:
        self.bad: list[object] = []
        self.slowest_s = 0.0
        self.count = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, args=(server, path))
        self._thread.start()

    def _ask(self, server: RunningServer, path: str) -> None:
        body = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}]}
        while not self._over.wait(0.01):
            start = time.monotonic()
            status, answer = call(server, path, body)
            self.slowest_s = max(self.slowest_s, time.monotonic() - start)
            self.count += 1
            if status != 200:
                self.bad.append(answer)

    def stop(self) -> None:
        self._over.set()
        self._thread.join(10)


def test_a_rollout_makes_no_hole(server: RunningServer, repository: Path) -> None:
    """From versions 1 and 2 to 2 and 3: while 3 starts, requests with and without a version are answered as ever."""
    newest = Asker(server, "/v2/models/rolled/infer")
    second = Asker(server, "/v2/models/rolled/versions/2/infer")
    first = Asker(server, "/v2/models/rolled/versions/1/infer")
    try:
        until(lambda: first.count > 5, "no answers before the change")
        (repository / "rolled" / "3").mkdir()
        until(lambda: server.status("/v2/models/rolled/versions/3/ready") == 200, "version 3 does not come")
        until(lambda: server.status("/v2/models/rolled/versions/1/ready") == 404, "version 1 does not go")
    finally:
        for asker in (newest, second, first):
            asker.stop()
    assert (newest.bad, second.bad) == ([], [])
    assert max(newest.slowest_s, second.slowest_s) < START_S, "a request waited for the new version to start"
    assert all("version" in answer["error"] for answer in first.bad), "version 1 failed for another reason than its end"
    assert infer(server, "rolled", ("INPUT0", "FP32", [1, 1], [1.0]))[1]["model_version"] == "3"


def test_a_reload_by_call_makes_no_hole(tmp_path: Path) -> None:
    folder = add_identity(tmp_path, "m", creation_delay_sec=str(START_S))
    with running(tmp_path, "--model-control-mode=explicit", "--load-model=m") as server:
        asker = Asker(server, "/v2/models/m/versions/1/infer")
        try:
            until(lambda: asker.count > 5, "no answers before the change")
            config = folder / "config.pbtxt"
            config.write_text(config.read_text().replace("max_batch_size: 8", "max_batch_size: 16"))
            assert call(server, "/v2/repository/models/m/load", {}) == (200, None)
            reloaded = asker.count
            until(lambda: asker.count > reloaded + 5, "no answers after the change")
        finally:
            asker.stop()
        assert call(server, "/v2/models/m/config")[1]["max_batch_size"] == 16
    assert asker.bad == []
    assert asker.slowest_s < START_S
