"""The backends that docs/backends.md shows pass the suite that it recommends."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_backends.conformance import Case, check_backend

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "backends.md"


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    """All names that the guide's blocks of Python define."""
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL):
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
