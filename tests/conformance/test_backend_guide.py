"""The backends that docs/backends.md shows pass the suite that it recommends."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asking_backend import installed
from clients import ask
from figures import figures
from harness import running
from headrace_backends.conformance import Case, check_backend
from repositories import add_identity, identity_config

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "backends.md"


BLOCKS = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    """All names that the guide's blocks of Python define."""
    names: dict[str, Any] = {}
    for block in BLOCKS:
        exec(compile(block, str(GUIDE), "exec"), names)  # noqa: S102 - our own documentation
    return names


def case(tmp_path: Path, *, decoupled: bool) -> Case:
    tensor = {"data_type": "TYPE_FP32", "dims": [1]}
    config = {
        "name": "shown",
        "max_batch_size": 8,
        "input": [{"name": "INPUT0", **tensor}],
        "output": [{"name": "OUTPUT0", **tensor}],
        "model_transaction_policy": {"decoupled": decoupled},
    }
    slow = {"INPUT0": np.array([[1e9]], np.float32)} if decoupled else None
    return Case(tmp_path, config, {"INPUT0": np.array([[3]], np.float32)}, slow_inputs=slow)


@pytest.mark.parametrize(("name", "decoupled"), [("Doubler", False), ("Counter", True), ("CountingEngine", True)])
def test_a_backend_of_the_guide_passes(shown: dict[str, Any], tmp_path: Path, name: str, decoupled: bool) -> None:
    check_backend(shown[name], case(tmp_path, decoupled=decoupled))


def test_the_check_of_the_guide_passes(shown: dict[str, Any], tmp_path: Path) -> None:
    shown["test_counter"](tmp_path)


def test_the_backends_of_the_guide_that_ask_the_server_do_so(tmp_path: Path) -> None:
    asking = [name for block in BLOCKS for name in re.findall(r"^class (Pipeline|Counting):", block, re.MULTILINE)]
    site, repository = tmp_path / "site", tmp_path / "models"
    env = installed(site, {name.lower(): f"guide:{name}" for name in asking})
    (site / "guide.py").write_text("\n".join(BLOCKS))
    add_identity(repository, "first")
    for name in asking:
        (repository / name / "1").mkdir(parents=True)
        text = identity_config(name).replace('"identity"', f'"{name.lower()}"')
        (repository / name / "config.pbtxt").write_text(text)
    with running(repository, env=env) as server:
        row = np.array([[1, 2, 3]], np.float32)
        assert ask(server, "http binary", "Pipeline", {"INPUT0": row})["OUTPUT0"].tolist() == row.tolist()
        assert figures(server, "first").requests == 1
        ask(server, "grpc", "Counting", {"INPUT0": row})
        assert 'my_rows_total{model="Counting"} 1.0' in server.metrics()
