"""A model whose versions behave differently, and what a server says and is told of the traffic of a model's versions."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from harness import RunningServer

ROW = np.ones((1, 3), np.float32)
MOODS = {
    "good": "pass",
    "failing": 'raise ValueError("broken on purpose")',
    "slow": "time.sleep(0.15)",
    "hanging": "time.sleep(1000)",
    "crashing": "os._exit(3)",
}
_CODE = """\
import os, time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            {mood}
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array + {version})]))
        return answers
"""
_CONFIG = """\
backend: "python" max_batch_size: 4
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 3 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 3 ] } ]
version_policy { all {} }
"""


def add_versions(repository: Path, name: str, *moods: str, extra: str = "") -> Path:
    """Write a model whose versions, from 1, add their number to INPUT0, each in its mood. Returns its folder."""
    folder = repository / name
    folder.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(_CONFIG + extra)
    for version, mood in enumerate(moods, 1):
        add_version(folder, version, mood)
    return folder


def add_version(folder: Path, version: int, mood: str = "good") -> None:
    """Write one version."""
    (folder / str(version)).mkdir()
    (folder / str(version) / "model.py").write_text(_CODE.format(mood=MOODS[mood], version=version))


def traffic(server: RunningServer, model: str = "m", changes: object = None) -> dict[str, Any]:
    """Return the status of a model's traffic, after changes where some are given; they have to be taken."""
    status, told = try_traffic(server, model, changes)
    assert status == 200, told
    return told


def try_traffic(server: RunningServer, model: str, changes: object) -> tuple[int, Any]:
    """Return status and answer."""
    return post(server, f"/v2/models/{model}/traffic", changes)


def post(server: RunningServer, path: str, body: object, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """POST a body as JSON, or GET where it is None; return status and answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{server.http}{path}", data, headers or {})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            text, status = answer.read(), answer.status
    except urllib.error.HTTPError as error:
        with error:
            text, status = error.read(), error.code
    return status, json.loads(text) if text else None


def weights(told: dict[str, Any]) -> dict[int, float]:
    """Return the shares of the versions that have one."""
    return {version["version"]: version["weight"] for version in told["versions"] if version["weight"]}
